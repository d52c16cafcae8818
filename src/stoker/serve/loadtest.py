"""A data server under load: many clients that read whole files as fast as they come."""

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
from stoker.storage import Entry, open_store, shown

TIMEOUT_S = 30.0
_PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the clients saw together; times are from the request to the last byte."""

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


def measure(
    url: str,
    *,
    clients: int,
    seconds: float,
    range_bytes: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Measured:
    """Read the files below a URL from many clients at once, whole or by random ranges."""
    files = [entry for entry in open_store(url).list() if entry.size]
    if not files:
        raise InputError("there are no files to read", where=shown(url), hint="name a folder with shards in it")
    start, stop = threading.Barrier(clients + 1), threading.Event()
    runs = [_Client(url, files, number, range_bytes, start, stop, progress) for number in range(clients)]
    for run in runs:
        run.start()
    start.wait()
    began = time.monotonic()
    stop.wait(seconds)
    took = time.monotonic() - began
    # What is counted up to now is what was measured; a client is ended in the middle of what it reads.
    counted = [(run.bytes, list(run.times)) for run in runs]
    stop.set()
    for run in runs:
        run.end()
    reasons = sum((run.reasons for run in runs), Counter[str]())
    sent = sum(count for count, _ in counted)
    times = sorted(itertools.chain.from_iterable(each for _, each in counted))
    if not sent:
        why = reasons.most_common(1)[0][0] if reasons else "nothing came in time"
        raise UnavailableError(f"no client could read anything: {why}", where=shown(url))
    return Measured(
        clients=clients,
        seconds=took,
        bytes=sent,
        requests=len(times),
        bytes_per_s=sent / took,
        requests_per_s=len(times) / took,
        p50_s=statistics.median(times) if times else None,
        p99_s=times[min(len(times) - 1, int(len(times) * 0.99))] if times else None,
        errors=reasons.total(),
        reasons=dict(reasons.most_common(5)),
    )


class _Client(threading.Thread):
    """One client with a kept connection, and its own order of files."""

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
        self._begin, self._end, self._progress = start, stop, progress
        self._memory = bytearray(_PIECE)
        self._connection = self._connected()
        self.bytes = 0
        self.times: list[float] = []
        self.reasons: Counter[str] = Counter()

    def run(self) -> None:
        self._begin.wait()
        while not self._end.is_set():
            began = time.monotonic()
            try:
                if self._read(self._connection, self._random.choice(self._files)):
                    self.times.append(time.monotonic() - began)
            except (OSError, http.client.HTTPException) as error:
                if self._end.is_set():
                    break
                self.reasons[str(error) or type(error).__name__] += 1
                self._connection.close()
                self._connection = self._connected()
                self._end.wait(0.05)
        self._connection.close()

    def end(self) -> None:
        """Wait for its end; one that waits for a silent server waits no longer."""
        while self.is_alive():
            if (sock := self._connection.sock) is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            self.join(0.1)

    def _connected(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        return kind(self._url.hostname or "", self._url.port, timeout=TIMEOUT_S)

    def _read(self, connection: http.client.HTTPConnection, file: Entry) -> bool:
        """Read one file or one range of it; False if the time was over before its end."""
        headers, wanted = self._headers(), file.size
        if self._range is not None:
            wanted = min(self._range, file.size)
            first = self._random.randint(0, file.size - wanted)
            headers["Range"] = f"bytes={first}-{first + wanted - 1}"
        connection.request("GET", f"{self._url.path.rstrip('/')}/{quote(file.name)}", headers=headers)
        response = connection.getresponse()
        if response.status not in (200, 206):
            response.read()
            raise http.client.HTTPException(f"the server answered {response.status}")
        got = 0
        while count := response.readinto(self._memory):
            got += count
            self.bytes += count
            self._progress(count)
            if self._end.is_set():
                connection.close()
                return False
        if got != wanted:
            raise http.client.HTTPException(f"{got} bytes came instead of {wanted}")
        return True

    def _headers(self) -> dict[str, str]:
        if not self._url.username and not self._url.password:
            return {}
        from base64 import b64encode
        from urllib.parse import unquote

        login = f"{unquote(self._url.username or '')}:{unquote(self._url.password or '')}"
        return {"Authorization": f"Basic {b64encode(login.encode()).decode()}"}
