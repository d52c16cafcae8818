"""A model server in a Kubernetes namespace."""
