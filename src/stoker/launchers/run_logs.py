"""Read the logs in a run folder, attempt by attempt, with the reason for each retry between them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from stoker.jobs.launcher import SlotLogLine
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.topology import Slot, list_slots
from stoker.telemetry.reader import LogLine, RunTail

POLL_S = 0.1


def read_run_logs(
    run: RunFolder,
    slot: Slot | None,
    *,
    is_over: Callable[[], bool],
    tail: int | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> Iterator[SlotLogLine]:
    """Yield the log lines in a run folder, or the last `tail` of them, and new ones until the run is over.

    `pause` waits between two reads, for at most so many seconds.
    """
    logs = RunTail(run.logs, slot=None if slot is None else str(slot))
    notes = RetryNotes(run, slot)
    while True:
        over = is_over()  # before the last read, so that it misses nothing
        lines = notes.insert(map(_to_slot_line, logs.lines(final=over)))
        yield from lines if tail is None else deque(lines, maxlen=tail)
        tail = None
        if over:
            return
        for line in logs.changed_bars():
            yield _to_slot_line(line)._replace(is_partial=True)
        pause(POLL_S)


class RetryNotes:
    """The reasons for retries, from the status of a run, as lines of its first slot."""

    def __init__(self, run: RunFolder, slot: Slot | None) -> None:
        """Read logs of one slot or all; those of another slot than the first have no notes."""
        self._run, self._slot = run, min(list_slots(run.job))
        self._is_shown = slot in (None, self._slot)
        self._noted = -1

    def insert(self, lines: Iterable[SlotLogLine]) -> Iterator[SlotLogLine]:
        """Yield the lines, which are sorted by attempt, with a note before those of each retry."""
        current = self._run.read_status().attempt  # before the lines are read: these are complete up to here
        for line in lines:
            yield from self._notes(line.attempt)
            yield line
        yield from self._notes(current)

    def _notes(self, attempt: int) -> Iterator[SlotLogLine]:
        """Yield the notes up to an attempt that were not yielded before."""
        if attempt <= self._noted or not self._is_shown:
            return
        for failed in self._run.read_status().attempts:
            if failed.is_retried and self._noted <= failed.number < attempt:
                text = f"--- attempt {failed.number + 1}: retrying because {failed.cause}"
                yield SlotLogLine(self._slot, failed.number + 1, text, failed.ended)
        self._noted = attempt


def _to_slot_line(line: LogLine) -> SlotLogLine:
    return SlotLogLine(Slot.parse(line.log.slot), line.log.attempt, line.text, line.t)
