"""Jobs on Kubernetes: objects as plain values, and what carries them to a cluster."""
