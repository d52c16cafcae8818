"""Ray launcher; `driver` and `slot_daemon` run on the cluster, all other modules on this machine."""
