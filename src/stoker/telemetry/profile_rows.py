"""Profile events as columns of numbers: decoded by msgspec if a line is valid, else from the parsed event."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker.telemetry.event_values import MAX_NUMBER, number
from stoker.telemetry.events import PREFIX, Event

PROFILE_FIELDS = (
    "interval_s", "cpu_pct", "iowait_pct", "load1", "cpus", "cores", "throttled_pct", "tree_cpu_pct", "tree_rss",
    "tree_processes", "mem_total", "mem_available", "cgroup_mem_limit", "cgroup_mem_used", "oom_kills", "net_rx_per_s",
    "net_tx_per_s", "tcp_sent_per_s", "tcp_retransmits_per_s", "disk_read_per_s", "disk_write_per_s",
    "cache_disk_free",
)  # fmt: skip
"""The numbers of a profile event, in the order of their columns."""
GPU_FIELDS = ("util_pct", "mem_used", "mem_total", "power_w", "temp_c", "sm_mhz")

_HEAD = ("v", "t", "rank", "attempt", "pid", "seq")
_T, _ATTEMPT = _HEAD.index("t"), _HEAD.index("attempt")
_Int = Annotated[int, msgspec.Meta(gt=-(2**53), lt=2**53)]
_GpuSample: Any = msgspec.defstruct(
    "_GpuSample",
    [("i", Annotated[int, msgspec.Meta(gt=-(10**15), lt=10**15)]), *((name, float, math.nan) for name in GPU_FIELDS)],
    gc=False,
)
_ProfileSample: Any = msgspec.defstruct(
    "_ProfileSample",
    [
        ("slot", str), ("machine", str, ""), ("gpu", list[_GpuSample], []),
        ("v", Literal[1]), ("t", Annotated[float, msgspec.Meta(gt=-MAX_NUMBER, lt=MAX_NUMBER)]),
        ("rank", _Int), ("attempt", _Int), ("pid", _Int, 0), ("seq", _Int),
        *((name, float, math.nan) for name in PROFILE_FIELDS),
    ],
    tag_field="k", tag="profile", kw_only=True, gc=False,
)  # fmt: skip
_DECODER = msgspec.json.Decoder(_ProfileSample)
_PREFIX = PREFIX.encode()
_KIND = b'"profile"'
_to_tuple = msgspec.structs.astuple
_ROW, _GPU_ROW = (struct.Struct(f"{len(fields)}d") for fields in ((*_HEAD, *PROFILE_FIELDS), ("i", *GPU_FIELDS)))


class ProfileRows:
    """Profiles as rows of packed numbers, in which they need much less memory than as events."""

    def __init__(self) -> None:
        self.slots: list[str] = []
        self.machines: list[str] = []
        self.gpu_counts: list[int] = []
        """The number of GPUs in each profile."""
        self._rows: list[bytes] = []
        self._gpu_rows: list[bytes] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add_lines(self, lines: Sequence[bytes], slot: str, attempt: int) -> list[int]:
        """Add the lines of a log that are plain profile events; return the positions of lines with other events.

        `slot` and `attempt` are those of events without a slot of their own.
        """
        others: list[int] = []
        decode, begin = _DECODER.decode, len(_PREFIX)
        is_profile = False
        for position, line in enumerate(lines):
            if line.startswith(_PREFIX):
                if is_profile or _KIND in line:  # after a profile, trying to decode is faster than searching
                    try:
                        sample = decode(line[begin:])
                    except (msgspec.MsgspecError, UnicodeDecodeError):
                        is_profile = False
                    else:
                        if not sample.slot:
                            sample.slot, sample.attempt = slot, attempt
                        self._add(sample)
                        is_profile = True
                        continue
            elif _PREFIX not in line:
                continue
            others.append(position)
        return others

    def add_event(self, event: Event) -> None:
        """Add a profile event; invalid numbers are NaN."""
        gpus = event.fields.get("gpu")
        samples = [
            _GpuSample(int(index), *(_number(gpu.get(name)) for name in GPU_FIELDS))
            for gpu in (gpus if isinstance(gpus, list) else [])
            if isinstance(gpu, Mapping) and (index := number(gpu.get("i"))) is not None
        ]
        head = {name: getattr(event, name) for name in ("slot", "t", "rank", "attempt", "pid", "seq")}
        machine = str(event.fields.get("machine", ""))
        numbers = {name: _number(event.fields.get(name)) for name in PROFILE_FIELDS}
        self._add(_ProfileSample(v=1, machine=machine, gpu=samples, **head, **numbers))

    def _add(self, sample: Any) -> None:
        """Pack a sample at once: its numbers are reused for the next one, and stay in the caches of the processor."""
        slot, machine, gpus, *numbers = _to_tuple(sample)
        self.slots.append(slot)
        self.machines.append(machine)
        self.gpu_counts.append(len(gpus))
        self._rows.append(_ROW.pack(*numbers))
        for gpu in gpus:
            self._gpu_rows.append(_GPU_ROW.pack(*_to_tuple(gpu)))

    def columns(self) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
        """Return the times, the attempts, and an array with one row for each of `PROFILE_FIELDS`."""
        columns = _unpack(self._rows, _ROW)
        return columns[_T], columns[_ATTEMPT].astype(np.int64), columns[len(_HEAD) :]

    def gpu_columns(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the numbers of the GPUs, and an array with one row for each of `GPU_FIELDS`."""
        columns = _unpack(self._gpu_rows, _GPU_ROW)
        return columns[0].astype(np.int64), columns[1:]


def _unpack(rows: Sequence[bytes], row: struct.Struct) -> NDArray[np.float64]:
    """Return rows as columns; numbers of an implausible size are NaN, as in `event_values.number`."""
    columns = np.frombuffer(b"".join(rows), np.float64).reshape(-1, row.size // 8).T.copy()
    columns[np.abs(columns) >= MAX_NUMBER] = np.nan
    return columns


def _number(value: Any) -> float:
    known = number(value)
    return math.nan if known is None else known
