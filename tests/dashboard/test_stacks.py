"""Stacks of all ranks on the page of the ranks, and who may request them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker import api
from stoker.jobs.run_folder import RunFolder
from tests.support.browsers import Browser
from tests.support.dashboards import Dashboard, running_dashboard
from tests.support.runs import Runs
from tests.support.waiting import wait_until

TOKEN = "0123456789abcdef0123"
PROGRAM = """
import time
from stoker.telemetry import recorder

def wait_for_the_others(record):
    step = 0
    while True:
        record.heartbeat(step)
        step += 1
        time.sleep(0.1)

wait_for_the_others(recorder())
"""


@pytest.fixture(params=["30s", 0])
def waiting(stoker_home: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[api.Run]:
    """A run of one rank, under the profiler or not, that sends heartbeats and prints its stacks on SIGUSR1."""
    script = tmp_path / "<b>waiting<b>.py"
    script.write_text(PROGRAM)
    keys = {"name": "waiting", "topology": "single", "profile": {"every": request.param}}
    run = api.Job.from_dict({**keys, "program": {"script": str(script)}}).run()
    yield run
    run.stop()


def test_button_shows_the_stacks_as_text(waiting: api.Run, browser: Browser) -> None:
    page = browser.page
    with running_dashboard() as dashboard:
        browser.open(f"{dashboard.url}/#/run/{waiting.id}/ranks")
        browser.wait_for(lambda: page.locator("tbody tr").count() == 1)
        page.get_by_role("button", name="Show stacks").focus()
        page.keyboard.press("Enter")
        browser.wait_for(lambda: "wait_for_the_others" in page.locator("pre.stacks").inner_text())
        assert "<b>waiting<b>.py" in page.locator("pre.stacks").inner_text()
        assert page.locator("main b").count() == 0
        assert browser.fact("stacks").startswith("as of ")
        assert browser.errors == []
        waiting.stop()
        browser.wait_for(lambda: page.get_by_role("button", name="Show stacks").count() == 0)
        assert "wait_for_the_others" in page.locator("pre.stacks").inner_text()


def test_reason_is_shown_instead(run: RunFolder, dashboard: Dashboard, browser: Browser) -> None:
    answer = dashboard.get(f"/api/runs/{run.id}/stacks", method="POST")
    assert (answer.code, answer.json["error"]) == (409, f"run {run.id} is not running (state: succeeded)")
    assert not (run.folder / "stacks.request").exists()
    record = json.loads((run.folder / "state.json").read_text())  # as if its end were not known yet
    (run.folder / "state.json").write_text(json.dumps({**record, "state": "running", "ended": None}))
    browser.open(f"{dashboard.url}/#/run/{run.id}/ranks")
    browser.page.get_by_role("button", name="Show stacks").click()
    browser.wait_for(lambda: "is not running (state: lost)" in browser.fact("stacks"))
    assert browser.page.locator("pre.stacks").is_hidden()


def test_program_without_stacks_is_named(stoker_home: Path) -> None:
    runs = Runs()
    silent = runs.start()
    try:
        with running_dashboard() as dashboard:
            answer = dashboard.get(f"/api/runs/{silent.id}/stacks", method="POST")
            assert answer.code == 409
            assert "no process prints its stacks" in answer.json["error"]
    finally:
        runs.stop()


@pytest.mark.parametrize("waiting", [0], indirect=True)
def test_request_from_another_site_is_refused(waiting: api.Run) -> None:
    wait_until(lambda: waiting.progress().step is not None)
    with running_dashboard() as dashboard:
        path, own = f"/api/runs/{waiting.id}/stacks", f"127.0.0.1:{dashboard.port}"
        for headers in (
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Origin": "http://127.0.0.1:1"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site", "Origin": f"http://{own}"},
        ):
            assert dashboard.get(path, headers, "POST").code == 403, headers
        assert dashboard.get(path).code == 405
        assert not list(waiting.files.folder.glob("stacks.*"))
        answer = dashboard.get(path, {"Origin": f"http://{own}", "Sec-Fetch-Site": "same-origin"}, "POST")
        assert answer.code == 200
    with running_dashboard(token=TOKEN) as dashboard:
        assert dashboard.get(path, method="POST").code == 401
