"""Fixtures of the tests of the dashboard."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import JobState
from tests.support.browsers import Browser
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


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A headless browser; tests are skipped without one."""
    playwright_api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed")
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Browser]:
    """A new page of the browser."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(60_000)
    yield Browser(context.new_page())
    context.close()
