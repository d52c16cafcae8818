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
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stoker.core.processes import adopt_orphans, end_children, until
from stoker.core.spec import to_json
from stoker.errors import StokerError
from stoker.jobs.retry_policy import Restart, decide, pause_s
from stoker.jobs.run_folder import Run, packages
from stoker.jobs.spec import Job
from stoker.jobs.status import STOPPED, Attempt, JobState, JobStatus, SlotStatus, signal_of
from stoker.jobs.topology import Slot, lead_slots, onlookers, slots_of
from stoker.launchers.diagnosis import Cause, cause
from stoker.launchers.monitor import Hearing
from stoker.launchers.plan import LocalPlan, read_plan
from stoker.launchers.process_group import Gang, end_left
from stoker.telemetry.profiler import machine_oom_kills

POLL_S = 0.05
SETTLE_S = 0.3
"""After the first failure: another slot may just be writing what really happened."""
FAILED_GRACE_S = 10.0
"""For those whose partners are gone already: they cannot finish a step any more."""
FAR_S = 12.0
"""What those elsewhere have, to tell of their own failure and of their end."""
LOCK_S = 2.0
STOPPING = "stopping"
"""The file by which the end of a run is asked for, where it is not to end with this machine."""


class Wish:
    """Whether someone asked the run to end; a signal is taken for it."""

    def __init__(self) -> None:
        self.stop = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)

    def _hear(self, *_: object) -> None:
        self.stop = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """Why an attempt is over, and how long what still runs of it may take to end."""

    cause: str
    grace_s: float
    code: int = 0
    hung: bool = False
    lost: bool = False


