"""What the slots of an attempt say while they run: heartbeats, scalars, and where they are when they hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.core.processes import catches, marked
from stoker.core.units import format_duration
from stoker.jobs.run_folder import Run
from stoker.jobs.spec import Job
from stoker.jobs.topology import Slot
from stoker.launchers.diagnosis import LOST_MARK
from stoker.launchers.plan import LocalPlan
from stoker.launchers.process_group import Gang
from stoker.telemetry.events import Event
from stoker.telemetry.mpi_rank import EXIT as RANK_EXIT
from stoker.telemetry.reader import Follower

if TYPE_CHECKING:
    from stoker.launchers.tensorboard import Board

PAUSE_S = 0.2
STACKS_S = 2.0
EXIT = "slot_exit"
"""The mark, in the log of a carried slot, by which its carrier tells its exit code."""
WAITING = "waiting"
"""The mark by which a carrier tells why its slots have no place yet; without a reason: they have one."""


@dataclass(slots=True)
class Pulse:
    """The last that was heard of one rank."""

    pid: int
    step: int
    at: float
    shard: str


class Hearing:
    """Follows the logs of an attempt."""

    def __init__(self, run: Run, attempt: int, plan: LocalPlan, job: Job) -> None:
        self._run, self._attempt, self._after_s = run, attempt, float(job.hang_after)
        self._is_far, self._carried = plan.is_far, frozenset(map(Slot.parse, plan.carried))
        self._followers = {slot: Follower(run.log(slot, attempt)) for slot in (*plan.commands, *self._carried)}
        self.steps = -1
        """The highest step that was told; -1 when none was."""
        self.exits: dict[Slot, int] = {}
        self.lost: set[Slot] = set()
        self.failed: dict[Slot, int] = {}
        """The exit code of the first rank of a slot that failed, where ranks tell."""
        self.is_placed = not plan.is_placed_later
        self.waiting = ""
        self._pulses: dict[tuple[Slot, int], Pulse] = {}
        self._board = _board(run, job)

    def catch_up(self) -> None:
        """Hear what an earlier watcher heard already, and has shown."""
        board, self._board = self._board, None
        self.listen()
        self._board = board

    def listen(self) -> list[str]:
        """Hear what is new; give the lines of text in it."""
        text = []
        for slot, follower in self._followers.items():
            lines, events = follower.read()
            text += [f"{slot}: {line}" for line in lines]
            self._show(events)
            for event in events:
                if event.kind == "heartbeat":
                    self._feel(slot, event)
                elif event.kind == "mark":
                    self._take(slot, event)
        return text

    def _feel(self, slot: Slot, event: Event) -> None:
        pulse = Pulse(
            pid=_whole(event.fields.get("pid"), 0),
            step=_whole(event.fields.get("step"), -1),
            at=time.monotonic(),
            shard=str(event.fields.get("shard") or ""),
        )
        self._pulses[slot, event.rank] = pulse
        self.steps = max(self.steps, pulse.step)

    def _take(self, slot: Slot, event: Event) -> None:
        """Take what is told of a slot: how it and its ranks ended, that it is lost, why it has no place yet."""
        name, is_carried = event.fields.get("name"), slot in self._carried
        if name == RANK_EXIT:
            self._pulses.pop((slot, event.rank), None)
            if code := _whole(event.fields.get("code"), 1):
                self.failed.setdefault(slot, code)
        elif name == LOST_MARK and self._is_far:
            self.lost.add(slot)
        elif name == EXIT and is_carried:
            self.exits[slot] = _whole(event.fields.get("code"), 1)
        elif name == WAITING and self._carried and not is_carried:
            self.waiting = str(event.fields.get("detail") or "")
            self.is_placed = not self.waiting

    def forget(self, slot: Slot) -> None:
        """Expect nothing of a slot's ranks until they are heard again."""
        self._pulses = {key: pulse for key, pulse in self._pulses.items() if key[0] != slot}
        self.lost.discard(slot)

    def hung(self, gang: Gang, codes: Mapping[Slot, int | None]) -> str:
        """Say which rank has not been heard of for too long; nothing when all have, or are gone."""
        since = time.monotonic() - self._after_s
        late = sorted((pulse.at, key) for key, pulse in self._pulses.items() if self._after_s > 0 and pulse.at < since)
        for _, key in late:
            # Of a rank elsewhere it is known only whether its slot has ended.
            if codes.get(key[0]) is None if self._is_far else gang.is_alive(self._pulses[key].pid):
                return self._described(*key)
            del self._pulses[key]  # it ended well, or its rank is another process now
        return ""

    def _described(self, slot: Slot, rank: int) -> str:
        pulse = self._pulses[slot, rank]
        where, silence = f" in {pulse.shard}" if pulse.shard else "", format_duration(self._after_s)
        return (
            f"{slot} (rank {rank}) hung at step {pulse.step}{where}: no heartbeat for {silence}; "
            f"the stacks of all ranks: {self._stacks}; its log: {self._run.log(slot, self._attempt)}"
        )

    @property
    def _stacks(self) -> Path:
        return self._run.folder / f"stacks.{self._attempt}.txt"

    def ask_for_stacks(self, gang: Gang) -> None:
        """Have every process that can write where each of its threads is, and keep that beside the logs."""
        text = self.listen()
        if self._is_far:  # who stands for a slot passes it on to the ranks there
            for pid in gang.pids.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
                text += self._next_lines()
        leaders = gang.pids.values()  # the profiler would pass the signal on to one that cannot
        for pid in sorted(marked({"STOKER_RUN": self._run.id})):
            if pid not in leaders and catches(pid, signal.SIGUSR1):  # one after the other, for they share a log
                ranks = [f"{slot} (rank {rank})" for (slot, rank), pulse in self._pulses.items() if pulse.pid == pid]
                text.append(f"--- {', '.join(ranks) or 'a process without a heartbeat'}, pid {pid}")
                os.kill(pid, signal.SIGUSR1)
                text += self._next_lines()
        self._run.write(self._stacks.name, "".join(f"{line}\n" for line in text).encode())

    def _next_lines(self) -> list[str]:
        """Hear what is being said, until there is a pause."""
        until, text = time.monotonic() + STACKS_S, list[str]()
        while time.monotonic() < until:
            time.sleep(PAUSE_S)
            more = self.listen()
            if text and not more:
                break
            text += more
        return text

    def _show(self, events: list[Event]) -> None:
        """Pass scalars on to TensorBoard; that they cannot be written is no reason to end a training."""
        if self._board is not None:
            try:
                self._board.write(events)
            except OSError as error:
                print(f"no more event files: {error}")  # noqa: T201 (into supervisor.log)
                self._board = None


def _whole(value: object, default: int) -> int:
    return int(value) if isinstance(value, int | float) and value == value and abs(value) < 2**63 else default


def _board(run: Run, job: Job) -> Board | None:
    if not job.tensorboard:
        return None
    from stoker.launchers.tensorboard import Board

    return Board(run.folder / "tensorboard" if job.tensorboard is True else Path(job.tensorboard))
