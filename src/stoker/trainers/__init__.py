"""Programs that train: each is one file to be read from top to bottom, and started by `python -m` or a job."""
