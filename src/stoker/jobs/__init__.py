"""Jobs: the job file, topologies, the launcher protocol, run folders, status, retry policy."""
