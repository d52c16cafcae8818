"""Load test of a data server: many clients read files as fast as they can."""

from __future__ import annotations

import http.client
import itertools
import random
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from stoker.errors import InputError, UnavailableError
from stoker.storage import Entry, open_store, redacted

TIMEOUT_S = 30.0
_READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LoadTestResult:
    """The results of all clients together; latencies are from the request to the last byte."""

    clients: int
    seconds: float
    bytes: int
    requests: int
    bytes_per_s: float
    requests_per_s: float
    p50_s: float | None
    p99_s: float | None
    errors: int
    reasons: dict[str, int]


def run_load_test(
    url: str,
    *,
    clients: int,
    seconds: float,
    range_bytes: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> LoadTestResult:
    """Read the files below a URL with many concurrent clients, whole or by random ranges."""
    try:
        files = [entry for entry in open_store(url).list() if entry.size]
    except UnavailableError as error:
        error.hint = error.hint or "check that the server is running and that the URL is correct"
        raise
    if not files:
        raise InputError("no files found", where=redacted(url), hint="pass the URL of a directory with shards")
    start, stop = threading.Barrier(clients + 1), threading.Event()
    threads = [_LoadClient(url, files, number, range_bytes, start, stop, progress) for number in range(clients)]
    for client in threads:
        client.start()
    start.wait()
    started = time.monotonic()
    stop.wait(seconds)
    elapsed_s = time.monotonic() - started
    # Take the counters first: clients are stopped in the middle of a transfer.
    results = [(client.bytes, list(client.times)) for client in threads]
    stop.set()
    for client in threads:
        client.stop()
    reasons = sum((client.reasons for client in threads), Counter[str]())
    sent = sum(count for count, _ in results)
    times = sorted(itertools.chain.from_iterable(each for _, each in results))
    if not sent:
        why = reasons.most_common(1)[0][0] if reasons else "no data received in time"
        raise UnavailableError(f"no client received any data: {why}", where=redacted(url))
    return LoadTestResult(
        clients=clients,
        seconds=elapsed_s,
        bytes=sent,
        requests=len(times),
        bytes_per_s=sent / elapsed_s,
        requests_per_s=len(times) / elapsed_s,
        p50_s=statistics.median(times) if times else None,
        p99_s=times[min(len(times) - 1, int(len(times) * 0.99))] if times else None,
        errors=reasons.total(),
        reasons=dict(reasons.most_common(5)),
    )


class _LoadClient(threading.Thread):
    """One client with a persistent connection and its own random order of files."""

    def __init__(
        self,
        url: str,
        files: Sequence[Entry],
        number: int,
        range_bytes: int | None,
        start: threading.Barrier,
        stop: threading.Event,
        progress: Callable[[int], None],
    ) -> None:
        super().__init__(name=f"stoker-load-{number}", daemon=True)
        self._url, self._files, self._range = urlsplit(url), files, range_bytes
        self._random = random.Random(number)
        self._start_barrier, self._stop_event, self._progress = start, stop, progress
        self._buffer = bytearray(_READ_BYTES)
        self._connection = self._connect()
        self.bytes = 0
        self.times: list[float] = []
        self.reasons: Counter[str] = Counter()

    def run(self) -> None:
        self._start_barrier.wait()
        while not self._stop_event.is_set():
            started = time.monotonic()
            try:
                if self._read(self._connection, self._random.choice(self._files)):
                    self.times.append(time.monotonic() - started)
            except (OSError, http.client.HTTPException) as error:
                if self._stop_event.is_set():
                    break
                self.reasons[str(error) or type(error).__name__] += 1
                self._connection.close()
                self._connection = self._connect()
                self._stop_event.wait(0.05)
        self._connection.close()

    def stop(self) -> None:
        """Stop the client and wait for it, also if the server does not respond."""
        while self.is_alive():
            if (sock := self._connection.sock) is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            self.join(0.1)

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        return kind(self._url.hostname or "", self._url.port, timeout=TIMEOUT_S)

    def _read(self, connection: http.client.HTTPConnection, file: Entry) -> bool:
        """Read one file, or one range of it; return False if the test ended before it was complete."""
        headers, expected = self._headers(), file.size
        if self._range is not None:
            expected = min(self._range, file.size)
            first = self._random.randint(0, file.size - expected)
            headers["Range"] = f"bytes={first}-{first + expected - 1}"
        connection.request("GET", f"{self._url.path.rstrip('/')}/{quote(file.name)}", headers=headers)
        response = connection.getresponse()
        if response.status not in (200, 206):
            raise http.client.HTTPException(f"server responded with HTTP {response.status}")
        received = 0
        while count := response.readinto(self._buffer):
            received += count
            self.bytes += count
            self._progress(count)
            if self._stop_event.is_set():
                connection.close()
                return False
        if received != expected:
            raise http.client.HTTPException(f"received {received} bytes, expected {expected}")
        return True

    def _headers(self) -> dict[str, str]:
        if not self._url.username and not self._url.password:
            return {}
        from base64 import b64encode
        from urllib.parse import unquote

        credentials = f"{unquote(self._url.username or '')}:{unquote(self._url.password or '')}"
        return {"Authorization": f"Basic {b64encode(credentials.encode()).decode()}"}
