"""The shared cache in a Kubernetes namespace: manifests and deployment."""
