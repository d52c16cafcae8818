"""Series for charts: columns of an index, down-sampled in bins of time. Pure functions of arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.telemetry.analysis import PARTS, STAGES
from stoker.telemetry.profile_rows import GPU_FIELDS, PROFILE_FIELDS
from stoker.telemetry.run_index import RunIndex

Numbers = list[float | None]
"""Numbers for JSON: None where there is no value, or where it is not finite."""


class Metric(NamedTuple):
    """What a heat map can show: its title, unit, and whether low or high values are bad."""

    title: str
    unit: str
    is_low_bad: bool


METRICS: Mapping[str, Metric] = {
    "gpu.util_pct": Metric("GPU utilization", "%", True),
    "gpu.power_w": Metric("GPU power", "W", True),
    "gpu.sm_mhz": Metric("GPU clock", "MHz", True),
    "gpu.mem_used": Metric("GPU memory", "B", False),
    "gpu.temp_c": Metric("GPU temperature", "°C", False),
    "cpu_pct": Metric("CPU", "%", False),
    "iowait_pct": Metric("I/O wait", "%", False),
    "loader_wait": Metric("loader wait", "%", False),
    "tree_rss": Metric("program memory", "B", False),
    "mem_available": Metric("available memory", "B", True),
    "net_rx_per_s": Metric("network received", "B/s", True),
    "net_tx_per_s": Metric("network sent", "B/s", True),
    "tcp_retransmits_per_s": Metric("TCP retransmits", "/s", False),
    "disk_read_per_s": Metric("disk read", "B/s", False),
    "disk_write_per_s": Metric("disk written", "B/s", False),
    "cache_disk_free": Metric("free cache disk", "B", True),
}
MAX_GPU = 255
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


class Window(NamedTuple):
    """A range of time in equal bins."""

    since: float
    until: float
    bins: int

    @property
    def bin_s(self) -> float:
        """The length of a bin."""
        return max((self.until - self.since) / self.bins, 1e-6)

    @property
    def centers(self) -> NDArray[np.float64]:
        """The times in the middle of the bins."""
        return np.float64(self.since) + (np.arange(self.bins, dtype=np.float64) + 0.5) * self.bin_s

    def select(self, t: NDArray[np.float64]) -> tuple[NDArray[np.bool_] | slice, NDArray[np.int64]]:
        """Return which times are in the window, a slice if all of them are, and the bins of those."""
        is_inside = (t >= self.since) & (t <= self.until)
        chosen = slice(None) if is_inside.all() else is_inside
        return chosen, np.minimum(((t[chosen] - self.since) / self.bin_s).astype(np.int64), self.bins - 1)


def scalar_series(index: RunIndex, name: str, window: Window) -> dict[str, Numbers]:
    """Return a scalar by time: `t`, `step`, `mean`, `min` and `max` of each bin that has values.

    No extreme value is lost by down-sampling.
    """
    table = index.tables["scalar"]
    empty: dict[str, Numbers] = {key: [] for key in ("t", "step", "mean", "min", "max")}
    if name not in index.names:
        return empty
    rows = table.read("name") == index.names.index(name)
    t, step, value = (table.read(column)[rows] for column in ("t", "step", "value"))
    chosen, bins = window.select(t)
    t, step, value = t[chosen], step[chosen], value[chosen]
    if not len(t):
        return empty
    if len(t) <= window.bins:
        order = np.argsort(t, kind="stable")
        numbers = to_numbers(value[order])
        return {
            "t": to_numbers(t[order]),
            "step": to_numbers(step[order]),
            "mean": numbers,
            "min": numbers,
            "max": numbers,
        }
    order = np.lexsort((t, bins))
    _, starts, counts = np.unique(bins[order], return_index=True, return_counts=True)
    value = value[order]
    return {
        "t": to_numbers(np.add.reduceat(t[order], starts) / counts),
        "step": to_numbers(np.maximum.reduceat(step[order], starts)),
        "mean": to_numbers(np.add.reduceat(value, starts) / counts),
        "min": to_numbers(np.minimum.reduceat(value, starts)),
        "max": to_numbers(np.maximum.reduceat(value, starts)),
    }


def step_series(index: RunIndex, window: Window) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    """Return the mean time of a step by its parts, and the mean time of a sample in each stage of the loader."""
    table = index.tables["span"]
    t = table.read("t")
    chosen, bins = window.select(t)
    names, lengths, counts, samples = (table.read(key)[chosen] for key in ("name", "length", "count", "samples"))

    def mean_of(name: str, weights: NDArray[Any]) -> NDArray[np.float64]:
        if name not in index.names:
            return np.full(window.bins, np.nan)
        rows = names == index.names.index(name)
        sums = np.bincount(bins[rows], lengths[rows], window.bins)
        total = np.bincount(bins[rows], weights[rows], window.bins)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(total > 0, sums / total, np.nan)

    parts = {name: mean_of(name, counts) for name in PARTS}
    known = np.array([*parts.values()])
    step = mean_of("step", counts)
    with np.errstate(invalid="ignore"):
        parts["rest"] = np.maximum(0.0, step - np.where(np.isnan(known), 0.0, known).sum(axis=0))
    stages = {stage: mean_of(f"loader.{stage}", samples) for stage in STAGES}
    return (
        {"t": to_numbers(window.centers), **{name: to_numbers(values) for name, values in parts.items()}},
        {"t": to_numbers(window.centers), **{name: to_numbers(values) for name, values in stages.items()}},
    )


class Matrix(NamedTuple):
    """Means by row (a slot, or a GPU of one) and bin; NaN where there is no data."""

    rows: list[str]
    values: NDArray[np.float32]


def matrix(index: RunIndex, metric: str, window: Window) -> Matrix:
    """Return a metric of every slot, or every GPU of every slot, by time."""
    if metric == "loader_wait":
        return _wait_matrix(index, window)
    is_gpu = metric.startswith("gpu.")
    field = metric.removeprefix("gpu.")
    if field not in (GPU_FIELDS if is_gpu else PROFILE_FIELDS):
        return Matrix([], np.zeros((0, window.bins), np.float32))
    names, rows, gpus = _gpu_rows(index) if is_gpu else (index.slots, np.arange(len(index.slots)), 1)
    table = index.tables["gpu" if is_gpu else "profile"]
    shape = (len(names), window.bins)
    sums, counts = np.zeros(shape), np.zeros(shape)
    for t, slot, values, *gpu in table.read_blocks("t", "slot", field, *(["gpu"] if gpus > 1 else [])):
        chosen, bins = window.select(t)
        owner, values = slot[chosen], values[chosen]
        if gpu:
            owner = owner * gpus + np.clip(gpu[0][chosen], 0, gpus - 1)
        cells = rows[owner] * window.bins + bins
        known = np.isfinite(values)
        if not known.all():
            cells, values = cells[known], values[known]
        _add_to_cells(sums, cells, values)
        _add_to_cells(counts, cells)
    with np.errstate(divide="ignore", invalid="ignore"):
        return Matrix(names, (sums / counts).astype(np.float32))  # 0 / 0 is NaN: no data


def _gpu_rows(index: RunIndex) -> tuple[list[str], NDArray[np.int64], int]:
    """Return the names of the rows of GPUs, the rows of all GPUs of all slots, and the number of GPUs of a slot."""
    slots = index.slots
    gpus = sorted({(slot, min(max(gpu, 0), MAX_GPU)) for slot, gpu in index.analysis.machines.gpus()})
    width = 1 + max((gpu for _, gpu in gpus), default=0)
    rows = np.zeros(len(slots) * width, np.int64)
    rows[[slot * width + gpu for slot, gpu in gpus]] = np.arange(len(gpus))
    return [f"{slots[slot]} gpu {gpu}" for slot, gpu in gpus], rows, width


def _wait_matrix(index: RunIndex, window: Window) -> Matrix:
    """Return the share of step time that each slot waits for input, in percent."""
    slots = {slot: row for row, slot in enumerate(sorted({process.slot for process in index.processes}))}
    if not slots or "loader_wait" not in index.names or "step" not in index.names:
        return Matrix([], np.zeros((0, window.bins), np.float32))
    rows = np.array([slots[process.slot] for process in index.processes])
    waits, steps = np.zeros((len(slots), window.bins)), np.zeros((len(slots), window.bins))
    totals = ((index.names.index("loader_wait"), waits), (index.names.index("step"), steps))
    for t, process, name, length in index.tables["span"].read_blocks("t", "process", "name", "length"):
        chosen, bins = window.select(t)
        cells, name, length = rows[process[chosen]] * window.bins + bins, name[chosen], length[chosen]
        for number, total in totals:
            _add_to_cells(total, cells[name == number], length[name == number])
    with np.errstate(divide="ignore", invalid="ignore"):
        return Matrix([*slots], np.where(steps > 0, 100 * waits / steps, np.nan).astype(np.float32))


def _add_to_cells(total: NDArray[np.float64], cells: NDArray[np.int64], weights: NDArray[Any] | None = None) -> None:
    """Add weights, or 1, to cells of a matrix; only the range of cells that occur is touched."""
    if len(cells):
        first, end = int(cells.min()), int(cells.max()) + 1
        total.reshape(-1)[first:end] += np.bincount(cells - first, weights, end - first)


def fill_short_gaps(values: NDArray[np.float32], interval_s: float, bin_s: float) -> NDArray[np.float32]:
    """Repeat a value in the bins until the next sample, if bins are shorter than the interval of samples."""
    reach = math.ceil(1.5 * interval_s / bin_s) - 1 if interval_s > 0 else 0
    if reach <= 0 or not values.size:
        return values
    columns = np.arange(values.shape[1], dtype=np.int32)
    last = np.maximum.accumulate(np.where(np.isnan(values), np.int32(-1), columns), axis=1)
    filled = np.take_along_axis(values, np.maximum(last, 0), axis=1)
    return np.where((last >= 0) & (columns - last <= reach), filled, np.float32(np.nan))


def worst_first(found: Matrix, metric: Metric) -> list[int]:
    """Return the rows in order: those without recent data, those with the longest gaps, then the worst means."""
    if not found.rows:
        return []
    known = np.isfinite(found.values)
    last = np.where(known.any(axis=1), found.values.shape[1] - 1 - np.argmax(known[:, ::-1], axis=1), -1)
    newest = last.max()
    gaps = 1 - known.mean(axis=1)
    is_dead = last < newest - max(1, found.values.shape[1] // 50)
    sums, counts = np.where(known, found.values, 0.0).sum(axis=1, dtype=np.float64), known.sum(axis=1)
    means = sums / np.maximum(counts, 1)
    badness = means if metric.is_low_bad else -means
    has_gap = gaps > gaps.min() + 0.02
    return [int(row) for row in np.lexsort((badness, np.where(has_gap, -gaps, 0.0), ~is_dead))]


def bands(found: Matrix) -> dict[str, Numbers]:
    """Return quantiles over all rows for each bin: `min`, `p10`, `p50`, `p90`, `max`."""
    names = ("min", "p10", "p50", "p90", "max")
    if not found.rows:
        return {name: [] for name in names}
    ordered = np.sort(found.values.T)  # NaN last
    counts = np.isfinite(ordered).sum(axis=1)
    columns = np.arange(len(ordered))
    picks: Callable[[float], NDArray[Any]] = lambda share: np.round(share * np.maximum(counts - 1, 0)).astype(np.int64)  # noqa: E731
    return {name: to_numbers(ordered[columns, picks(share)]) for name, share in zip(names, QUANTILES, strict=True)}


def quantize(values: NDArray[np.float32], unit: str) -> tuple[bytes, float, float]:
    """Return a matrix as bytes from 0 to 254, and the values of 0 and 254; 255 is no data.

    Percentages have a fixed scale, other values that of their extremes.
    """
    known = np.isfinite(values)
    if not known.any():
        return bytes(np.full(values.shape, 255, np.uint8).tobytes()), 0.0, 1.0
    low, high = float(values[known].min()), float(values[known].max())
    if unit == "%":
        low, high = min(low, 0.0), max(high, 100.0)
    span = high - low or 1.0
    scaled = np.where(known, np.nan_to_num((values - low) / span * 254), 255.0)
    return np.rint(scaled).astype(np.uint8).tobytes(), low, low + span


def to_numbers(values: NDArray[Any]) -> Numbers:
    """Return an array as numbers for JSON, with six significant digits; times keep milliseconds."""
    return [
        None if not math.isfinite(value) else value if abs(value) >= 1e6 else float(f"{value:.6g}")
        for value in values.tolist()
    ]
