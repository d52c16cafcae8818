"""Preflight checks of a machine, a target and a job, each failed one with its fix."""
