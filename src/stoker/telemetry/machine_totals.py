"""Totals of the profile events of each slot: means, last values and peaks, updated by blocks of rows."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker.telemetry.profile_rows import GPU_FIELDS, PROFILE_FIELDS, ProfileRows

_LAST_FIELDS = (
    "mem_total", "mem_available", "cgroup_mem_limit", "cgroup_mem_used", "cores", "cpus", "cache_disk_free",
)  # fmt: skip
_WIDTH = len(PROFILE_FIELDS)
_COLUMN = {name: number for number, name in enumerate(PROFILE_FIELDS)}
_LAST_COLUMN = {name: number for number, name in enumerate(_LAST_FIELDS)}
_UTIL, _USED, _TOTAL = (GPU_FIELDS.index(name) for name in ("util_pct", "mem_used", "mem_total"))


class ProfileBlock(msgspec.Struct, frozen=True):
    """Profiles as arrays; `slots` are numbers of slots in `MachineTotals.slots`."""

    t: NDArray[np.float64]
    slots: NDArray[np.int64]
    attempts: NDArray[np.int64]
    values: NDArray[np.float64]
    """One row for each of `PROFILE_FIELDS`."""
    gpu_owners: NDArray[np.int64]
    """The profile in this block that each GPU belongs to."""
    gpu_numbers: NDArray[np.int64]
    gpu_values: NDArray[np.float64]
    """One row for each of `GPU_FIELDS`."""


class MachineTotals:
    """What is known of the machine of each slot; a slot has the number of its position in `slots`."""

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}
        self.machines: dict[str, str] = {}
        self.profiles = 0
        self.has_gpu = False
        self.last_t: NDArray[np.float64] = np.zeros(0)
        """When the last profile of each slot was taken."""
        self._sums, self._counts, self._peaks = (np.zeros((0, _WIDTH)) for _ in range(3))
        self._last = np.zeros((0, len(_LAST_FIELDS), 3))
        """The attempt, time and value of the last known value of a field."""
        self._gpu_util: dict[int, dict[int, tuple[float, int]]] = {}
        """Sum and number of the utilizations of each GPU of each slot."""
        self._gpu_memory: NDArray[np.float64] = np.zeros(0)
        """The highest share of GPU memory in use on each slot."""

    def add(self, rows: ProfileRows) -> ProfileBlock:
        """Add profiles, in any order; return them as arrays."""
        for slot, machine in dict.fromkeys(zip(rows.slots, rows.machines, strict=True)):
            self.slots.setdefault(slot, len(self.slots))
            if machine:
                self.machines.setdefault(slot, machine)
        self._grow()
        t, attempts, values = rows.columns()
        gpu_numbers, gpu_values = rows.gpu_columns()
        block = ProfileBlock(
            t=t,
            slots=np.fromiter(map(self.slots.__getitem__, rows.slots), np.int64, len(rows)),
            attempts=attempts,
            values=values,
            gpu_owners=np.repeat(np.arange(len(rows)), rows.gpu_counts),
            gpu_numbers=gpu_numbers,
            gpu_values=gpu_values,
        )
        if len(rows):
            self._add_block(block)
        return block

    def _add_block(self, block: ProfileBlock) -> None:
        self.profiles += len(block.t)
        order = np.argsort(block.slots, kind="stable")
        slots, starts = np.unique(block.slots[order], return_index=True)
        values = block.values[:, order]
        known = np.isfinite(values)
        values[~known] = 0.0
        self._sums[slots] += np.add.reduceat(values, starts, axis=1).T
        self._counts[slots] += np.add.reduceat(known, starts, axis=1, dtype=np.float64).T
        self._peaks[slots] = np.maximum(self._peaks[slots], np.maximum.reduceat(values, starts, axis=1).T)
        self.last_t[slots] = np.maximum(self.last_t[slots], np.maximum.reduceat(block.t[order], starts))
        self._keep_last(block)
        self._add_gpus(block)

    def mean(self, slot: str, name: str) -> float | None:
        """Return the mean of a field on a slot; None if it was never reported."""
        number, column = self.slots[slot], _COLUMN[name]
        count = self._counts[number, column]
        return float(self._sums[number, column] / count) if count else None

    def last(self, slot: str, name: str) -> float | None:
        """Return the last known value of a field on a slot."""
        value = self._last[self.slots[slot], _LAST_COLUMN[name], 2]
        return None if np.isnan(value) else float(value)

    def peak(self, slot: str, name: str) -> float:
        """Return the highest value of a field on a slot; 0 if there is none above."""
        return float(self._peaks[self.slots[slot], _COLUMN[name]])

    def overall_mean(self, name: str) -> float | None:
        """Return the mean of a field over all profiles of all slots."""
        count = self._counts[:, _COLUMN[name]].sum()
        return float(self._sums[:, _COLUMN[name]].sum() / count) if count else None

    def gpu_utilization(self, slot: str) -> list[float]:
        """Return the mean utilization of each GPU of a slot."""
        return [total / count for total, count in self._gpu_util.get(self.slots[slot], {}).values() if count]

    def gpus(self) -> list[tuple[int, int]]:
        """Return the GPUs of all slots, as the number of the slot and that of the GPU."""
        return sorted((slot, gpu) for slot, gpus in self._gpu_util.items() for gpu in gpus)

    def gpu_memory(self, slot: str) -> float:
        """Return the highest share of its memory that a GPU of a slot has used."""
        return float(self._gpu_memory[self.slots[slot]])

    def _grow(self) -> None:
        missing = len(self.slots) - len(self._sums)
        if missing <= 0:
            return
        empty = np.zeros((missing, _WIDTH))
        self.last_t = np.concatenate([self.last_t, np.full(missing, -np.inf)])
        self._gpu_memory = np.concatenate([self._gpu_memory, np.zeros(missing)])
        self._sums, self._counts, self._peaks = (
            np.concatenate([array, empty]) for array in (self._sums, self._counts, self._peaks)
        )
        unknown = np.full((missing, len(_LAST_FIELDS), 3), [-np.inf, -np.inf, np.nan])
        self._last = np.concatenate([self._last, unknown])

    def _keep_last(self, block: ProfileBlock) -> None:
        order = np.lexsort((block.t, block.attempts))
        for number, name in enumerate(_LAST_FIELDS):
            column = block.values[_COLUMN[name]]
            known = order[np.isfinite(column[order])]
            newest = np.full(len(self._last), -1)
            newest[block.slots[known]] = known  # of several rows of a slot, the last one in order stays
            slots = np.flatnonzero(newest >= 0)
            rows = newest[slots]
            attempts, times = self._last[slots, number, 0], self._last[slots, number, 1]
            is_newer = (block.attempts[rows] > attempts) | (
                (block.attempts[rows] == attempts) & (block.t[rows] >= times)
            )
            slots, rows = slots[is_newer], rows[is_newer]
            self._last[slots, number] = np.stack([block.attempts[rows], block.t[rows], column[rows]], axis=1)

    def _add_gpus(self, block: ProfileBlock) -> None:
        if not len(block.gpu_owners):
            return
        self.has_gpu = True
        slots, util = block.slots[block.gpu_owners], block.gpu_values[_UTIL]
        (indexes, numbers), width = np.unique(block.gpu_numbers, return_inverse=True), len(block.gpu_numbers)
        pairs, owners = np.unique(slots * width + numbers, return_inverse=True)
        keys = np.stack([pairs // width, indexes[pairs % width]], axis=1)
        known = np.isfinite(util)
        sums = np.bincount(owners, np.where(known, util, 0.0), len(keys))
        counts = np.bincount(owners, known, len(keys))
        for (slot, gpu), total, count in zip(keys.tolist(), sums.tolist(), counts.tolist(), strict=True):
            gpus_of_slot = self._gpu_util.setdefault(slot, {})
            before, number = gpus_of_slot.get(gpu, (0.0, 0))
            gpus_of_slot[gpu] = (before + total, number + int(count))
        has_memory = block.gpu_values[_TOTAL] != 0
        shares = block.gpu_values[_USED, has_memory] / block.gpu_values[_TOTAL, has_memory]
        np.fmax.at(self._gpu_memory, slots[has_memory], shares)

    def dump(self) -> bytes:
        """Return the totals as bytes, for an index on disk."""
        names = ("last_t", "_gpu_memory", "_sums", "_counts", "_peaks", "_last")
        state = _StoredTotals(
            slots=list(self.slots), machines=self.machines, profiles=self.profiles, has_gpu=self.has_gpu,
            arrays={name: getattr(self, name).tobytes() for name in names}, gpu_util=self._gpu_util,
        )  # fmt: skip
        return msgspec.msgpack.encode(state)

    @classmethod
    def load(cls, data: bytes) -> MachineTotals:
        """Return the totals that `dump` has written."""
        state = msgspec.msgpack.decode(data, type=_StoredTotals)
        totals = cls()
        totals.slots = {slot: number for number, slot in enumerate(state.slots)}
        totals.machines, totals.profiles, totals.has_gpu = state.machines, state.profiles, state.has_gpu
        totals._grow()
        for name, stored in state.arrays.items():
            shape = getattr(totals, name).shape
            setattr(totals, name, np.frombuffer(stored, np.float64).reshape(shape).copy())
        totals._gpu_util = state.gpu_util
        return totals


class _StoredTotals(msgspec.Struct):
    slots: list[str]
    machines: dict[str, str]
    profiles: int
    has_gpu: bool
    arrays: dict[str, bytes]
    gpu_util: dict[int, dict[int, tuple[float, int]]]
