"""Monitor for one attempt: reads heartbeats, scalars and marks from slot logs, detects hangs, dumps stacks."""

from __future__ import annotations

import linecache
import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.core.processes import find_processes_by_env, handles_signal, parent_pid, read_env
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.spec import JobSpec
from stoker.jobs.topology import Slot
from stoker.launchers.plan import LocalPlan
from stoker.launchers.supervise.diagnosis import LOST_MARK
from stoker.launchers.supervise.hangs import RankKey, RankPosition, StackDump, describe_hang
from stoker.launchers.supervise.process_group import ProcessGroup
from stoker.remote.mpi_rank import RANK_EXIT_MARK
from stoker.telemetry.events import Event
from stoker.telemetry.reader import LogTail

if TYPE_CHECKING:
    from stoker.launchers.supervise.tensorboard import ScalarWriter

POLL_S = 0.2
STACK_DUMP_S = 2.0
SLOT_EXIT_MARK = "slot_exit"
"""Mark in the log of a delegated slot with its exit code, written by the process that manages the slot."""
PENDING_MARK = "waiting"
"""Mark with the reason why slots are not placed yet; a mark without a reason means that they are."""


@dataclass(slots=True)
class Heartbeat:
    """The latest heartbeat of one rank."""

    pid: int
    step: int
    at: float
    shard: str


