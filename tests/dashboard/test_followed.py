"""Runs of a cluster that others started, on the pages of the dashboard."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.launchers.followed_runs import FollowedRuns, open_cluster_runs
from stoker.telemetry.events import PREFIX
from tests.launchers.contract import job_of
from tests.support.browsers import Browser
from tests.support.dashboards import running_dashboard
from tests.support.kube_api import KubeApi, running_kube_api
from tests.support.trees import stoker

pytest.importorskip("lightkube")
RUN_ID = "digits-20260101-000000-aaaa"
POD = f"{RUN_ID}-worker"


@pytest.fixture
def kube(stoker_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    """A fake cluster with one run."""
    with running_kube_api(tmp_path) as (server, config):
        monkeypatch.setenv("KUBECONFIG", str(config))
        data = {"train": str(tmp_path / "shards")}
        server.add_run(job_of("true", name="digits", image="registry.example/x:1", data=data), RUN_ID)
        yield server
    assert {method for method, _ in server.requests} == {"GET"}


def event(seq: int, **fields: object) -> str:
    head = {"v": 1, "t": time.time(), "slot": "worker/0", "rank": 0, "attempt": 0, "pid": 5, "seq": seq}
    return f"{PREFIX}{json.dumps({**head, **fields})}"


def test_pages_of_a_followed_run(kube: KubeApi, browser: Browser) -> None:
    kube.write_log(POD, "hello", event(0, k="scalar", name="loss", step=1, value=2.5), event(1, k="heartbeat", step=1))
    kube.write_log(POD, event(2, k="mark", name="bad_sample", shard="x.tar", reason="cut", offset=5, length=7))
    followed = FollowedRuns(open_cluster_runs("k8s://ctx/team"))
    followed.start()
    page = browser.page
    with running_dashboard(followed=followed) as dashboard:
        browser.open(f"{dashboard.url}/#/runs")
        assert browser.fact("target") == "followed on k8s://ctx/team"
        browser.wait_for(lambda: page.locator(f"tr[data-run='{RUN_ID}']").count() == 1)
        page.get_by_role("link", name=RUN_ID).click()
        browser.wait_for(lambda: page.locator("[data-fact=loss]").count() == 1 and browser.fact("loss") == "2.5")
        kube.write_log(POD, event(3, k="scalar", name="loss", step=2, value=1.25), "bye")
        browser.wait_for(lambda: browser.fact("loss") == "1.25")
        browser.open(f"{dashboard.url}/#/run/{RUN_ID}/logs")
        browser.wait_for(lambda: page.locator(".log div").all_inner_texts()[-1:] != [])
        browser.wait_for(lambda: "bye" in page.locator(".log").inner_text())
        browser.open(f"{dashboard.url}/#/run/{RUN_ID}/ranks")
        page.get_by_role("button", name="Show stacks").click()
        browser.wait_for(lambda: "started elsewhere" in browser.fact("stacks"))
        browser.open(f"{dashboard.url}/#/run/{RUN_ID}/data")
        browser.wait_for(lambda: "started elsewhere" in page.locator(".thumbnail").inner_text())
        kube.finish(RUN_ID)
        browser.open(f"{dashboard.url}/#/run/{RUN_ID}")
        browser.wait_for(lambda: page.locator(".state").first.inner_text() == "succeeded")
        page.goto("about:blank")
    followed.stop()
    assert [error for error in browser.errors if "409" not in error] == []


def test_wrong_targets_are_refused(stoker_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("dash", "--on", "local") == 2
    assert "cannot be followed" in capsys.readouterr().err
    assert stoker("dash", "--on", "ray://127.0.0.1:1", "--port", "0") == 5
    assert stoker("dash", "--on", "k8s://ctx/team", "--html", "x.html") == 2
