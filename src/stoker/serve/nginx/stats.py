"""Statistics of a running nginx, counted from its access log, which is rotated when it grows."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from stoker.serve.nginx.config import NginxCacheConfig, NginxConfig, cache_path
from stoker.serve.stats import format_prometheus
from stoker.storage import redacted

MAX_LOG_BYTES = 16 << 20
_LOG_LINE = re.compile(rb"(\d{3}) (\d+) (\d+) (\S+) ([-\d, :]+)")
_HIT_STATUSES = frozenset({b"HIT", b"STALE", b"UPDATING", b"REVALIDATED"})
_MISS_STATUSES = frozenset({b"MISS", b"EXPIRED", b"BYPASS"})


class NginxStats:
    """Counters of an nginx, read from its access log; `reopen` makes nginx reopen its logs.

    A log file loses nothing; a syslog socket drops lines after as few as ten datagrams (net.unix.max_dgram_qlen).
    """

    def __init__(self, config: NginxConfig, home: Path, *, reopen: Callable[[], None]) -> None:
        self._cache = config if isinstance(config, NginxCacheConfig) else None
        self._logs = home / "access.log", home / "error.log"
        self._reopen = reopen
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._measured = -10.0, 0
        self._tails: list[_LogTail] = []
        self._rotate_logs()

    def to_dict(self) -> dict[str, object]:
        """Return the statistics, with the same keys for all engines."""
        self.update()
        totals, cache = self._totals, self._cache
        return {
            "engine": "nginx",
            "uptime_s": round(time.monotonic() - self._started, 3),
            "requests": totals["requests"],
            "bytes": totals["bytes"],
            "errors": totals["errors"],
            "hits": totals["hits"],
            "misses": totals["misses"],
            "origin_bytes": None if cache is None else totals["origin_bytes"],
            "evictions": None,
            "held_bytes": None if cache is None else self._measure_used_bytes(cache),
            "budget": None if cache is None else cache.size,
        }

    def to_prometheus(self) -> str:
        """Return the statistics in the Prometheus text format."""
        return format_prometheus(self.to_dict(), gauges={"uptime_s", "held_bytes", "budget"})

    def origins(self) -> list[dict[str, str]]:
        """Return the names and URLs of the origins, without credentials."""
        return [{"name": name, "url": redacted(url)} for name, url in (self._cache.origins if self._cache else ())]

    def update(self) -> None:
        """Count the log lines since the last call; rotate the logs if they are too large."""
        with self._lock:
            for tail in self._tails:
                for line in tail.read_lines():
                    count_log_line(line, self._totals)
            if any(file_size(path) > MAX_LOG_BYTES for path in self._logs):
                self._rotate_logs()
                self._reopen()

    def close(self) -> None:
        """Close the logs."""
        for tail in self._tails:
            tail.close()

    def _rotate_logs(self) -> None:
        """Start new logs; workers may still write to the previous one, so it is read until the next rotation."""
        for path in self._logs:
            path.unlink(missing_ok=True)
            path.touch(mode=0o600)
        for tail in self._tails[:-1]:
            tail.close()
        self._tails = [*self._tails[-1:], _LogTail(self._logs[0])]

    def _measure_used_bytes(self, cache: NginxCacheConfig) -> int:
        """Sum up the cache's files, at most once a second, since there may be many."""
        measured_at, used_bytes = self._measured
        if time.monotonic() - measured_at > 1:
            used_bytes = sum(file_size(path) for path in walk_files(cache_path(cache)))
            self._measured = time.monotonic(), used_bytes
        return used_bytes


def count_log_line(line: bytes, totals: Counter[str]) -> None:
    """Add one line of nginx's access log to the totals; ignore any other text."""
    fields = _LOG_LINE.fullmatch(line)
    if fields is None:  # for example truncated, on a full disk
        return
    status, sent, length, cache_status, received = fields.groups()
    if length != b"0":  # 0 is a slice, a subrequest of a request with its own line
        totals["requests"] += 1
        totals["bytes"] += int(sent)
        totals["errors"] += status >= b"500"
    totals["hits"] += cache_status in _HIT_STATUSES
    totals["misses"] += cache_status in _MISS_STATUSES
    totals["origin_bytes"] += sum(map(int, re.findall(rb"\d+", received)))


class _LogTail:
    """A growing log, read by whole lines."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._rest = b""

    def read_lines(self) -> list[bytes]:
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return lines

    def close(self) -> None:
        self._file.close()


def walk_files(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder."""
    for where, _, names in os.walk(folder):
        for name in names:
            yield Path(where, name)


def file_size(path: Path) -> int:
    """Return a file's size in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