class AttemptMonitor:
    """Monitor for one attempt: follows the logs of its slots."""

    def __init__(self, run: RunFolder, attempt: int, plan: LocalPlan, job: JobSpec) -> None:
        self._run, self._attempt, self._hang_after_s = run, attempt, float(job.hang_after)
        self._is_remote, self._delegated = plan.is_remote, frozenset(map(Slot.parse, plan.delegated))
        self._logs = {slot: LogTail(run.log_path(slot, attempt)) for slot in (*plan.commands, *self._delegated)}
        self.last_step = -1
        """The highest step reported by any rank; -1 before the first heartbeat."""
        self.exit_codes: dict[Slot, int] = {}
        """Exit codes of delegated slots."""
        self.lost_slots: set[Slot] = set()
        self.rank_failures: dict[Slot, int] = {}
        """The exit code of the first failed rank of each slot whose ranks report their exit."""
        self.is_placed = not plan.waits_for_placement
        self.pending_reason = ""
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
                elif event.kind == "mark":
                    self._handle_mark(slot, event)
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

    def _handle_mark(self, slot: Slot, event: Event) -> None:
        """Record the exit of a rank or slot, a lost slot, or the reason why slots wait for placement."""
        name, is_delegated = event.fields.get("name"), slot in self._delegated
        if name == RANK_EXIT_MARK:
            self._heartbeats.pop((slot, event.rank), None)
            if code := _to_int(event.fields.get("code"), 1):
                self.rank_failures.setdefault(slot, code)
        elif name == LOST_MARK and self._is_remote:
            self.lost_slots.add(slot)
        elif name == SLOT_EXIT_MARK and is_delegated:
            self.exit_codes[slot] = _to_int(event.fields.get("code"), 1)
        elif name == PENDING_MARK and self._delegated and not is_delegated:
            self.pending_reason = str(event.fields.get("detail") or "")
            self.is_placed = not self.pending_reason

    def reset_slot(self, slot: Slot) -> None:
        """Forget the heartbeats of a slot that is about to be restarted."""
        self._heartbeats = {key: heartbeat for key, heartbeat in self._heartbeats.items() if key[0] != slot}
        self.lost_slots.discard(slot)

    def find_silent_ranks(self, processes: ProcessGroup, exit_codes: Mapping[Slot, int | None]) -> list[RankPosition]:
        """Return the live ranks that hang: one without a heartbeat for `hang_after`, others for half of that."""
        now = time.monotonic()
        if self._hang_after_s <= 0 or all(beat.at >= now - self._hang_after_s for beat in self._heartbeats.values()):
            return []
        limit = now - self._hang_after_s / 2
        for key in [key for key, heartbeat in self._heartbeats.items() if heartbeat.at < limit]:
            # Of a remote rank we know only whether its slot has exited.
            pid = self._heartbeats[key].pid
            if not (exit_codes.get(key[0]) is None if self._is_remote else processes.is_alive(pid)):
                del self._heartbeats[key]  # it exited normally, or the rank has a new process
        if all(beat.at >= now - self._hang_after_s for beat in self._heartbeats.values()):
            return []
        return [self._rank_position(key) for key, beat in sorted(self._heartbeats.items()) if beat.at < limit]

    def _rank_position(self, key: RankKey) -> RankPosition:
        heartbeat = self._heartbeats[key]
        return RankPosition(*key, step=heartbeat.step, shard=heartbeat.shard)

    def explain_hang(self, silent: Sequence[RankPosition], processes: ProcessGroup) -> str:
        """Save the stacks of all ranks beside the logs, and return which rank hangs, in one sentence."""
        dumps = self._dump_stacks(processes)
        # The files of another machine may differ from those here.
        read_source = (lambda *_: "") if self._is_remote else linecache.getline
        hang = describe_hang(silent, dumps, self._hang_after_s, read_source)
        log = self._run.log_path(hang.slot, self._attempt)
        return f"{hang.message}; stack traces of all ranks: {self._stacks_file}; log: {log}"

    @property
    def _stacks_file(self) -> Path:
        return self._run.folder / f"stacks.{self._attempt}.txt"

    def _dump_stacks(self, processes: ProcessGroup) -> list[StackDump]:
        """Signal every process with a stack dump handler, and save and return the dumps."""
        text = [f"{slot}: {line}" for slot, line in self.read_events()]
        dumps = list[StackDump]()
        leaders = processes.pids.values()
        if self._is_remote:  # the local process of a remote slot forwards the signal to its ranks
            lines = list[tuple[Slot, str]]()
            for pid in leaders:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
                lines += self._read_until_quiet()
            text += [f"{slot}: {line}" for slot, line in lines]
            for slot in dict.fromkeys(slot for slot, _ in lines):
                ranks = tuple(self._rank_position(key) for key in sorted(self._heartbeats) if key[0] == slot)
                dumps.append(StackDump(ranks, [line for source, line in lines if source == slot]))
        # Not the leaders: the profiler would forward the signal to a program without a handler.
        candidates = sorted(set(find_processes_by_env({"STOKER_RUN": self._run.id})) - set(leaders))
        pids = [pid for pid in candidates if handles_signal(pid, signal.SIGUSR1)]
        for pid in pids:
            ranks = self._ranks_of(pid, pids)
            names = [f"{rank.slot} (rank {rank.rank})" for rank in ranks]
            text.append(f"--- {', '.join(names) or 'a process without a heartbeat'}, pid {pid}")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
            lines = self._read_until_quiet()  # one process at a time, because ranks share a log
            text += [f"{slot}: {line}" for slot, line in lines]
            dumps.append(StackDump(ranks, [line for _, line in lines]))
        self._run.write(self._stacks_file.name, "".join(f"{line}\n" for line in text).encode())
        return dumps

    def _ranks_of(self, pid: int, pids: Collection[int]) -> tuple[RankPosition, ...]:
        """Return the rank that a process is, from its heartbeats or else its environment; none for its descendants."""
        keys = [key for key, heartbeat in self._heartbeats.items() if heartbeat.pid == pid]
        if keys:
            return tuple(map(self._rank_position, keys))
        env = read_env(pid)
        slot, rank = env.get("STOKER_SLOT", ""), env.get("RANK", "")
        is_unknown = rank.isdigit() and all(known != int(rank) for _, known in self._heartbeats)
        if not slot or not is_unknown or parent_pid(pid) in pids:
            return ()
        return (RankPosition(Slot.parse(slot), int(rank)),)

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
                print(f"cannot write TensorBoard event files: {error}")  # noqa: T201 (into supervisor.log)
                self._scalar_writer = None


def _to_int(value: object, default: int) -> int:
    return int(value) if isinstance(value, int | float) and value == value and abs(value) < 2**63 else default


def _make_scalar_writer(run: RunFolder, job: JobSpec) -> ScalarWriter | None:
    if not job.tensorboard:
        return None
    from stoker.launchers.supervise.tensorboard import ScalarWriter

    return ScalarWriter(run.folder / "tensorboard" if job.tensorboard is True else Path(job.tensorboard))
