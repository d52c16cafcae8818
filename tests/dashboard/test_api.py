"""The API of the dashboard: its numbers are those of the events, and it reads nothing but run folders."""

from __future__ import annotations

import base64
import csv
import io

import numpy as np
import pytest

from stoker.jobs.run_folder import RunFolder
from stoker.telemetry.analysis import analyze
from stoker.telemetry.reader import read_events
from tests.support.dashboards import Dashboard, running_dashboard
from tests.support.event_logs import EventLogs


def test_numbers_are_those_of_the_events(dashboard: Dashboard, run: RunFolder) -> None:
    events = read_events(run.logs)
    found = dashboard.get(f"/api/runs/{run.id}").json
    analysis = analyze(events)
    progress = analysis.progress()
    assert (found["run"]["step"], found["run"]["total_steps"]) == (progress.step, progress.total_steps)
    assert found["run"]["verdict"] == analysis.verdict().sentence
    assert found["restarts"] == analysis.restarts().count
    assert len(found["marks"]) == sum(event.kind == "mark" for event in events)
    listed = dashboard.get("/api/runs").json["runs"]
    assert [row["id"] for row in listed] == [run.id]
    assert listed[0]["loss"] == found["run"]["loss"]


def test_series_keep_every_extreme_value(dashboard: Dashboard, run: RunFolder) -> None:
    losses = [e.fields["value"] for e in read_events(run.logs) if e.fields.get("name") == "loss" and e.kind == "scalar"]
    finite = [value for value in losses if value == value]
    for bins in (5, 600):
        series = dashboard.get(f"/api/runs/{run.id}/scalars?names=loss&bins={bins}").json["scalars"]["loss"]
        assert len(series["t"]) <= max(bins, len(losses))
        if bins == 600:
            assert max(v for v in series["max"] if v is not None) == pytest.approx(max(finite), rel=1e-5)
            assert min(v for v in series["min"] if v is not None) == pytest.approx(min(finite), rel=1e-5)
    steps = dashboard.get(f"/api/runs/{run.id}/steps?bins=50").json
    assert set(steps["parts"]) == {"t", "loader_wait", "h2d", "compute", "collective_wait", "rest"}


