"""Supervisor of one run on this machine: start the gang, monitor it, and start it again when a retry may help.

Runs as a process of its own, in its own session, so that neither a closed terminal nor the exit of `stoker job run`
affects the job. It holds a lock on the run folder while it lives: acquiring the lock proves that no supervisor is
running.
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

from stoker.core.processes import become_subreaper, kill_children, wait_until
from stoker.core.spec import to_json
from stoker.errors import StokerError
from stoker.jobs.retry_policy import Restart, backoff_s, decide_retry, not_retried
from stoker.jobs.run_folder import RunFolder, list_packages
from stoker.jobs.spec import JobSpec
from stoker.jobs.status import STOPPED_MESSAGE, Attempt, JobState, JobStatus, SlotStatus, signal_from_exit_code
from stoker.jobs.topology import Slot, lead_slots, list_slots, observer_slots
from stoker.launchers.plan import LocalPlan, read_plan
from stoker.launchers.supervise.diagnosis import Diagnosis, diagnose_slot, insert_note
from stoker.launchers.supervise.monitor import AttemptMonitor
from stoker.launchers.supervise.process_group import ProcessGroup, stop_leftovers
from stoker.remote.profiler import machine_oom_kills

POLL_S = 0.05
SETTLE_S = 0.3
"""Wait after the first failure: the slot with the root cause may still be writing its error."""
FAILED_GRACE_S = 10.0
"""Grace period of slots whose peers have failed: they cannot finish another step."""
REMOTE_REPORT_S = 12.0
"""Time for remote slots to report their own failure and their exit."""
LOCK_TIMEOUT_S = 2.0
STOP_REQUEST_FILE = "stopping"
"""File in the run folder that requests a stop of a detached run, which a shutdown of this machine does not."""

ExitCodes = Mapping[Slot, int | None]


class StopFlag:
    """Set by SIGTERM or SIGINT: the run should stop."""

    def __init__(self) -> None:
        self.is_set = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._set)

    def _set(self, *_: object) -> None:
        self.is_set = True


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """Why an attempt is over, and the grace period of the slots that are still running."""

    cause: str
    grace_s: float
    code: int = 0
    hung: bool = False
    lost: bool = False


class Supervisor:
    """Supervisor of one run, from its first attempt to its final state."""

    def __init__(self, run: RunFolder, stop_flag: StopFlag, *, reattach: bool = False) -> None:
        """Supervise a run; with `reattach`, one whose remote slots kept running without a supervisor."""
        self._run, self._stop_flag = run, stop_flag
        self._job: JobSpec = run.job
        self._plan: LocalPlan = read_plan(run)
        self._slots = frozenset(list_slots(self._job))
        self._status = run.read_status()
        self._reattach = reattach
        self._attempts: list[Attempt] = []
        self._is_reattaching = False
        if reattach:
            self._restore_attempts()
        else:
            self._previous_attempts, self._first_number = _previous_attempts(self._status)
        self._restarts, self._next_restart_at = 0, 0.0
        self._oom = _OomMonitor()
        self._remote_report_s = REMOTE_REPORT_S if self._plan.is_remote else 0.0

    def _restore_attempts(self) -> None:
        """Continue the count of attempts where the previous supervisor left off."""
        status = self._status
        self._previous_attempts = tuple(attempt for attempt in status.attempts if attempt.began < status.began)
        self._attempts = [attempt for attempt in status.attempts if attempt.began >= status.began]
        is_over = any(attempt.number == status.attempt for attempt in status.attempts)
        self._is_reattaching = not is_over
        self._first_number = status.attempt + is_over - len(self._attempts)

    def run(self) -> None:
        """Run attempts until the job succeeds, is stopped or is given up; always record the final state."""
        try:
            began = self._status.began if self._reattach else time.time()
            state = _slot_state(None, is_placed=not self._plan.waits_for_placement)
            self._update_status(state=state, began=began, ended=None, message="")
            stop_leftovers(self._run, float(self._job.grace), only_remote_slots=self._reattach)
            state, message = self._run_attempts()
        except StokerError as error:
            state, message = JobState.FAILED, str(error)
        except Exception as error:  # a bug of ours or a full disk: the run must still get a final state
            traceback.print_exc()
            log = self._run.folder / "supervisor.log"
            state, message = JobState.FAILED, f"the supervisor failed: {type(error).__name__}: {error}; log: {log}"
        self._update_status(state=state, message=message, ended=time.time())

    def _run_attempts(self) -> tuple[JobState, str]:
        while True:
            number = self._first_number + len(self._attempts)
            self._update_status(attempt=number)
            if self._attempts and not self._is_reattaching:
                self._log_retry_reason(number, self._attempts[-1].cause)
            attempt = self._run_attempt(number)
            self._is_reattaching = False
            self._attempts.append(attempt)
            self._update_status(attempts=(*self._previous_attempts, *self._attempts))
            if attempt.cause == STOPPED_MESSAGE:
                return JobState.STOPPED, STOPPED_MESSAGE
            if attempt.code == 0 and not attempt.hung:
                return JobState.SUCCEEDED, ""
            decision = decide_retry(self._attempts, self._job.retries, is_elastic=self._job.is_elastic)
            if not isinstance(decision, Restart):
                if not self._job.retries:
                    return JobState.FAILED, attempt.cause
                return JobState.FAILED, insert_note(attempt.cause, not_retried(decision.reason))
            self._update_status(message=f"attempt {number} failed, retrying: {attempt.cause}")
            wait_until(self._should_stop, decision.after_s)
            if self._should_stop():
                return JobState.STOPPED, STOPPED_MESSAGE
            self._update_status(message="")

    def _run_attempt(self, number: int) -> Attempt:
        """Run one attempt to its end and leave no process of it behind."""
        began = self._attempt_start() if self._is_reattaching else time.time()
        plan = self._plan if self._job.port else self._plan.with_free_ports()
        monitor = AttemptMonitor(self._run, number, plan, self._job)
        if self._is_reattaching:
            monitor.catch_up()
        processes = ProcessGroup(
            self._run, number, plan.commands, final_grace_s=self._remote_report_s, reattach=self._is_reattaching
        )
        outcome: AttemptOutcome | None = None
        self._next_restart_at = 0.0
        try:
            self._update_slots(processes, monitor)
            if number == 0:  # for `job report`; listing them takes a moment, so after the slots have started
                self._run.write("packages.json", to_json(list_packages()))
            while (outcome := self._poll(processes, monitor, number)) is None:
                time.sleep(POLL_S)
        finally:
            self._stop_slots(processes, monitor, number, outcome)
        return Attempt(
            number=number,
            began=began,
            ended=time.time(),
            code=outcome.code,
            cause=outcome.cause,
            hung=outcome.hung,
            lost=outcome.lost,
            steps=monitor.last_step,
        )

    def _attempt_start(self) -> float:
        """Return when the attempt began that we reattach to, ignoring the pause before it."""
        return self._attempts[-1].ended if self._attempts else self._status.began

    def _stop_slots(
        self, processes: ProcessGroup, monitor: AttemptMonitor, number: int, outcome: AttemptOutcome | None
    ) -> None:
        """Stop all slots of an attempt and record their final states."""
        if self._plan.detached:  # tells the local processes of detached slots to stop those instead of leaving them
            self._run.write(f"ending.{number}", b"")
        running = [slot for slot, code in self._exit_codes(processes, monitor).items() if code is None]
        processes.stop(outcome.grace_s if outcome else float(self._job.grace))
        monitor.read_events()
        stopped: Collection[Slot] = ()
        if outcome is not None and outcome.cause == STOPPED_MESSAGE:
            stopped = running
        elif outcome is not None and not outcome.cause:
            # The lead role is done; roles that never exit by themselves were stopped, which is no failure.
            codes = self._exit_codes(processes, monitor)
            stopped = [slot for slot in running if codes.get(slot)]
        self._update_slots(processes, monitor, stopped=stopped)
        kill_children()

    def _poll(self, processes: ProcessGroup, monitor: AttemptMonitor, number: int) -> AttemptOutcome | None:
        """Check events, exit codes, hangs and the stop flag once; return the outcome when the attempt is over."""
        processes.log_times.sample()
        monitor.read_events()
        self._oom.sample()
        codes = self._update_slots(processes, monitor)
        state = _slot_state(None, is_placed=monitor.is_placed)
        if (state, monitor.pending_reason) != (self._status.state, self._status.message):
            self._update_status(state=state, message=monitor.pending_reason)
        grace = float(self._job.grace)
        tolerated: Collection[Slot] = observer_slots(self._job)
        if self._job.is_elastic:
            tolerated = self._handle_elastic_losses(processes, monitor, codes)
            if 0 in codes.values():
                processes.wait(grace)  # the last step is done; a slot still running then waits for a peer that is gone
                return AttemptOutcome("", 0.0)
        if any(code for slot, code in codes.items() if slot not in tolerated):
            diagnosis = self._diagnose_failure(processes, monitor, number, tolerated)
            failed_grace = min(grace, FAILED_GRACE_S)
            return AttemptOutcome(diagnosis.message, failed_grace, code=diagnosis.code, lost=diagnosis.lost)
        if all(codes[slot] == 0 for slot in lead_slots(self._job)):
            return AttemptOutcome("", grace)
        if silent := monitor.find_silent_ranks(processes, codes):
            cause = monitor.explain_hang(silent, processes)
            return AttemptOutcome(cause, min(grace, FAILED_GRACE_S), hung=True)
        return AttemptOutcome(STOPPED_MESSAGE, grace) if self._should_stop() else None

    def _diagnose_failure(
        self, processes: ProcessGroup, monitor: AttemptMonitor, number: int, tolerated: Collection[Slot]
    ) -> Diagnosis:
        """Return the diagnosis of a failed attempt, waiting a moment for a slot that names the root cause."""
        time.sleep(SETTLE_S)
        monitor.read_events()
        diagnosis = self._diagnose(self._exit_codes(processes, monitor), number, tolerated)
        deadline = time.monotonic() + self._remote_report_s
        while not diagnosis.is_conclusive and None in processes.exit_codes().values() and time.monotonic() < deadline:
            time.sleep(POLL_S)
            diagnosis = self._diagnose(self._exit_codes(processes, monitor), number, tolerated)
        return diagnosis

    def _diagnose(self, codes: ExitCodes, number: int, tolerated: Collection[Slot]) -> Diagnosis:
        """Choose the root cause among the failed slots: an error of its own before one caused by a peer."""
        out_of_memory = self._oom.has_recent_kills() and not self._plan.is_remote
        diagnoses = [
            diagnose_slot(slot, code, self._run.log_path(slot, number), out_of_memory=out_of_memory)
            for slot, code in codes.items()
            if code and slot not in tolerated
        ]
        return min(diagnoses, key=lambda diagnosis: diagnosis.sort_key)

    def _handle_elastic_losses(self, processes: ProcessGroup, monitor: AttemptMonitor, codes: ExitCodes) -> set[Slot]:
        """Restart lost workers of an elastic job after a pause, and return those whose loss it tolerates."""
        if any(codes.values()):  # their last marks may have arrived since the logs were read
            monitor.read_events()
        lost = _lost_slots(codes, monitor.lost_slots)
        if not lost:
            return set()
        if self._restarts >= self._job.retries:
            return set(lost) if len(codes) - len(lost) >= self._job.min_workers else set()
        now = time.monotonic()
        if not self._next_restart_at:
            self._next_restart_at = now + backoff_s(self._restarts)
        elif now >= self._next_restart_at:
            self._next_restart_at = 0.0
            self._restarts += 1
            monitor.reset_slot(lost[0])
            processes.restart_slot(lost[0])
        return set(lost)

    def _should_stop(self) -> bool:
        """Whether the run should stop; a signal without a stop request only ends the supervisor of a detached run."""
        if self._stop_flag.is_set and self._plan.detached and not (self._run.folder / STOP_REQUEST_FILE).exists():
            os._exit(0)
        return self._stop_flag.is_set

    def _log_retry_reason(self, number: int, cause: str) -> None:
        """Start the log of a new attempt with the reason for it, where `job logs --follow` shows it."""
        first = min(self._plan.commands)
        self._run.log_path(first, number).write_text(f"--- attempt {number}: retrying because {cause}\n")

    def _exit_codes(self, processes: ProcessGroup, monitor: AttemptMonitor) -> dict[Slot, int | None]:
        """Return the exit codes of all slots; a delegated slot without one has that of the process managing it."""
        codes = processes.exit_codes()
        if self._plan.delegated:
            manager_code = next(iter(codes.values()))
            if manager_code is not None:  # its last marks may have arrived since the logs were read
                monitor.read_events()
            delegated = map(Slot.parse, self._plan.delegated)
            codes |= {slot: monitor.exit_codes.get(slot, manager_code) for slot in delegated}
        if any(codes.values()):  # a standby slot exits with 0 even when its ranks report a failure
            codes |= {slot: code for slot, code in monitor.rank_failures.items() if not codes.get(slot)}
        return {slot: code for slot, code in codes.items() if slot in self._slots}

    def _update_slots(
        self, processes: ProcessGroup, monitor: AttemptMonitor, *, stopped: Collection[Slot] = ()
    ) -> dict[Slot, int | None]:
        """Record the state of all slots if it has changed, and return their exit codes."""
        pids, codes = processes.pids, self._exit_codes(processes, monitor)
        slots = tuple(
            SlotStatus(
                slot=str(slot),
                state=JobState.STOPPED if slot in stopped else _slot_state(code, is_placed=monitor.is_placed),
                pid=pids.get(slot),
                code=code,
            )
            for slot, code in codes.items()
        )
        if slots != self._status.slots:
            self._update_status(slots=slots)
        return codes

    def _update_status(self, **changes: object) -> None:
        """Write the status to the run folder; a write error must not stop the training."""
        self._status = msgspec.structs.replace(self._status, **changes)
        with suppress(OSError):
            self._run.write_status(self._status)


class _OomMonitor:
    """Counter of OOM kills on this machine during the last seconds."""

    def __init__(self) -> None:
        self._counts = [(time.monotonic(), machine_oom_kills())]

    def sample(self) -> None:
        """Record the count, at most once per second."""
        now = time.monotonic()
        if now - self._counts[-1][0] >= 1.0:
            self._counts = [*self._counts[-5:], (now, machine_oom_kills())]

    def has_recent_kills(self) -> bool:
        """Whether the kernel has killed a process since the oldest sample."""
        return machine_oom_kills() > self._counts[0][1]


def _previous_attempts(status: JobStatus) -> tuple[tuple[Attempt, ...], int]:
    """Return the attempts before a restart, including one lost with its supervisor, and the next attempt's number."""
    if not status.next_attempt:
        return (), 0
    recorded = {attempt.number for attempt in status.attempts}
    if status.attempt in recorded:
        return status.attempts, status.next_attempt
    lost = Attempt(number=status.attempt, began=status.began, ended=time.time(), cause="lost with its supervisor")
    return (*status.attempts, lost), status.next_attempt


