"""Fixtures of the tests of the dashboard."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import JobState
from tests.support.dashboards import Dashboard, running_dashboard
from tests.support.event_logs import EventLogs
from tests.support.runs import Runs

RUN_ID = "digits-20260101-000000-abcd"


@pytest.fixture
def run(stoker_home: Path) -> RunFolder:
    """A finished run with events of three slots."""
    run = Runs().write(stoker_home, RUN_ID, JobState.SUCCEEDED)
    EventLogs(run.logs, seed=3, t=time.time() - 120).write(60)
    return run


@pytest.fixture
def dashboard(run: RunFolder) -> Iterator[Dashboard]:
    """A dashboard of all runs, of which there is one."""
    with running_dashboard() as dashboard:
        yield dashboard
