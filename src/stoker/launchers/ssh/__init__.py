"""Jobs on hosts reached by ssh; what runs on the hosts themselves is in `stoker.remote`."""
