"""Slurm launcher: one batch job per run, rendered from the topology."""
