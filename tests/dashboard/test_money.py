"""What a run has cost, from the prices in its job file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import JobState
from stoker.jobs.topology import sum_prices
from tests.launchers.contract import job_of
from tests.support.browsers import Browser
from tests.support.dashboards import Dashboard, running_dashboard
from tests.support.event_logs import EventLogs
from tests.support.runs import Runs


@pytest.fixture
def priced(stoker_home: Path) -> RunFolder:
    """A finished run of a minute whose worker costs 90 per hour."""
    resources = {"price_per_hour": 90}
    run = Runs().write(stoker_home, "paid-20260101-000000-abcd", JobState.SUCCEEDED, resources=resources)
    EventLogs(run.logs, seed=3, t=run.read_status().began).write(40)
    return run


def test_goodput_is_shown_in_money(priced: RunFolder, browser: Browser) -> None:
    with running_dashboard() as dashboard:
        found = dashboard.get(f"/api/runs/{priced.id}").json
        assert found["price_per_hour"] == 90
        assert found["run"]["cost"] == pytest.approx(1.5)
        assert f'stoker_run_cost{{run="{priced.id}",job="paid"}}' in dashboard.get("/metrics").body.decode()
        browser.open(f"{dashboard.url}/#/run/{priced.id}")
        assert browser.fact("cost") == "cost 1.50, at 90.00 per hour for all slots"
        legend = browser.page.locator("section[aria-label=Goodput] .legend span").all_inner_texts()
        amounts = [float(match[1]) for text in legend if (match := re.search(r"\), ([\d.]+)$", text))]
        assert len(amounts) == len(legend) == 6
        assert sum(amounts) == pytest.approx(1.5, abs=0.01)
        browser.open(f"{dashboard.url}/#/runs")
        assert "1.50" in browser.page.locator(f"tr[data-run='{priced.id}'] td").all_inner_texts()
    assert browser.errors == []


def test_nothing_is_said_without_a_price(run: RunFolder, dashboard: Dashboard, browser: Browser) -> None:
    found = dashboard.get(f"/api/runs/{run.id}").json
    assert (found["price_per_hour"], found["run"]["cost"]) == (None, None)
    browser.open(f"{dashboard.url}/#/run/{run.id}")
    assert browser.page.locator("[data-fact=cost]").count() == 0


def test_prices_of_all_slots_are_added() -> None:
    groups = [{"count": 2, "resources": {"price_per_hour": 10}}, {"count": 1, "resources": {"price_per_hour": 3.5}}]
    program = {"script": "train.py"}
    assert sum_prices(job_of(program=program, topology="torchrun", workers=groups)) == 23.5
    roles = {"ps": {"count": 2, "resources": {"price_per_hour": 0.5}}}
    assert sum_prices(job_of(program=program, topology="tf-ps", workers=2, roles=roles)) == 1.0
    assert sum_prices(job_of("true")) is None
