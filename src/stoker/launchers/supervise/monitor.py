"""Monitor for one attempt: reads heartbeats, scalars and marks from slot logs, detects hangs, dumps stacks."""

from __future__ import annotations

import linecache
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.jobs.run_files import stacks_file
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.spec import JobSpec
from stoker.jobs.topology import Slot, list_slots
from stoker.launchers.supervise.hangs import RankKey, RankPosition, StackDump, describe_hang
from stoker.launchers.supervise.slot_handle import SlotHandle, StackRequest
from stoker.launchers.supervise.status_writer import log_remark, try_write
from stoker.remote.mpi_rank import RANK_EXIT_MARK
from stoker.telemetry.events import Event
from stoker.telemetry.reader import LogTail

if TYPE_CHECKING:
    from stoker.launchers.supervise.tensorboard import ScalarWriter

POLL_S = 0.2
STACK_DUMP_S = 2.0

Handles = Mapping[Slot, SlotHandle]


@dataclass(slots=True)
class Heartbeat:
    """The latest heartbeat of one rank."""

    pid: int
    step: int
    at: float
    shard: str


class AttemptMonitor:
    """Monitor for one attempt: follows the logs of its slots."""

    def __init__(self, run: RunFolder, attempt: int, job: JobSpec) -> None:
        self._run, self._attempt, self._hang_after_s = run, attempt, float(job.hang_after)
        self._logs = {slot: LogTail(run.log_path(slot, attempt)) for slot in list_slots(job)}
        self.last_step = -1
        """The highest step reported by any rank; -1 before the first heartbeat."""
        self.rank_failures: dict[Slot, int] = {}
        """The exit code of the first failed rank of each slot whose ranks report their exit."""
        self._heartbeats: dict[RankKey, Heartbeat] = {}
        self._scalar_writer = _make_scalar_writer(run, job)

    def catch_up(self) -> None:
        """Read the events that an earlier supervisor has already read and passed on to TensorBoard."""
        writer, self._scalar_writer = self._scalar_writer, None
        self.read_events()
        self._scalar_writer = writer

    def read_events(self) -> list[tuple[Slot, str]]:
        """Process new events in all logs and return the new lines of plain text with their slots."""
        text = []
        for slot, log in self._logs.items():
            lines, events = log.read()
            text += [(slot, line) for line in lines]
            self._write_scalars(events)
            for event in events:
                if event.kind == "heartbeat":
                    self._record_heartbeat(slot, event)
                elif event.kind == "mark" and event.fields.get("name") == RANK_EXIT_MARK:
                    self._record_rank_exit(slot, event)
        return text

    def _record_heartbeat(self, slot: Slot, event: Event) -> None:
        heartbeat = Heartbeat(
            pid=_to_int(event.fields.get("pid"), 0),
            step=_to_int(event.fields.get("step"), -1),
            at=time.monotonic(),
            shard=str(event.fields.get("shard") or ""),
        )
        self._heartbeats[slot, event.rank] = heartbeat
        self.last_step = max(self.last_step, heartbeat.step)

    def _record_rank_exit(self, slot: Slot, event: Event) -> None:
        self._heartbeats.pop((slot, event.rank), None)
        if code := _to_int(event.fields.get("code"), 1):
            self.rank_failures.setdefault(slot, code)

    def reset_slot(self, slot: Slot) -> None:
        """Forget the heartbeats of a slot that is about to be restarted."""
        self._heartbeats = {key: heartbeat for key, heartbeat in self._heartbeats.items() if key[0] != slot}

    def find_silent_ranks(self, handles: Handles) -> list[RankPosition]:
        """Return the live ranks that hang: one without a heartbeat for `hang_after`, others for half of that."""
        now = time.monotonic()
        if self._hang_after_s <= 0 or all(beat.at >= now - self._hang_after_s for beat in self._heartbeats.values()):
            return []
        limit = now - self._hang_after_s / 2
        for slot, rank in [key for key, heartbeat in self._heartbeats.items() if heartbeat.at < limit]:
            if not handles[slot].has_process(self._heartbeats[slot, rank].pid):
                del self._heartbeats[slot, rank]  # it exited normally, or the rank has a new process
        if all(beat.at >= now - self._hang_after_s for beat in self._heartbeats.values()):
            return []
        return [self._rank_position(key) for key, beat in sorted(self._heartbeats.items()) if beat.at < limit]

    def _rank_position(self, key: RankKey) -> RankPosition:
        heartbeat = self._heartbeats[key]
        return RankPosition(*key, step=heartbeat.step, shard=heartbeat.shard)

    def explain_hang(self, silent: Sequence[RankPosition], handles: Handles) -> str:
        """Save the stacks of all ranks beside the logs, and return which rank hangs, in one sentence."""
        dumps = self.save_stacks(handles)
        # The files of another machine may differ from those here.
        has_sources = all(handle.reads_local_sources for handle in handles.values())
        hang = describe_hang(silent, dumps, self._hang_after_s, linecache.getline if has_sources else lambda *_: "")
        log = self._run.log_path(hang.slot, self._attempt)
        stacks = f"; stack traces of all ranks: {self._stacks_file}" if self._stacks_file.exists() else ""
        return f"{hang.message}{stacks}; log: {log}"

    @property
    def _stacks_file(self) -> Path:
        return self._run.folder / stacks_file(self._attempt)

    def save_stacks(self, handles: Handles) -> list[StackDump]:
        """Ask every slot for the stacks of its processes, and save and return them."""
        text = [f"{slot}: {line}" for slot, line in self.read_events()]
        dumps = list[StackDump]()
        for slot, handle in handles.items():
            for request in handle.dump_stacks():
                lines = self._read_until_quiet()
                if request.pid is not None:
                    ranks = self._ranks_of(slot, request)
                    names = [f"{rank.slot} (rank {rank.rank})" for rank in ranks]
                    text.append(f"--- {', '.join(names) or 'a process without a heartbeat'}, pid {request.pid}")
                    dumps.append(StackDump(ranks, [line for _, line in lines]))
                else:
                    dumps += self._split_by_slot(lines)
                text += [f"{source}: {line}" for source, line in lines]
        try_write(self._run, self._stacks_file.name, "".join(f"{line}\n" for line in text).encode())
        return dumps

    def _split_by_slot(self, lines: Sequence[tuple[Slot, str]]) -> list[StackDump]:
        """Return the stacks in each log, for ranks that cannot be asked one by one."""
        return [
            StackDump(
                tuple(self._rank_position(key) for key in sorted(self._heartbeats) if key[0] == slot),
                [line for source, line in lines if source == slot],
            )
            for slot in dict.fromkeys(source for source, _ in lines)
        ]

    def _ranks_of(self, slot: Slot, request: StackRequest) -> tuple[RankPosition, ...]:
        """Return the rank that a process is, from its heartbeats or else its environment; none for its descendants."""
        keys = [key for key, heartbeat in self._heartbeats.items() if key[0] == slot and heartbeat.pid == request.pid]
        if keys:
            return tuple(map(self._rank_position, keys))
        if request.rank is None or any(rank == request.rank for _, rank in self._heartbeats):
            return ()
        return (RankPosition(slot, request.rank),)

    def _read_until_quiet(self) -> list[tuple[Slot, str]]:
        """Read new lines until none arrive for a moment, for at most `STACK_DUMP_S`."""
        deadline, text = time.monotonic() + STACK_DUMP_S, list[tuple[Slot, str]]()
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            lines = self.read_events()
            if text and not lines:
                break
            text += lines
        return text

    def _write_scalars(self, events: list[Event]) -> None:
        """Write scalars to TensorBoard event files; a write error must not stop the training."""
        if self._scalar_writer is not None:
            try:
                self._scalar_writer.write(events)
            except OSError as error:
                log_remark(f"cannot write TensorBoard event files: {error}")
                self._scalar_writer = None


def _to_int(value: object, default: int) -> int:
    return int(value) if isinstance(value, int | float) and value == value and abs(value) < 2**63 else default


def _make_scalar_writer(run: RunFolder, job: JobSpec) -> ScalarWriter | None:
    if not job.tensorboard:
        return None
    from stoker.launchers.supervise.tensorboard import ScalarWriter

    return ScalarWriter(run.folder / "tensorboard" if job.tensorboard is True else Path(job.tensorboard))
