"""Statistics of a server, as a dictionary for JSON and in the Prometheus text format."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Set


class ServerStats:
    """Thread-safe counters; `gauges` are read when the statistics are requested."""

    def __init__(self, engine: str, gauges: Mapping[str, Callable[[], int | None]]) -> None:
        self._engine, self._gauges = engine, gauges
        self._counts: Counter[str] = Counter(requests=0, bytes=0, errors=0)
        self._lock = threading.Lock()
        self._started = time.monotonic()

    def add(self, **amounts: int) -> None:
        """Increase counters by the given amounts."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def to_dict(self) -> dict[str, object]:
        """Return all counters and gauges by name."""
        with self._lock:
            counts = dict(self._counts)
        gauges = {name: read() for name, read in self._gauges.items()}
        return {"engine": self._engine, "uptime_s": round(time.monotonic() - self._started, 3), **counts, **gauges}

    def to_prometheus(self) -> str:
        """Return the statistics in the Prometheus text format."""
        return format_prometheus(self.to_dict(), gauges={"uptime_s", *self._gauges})


def format_prometheus(stats: Mapping[str, object], gauges: Set[str]) -> str:
    """Format numeric statistics for Prometheus; everything that is not a gauge is a counter."""
    lines = []
    for name, value in stats.items():
        if isinstance(value, int | float):
            kind, full = ("gauge", f"stoker_{name}") if name in gauges else ("counter", f"stoker_{name}_total")
            lines += [f"# TYPE {full} {kind}", f"{full} {value}"]
    return "\n".join([*lines, ""])
