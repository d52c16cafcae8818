"""Test helpers for users: make shards, run a job on this machine, read its log and events.

Works with any test framework; see docs/testing.md.
"""

from stoker.testing.jobs import FinishedRun, read_events, run_job
from stoker.testing.shards import make_shards

__all__ = ["FinishedRun", "make_shards", "read_events", "run_job"]
