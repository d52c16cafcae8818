"""Copy the log of one pod into the run folder: each line once, resumed after every disconnect."""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import msgspec

from stoker.errors import NotFoundError, StokerError
from stoker.kube.client import KubeClient
from stoker.kube.objects import MAIN_CONTAINER
from stoker.telemetry.log_times import LogTimesWriter

RETRY_DELAYS_S = (0.5, 1.0, 2.0, 5.0)
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT")


class LogPosition(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a pod's log has been copied: the file size, and the last timestamp, which lines can share."""

    slot: str
    attempt: int
    size: int = 0
    time: str = ""
    count: int = 0
    """How many lines with that timestamp were copied."""
    done: bool = False


class LogStream(threading.Thread):
    """Thread that copies the log of one pod."""

    def __init__(self, client: KubeClient, pod: str, path: Path, position: LogPosition) -> None:
        super().__init__(daemon=True, name=pod)
        self._client, self._pod, self._path = client, pod, path
        self.position = position
        """Replaced as a whole, so that other threads never read a partial update."""
        self.is_pod_finished = False
        """Whether the pod has finished, so that its log is complete."""
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Give up an incomplete log."""
        self._stopped.set()

    def run(self) -> None:
        """Follow the log, again after each disconnect, until it is complete."""
        failures = 0
        while not (self.position.done or self._stopped.is_set()):
            is_last, before = self.is_pod_finished, self.position
            try:
                self._copy(is_last)
                if is_last:
                    self._update(done=True)
            except NotFoundError:
                self._update(done=True)
            except (StokerError, OSError, ValueError):  # retried below
                pass
            except RuntimeError:
                if not self._stopped.is_set():  # otherwise its client was closed
                    raise
            failures = 0 if self.position != before else failures + 1
            if not self.position.done:
                self._stopped.wait(RETRY_DELAYS_S[min(failures, len(RETRY_DELAYS_S) - 1)])

    def _copy(self, is_last: bool) -> None:
        """Append the lines after the position; an incomplete line only if no more can come."""
        last_time, skip = self.position.time, self.position.count
        times = LogTimesWriter(self._path)
        with open(self._path, "ab") as file:
            for line in self._client.stream_log(self._pod, MAIN_CONTAINER, follow=True, since=last_time):
                prefix, _, text = line.partition(b" ")
                timestamp = prefix.decode(errors="replace")
                if (
                    not _TIMESTAMP.match(timestamp)  # a message of the kubelet, such as that the log is gone
                    or timestamp < last_time
                    or not (line.endswith(b"\n") or is_last)
                ):
                    continue
                if timestamp == last_time and skip:
                    skip -= 1
                    continue
                with suppress(ValueError):
                    times.add(file.tell(), datetime.fromisoformat(timestamp).timestamp())
                file.write(text if text.endswith(b"\n") else text + b"\n")
                file.flush()
                count = self.position.count + 1 if timestamp == self.position.time else 1
                self._update(time=timestamp, count=count, size=file.tell())

    def _update(self, **changes: object) -> None:
        self.position = msgspec.structs.replace(self.position, **changes)
