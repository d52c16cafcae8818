"""Live updates: every scalar and mark once, also for a client whose connection was dropped."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from stoker.jobs.run_folder import RunFolder
from stoker.telemetry.reader import read_events
from tests.support.dashboards import Dashboard
from tests.support.event_logs import EventLogs
from tests.support.waiting import wait_until


def read_messages(dashboard: Dashboard, path: str, last: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the IDs and values of messages; closing the generator drops the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=60)
    connection.request("GET", path, headers={"Last-Event-ID": last} if last else {})
    response = connection.getresponse()
    assert response.getheader("content-type", "").startswith("text/event-stream")
    fields: dict[str, str] = {}
    try:
        for raw in response:
            line = raw.decode().rstrip("\n")
            name, _, value = line.partition(": ")
            fields[name] = value
            if not line and "data" in fields:
                yield fields["id"], json.loads(fields["data"])
                fields = {}
    finally:
        response.close()
        connection.close()


def last_event(dashboard: Dashboard, run: RunFolder) -> float:
    """Return the time of the last event that the server knows."""
    return float(dashboard.get(f"/api/runs/{run.id}").json["run"]["last_event"])


def test_dropped_connection_resumes_without_gap_or_double(dashboard: Dashboard, run: RunFolder) -> None:
    before = len([event for event in read_events(run.logs) if event.kind == "scalar"])
    first_t = time.time()
    writer = EventLogs(run.logs, seed=9, t=first_t)
    scalars: list[Any] = []
    marks: list[Any] = []
    last, drops = "", 0
    path = f"/api/runs/{run.id}/stream"
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            writer.write()
            stop.wait(0.02)

    stream = read_messages(dashboard, path)
    last, first = next(stream)
    assert first["scalars"] == []
    thread = threading.Thread(target=write)
    thread.start()
    try:
        while drops < 5:
            last, update = next(stream)
            scalars += update["scalars"]
            marks += update["marks"]
            if update["scalars"]:
                stream.close()
                drops += 1
                wait_until(
                    lambda seen=update: last_event(dashboard, run) > seen["run"]["last_event"]
                )  # messages are lost
                stream = read_messages(dashboard, path, last)
    finally:
        stop.set()
        thread.join()
    expected = [event for event in read_events(run.logs) if event.kind == "scalar"]
    while len(scalars) < len(expected) - before:
        last, update = next(stream)
        scalars += update["scalars"]
        marks += update["marks"]
    stream.close()
    known = sorted((event.t, event.fields["step"]) for event in expected if event.t > first_t)
    assert sorted((row["t"], row["step"]) for row in scalars) == known


def test_client_of_another_generation_is_reset(dashboard: Dashboard, run: RunFolder) -> None:
    total = len([event for event in read_events(run.logs) if event.kind == "scalar"])
    for last in ("other:5:7", "other:99999999:7"):
        stream = read_messages(dashboard, f"/api/runs/{run.id}/stream", last)
        _, update = next(stream)
        stream.close()
        assert update["is_reset"]
        assert len(update["scalars"]) == total


def test_stream_of_an_unknown_run(dashboard: Dashboard) -> None:
    assert dashboard.get("/api/runs/nothing/stream").code == 404