class Supervisor:
    """One run, from its first attempt to its end."""

    def __init__(self, run: Run, wish: Wish, *, continues: bool = False) -> None:
        """Take a run; with `continues`, one whose slots went on elsewhere while nobody watched."""
        self._run, self._wish = run, wish
        self._job: Job = run.job
        self._plan: LocalPlan = read_plan(run)
        self._slots = frozenset(slots_of(self._job))
        self._status = run.read_status()
        self._earlier, self._first = _earlier(self._status)
        self._attempts: list[Attempt] = []
        self._continues = continues
        self._takes_up = False
        if continues:
            status = self._status
            self._earlier = tuple(one for one in status.attempts if one.began < status.began)
            self._attempts = [one for one in status.attempts if one.began >= status.began]
            is_over = any(one.number == status.attempt for one in status.attempts)
            self._takes_up = not is_over
            self._first = status.attempt + is_over - len(self._attempts)
        self._replaced, self._replaces_at = 0, 0.0
        self._memory = _Memory()
        self._far_s = FAR_S if self._plan.is_far else 0.0

    def watch(self) -> None:
        """Try until the job succeeds, is stopped, or is given up; whatever happens is told in the run's state."""
        try:
            began = self._status.began if self._continues else time.time()
            state = _state(None, is_placed=not self._plan.is_placed_later)
            self._tell(state=state, began=began, ended=None, message="")
            end_left(self._run, float(self._job.grace), standing_in=self._continues)
            state, message = self._watch()
        except StokerError as error:
            state, message = JobState.FAILED, str(error)
        except Exception as error:  # a bug of ours, or a full disk; the job's end must be told all the same
            traceback.print_exc()
            where = self._run.folder / "supervisor.log"
            state, message = JobState.FAILED, f"the supervisor failed: {type(error).__name__}: {error}; see {where}"
        self._tell(state=state, message=message, ended=time.time())

    def _watch(self) -> tuple[JobState, str]:
        while True:
            number = self._first + len(self._attempts)
            self._tell(attempt=number)
            if self._attempts and not self._takes_up:
                self._explain(number, self._attempts[-1].cause)
            attempt = self._try(number)
            self._takes_up = False
            self._attempts.append(attempt)
            self._tell(attempts=(*self._earlier, *self._attempts))
            if attempt.cause == STOPPED:
                return JobState.STOPPED, STOPPED
            if attempt.code == 0 and not attempt.hung:
                return JobState.SUCCEEDED, ""
            decision = decide(self._attempts, self._job.retries, elastic=self._job.is_elastic)
            if not isinstance(decision, Restart):
                return JobState.FAILED, attempt.cause + (f" ({decision.why})" if self._job.retries else "")
            self._tell(message=f"attempt {number} failed: {attempt.cause}; starting again")
            until(self._should_stop, decision.after_s)
            if self._should_stop():
                return JobState.STOPPED, STOPPED
            self._tell(message="")

    def _try(self, number: int) -> Attempt:
        """Carry out one attempt, and tell how it ended; nothing of it is left then."""
        began = self._began() if self._takes_up else time.time()
        plan = self._plan if self._job.port else self._plan.on_free_port()
        hearing = Hearing(self._run, number, plan, self._job)
        if self._takes_up:
            hearing.catch_up()
        gang = Gang(self._run, number, plan.commands, last_s=self._far_s, continues=self._takes_up)
        outcome: Outcome | None = None
        self._replaces_at = 0.0
        try:
            self._tell_slots(gang, hearing)
            if number == 0:  # for a report; it takes a moment, in which the job has already started
                self._run.write("packages.json", to_json(packages()))
            while (outcome := self._outcome(gang, hearing, number)) is None:
                time.sleep(POLL_S)
        finally:
            if plan.detached:  # else those that stand for slots elsewhere would leave them alone
                self._run.write(f"ending.{number}", b"")
            is_stopped = outcome is not None and outcome.cause == STOPPED
            running = [slot for slot, code in self._codes(gang, hearing).items() if code is None]
            gang.end(outcome.grace_s if outcome else float(self._job.grace))
            hearing.listen()
            if outcome is not None and not outcome.cause:  # the lead is done, and who never ends by itself was ended
                codes = self._codes(gang, hearing)
                running, is_stopped = [slot for slot in running if codes.get(slot)], True
            self._tell_slots(gang, hearing, stopped=running if is_stopped else ())
            end_children()
        return Attempt(
            number=number,
            began=began,
            ended=time.time(),
            code=outcome.code,
            cause=outcome.cause,
            hung=outcome.hung,
            lost=outcome.lost,
            steps=hearing.steps,
        )

    def _began(self) -> float:
        """Tell when the attempt began that is taken up, but for the pause before it."""
        return self._attempts[-1].ended if self._attempts else self._status.began

    def _outcome(self, gang: Gang, hearing: Hearing, number: int) -> Outcome | None:
        """Look once: what has been said, who has ended, who hangs, and whether it should stop."""
        hearing.listen()
        self._memory.look()
        codes = self._tell_slots(gang, hearing)
        state = _state(None, is_placed=hearing.is_placed)
        if (state, hearing.waiting) != (self._status.state, self._status.message):
            self._tell(state=state, message=hearing.waiting)
        grace = float(self._job.grace)
        spared: Collection[Slot] = onlookers(self._job)
        if self._job.is_elastic:
            spared = self._spared(gang, hearing, codes)
            if 0 in codes.values():
                gang.leave(grace)  # the last step is over; who is not done by then waits for someone who is gone
                return Outcome("", 0.0)
        if any(code for slot, code in codes.items() if slot not in spared):
            time.sleep(SETTLE_S)
            hearing.listen()
            found = self._cause(self._codes(gang, hearing), number, spared)
            far = time.monotonic() + self._far_s
            while not found.says_why and None in gang.codes().values() and time.monotonic() < far:
                time.sleep(POLL_S)
                found = self._cause(self._codes(gang, hearing), number, spared)
            return Outcome(found.sentence, min(grace, FAILED_GRACE_S), code=found.code, lost=found.lost)
        if all(codes[slot] == 0 for slot in lead_slots(self._job)):
            return Outcome("", grace)
        if hung := hearing.hung(gang, codes):
            hearing.ask_for_stacks(gang)
            return Outcome(hung, min(grace, FAILED_GRACE_S), hung=True)
        return Outcome(STOPPED, grace) if self._should_stop() else None

    def _spared(self, gang: Gang, hearing: Hearing, codes: Mapping[Slot, int | None]) -> set[Slot]:
        """Give those whose loss an elastic world bears: replaced after a pause, or left out while enough live."""
        if any(codes.values()):  # what it told last may have come after we listened
            hearing.listen()
        lost = _lost(codes, hearing.lost)
        if not lost:
            return set()
        if self._replaced >= self._job.retries:
            return set(lost) if len(codes) - len(lost) >= self._job.min_workers else set()
        now = time.monotonic()
        if not self._replaces_at:
            self._replaces_at = now + pause_s(self._replaced)
        elif now >= self._replaces_at:
            self._replaces_at = 0.0
            self._replaced += 1
            hearing.forget(lost[0])
            gang.replace(lost[0])
        return set(lost)

    def _should_stop(self) -> bool:
        """Whether someone asked the run to end; that this machine shuts down is not meant for who goes on elsewhere."""
        if self._wish.stop and self._plan.detached and not (self._run.folder / STOPPING).exists():
            os._exit(0)
        return self._wish.stop

    def _cause(self, codes: Mapping[Slot, int | None], number: int, spared: Collection[Slot]) -> Cause:
        """Choose among slots that failed the one that says most: a program's own error before an ended partner."""
        short = self._memory.was_short() and not self._plan.is_far
        causes = [
            cause(slot, code, self._run.log(slot, number), out_of_memory=short)
            for slot, code in codes.items()
            if code and slot not in spared
        ]
        return min(causes, key=lambda one: one.weight)

    def _explain(self, number: int, why: str) -> None:
        """Begin the log of a new attempt with the reason for it, where whoever follows will see it."""
        first = min(self._plan.commands)
        self._run.log(first, number).write_text(f"--- attempt {number}, because {why}\n")

    def _codes(self, gang: Gang, hearing: Hearing) -> dict[Slot, int | None]:
        """Give the exit codes of all slots: a carried one's is what was told of it, or else that of who carries it."""
        codes = gang.codes()
        if self._plan.carried:
            carrier = next(iter(codes.values()))
            if carrier is not None:  # what it told last may have come after we listened
                hearing.listen()
            codes |= {slot: hearing.exits.get(slot, carrier) for slot in map(Slot.parse, self._plan.carried)}
        if any(codes.values()):  # a slot that stands by ends well, and only its ranks tell that they did not
            codes |= {slot: code for slot, code in hearing.failed.items() if not codes.get(slot)}
        return {slot: code for slot, code in codes.items() if slot in self._slots}

    def _tell_slots(self, gang: Gang, hearing: Hearing, *, stopped: Collection[Slot] = ()) -> dict[Slot, int | None]:
        """Tell how the slots are, where that has changed; give their exit codes."""
        pids, codes = gang.pids, self._codes(gang, hearing)
        slots = tuple(
            SlotStatus(
                slot=str(slot),
                state=JobState.STOPPED if slot in stopped else _state(code, is_placed=hearing.is_placed),
                pid=pids.get(slot),
                code=code,
            )
            for slot, code in codes.items()
        )
        if slots != self._status.slots:
            self._tell(slots=slots)
        return codes

    def _tell(self, **changes: object) -> None:
        """Keep the state for others to read; that it cannot be written is no reason to end a training."""
        self._status = msgspec.structs.replace(self._status, **changes)
        with suppress(OSError):
            self._run.write_status(self._status)


