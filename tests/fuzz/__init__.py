"""Hostile input: known cases in the default run, fresh seeds for a minute each in `make test-all`."""
