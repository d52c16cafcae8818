"""Report what the loader of a process skipped and how its cache did, as events for the dashboard."""

from __future__ import annotations

from stoker.load.loader import BadSample, Loader
from stoker.telemetry import Recorder

MAX_MARKS = 50
"""Bad samples of a process that get a mark each; after that, only the number of bad samples is reported."""
BAD_SAMPLE_MARK = "bad_sample"


class DataReporter:
    """Reporter of one process; writes an event only for what has changed since the last report."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._reported, self._marks = 0, 0
        self._epoch = 0
        self._positions: set[int] = set()
        """Positions of the bad samples of the epoch; one that is loaded again counts once."""
        self._values: dict[str, int] = {"bad_samples": 0}

    def report(self, loader: Loader, epoch: int, step: int) -> None:
        """Report new bad samples, their number in this epoch, and the counters of the cache."""
        if epoch != self._epoch:
            self._epoch, self._positions = epoch, set()
        new = loader.bad[self._reported :]
        self._reported += len(new)
        for sample in new:
            self._mark(sample)
            if sample.epoch == epoch:
                self._positions.add(sample.position)
        values = {"bad_samples": len(self._positions)}
        if (stats := loader.cache_stats) is not None:
            values |= {
                "cache_hits": stats.hits,
                "cache_misses": stats.misses,
                "cache_fetched_bytes": stats.fetched_bytes,
            }
        for name, value in values.items():
            if self._values.get(name) != value:
                self._record.scalar(name, value, step)
        self._values = values

    def _mark(self, sample: BadSample) -> None:
        if self._marks == MAX_MARKS:
            return
        self._marks += 1
        where = {"shard": sample.shard, "offset": sample.offset, "length": sample.length, "sha256": sample.sha256}
        detail = f"{sample.shard} at byte {sample.offset:,}: {sample.reason}"
        numbers = {"epoch": sample.epoch, "position": sample.position}
        self._record.mark(BAD_SAMPLE_MARK, detail, reason=sample.reason, **where, **numbers)
