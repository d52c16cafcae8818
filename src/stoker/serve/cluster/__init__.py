"""The shared cache inside a Kubernetes namespace: its objects, and their deployment."""
