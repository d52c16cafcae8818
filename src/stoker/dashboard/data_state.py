"""Data of a run for the dashboard: the samples of its epoch, bad samples, cache hits, and the shard of each rank."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from stoker.dashboard.bad_samples import BadSampleRow, list_bad_samples
from stoker.dashboard.ranks import RankRow, list_ranks
from stoker.dashboard.runs import DashboardRun
from stoker.telemetry.run_index import RunIndex

MAX_TOTAL = 2**53


class CacheTotals(msgspec.Struct, frozen=True):
    """Counters of the disk caches of all ranks in the newest attempt, in shards and bytes."""

    hits: int
    misses: int
    fetched_bytes: int


class DataState(msgspec.Struct, frozen=True):
    """What a run has read: the samples of its epoch, bad samples, cache hits, and the shard that each rank reads."""

    train: str
    val: str
    samples: int | None
    epoch: float | None
    epochs: float | None
    seen: int | None
    left: int | None
    bad: int | None
    """Bad samples in this epoch since the newest attempt began; None if the program does not report them."""
    bad_samples: list[BadSampleRow]
    cache: CacheTotals | None
    """None without a disk cache."""
    global_batch: int | None
    ranks: list[RankRow]
    stages: dict[str, float]
    """Seconds that the loader's threads spent in each stage, over all ranks."""


def describe_data(run: DashboardRun) -> DataState:
    """Return what a run has read of its dataset."""
    with run.lock:
        index = run.index()
        progress = index.analysis.progress()
        starts = [mark for mark in index.marks()[0] if mark.name == "start"]
        numbers = starts[-1].numbers if starts else {}
        samples, batch = numbers.get("samples"), numbers.get("global_batch")
        seen = None
        if samples and progress.epoch is not None and math.isfinite(progress.epoch):
            is_end = progress.ended or (progress.epochs is not None and progress.epoch >= progress.epochs)
            seen = int(samples) if is_end else round(progress.epoch % 1 * samples)
        stages: dict[str, float] = {}
        for times in index.analysis.spans.by_rank().values():
            for name, seconds in times.seconds.items():
                if name.startswith("loader."):
                    stage = name.removeprefix("loader.")
                    stages[stage] = stages.get(stage, 0.0) + seconds
        train, val = _data_urls(run)
        bad_samples = list_bad_samples(run)
        return DataState(
            train=train,
            val=val,
            samples=None if samples is None else int(samples),
            epoch=progress.epoch,
            epochs=progress.epochs,
            seen=seen,
            left=None if seen is None or samples is None else max(0, int(samples) - seen),
            bad=_count_bad(index, bad_samples),
            bad_samples=bad_samples,
            cache=_sum_cache(index),
            global_batch=None if batch is None else int(batch),
            ranks=list_ranks(run),
            stages=stages,
        )


def _count_bad(index: RunIndex, known: list[BadSampleRow]) -> int | None:
    """Return the number of bad samples; None if the program does not report on its loader at all."""
    total = _sum_newest(index, "bad_samples")
    if total is None and not known and not any(name.startswith("loader.") for name in index.names):
        return None
    return total or 0


def _sum_cache(index: RunIndex) -> CacheTotals | None:
    hits, misses, fetched = (_sum_newest(index, f"cache_{name}") for name in ("hits", "misses", "fetched_bytes"))
    return None if hits is None and misses is None else CacheTotals(hits or 0, misses or 0, fetched or 0)


def _sum_newest(index: RunIndex, name: str) -> int | None:
    """Return the sum of the last values of a scalar of all ranks in the newest attempt; None if none reported it."""
    if name not in index.names:
        return None
    table = index.tables["scalar"]
    rows = np.flatnonzero(table.read("name") == index.names.index(name))
    processes, values = table.read("process")[rows].tolist(), table.read("value")[rows].tolist()
    newest = max((process.attempt for process in index.processes), default=0)
    last: dict[tuple[str, int], float] = {}
    for number, value in zip(processes, values, strict=True):
        process = index.processes[number]
        if process.attempt == newest and 0 <= value < MAX_TOTAL:
            last[process.slot, process.rank] = value
    return int(min(sum(last.values()), MAX_TOTAL))


def _data_urls(run: DashboardRun) -> tuple[str, str]:
    try:
        data = run.folder.job.data
        return str(data.train or ""), str(data.val or "")
    except Exception:  # a job file of another version
        return "", ""
