"""Alerts that are posted to a URL."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.dashboard.notify import Notifier
from stoker.dashboard.runs import RunCatalog
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.telemetry.events import Recorder
from tests.support.runs import Runs


class Receiver(http.server.HTTPServer):
    """Receiver of alerts on a loopback port."""

    def __init__(self) -> None:
        self.alerts: list[Any] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def kinds(self) -> list[str]:
        return [alert["kind"] for alert in self.alerts]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        self.server.alerts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_each_alert_is_posted_once(stoker_home: Path, receiver: Receiver) -> None:
    run = Runs().write(stoker_home, "digits-20260101-000000-abcd", JobState.RUNNING)
    run.write_status(msgspec.structs.replace(run.read_status(), ended=None))
    notifier = Notifier(RunCatalog(), f"http://127.0.0.1:{receiver.server_port}/hook")
    with open(run.log_path(Slot("worker", 0), 0), "ab", buffering=0) as log:
        record = Recorder(slot="worker/0", fd=log.fileno())
        record.scalar("samples_per_s", 900.0, 1)
        notifier.check()
        assert receiver.kinds == []
        record.scalar("samples_per_s", 500.0, 2)
        notifier.check()
        notifier.check()
        assert receiver.kinds == ["slow"]
        record.scalar("samples_per_s", 890.0, 3)
        record.emit("profile", interval_s=1.0, cache_disk_free=1 << 20)
        notifier.check()
        assert receiver.kinds == ["slow", "disk"]
    run.write_status(msgspec.structs.replace(run.read_status(), state=JobState.FAILED, message="rank 1 was killed"))
    notifier.check()
    notifier.check()
    assert receiver.kinds == ["slow", "disk", "failed"]
    assert receiver.alerts[-1]["text"] == "rank 1 was killed"
    assert receiver.alerts[-1]["run"] == run.id


def test_silent_run_is_reported_as_hung(stoker_home: Path, receiver: Receiver) -> None:
    run = _silent_run(stoker_home)
    notifier = Notifier(RunCatalog(), f"http://127.0.0.1:{receiver.server_port}/hook")
    notifier.check()
    assert receiver.kinds == ["hung"]
    assert receiver.alerts[0]["run"] == run.id


def test_alert_is_posted_again_if_the_receiver_was_down(stoker_home: Path, receiver: Receiver) -> None:
    _silent_run(stoker_home)
    notifier = Notifier(RunCatalog(), "http://127.0.0.1:1/")
    notifier.check()
    assert notifier.failures == 1
    notifier._url = f"http://127.0.0.1:{receiver.server_port}/hook"
    notifier.check()
    assert receiver.kinds == ["hung"]


def test_runs_that_ended_before_are_not_reported(stoker_home: Path, receiver: Receiver) -> None:
    Runs().write(stoker_home, "digits-20260101-000000-abcd", JobState.FAILED)
    notifier = Notifier(RunCatalog(), f"http://127.0.0.1:{receiver.server_port}/hook")
    notifier.check()
    assert receiver.kinds == []


def _silent_run(home: Path) -> RunFolder:
    run = Runs().write(home, "digits-20260101-000000-abcd", JobState.RUNNING)
    run.write_status(msgspec.structs.replace(run.read_status(), ended=None))
    event = {"v": 1, "t": time.time() - 1000, "slot": "worker/0", "rank": 0, "attempt": 0, "seq": 0, "k": "heartbeat"}
    run.log_path(Slot("worker", 0), 0).write_text(f"@stoker {json.dumps({**event, 'step': 1})}\n")
    return run
