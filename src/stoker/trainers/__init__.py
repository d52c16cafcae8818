"""Training programs, started with `python -m` or by a job; each reads from top to bottom."""
