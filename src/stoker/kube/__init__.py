"""Kubernetes client, object builders and error messages; no other package imports a Kubernetes library."""
