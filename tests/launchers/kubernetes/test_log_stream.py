"""Log streams: each line is copied once, across disconnects, incomplete lines and shared timestamps."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import NotFoundError, UnavailableError
from stoker.launchers.kubernetes.log_stream import LogPosition, LogStream
from stoker.telemetry.reader import RunTail
from tests.support.waiting import TIMEOUT_S, wait_until


class DisconnectingClient:
    """A client whose log streams disconnect after so many lines, in the middle of the next one."""

    def __init__(self, lines: list[tuple[str, str]], limits: list[int]) -> None:
        self.lines, self.limits = lines, limits

    def stream_log(self, pod: str, container: str, *, follow: bool, since: str) -> Iterator[bytes]:
        # The API server compares `sinceTime` to the second.
        lines = [line for line in self.lines if f"2026-11-16T10:00:{line[0]}" >= since[:-5]]
        limit = self.limits.pop(0) if self.limits else len(lines)
        for time, text in lines[:limit]:
            yield f"2026-11-16T10:00:{time}Z {text}\n".encode()
        yield b"unable to retrieve container logs for containerd://0123"
        if limit < len(lines):
            time, text = lines[limit]
            yield f"2026-11-16T10:00:{time}Z {text[:3]}".encode()
            if limit % 2:  # otherwise the stream ends as if it were complete
                raise UnavailableError("connection lost")


def build_stream(client: Any, path: Path) -> LogStream:
    return LogStream(client, "pod", path, LogPosition(slot="worker/0", attempt=0))


def test_each_line_is_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.launchers.kubernetes.log_stream.RETRY_DELAYS_S", (0.0,))
    times = ["01.000", "01.001", "01.001", "01.001", "01.002", "02.000", "02.000", "03.000"]
    lines = [(time, f"line {number}") for number, time in enumerate(times)]
    path = tmp_path / "worker-0.0.log"
    client = DisconnectingClient(lines, [0, 2, 3, 3, 1, 5])
    stream = build_stream(client, path)
    stream.start()
    wait_until(lambda: not client.limits)
    stream.is_pod_finished = True
    stream.join(TIMEOUT_S)
    assert path.read_text().splitlines() == [text for _, text in lines]
    assert stream.position.size == path.stat().st_size
    seconds = [datetime.fromtimestamp(line.t, UTC).second for line in RunTail(tmp_path).lines(final=True)]
    assert seconds == [1, 1, 1, 1, 1, 2, 2, 3]  # the times of the kubelet


def test_log_of_a_deleted_pod_is_complete(tmp_path: Path) -> None:
    class EmptyClient:
        def stream_log(self, *args: Any, **options: Any) -> Iterator[bytes]:
            raise NotFoundError("gone")

    stream = build_stream(EmptyClient(), tmp_path / "a.log")
    stream.run()
    assert stream.position.done
