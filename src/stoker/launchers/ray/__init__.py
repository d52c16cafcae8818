"""Ray launcher; `driver` runs on the cluster, all other modules on this machine."""
