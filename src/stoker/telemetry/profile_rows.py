"""Profile events as rows of numbers: decoded by msgspec if a line is valid, else from the parsed event."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker.telemetry.event_values import MAX_NUMBER, number
from stoker.telemetry.events import Event

PROFILE_FIELDS = (
    "interval_s", "cpu_pct", "iowait_pct", "load1", "cpus", "cores", "throttled_pct", "tree_cpu_pct", "tree_rss",
    "tree_processes", "mem_total", "mem_available", "cgroup_mem_limit", "cgroup_mem_used", "oom_kills", "net_rx_per_s",
    "net_tx_per_s", "tcp_sent_per_s", "tcp_retransmits_per_s", "disk_read_per_s", "disk_write_per_s",
    "cache_disk_free",
)  # fmt: skip
"""The numbers of a profile event, in the order of a row."""
GPU_FIELDS = ("util_pct", "mem_used", "mem_total", "power_w", "temp_c", "sm_mhz")

ProfileRow: TypeAlias = tuple[Any, ...]
"""One profile event: `ROW_FIELDS`, then the numbers, NaN if absent."""
ROW_FIELDS = ("v", "t", "slot", "rank", "attempt", "seq", "pid", "machine", "gpu")
T, SLOT, ATTEMPT, MACHINE, GPU = (ROW_FIELDS.index(name) for name in ("t", "slot", "attempt", "machine", "gpu"))

_Int = Annotated[int, msgspec.Meta(gt=-(2**53), lt=2**53)]
_GpuSample: Any = msgspec.defstruct(
    "_GpuSample",
    [("i", Annotated[int, msgspec.Meta(gt=-(10**15), lt=10**15)]), *((name, float, math.nan) for name in GPU_FIELDS)],
    gc=False,
)
_ProfileLine: Any = msgspec.defstruct(
    "_ProfileLine",
    [
        ("v", Literal[1]), ("t", Annotated[float, msgspec.Meta(gt=-MAX_NUMBER, lt=MAX_NUMBER)]), ("slot", str),
        ("rank", _Int), ("attempt", _Int), ("seq", _Int), ("pid", _Int, 0), ("machine", str, ""),
        ("gpu", list[_GpuSample], []), *((name, float, math.nan) for name in PROFILE_FIELDS),
    ],
    tag_field="k", tag="profile", gc=False,
)  # fmt: skip
_DECODER = msgspec.json.Decoder(_ProfileLine)


def decode_profiles(texts: list[bytes]) -> tuple[list[ProfileRow], list[bytes]]:
    """Return the rows of JSON texts that are plain profile events, and the other texts."""
    rows, others = [], []
    decode, to_tuple = _DECODER.decode, msgspec.structs.astuple
    for text in texts:
        try:
            rows.append(to_tuple(decode(text)))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            others.append(text)
    return rows, others


def profile_row(event: Event) -> ProfileRow:
    """Return the row of a profile event; invalid numbers are NaN."""
    rows = event.fields.get("gpu")
    gpus = [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
    samples = [
        _GpuSample(int(index), *(_number(gpu.get(name)) for name in GPU_FIELDS))
        for gpu in gpus
        if (index := number(gpu.get("i"))) is not None
    ]
    machine = str(event.fields["machine"]) if "machine" in event.fields else ""
    numbers = (_number(event.fields.get(name)) for name in PROFILE_FIELDS)
    return (1, event.t, event.slot, event.rank, event.attempt, event.seq, event.pid, machine, samples, *numbers)


def to_array(columns: Iterable[Sequence[float]]) -> NDArray[np.float64]:
    """Return columns as an array of rows; numbers of an implausible size are NaN, as in `event_values.number`."""
    array = np.array([np.fromiter(column, np.float64, len(column)) for column in columns])
    with np.errstate(invalid="ignore"):
        array[~(np.abs(array) < MAX_NUMBER)] = np.nan
    return array.T


def _number(value: Any) -> float:
    known = number(value)
    return math.nan if known is None else known
