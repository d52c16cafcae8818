"""The pages of the dashboard in a real browser: Debian's Chromium, driven by playwright."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker import api
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import JobState
from stoker.telemetry.events import PREFIX
from stoker.telemetry.reader import read_events
from tests.support.browsers import Browser
from tests.support.dashboards import Dashboard, running_dashboard
from tests.support.event_logs import EventLogs
from tests.support.runs import Runs
from tests.support.trees import stoker

PAGES = ("", "/slots", "/ranks", "/data", "/logs")
PAYLOAD = "<img src=x onerror=window.pwned=1>\"'</script><b>x"


LABEL_COLORS = """canvas => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, 60, canvas.height).data;
  const reds = [...pixels].filter((_, i) => i % 4 === 0 && pixels[i + 3] > 200);
  return [Math.min(...reds), Math.max(...reds)];
}"""
"""The darkest and the brightest red of the labels left of a chart."""


def finite_losses(run: RunFolder) -> list[Any]:
    return [event for event in read_events(run.logs) if event.kind == "scalar" and event.fields["name"] == "loss"]


def find_ranks(run: RunFolder) -> dict[int, int]:
    """Return the process IDs of the ranks that have sent heartbeats in the newest attempt, and are alive."""
    beats = [event for event in read_events(run.logs) if event.kind == "heartbeat"]
    newest = max((event.attempt for event in beats), default=0)
    pids = {event.rank: event.pid for event in beats if event.attempt == newest}
    return {rank: pid for rank, pid in pids.items() if Path(f"/proc/{pid}").exists()}


def test_live_training_with_a_restart(stoker_home: Path, training_shards: Path, browser: Browser) -> None:
    flags = ["--model", "trivial", "--size", "16", "--epochs", "100000", "--global-batch-size", "32", "--device", "cpu"]
    flags += ["--log-every", "1s", "--checkpoint-every-steps", "20", "--validate-every", "0"]
    job = api.Job.from_dict(
        {
            "name": "live", "topology": "torchrun", "processes_per_worker": 2, "retries": 2,
            "program": {"module": "stoker.trainers.torch_image", "args": flags},
            "data": {"train": str(training_shards / "train")},
        }
    )  # fmt: skip
    started = job.run()
    try:
        with running_dashboard() as dashboard:
            browser.open(f"{dashboard.url}/#/run/{started.id}")
            assert browser.page.locator(".state").first.inner_text() in ("pending", "running")
            browser.wait_for(lambda: browser.fact("loss") != "–")
            browser.wait_for(lambda: len(find_ranks(started.files)) == 2)
            os.kill(find_ranks(started.files)[1], signal.SIGKILL)
            browser.wait_for(lambda: browser.fact("attempts") == "2")
            browser.wait_for(lambda: browser.page.locator("[data-mark=resume]").count() >= 1)
            browser.wait_for(lambda: "1 restart" in browser.fact("restarts"))
            started.stop()
            browser.wait_for(lambda: browser.page.locator(".state").first.inner_text() == "stopped")
            progress, restarts = started.progress(), started.analysis().restarts()
            browser.wait_for(lambda: browser.fact("step").startswith(f"{progress.step:,} of "))
            assert restarts.count == 1
            browser.wait_for(lambda: f"{restarts.repeated_steps:,} steps repeated" in browser.fact("restarts"))
            assert progress.loss is not None
            loss = pytest.approx(progress.loss, rel=1e-3)
            browser.wait_for(lambda: float(browser.fact("loss").replace(",", "")) == loss)
            # Without a gap and without a double, although most points came as live updates.
            browser.wait_for(lambda: browser.chart_rows("Loss") == len(finite_losses(started.files)))
            browser.open(f"{dashboard.url}/#/run/{started.id}/ranks")
            rows = browser.page.locator("tbody tr").all_inner_texts()
            assert len(rows) == 2
    finally:
        started.stop()
    assert browser.errors == []


def test_dropped_connection_resumes_without_gap_or_double(run: RunFolder, browser: Browser) -> None:
    run.write_status(_running(run))
    writer = EventLogs(run.logs, seed=11, t=time.time())
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with running_dashboard(port=port) as dashboard:
        browser.open(f"{dashboard.url}/#/run/{run.id}")
        browser.wait_for(lambda: browser.connection == "live")
    writer.write(20)
    browser.wait_for(lambda: browser.connection != "live")
    run.write_status(_finished(run))  # from now on, only the live updates bring points
    with running_dashboard(port=port):
        browser.wait_for(lambda: browser.connection == "live")
        writer.write(20)
        expected = len(finite_losses(run))
        browser.wait_for(lambda: browser.chart_rows("Loss") >= expected)
        browser.page.wait_for_timeout(1500)  # a double would come now
        assert browser.chart_rows("Loss") == expected


def test_nothing_from_a_run_becomes_markup(stoker_home: Path, browser: Browser) -> None:
    run = Runs().write(stoker_home, "evil-20260101-000000-abcd", JobState.FAILED)
    status = run.read_status()
    (run.folder / "state.json").write_text(
        json.dumps({**json.loads((run.folder / "state.json").read_text()), "message": PAYLOAD})
    )
    assert status.state is JobState.FAILED
    (run.folder / "job.yaml").write_text(f"name: evil\nprogram: {{script: {json.dumps(PAYLOAD)}}}\n")
    head = {"v": 1, "t": time.time(), "slot": PAYLOAD[:60], "rank": 0, "attempt": 0, "pid": 5}
    events: list[dict[str, Any]] = [
        {"k": "mark", "name": PAYLOAD, "detail": PAYLOAD, "step": 1},
        {"k": "mark", "name": "bad_sample", "detail": PAYLOAD, "shard": PAYLOAD, "reason": PAYLOAD, "offset": 1},
        {"k": "scalar", "name": PAYLOAD, "step": 1, "value": 1.5},
        {"k": "scalar", "name": "loss", "step": 1, "value": 1.5},
        {"k": "heartbeat", "step": 1, "shard": PAYLOAD, "sample": 3},
        {"k": "profile", "cpu_pct": 5.0, "machine": PAYLOAD, "interval_s": 1.0},
    ]
    lines = [f"{PREFIX}{json.dumps({**head, 'seq': number, **event})}" for number, event in enumerate(events)]
    (run.logs / "worker-0.0.log").write_text("\n".join([*lines, PAYLOAD, ""]))
    with running_dashboard() as dashboard:
        for path in (*(f"#/run/{run.id}{page}" for page in PAGES), f"#/compare/{run.id}", "#/runs", f"#/run/{PAYLOAD}"):
            browser.open(f"{dashboard.url}/{path}")
            for details in browser.page.locator("details").all():
                details.evaluate("node => { node.open = true; }")
            assert browser.page.evaluate("window.pwned") is None, path
            assert browser.page.locator("img").count() == 0
            assert browser.page.locator("b:text-is('x')").count() == 0
        browser.open(f"{dashboard.url}/#/run/{run.id}/logs")
        assert browser.page.get_by_text(PAYLOAD, exact=True).count() == 1
        assert all(url.startswith((dashboard.url, "data:")) for url in browser.requests)
        browser.page.goto("about:blank")  # before the server stops: the page asks for new lines every second
    browser.open(_export(run).as_uri())
    assert browser.page.evaluate("window.pwned") is None
    assert [error for error in browser.errors if "404" not in error] == []


def _export(run: RunFolder) -> Path:
    path = run.folder / "page.html"
    assert stoker("dash", run.id, "--html", path) == 0
    return path


def test_zoom_pan_search_and_compare(run: RunFolder, dashboard: Dashboard, browser: Browser) -> None:
    other = RunFolder(run.folder.with_name("digits-20260102-000000-abcd"))
    shutil.copytree(run.folder, other.folder)
    (other.folder / "job.yaml").write_text((run.folder / "job.yaml").read_text() + "retries: 7\n")
    page = browser.page
    browser.open(f"{dashboard.url}/#/run/{run.id}")
    box = page.locator('section[aria-label="Loss"] canvas').bounding_box()
    assert box is not None
    with page.expect_response(lambda response: "/scalars" in response.url and "since=" in response.url):
        page.mouse.move(box["x"] + 200, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 300, box["y"] + 50)
        page.mouse.up()
    assert page.get_by_role("button", name="Live").get_attribute("aria-pressed") == "false"
    zoomed = browser.chart_rows("Loss")
    with page.expect_response(lambda response: "/scalars" in response.url and "since=" not in response.url):
        page.get_by_role("button", name="Live").click()
    browser.wait_for(lambda: browser.chart_rows("Loss") > zoomed)
    browser.open(f"{dashboard.url}/#/run/{run.id}/logs")
    page.get_by_label("Search in the logs").fill("TAGGED")
    browser.wait_for(lambda: "match" in page.locator("[role=status]").all_inner_texts()[-1])
    browser.wait_for(
        lambda: page.locator(".log div").count() > 0 and page.locator(".log div:not(:has(mark))").count() == 0
    )
    browser.open(f"{dashboard.url}/#/runs")
    for box_node in page.locator("tbody input").all():
        box_node.check()
    page.get_by_role("button", name="Compare").click()
    page.wait_for_selector("text=retries")
    assert page.locator("section[aria-label=Differences] tbody tr").count() == 1
    assert browser.errors == []


def test_keyboard_is_enough(run: RunFolder, dashboard: Dashboard, browser: Browser) -> None:
    page = browser.page
    browser.open(f"{dashboard.url}/#/runs")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"

    def tab_to(selector: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("selector => document.activeElement.matches(selector)", selector):
                return
        raise AssertionError(f"{selector} cannot be reached with Tab")

    tab_to("input[type=search]")
    page.keyboard.type("no such run")
    assert page.locator("tbody tr[data-run]").count() == 0
    page.keyboard.press("Control+a")
    page.keyboard.press("Delete")
    tab_to(f"a[href='#/run/{run.id}']")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-fact=step]")
    tab_to("section[aria-label=Loss] canvas")
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    assert ":" in page.locator("section[aria-label=Loss] .legend span").first.inner_text()
    with page.expect_response(lambda response: "since=" in response.url):
        page.keyboard.press("+")
    page.keyboard.press("Escape")
    tab_to("section[aria-label=Loss] summary")
    page.keyboard.press("Enter")
    page.wait_for_selector("section[aria-label=Loss] tbody tr")
    assert browser.errors == []


def test_dark_mode_is_kept(run: RunFolder, dashboard: Dashboard, browser: Browser) -> None:
    page = browser.page
    browser.open(f"{dashboard.url}/#/run/{run.id}")

    def colors() -> tuple[str, list[int]]:
        background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        return background, page.locator("section[aria-label=Loss] canvas").evaluate(LABEL_COLORS)

    light, light_labels = colors()
    page.get_by_label("Switch between light and dark").click()
    page.wait_for_selector("html[data-theme=dark]")
    browser.wait_for(lambda: colors()[1] != light_labels)
    dark, dark_labels = colors()
    assert light != dark
    assert dark_labels[1] > 130  # labels on the canvas are bright, too
    page.reload()
    page.wait_for_selector("html[data-theme=dark]")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_accessibility_violations(run: RunFolder, dashboard: Dashboard, chromium: Any, scheme: str) -> None:
    context = chromium.new_context(color_scheme=scheme, bypass_csp=True)
    try:
        browser = Browser(context.new_page())
        for path in (*(f"#/run/{run.id}{page}" for page in PAGES), "#/runs", f"#/compare/{run.id}"):
            browser.open(f"{dashboard.url}/{path}")
            assert browser.serious_violations() == [], path
    finally:
        context.close()


def test_exported_page_is_self_contained(run: RunFolder, browser: Browser) -> None:
    path = _export(run)
    browser.page.context.set_offline(True)
    browser.open(path.as_uri())
    step = api.Run(run.folder).progress().step
    assert browser.fact("step").startswith(f"{step:,}")
    assert browser.chart_rows("Loss") == len(finite_losses(run))
    for page in PAGES[1:]:
        browser.open(f"{path.as_uri()}#/run/{run.id}{page}")
        assert browser.page.locator("[role=alert]").count() == 0
    assert browser.errors == []
    assert all(url.startswith(("file:", "data:")) for url in browser.requests)


def _running(run: RunFolder) -> Any:
    return msgspec.structs.replace(run.read_status(), state=JobState.RUNNING, ended=None)


def _finished(run: RunFolder) -> Any:
    return msgspec.structs.replace(run.read_status(), state=JobState.SUCCEEDED, ended=time.time())
