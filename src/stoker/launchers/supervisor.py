"""Watches over one run on this machine: starts the gang, hears its events, and starts it again when that may help.

A process of its own, in a session of its own, so that neither a closed terminal nor the end of `stoker job run` touches
the job. It holds a lock on the run folder while it lives: who gets that lock knows that nobody watches any more.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from stoker.core.processes import marked
from stoker.core.spec import to_json
from stoker.errors import StokerError
from stoker.jobs.control import Restart, decide
from stoker.jobs.runs import Run, packages
from stoker.jobs.spec import Job
from stoker.jobs.status import Attempt, JobState, JobStatus, SlotStatus
from stoker.jobs.topology import Slot, lead_slots
from stoker.launchers.causes import Cause, cause
from stoker.launchers.gang import Gang, end_left
from stoker.launchers.plan import LocalPlan, read_plan
from stoker.telemetry.reader import Follower

if TYPE_CHECKING:
    from stoker.launchers.tensorboard import Board

POLL_S = 0.05
SETTLE_S = 0.3
"""After the first failure: another slot may just be writing what really happened."""
FAILED_GRACE_S = 10.0
"""For those whose partners are gone already: they cannot finish a step any more."""
STACKS_S = 2.0
FAR_S = 5.0
"""What those elsewhere have, to tell of their own failure and of their end."""
LOCK_S = 2.0
RENEWED_S = 10.0
STOPPED = "stopped"


class Stopped(Exception):  # noqa: N818
    """Someone asked the run to end."""


@dataclass(slots=True)
class Pulse:
    """The last that was heard of one rank."""

    pid: int
    step: int
    at: float
    shard: str


class Supervisor:
    """One run, from its first attempt to its end."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._job: Job = run.job
        self._plan: LocalPlan = read_plan(run)
        self._status = run.read_status()
        self._stop = False
        self._board = _board(run, self._job)

    def ask_to_stop(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Take a signal for the wish to end."""
        self._stop = True

    def watch(self) -> JobStatus:
        """Try until the job succeeds, is stopped, or is given up."""
        end_left(self._run)
        earlier, first = _earlier(self._status)
        began = time.time()
        attempts: list[Attempt] = []
        try:
            while True:
                number = first + len(attempts)
                self._tell(JobState.RUNNING, attempt=number, attempts=(*earlier, *attempts), began=began)
                if attempts:
                    self._explain(number, attempts[-1].cause)
                attempt = self._try(number)
                attempts.append(attempt)
                if self._stop and attempt.cause == STOPPED:
                    return self._end(JobState.STOPPED, earlier, attempts, STOPPED)
                if attempt.code == 0 and not attempt.hung:
                    return self._end(JobState.SUCCEEDED, earlier, attempts)
                decision = decide(attempts, self._job.retries)
                if not isinstance(decision, Restart):
                    why = f" ({decision.why})" if self._job.retries else ""
                    return self._end(JobState.FAILED, earlier, attempts, f"{attempt.cause}{why}")
                self._tell(
                    JobState.RUNNING,
                    attempts=(*earlier, *attempts),
                    message=f"attempt {number} failed: {attempt.cause}; starting again",
                )
                self._pause(decision.after_s)
        except Stopped:
            return self._end(JobState.STOPPED, earlier, attempts, STOPPED)
        except StokerError as error:
            return self._end(JobState.FAILED, earlier, attempts, str(error))

    def _try(self, number: int) -> Attempt:
        """Carry out one attempt, and tell how it ended; nothing of it is left then."""
        began, killed_before = time.time(), _oom_kills()
        hearing = _Hearing(self._run, number, self._plan.commands, self._board)
        far_s = FAR_S if self._plan.hosts else 0.0
        gang = Gang(self._run, number, self._plan.commands, last_s=far_s)
        grace = float(self._job.grace)
        found: Cause | None = None
        hung = why = ""
        replaced = 0
        try:
            self._tell_slots(gang.pids, gang.codes())
            if number == 0:  # for a report; it takes a moment, in which the job has already started
                self._run.write("packages.json", to_json(packages()))
            while True:
                hearing.listen()
                codes = gang.codes()
                self._tell_slots(gang.pids, codes)
                if self._job.is_elastic and replaced < self._job.retries and (lost := _lost(codes)):
                    replaced += 1
                    hearing.forget(lost)
                    gang.replace(lost)
                    continue
                if self._job.is_elastic and 0 in codes.values():
                    gang.leave(grace)  # the last step is over; who is not done by then waits for someone who is gone
                    break
                if any(codes.values()):
                    time.sleep(SETTLE_S)
                    found = self._cause(gang.codes(), number, _oom_kills() > killed_before)
                    far = time.monotonic() + far_s
                    while found.is_of_a_partner and None in gang.codes().values() and time.monotonic() < far:
                        time.sleep(POLL_S)
                        found = self._cause(gang.codes(), number, _oom_kills() > killed_before)
                    grace = min(grace, FAILED_GRACE_S)
                    break
                if all(codes[slot] == 0 for slot in lead_slots(self._job)):
                    break
                if hung := hearing.hung(float(self._job.hang_after)):
                    hearing.ask_for_stacks(gang.pids if self._plan.hosts else {})
                    grace = min(grace, FAILED_GRACE_S)
                    break
                if self._stop:
                    why = STOPPED
                    break
                time.sleep(POLL_S)
        finally:
            gang.end(grace)
            self._tell_slots(gang.pids, gang.codes())
        hearing.listen()
        return Attempt(
            number=number,
            began=began,
            ended=time.time(),
            code=found.code if found else 0,
            cause=found.sentence if found else hung or why,
            hung=bool(hung),
            steps=hearing.steps,
        )

    def _cause(self, codes: Mapping[Slot, int | None], number: int, out_of_memory: bool) -> Cause:
        """Choose among slots that failed the one that says most: a program's own error before an ended partner."""
        causes = [
            cause(slot, code, self._run.log(slot, number), out_of_memory=out_of_memory)
            for slot, code in codes.items()
            if code
        ]
        return min(causes, key=lambda one: (one.is_of_a_partner, one.words is None, one.slot))

    def _explain(self, number: int, why: str) -> None:
        """Begin the log of a new attempt with the reason for it, where whoever follows will see it."""
        first = min(self._plan.commands)
        self._run.log(first, number).write_text(f"--- attempt {number}, because {why}\n")

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._stop:
                raise Stopped
            time.sleep(POLL_S)

    def _tell_slots(self, pids: Mapping[Slot, int], codes: Mapping[Slot, int | None]) -> None:
        slots = tuple(
            SlotStatus(slot=str(slot), state=_state(code), pid=pids[slot], code=code) for slot, code in codes.items()
        )
        if slots != self._status.slots:
            self._tell(slots=slots)

    def _tell(self, state: JobState | None = None, **changes: object) -> None:
        given = changes if state is None else {"state": state, **changes}
        self._status = msgspec.structs.replace(self._status, **given)
        self._run.write_status(self._status)

    def _end(
        self, state: JobState, earlier: tuple[Attempt, ...], attempts: list[Attempt], message: str = ""
    ) -> JobStatus:
        self._tell(state, attempts=(*earlier, *attempts), message=message, ended=time.time())
        return self._status


class _Hearing:
    """What the slots of an attempt have said so far."""

    def __init__(self, run: Run, attempt: int, slots: Iterable[Slot], board: Board | None) -> None:
        self._run, self._attempt, self._board = run, attempt, board
        self._followers = {slot: Follower(run.log(slot, attempt)) for slot in slots}
        self._pulses: dict[tuple[Slot, int], Pulse] = {}

    @property
    def steps(self) -> int:
        return max((pulse.step for pulse in self._pulses.values()), default=-1)

    def listen(self) -> list[str]:
        """Hear what is new; give the lines of text in it."""
        text = []
        for slot, follower in self._followers.items():
            lines, events = follower.read()
            text += [f"{slot}: {line}" for line in lines]
            if self._board is not None:
                self._board.write(events)
            for event in events:
                if event.kind == "heartbeat":
                    if all(pulse.pid != event.pid for pulse in self._pulses.values()):
                        self._forget_older(slot)
                    self._pulses[slot, event.rank] = Pulse(
                        pid=int(event.fields.get("pid", 0)),
                        step=int(event.fields.get("step", -1)),
                        at=time.monotonic(),
                        shard=str(event.fields.get("shard", "")),
                    )
        return text

    def forget(self, slot: Slot) -> None:
        """Expect nothing of a slot's ranks until they are heard again."""
        self._pulses = {key: pulse for key, pulse in self._pulses.items() if key[0] != slot}

    def _forget_older(self, slot: Slot) -> None:
        """Forget ranks of a slot that were silent when a new process began there: an elastic world has new ranks."""
        since = time.monotonic() - RENEWED_S
        self._pulses = {key: pulse for key, pulse in self._pulses.items() if key[0] != slot or pulse.at >= since}

    def hung(self, after_s: float) -> str:
        """Say which rank has not been heard of for so long; nothing when all have."""
        now = time.monotonic()
        late = [(pulse.at, key) for key, pulse in self._pulses.items() if after_s > 0 and now - pulse.at > after_s]
        if not late:
            return ""
        _, (slot, rank) = min(late)
        pulse = self._pulses[slot, rank]
        where = f" in {pulse.shard}" if pulse.shard else ""
        log = self._run.log(slot, self._attempt)
        stacks = self._run.folder / f"stacks.{self._attempt}.txt"
        return (
            f"{slot} (rank {rank}) hung at step {pulse.step}{where}: no heartbeat for {after_s:g} s; "
            f"the stacks of all ranks: {stacks}; its log: {log}"
        )

    def ask_for_stacks(self, stand_ins: Mapping[Slot, int]) -> None:
        """Have every rank write where each of its threads is, and keep that beside the logs.

        Who stands for a slot elsewhere passes it on to the ranks there.
        """
        members = marked({"STOKER_RUN": self._run.id})
        text = self.listen()
        for slot in {slot for slot, _ in self._pulses if slot in stand_ins}:
            os.kill(stand_ins[slot], signal.SIGUSR1)
            text += self._next_lines()
        for (slot, _), pulse in sorted(self._pulses.items()):
            if slot not in stand_ins and pulse.pid in members:  # one after the other, for they share a log
                os.kill(pulse.pid, signal.SIGUSR1)
                text += self._next_lines()
        self._run.write(f"stacks.{self._attempt}.txt", "".join(f"{line}\n" for line in text).encode())

    def _next_lines(self) -> list[str]:
        """Hear what is being said, until there is a pause."""
        until, text = time.monotonic() + STACKS_S, list[str]()
        while time.monotonic() < until:
            time.sleep(4 * POLL_S)
            more = self.listen()
            if text and not more:
                break
            text += more
        return text


def _earlier(status: JobStatus) -> tuple[tuple[Attempt, ...], int]:
    """Give the attempts of a run's earlier lives, one that nobody saw end among them, and the number of the next."""
    if not status.slots:
        return (), 0
    seen = {attempt.number for attempt in status.attempts}
    unseen = Attempt(number=status.attempt, began=status.began, ended=time.time(), cause="lost with its supervisor")
    return (*status.attempts, *(() if status.attempt in seen else (unseen,))), status.attempt + 1


def _board(run: Run, job: Job) -> Board | None:
    if not job.tensorboard:
        return None
    from stoker.launchers.tensorboard import Board

    return Board(run.folder / "tensorboard" if job.tensorboard is True else Path(job.tensorboard))


def _state(code: int | None) -> JobState:
    return JobState.RUNNING if code is None else JobState.SUCCEEDED if code == 0 else JobState.FAILED


def _lost(codes: Mapping[Slot, int | None]) -> Slot | None:
    """Find a slot of an elastic world that was killed; the others meet at the first, which cannot be replaced."""
    killed = (slot for slot, code in codes.items() if code is not None and (code < 0 or code > 128))
    return next((slot for slot in killed if slot.index > 0), None)


def _oom_kills() -> int:
    """Count the processes that the kernel has killed for want of memory since it began."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return 0


@contextmanager
def watching(run: Run) -> Iterator[None]:
    """Be the one that watches over a run, for all others to see."""
    with open(run.folder / "lock", "a") as lock:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # someone watches, or someone looks whether one does
                if time.monotonic() > deadline:
                    sys.exit(f"{run.folder}: another process watches over this run")
                time.sleep(0.01)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def watcher(run: Run) -> int | None:
    """Tell which process watches over a run; None when none does."""
    try:
        with open(run.folder / "lock") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(lock.read() or 0)
    except FileNotFoundError:
        pass
    return None


def main() -> None:
    """Watch over the run whose folder is given."""
    run = Run(Path(sys.argv[1]))
    if os.fork():  # whoever started us need not wait for us, nor be there when we end
        os._exit(0)
    os.setsid()
    with watching(run):
        supervisor = Supervisor(run)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, supervisor.ask_to_stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        supervisor.watch()


if __name__ == "__main__":
    main()
