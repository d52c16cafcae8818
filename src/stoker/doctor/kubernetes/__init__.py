"""Checks of a job on a Kubernetes cluster: existing objects, server-side dry run, and one small pod per image."""