def _slot_state(code: int | None, *, is_placed: bool) -> JobState:
    if code is None:
        return JobState.RUNNING if is_placed else JobState.PENDING
    return JobState.SUCCEEDED if code == 0 else JobState.FAILED


def _lost_slots(codes: ExitCodes, reported: Collection[Slot]) -> list[Slot]:
    """Return the slots of an elastic job that were killed or lost; not the first, which hosts the rendezvous."""
    killed = (slot for slot, code in codes.items() if code and (signal_from_exit_code(code) or slot in reported))
    return [slot for slot in killed if slot.index > 0]


@contextmanager
def supervisor_lock(run: RunFolder) -> Iterator[None]:
    """Hold the lock of a run's supervisor, with our process id in it; exit if another process holds it."""
    with open(run.folder / "lock", "a") as lock:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # another supervisor, or a process that is just testing the lock
                if time.monotonic() > deadline:
                    sys.exit(f"{run.folder}: another supervisor is running this run")
                time.sleep(0.01)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        try:
            yield
        finally:
            lock.truncate(0)


def supervisor_pid(run: RunFolder) -> int | None:
    """Return the process id of a run's supervisor; None when none is running."""
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
    """Supervise the run in the given folder, as a daemon."""
    run = RunFolder(Path(sys.argv[1]))
    if os.fork():  # so that the process that started us need not wait for us
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if inherited as ignored, exit codes would be lost
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop_flag = StopFlag()  # before the lock publishes our process id
    become_subreaper()
    reattach = "--continue" in sys.argv
    with supervisor_lock(run):
        if reattach and (run.read_status().state.is_final or (run.folder / STOP_REQUEST_FILE).exists()):
            return  # another process has finished it while we waited for the lock
        Supervisor(run, stop_flag, reattach=reattach).run()


if __name__ == "__main__":
    main()
