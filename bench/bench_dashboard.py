"""Measure the dashboard on a generated run of 1,000 slots × 24 hours: opening it, its first page, zooming."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import event_logs
from measure import BenchContext, BenchResult, Comparison, Implementation, Limit, Timing

SLOTS, HOURS = 1000, 24
OPEN = "first open"
PARSE = "json.loads of every line"
PARSED_SLOTS = 100
SCRIPT = "import pathlib, sys; from stoker.telemetry import run_index; run_index.open_index(pathlib.Path(sys.argv[1]))"

PARSE_SCRIPT = "import json, sys\nfor path in sys.argv[1:]:\n for line in open(path): json.loads(line[8:])"


def run(context: BenchContext) -> BenchResult:
    home = context.work / "home"
    large = event_logs.write_run(home / "runs", SLOTS, HOURS)
    lines = SLOTS * int(HOURS * 120)
    first = cpu_time(SCRIPT, large.logs)
    again = [cpu_time(SCRIPT, large.logs) for _ in range(context.rounds)]
    parse = cpu_time(PARSE_SCRIPT, *sorted(large.logs.glob("*.log"))[:PARSED_SLOTS])
    page = measure_page(home, large.id)
    wide = event_logs.write_run(home / "runs", 10_000, 1, name="wide")
    wide_first = cpu_time(SCRIPT, wide.logs)
    wide_page = measure_page(home, wide.id)
    shutil.rmtree(home)
    implementations = [
        Implementation(name=OPEN, run=lambda: Timing(0.0), ours=True),
        Implementation(name=PARSE, run=lambda: Timing(0.0)),
    ]
    limits = [
        Limit(what="First open, CPU time", value=first, bound=15, unit="s"),
        Limit(what="Later opens, CPU time", value=1000 * statistics.median(again), bound=2000, unit="ms"),
        Limit(what="First open of 10,000 slots × 1 h, CPU time", value=wide_first, bound=15, unit="s"),
    ]
    return BenchResult(
        name="dashboard",
        title=f"Open the dashboard of {SLOTS:,} slots × {HOURS} h ({lines / 1e6:.1f} million events)",
        unit="events/s",
        implementations=implementations,
        speeds={OPEN: [lines / first], PARSE: [lines * PARSED_SLOTS / SLOTS / parse]},
        comparisons=[Comparison(ours=OPEN, peer=PARSE, note="parsing alone, without keeping anything")],
        limits=[*limits, *page_limits(page), *wide_page_limits(wide_page)],
        notes=["Logs of 2 GB with one sample of each slot every 30 s. CPU time of a new process, with imports."],
    )


def cpu_time(script: str, *paths: Path) -> float:
    """Return the CPU time of a new process that runs a script."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", script, *map(str, paths)], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


def measure_page(home: Path, run_id: str) -> dict[str, Any]:
    """Open the page of the slots in Chromium, zoom and pan; return nothing without Chromium."""
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        print("chromium or playwright is missing: the page is not measured", file=sys.stderr)
        return {}
    command = [sys.executable, "-m", "stoker", "dash", "--port", "0"]
    environment = {**os.environ, "STOKER_HOME": str(home)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        found = re.search(r"http://\S+", server.stderr.readline())
        assert found
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(f"{found[0]}#/run/{run_id}/slots")
            page.wait_for_selector("main[data-ready]", timeout=120_000)
            measures = zoom_and_pan(page)
            browser.close()
        peak = int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{server.pid}/status").read_text())[0]) / 1024
        server.terminate()
    return {**measures, "peak": peak}


def page_limits(measures: dict[str, Any]) -> list[Limit]:
    """Return what was measured with the limits of the dashboard; an empty list if nothing was."""
    if not measures:
        return []
    ready, zooms, sent = measures["ready"][0], statistics.median(measures["slots"][1:]), measures["bytes"] / 1e3
    return [
        Limit(what="Page of all slots, from the request to the drawn heat map", value=ready, bound=2000, unit="ms"),
        Limit(what="Zoom and pan, median", value=zooms, bound=250, unit="ms"),
        Limit(what="Sent to the page in all", value=sent, bound=5000, unit="kB"),
        Limit(what="Peak memory of the server", value=measures["peak"], bound=500, unit="MB"),
    ]


def wide_page_limits(measures: dict[str, Any]) -> list[Limit]:
    """Return the limits of the page of 10,000 slots: it opens, and the server stays within its memory."""
    if not measures:
        return []
    return [
        Limit(what="Page of 10,000 slots × 1 h", value=measures["ready"][0], bound=5000, unit="ms"),
        Limit(what="Peak memory of the server, 10,000 slots", value=measures["peak"], bound=500, unit="MB"),
    ]


def zoom_and_pan(page: Any) -> dict[str, Any]:
    """Zoom in and pan several times; return the times in milliseconds, and the bytes that were received."""

    def count() -> int:
        return int(page.evaluate("window.stokerMeasures.timings.slots.length"))

    for name in ("Zoom in", "Zoom in", "Pan left", "Pan right", "Zoom in", "Pan left", "Pan left", "Whole run"):
        known = count()
        page.get_by_role("button", name=name).click()
        deadline = time.monotonic() + 60
        while count() == known and time.monotonic() < deadline:
            page.wait_for_timeout(20)
    found: dict[str, Any] = json.loads(page.evaluate("JSON.stringify(window.stokerMeasures)"))
    return {**found["timings"], "bytes": found["traffic"]["bytes"]}