class _Memory:
    """Whether the kernel has just killed a process for want of memory, on all of this machine."""

    def __init__(self) -> None:
        self._counts = [(time.monotonic(), machine_oom_kills())]

    def look(self) -> None:
        """Keep the count of the last seconds."""
        now = time.monotonic()
        if now - self._counts[-1][0] >= 1.0:
            self._counts = [*self._counts[-5:], (now, machine_oom_kills())]

    def was_short(self) -> bool:
        """Whether there are more than some seconds ago."""
        return machine_oom_kills() > self._counts[0][1]


def _earlier(status: JobStatus) -> tuple[tuple[Attempt, ...], int]:
    """Give the attempts of a run's earlier lives, one that nobody saw end among them, and the number of the next."""
    if not status.next_attempt:
        return (), 0
    seen = {attempt.number for attempt in status.attempts}
    unseen = Attempt(number=status.attempt, began=status.began, ended=time.time(), cause="lost with its supervisor")
    return (*status.attempts, *(() if status.attempt in seen else (unseen,))), status.next_attempt


def _state(code: int | None, *, is_placed: bool) -> JobState:
    if code is None:
        return JobState.RUNNING if is_placed else JobState.PENDING
    return JobState.SUCCEEDED if code == 0 else JobState.FAILED


def _lost(codes: Mapping[Slot, int | None], lost: Collection[Slot]) -> list[Slot]:
    """Find the slots of an elastic world that were killed or lost; the others meet at the first, which must stay."""
    killed = (slot for slot, code in codes.items() if code and (signal_of(code) or slot in lost))
    return [slot for slot in killed if slot.index > 0]


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
        try:
            yield
        finally:
            lock.truncate(0)


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
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, exit codes are lost
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    wish = Wish()  # before anyone can know whom to tell it
    adopt_orphans()
    continues = "--continue" in sys.argv
    with watching(run):
        if continues and (run.read_status().state.is_final or (run.folder / STOPPING).exists()):
            return  # another one has seen to it, while we were waiting
        Supervisor(run, wish, continues=continues).watch()


if __name__ == "__main__":
    main()
