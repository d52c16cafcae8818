"""Supervision of a run from this machine: attempts, retries, hangs and diagnosis, wherever its slots run."""
