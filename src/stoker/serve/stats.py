"""What a server has done so far, as JSON and as Prometheus wants it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Set


class Stats:
    """Counters that many threads add to; `gauges` are asked for when somebody looks."""

    def __init__(self, engine: str, gauges: Mapping[str, Callable[[], int | None]]) -> None:
        self._engine, self._gauges = engine, gauges
        self._counts: Counter[str] = Counter(requests=0, bytes=0, errors=0)
        self._lock = threading.Lock()
        self._began = time.monotonic()

    def add(self, **amounts: int) -> None:
        """Add to some counters."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def told(self) -> dict[str, object]:
        """Give everything by name."""
        with self._lock:
            counts = dict(self._counts)
        gauges = {name: ask() for name, ask in self._gauges.items()}
        return {"engine": self._engine, "uptime_s": round(time.monotonic() - self._began, 3), **counts, **gauges}

    def metrics(self) -> str:
        """Give the same as text for Prometheus."""
        return as_metrics(self.told(), gauges={"uptime_s", *self._gauges})


def as_metrics(told: Mapping[str, object], gauges: Set[str]) -> str:
    """Write numbers for Prometheus; what is no gauge is a counter."""
    lines = []
    for name, value in told.items():
        if isinstance(value, int | float):
            kind, full = ("gauge", f"stoker_{name}") if name in gauges else ("counter", f"stoker_{name}_total")
            lines += [f"# TYPE {full} {kind}", f"{full} {value}"]
    return "\n".join([*lines, ""])
