"""Kubernetes launcher: runs the slots of a job as pods of Jobs or an MPIJob."""