def test_heat_map_shows_a_slot_that_stopped_reporting_first(stoker_home: object, run: RunFolder) -> None:
    for log in run.logs.glob("worker-1.*.log"):
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join(lines[: len(lines) // 4]))
    with running_dashboard() as dashboard:
        found = dashboard.get(f"/api/runs/{run.id}/heat?metric=cpu_pct&bins=60").json
    cells = np.frombuffer(base64.b64decode(found["cells"]), np.uint8).reshape(len(found["rows"]), found["bins"])
    assert found["rows"][0] == "worker/1"
    assert (cells[0] == 255).sum() > (cells[1] == 255).sum()
    assert (found["low"], found["high"]) == (0, 100)
    values = [e.fields["cpu_pct"] for e in read_events(run.logs) if e.kind == "profile"]
    decoded = cells[cells < 255] / 254 * 100
    assert min(values) - 1 <= decoded.min() <= decoded.max() <= max(values) + 1
    assert len(found["bands"]["p50"]) == 60


def test_heat_map_keeps_the_gpus_of_a_dead_slot_in_a_window_without_them(stoker_home: object, run: RunFolder) -> None:
    for log in run.logs.glob("worker-1.*.log"):
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join(lines[: len(lines) // 4]))
    last = max(e.t for e in read_events(run.logs))
    with running_dashboard() as dashboard:
        found = dashboard.get(f"/api/runs/{run.id}/heat?metric=gpu.util_pct&bins=60&since={last - 2}").json
    cells = np.frombuffer(base64.b64decode(found["cells"]), np.uint8).reshape(len(found["rows"]), found["bins"])
    assert sorted(found["rows"]) == [f"worker/{slot} gpu {gpu}" for slot in range(3) for gpu in range(2)]
    assert found["rows"][:2] == ["worker/1 gpu 0", "worker/1 gpu 1"]
    assert (cells[:2] == 255).all()
    assert (cells[2:] < 255).any(axis=1).all()


def test_slots_are_the_worst_first(stoker_home: object, run: RunFolder) -> None:
    silent = run.logs / "worker-1.0.log"
    lines = silent.read_text().splitlines(keepends=True)
    late = [line.replace('"t": ', '"t": 9') for line in lines if '"slot": "worker/1"' in line]
    (run.logs / "worker-8.0.log").write_text("".join(late).replace('"worker/1"', '"worker/8"'))
    with running_dashboard() as dashboard:
        slots = dashboard.get(f"/api/runs/{run.id}/slots").json["slots"]
        first = dashboard.get(f"/api/runs/{run.id}/slots?limit=2").json["slots"]
    busy = [slot["gpu_util_pct"] for slot in slots if slot["is_silent"]]
    assert [slot["slot"] for slot in slots][-1] == "worker/8"
    assert [slot["is_silent"] for slot in slots] == [True] * 3 + [False]
    assert busy == sorted(busy)
    assert first == slots[:2]


def test_ranks_slots_and_data(dashboard: Dashboard, run: RunFolder) -> None:
    events = read_events(run.logs)
    last = max(event.attempt for event in events)
    beats = {e.rank: e for e in events if e.kind == "heartbeat" and e.attempt == last}
    rows = dashboard.get(f"/api/runs/{run.id}/ranks").json["ranks"]
    for row in rows:
        beat = beats[row["rank"]].fields
        assert (row["step"], row["shard"], row["sample"]) == (beat["step"], beat["shard"], beat["sample"])
    slots = dashboard.get(f"/api/runs/{run.id}/slots").json["slots"]
    assert {slot["slot"] for slot in slots} == {"worker/0", "worker/1", "worker/2"}
    assert len(dashboard.get(f"/api/runs/{run.id}/data").json["ranks"]) == len(rows)


def test_log_pages_lead_from_the_begin_to_the_end(dashboard: Dashboard, run: RunFolder) -> None:
    logs = dashboard.get(f"/api/runs/{run.id}/logs").json["logs"]
    name = max(logs, key=lambda log: log["bytes"])["name"]
    expected = [line for line in (run.logs / name).read_text().split("\n") if line and '@stoker {"v"' not in line]
    path = f"/api/runs/{run.id}/lines?logs={name}&limit=2&tail=false"
    lines, offset, pages = [], 0, 0
    while True:
        page = dashboard.get(f"{path}&offsets={offset}").json
        lines += [line["text"] for line in page["lines"]]
        offset, pages = page["next"][name], pages + 1
        if page["is_complete"]:
            break
    assert len(lines) == len(expected)
    assert pages > 1
    found = dashboard.get(f"/api/runs/{run.id}/lines?logs={name}&search=TAGGED&tail=false").json["lines"]
    assert found
    assert all("tagged" in line["text"] for line in found)


def test_csv_has_every_row(dashboard: Dashboard, run: RunFolder) -> None:
    answer = dashboard.get(f"/api/runs/{run.id}/export.csv?table=span")
    rows = list(csv.DictReader(io.StringIO(answer.body.decode())))
    spans = [event for event in read_events(run.logs) if event.kind == "span"]
    assert len(rows) == len(spans)
    assert {row["name"] for row in rows} == {event.fields["name"] for event in spans}
    assert answer.headers["content-disposition"] == f'attachment; filename="{run.id}-span.csv"'


def test_prometheus_metrics(dashboard: Dashboard, run: RunFolder) -> None:
    row = dashboard.get("/api/runs").json["runs"][0]
    text = dashboard.get("/metrics").body.decode()
    assert f'stoker_run_step{{run="{run.id}",job="digits"}} {row["step"]}' in text.splitlines()
    assert f'stoker_run_state{{run="{run.id}",job="digits",state="succeeded"}} 1' in text.splitlines()


def test_comparison_lists_what_differs(dashboard: Dashboard, run: RunFolder) -> None:
    other = RunFolder(run.folder.with_name("digits-20260102-000000-abcd"))
    other.logs.mkdir(parents=True)
    for name in ("handle", "state.json", "environment.json"):
        (other.folder / name).write_bytes((run.folder / name).read_bytes())
    (other.folder / "job.yaml").write_text((run.folder / "job.yaml").read_text() + "retries: 7\n")
    EventLogs(other.logs, seed=4).write(30)
    found = dashboard.get(f"/api/compare?runs={run.id},{other.id}&name=loss&by=step").json
    assert {row["key"] for row in found["differences"]} == {"retries"}
    assert [len(curve["x"]) > 0 for curve in found["curves"]] == [True, True]
    by_samples = dashboard.get(f"/api/compare?runs={run.id}&name=loss&by=samples").json["curves"][0]
    assert by_samples["x"] == [64 * step for step in found["curves"][0]["x"]]
    assert dashboard.get(f"/api/compare?runs={run.id},nothing").code == 404


@pytest.mark.parametrize("path", ["/api/runs", "/api/runs/digits-20260101-000000-abcd/lines", "/metrics"])
def test_deleted_run_disappears(dashboard: Dashboard, run: RunFolder, path: str) -> None:
    assert dashboard.get(path).code == 200
    run.folder.rename(run.folder.with_name(".gone"))
    assert dashboard.get(path).code in (200, 404)
    assert dashboard.get("/api/runs").json["runs"] == []
    assert not run.folder.exists()  # nothing of it was created again


def test_heat_map_of_a_run_without_events(dashboard: Dashboard, run: RunFolder) -> None:
    for log in run.logs.iterdir():
        log.write_text("text\n")
    for metric in ("cpu_pct", "gpu.util_pct", "loader_wait"):
        answer = dashboard.get(f"/api/runs/{run.id}/heat?metric={metric}")
        assert (answer.code, answer.json["rows"], answer.json["cells"]) == (200, [], "")


def test_requests_read_only_below_run_folders(dashboard: Dashboard, run: RunFolder) -> None:
    secret = run.folder.parent / "secret.txt"
    secret.write_text("do not read")
    (run.logs / "worker-9.0.log").symlink_to(secret)
    base = f"/api/runs/{run.id}"
    for path in (
        "/api/runs/..", "/api/runs/%2e%2e", "/api/runs/..%2f..%2fetc", "/api/runs/" + "a" * 300, "/static/../server.py",
        "/static/%2e%2e/server.py", f"{base}/lines?logs=../secret.txt", f"{base}/lines?logs=..%2fsecret.txt",
        f"{base}/lines?logs=/etc/passwd", f"{base}/lines?logs=worker-9.0.log", f"{base}/lines?logs=%00", "/nothing",
    ):  # fmt: skip
        answer = dashboard.get(path)
        assert answer.code == 404, path
        assert b"do not read" not in answer.body


@pytest.mark.parametrize(
    "query",
    ["heat?metric=nonsense", "heat?bins=0", "heat?bins=x", "scalars?since=nan", "scalars?bins=99999", "lines?limit=0",
     "lines?logs=worker-0.0.log&offsets=-1", "lines?logs=a,b&offsets=1", "export.csv?table=secret"],
)  # fmt: skip
def test_invalid_queries_are_refused(dashboard: Dashboard, run: RunFolder, query: str) -> None:
    answer = dashboard.get(f"/api/runs/{run.id}/{query}")
    assert answer.code == 400
    assert answer.json["error"]
    assert dashboard.get("/api/compare").code == 400
    assert dashboard.get("/api/runs", method="POST").code == 405
