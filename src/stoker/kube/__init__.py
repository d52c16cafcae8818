"""Kubernetes: the client, and the words for what it answers; no other package imports a Kubernetes library."""
