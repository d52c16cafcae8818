"""Summary of a profiled program: means and peaks of its samples, kept instead of writing them as events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from stoker.core.units import format_bytes, format_duration
from stoker.remote.profiler import MIN_INTERVAL_S, EventWriter
from stoker.telemetry.event_values import number


class Row(NamedTuple):
    """One metric of the summary."""

    metric: str
    mean: str
    peak: str


def _format_percent(value: float) -> str:
    return f"{value:.0f}%"


def _format_cores(value: float) -> str:
    return f"{value / 100:.2f}"


def _format_rate(value: float) -> str:
    return f"{format_bytes(value)}/s"


_METRICS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "tree_cpu_pct": ("program CPU (cores)", _format_cores),
    "tree_rss": ("program memory", format_bytes),
    "throttled_pct": ("throttled by CPU quota", _format_percent),
    "cpu_pct": ("machine CPU", _format_percent),
    "iowait_pct": ("machine I/O wait", _format_percent),
    "net_rx_per_s": ("network received", _format_rate),
    "net_tx_per_s": ("network sent", _format_rate),
    "disk_read_per_s": ("disk read", _format_rate),
    "disk_write_per_s": ("disk written", _format_rate),
}
_GPU_METRICS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "util_pct": ("utilization", _format_percent),
    "mem_used": ("memory", format_bytes),
    "power_w": ("power", lambda value: f"{value:.0f} W"),
}


class _Mean:
    """Mean over time, and peak."""

    def __init__(self) -> None:
        self._sum = self._weight = self.peak = 0.0

    def add(self, value: float, interval_s: float) -> None:
        self._sum += value * interval_s
        self._weight += interval_s
        self.peak = max(self.peak, value)

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else 0.0


class ProfileSummary(EventWriter):
    """Receiver of the profiler's events: keeps means and peaks, and how the program exited."""

    def __init__(self) -> None:
        super().__init__()
        self._means: dict[tuple[str, str], _Mean] = {}
        self._exit: Mapping[str, Any] = {}

    def write(self, kind: str, **fields: Any) -> None:
        """Add one event to the summary."""
        if kind == "mark":
            self._exit = fields
            return
        interval_s = number(fields.get("interval_s")) or 0.0
        if interval_s < MIN_INTERVAL_S:  # a program that exits at once: rates over a few milliseconds say nothing
            return
        self._add("", fields, _METRICS, interval_s)
        for gpu in fields.get("gpu") or ():
            self._add(f"GPU {gpu.get('i')} ", gpu, _GPU_METRICS, interval_s)

    def _add(self, device: str, fields: Mapping[str, Any], metrics: Mapping[str, Any], interval_s: float) -> None:
        for name in metrics:
            if (value := number(fields.get(name))) is not None:
                self._means.setdefault((device, name), _Mean()).add(value, interval_s)

    @property
    def sentence(self) -> str:
        """How the program exited, its duration and, if known, its peak memory; empty if it was never started."""
        if not self._exit:
            return ""
        memory = f", peak memory {format_bytes(self._exit['max_rss'])}" if "max_rss" in self._exit else ""
        return f"{self._exit['detail']} after {format_duration(self._exit['seconds'])}{memory}"

    @property
    def rows(self) -> list[Row]:
        """The metrics that this machine provides."""
        rows = []
        for (device, name), mean in self._means.items():
            metric, format_value = (_GPU_METRICS if device else _METRICS)[name]
            rows.append(Row(f"{device}{metric}", format_value(mean.value), format_value(mean.peak)))
        return rows
