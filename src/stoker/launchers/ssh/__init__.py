"""Jobs on hosts reached by ssh. `slot_daemon`, `host_probe` and `rsh_agent` run on the hosts, the rest runs here."""
