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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from stoker.core.processes import become_subreaper
from stoker.core.registry import Registry
from stoker.errors import StokerError
from stoker.jobs.retry_policy import Restart, decide_retry, not_retried
from stoker.jobs.run_files import STOP_REQUEST_FILE
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.spec import JobSpec
from stoker.jobs.status import STOPPED_MESSAGE, Attempt, JobState, JobStatus
from stoker.jobs.topology import Slot
from stoker.launchers.supervise.attempt import POLL_S, AttemptRunner, RunContext
from stoker.launchers.supervise.diagnosis import insert_note
from stoker.launchers.supervise.slot_handle import SlotBackend, SlotState, Unreachable
from stoker.launchers.supervise.slot_restarts import SlotRestarts
from stoker.launchers.supervise.status_writer import StatusWriter, log_remark
from stoker.launchers.supervise.wakeup import Wakeup

LOCK_TIMEOUT_S = 2.0

BACKENDS: Registry[Callable[[RunFolder, Callable[[], None]], SlotBackend]] = Registry(
    "slot backend",
    {
        "local": "stoker.launchers.supervise.process_group:open_local_backend",
        "ray": "stoker.launchers.ray.slots:RayBackend",
        "ssh": "stoker.launchers.ssh.slots:SshBackend",
    },
)
"""What starts the slots of a run, by the scheme of its handle; it calls a function when the state of a slot changes."""


class StopFlag:
    """Set by SIGTERM or SIGINT: the run should stop."""

    def __init__(self) -> None:
        self.is_set = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._set)

    def _set(self, *_: object) -> None:
        self.is_set = True


class Supervisor:
    """Supervisor of one run, from its first attempt to its final state."""

    def __init__(
        self,
        run: RunFolder,
        backend: SlotBackend,
        stop_flag: StopFlag,
        *,
        pause: Callable[[float], object] | None = None,
        reattach: bool = False,
    ) -> None:
        """Supervise a run; with `reattach`, one whose slots kept running without a supervisor.

        `pause` waits between two polls, for at most so many seconds.
        """
        self._run, self._backend, self._stop_flag, self._pause = run, backend, stop_flag, pause or time.sleep
        self._job: JobSpec = run.job
        self._status = StatusWriter(run)
        self._restarts = SlotRestarts(self._job)
        self._reattach = reattach
        self._attempts: list[Attempt] = []
        self._is_reattaching = False
        if reattach:
            self._restore_attempts()
        else:
            self._previous_attempts, self._first_number = _previous_attempts(self._status.current)

    def _restore_attempts(self) -> None:
        """Continue the count of attempts where the previous supervisor left off."""
        status = self._status.current
        self._previous_attempts = tuple(attempt for attempt in status.attempts if attempt.began < status.began)
        self._attempts = [attempt for attempt in status.attempts if attempt.began >= status.began]
        is_over = any(attempt.number == status.attempt for attempt in status.attempts)
        self._is_reattaching = not is_over
        self._first_number = status.attempt + is_over - len(self._attempts)

    def run(self) -> None:
        """Run attempts until the job succeeds, is stopped or is given up; always record the final state."""
        try:
            began = self._status.current.began if self._reattach else time.time()
            attempts = (*self._previous_attempts, *self._attempts)
            self._status.update(state=JobState.RUNNING, attempts=attempts, began=began, ended=None, message="")
            self._backend.prepare(float(self._job.grace), reattach=self._reattach)
            state, message = self._run_attempts()
        except StokerError as error:
            state, message = JobState.FAILED, str(error)
        except Exception as error:  # a bug of ours or a full disk: the run must still get a final state
            traceback.print_exc()
            log = self._run.folder / "supervisor.log"
            state, message = JobState.FAILED, f"the supervisor failed: {type(error).__name__}: {error}; log: {log}"
        self._status.finish(state=state, message=message, ended=time.time())

    def _run_attempts(self) -> tuple[JobState, str]:
        context = RunContext(
            self._run,
            self._job,
            self._backend,
            self._status,
            self._restarts,
            should_stop=self._should_stop,
            pause=self._pause,
        )
        while True:
            runner, attempt = self._run_attempt(context, self._first_number + len(self._attempts))
            self._record(attempt)
            if attempt.cause == STOPPED_MESSAGE:
                return JobState.STOPPED, STOPPED_MESSAGE
            if attempt.code == 0 and not attempt.hung:
                return JobState.SUCCEEDED, ""
            decision = decide_retry(
                self._attempts,
                self._job.retries,
                is_elastic=self._job.is_elastic,
                slot_restarts=self._restarts.charged,
            )
            survivors = runner.find_survivors()
            if has_no_lease(survivors):
                return JobState.FAILED, insert_note(attempt.cause, _how_to_stop(self._run, survivors))
            if not isinstance(decision, Restart):
                if not self._job.retries:
                    return JobState.FAILED, attempt.cause
                return JobState.FAILED, insert_note(attempt.cause, not_retried(decision.reason))
            self._announce_retry(attempt)
            survivors = self._wait_for_retry(runner, decision.after_s)
            if self._should_stop():
                return JobState.STOPPED, STOPPED_MESSAGE
            if survivors:
                self._record(attempt)
                return JobState.FAILED, insert_note(attempt.cause, _how_to_stop(self._run, survivors))

    def _run_attempt(self, context: RunContext, number: int) -> tuple[AttemptRunner, Attempt]:
        """Run one attempt to its end."""
        self._status.update(attempt=number, message="")
        began = self._attempt_start() if self._is_reattaching else time.time()
        runner = AttemptRunner(context, number, self._backend.start(number, reattach=self._is_reattaching))
        if self._is_reattaching:
            runner.monitor.catch_up()
        self._is_reattaching = False
        return runner, runner.run(began)

    def _attempt_start(self) -> float:
        """Return when the attempt began that we reattach to, ignoring the pause before it."""
        return self._attempts[-1].ended if self._attempts else self._status.current.began

    def _record(self, attempt: Attempt) -> None:
        self._attempts = [*(known for known in self._attempts if known.number != attempt.number), attempt]
        self._status.update(attempts=(*self._previous_attempts, *self._attempts))

    def _announce_retry(self, attempt: Attempt) -> None:
        """Record why there will be another attempt: in the status, which `job logs` shows too, and in our own log."""
        self._record(msgspec.structs.replace(attempt, is_retried=True))
        log_remark(f"attempt {attempt.number} failed, retrying: {attempt.cause}")
        self._status.update(message=f"attempt {attempt.number} failed, retrying: {attempt.cause}")

    def _wait_for_retry(self, runner: AttemptRunner, pause_s: float) -> dict[Slot, SlotState]:
        """Wait for the pause, and until no slot of the last attempt can be running, or until the run should stop.

        Return the slots that may be running if one of them was lost meanwhile and may run on without end.
        """
        resume_at = time.monotonic() + pause_s
        while not self._should_stop():
            survivors = runner.find_survivors()
            is_over = not survivors and time.monotonic() >= resume_at
            if is_over or has_no_lease({slot: state for slot, state in survivors.items() if _is_lost(state)}):
                return survivors
            self._pause(POLL_S)
        return {}

    def _should_stop(self) -> bool:
        """Whether the run should stop; a signal without a stop request only ends the supervisor of a detached run."""
        if self._stop_flag.is_set and self._backend.is_detached and not (self._run.folder / STOP_REQUEST_FILE).exists():
            os._exit(0)
        return self._stop_flag.is_set or self._is_deleted()

    def _is_deleted(self) -> bool:
        """Whether somebody has removed the run folder: without it, no command could stop the run."""
        try:
            self._run.folder.stat()
        except FileNotFoundError:
            return True
        except OSError:  # for example of a file server that does not respond
            return False
        return False


def has_no_lease(survivors: Mapping[Slot, SlotState]) -> bool:
    """Whether any of these slots may run on without end, because it has no lease that expires."""
    return any(isinstance(state, Unreachable) and state.gone_by is None for state in survivors.values())


def _is_lost(state: SlotState) -> bool:
    return isinstance(state, Unreachable) and state.is_lost


def _how_to_stop(run: RunFolder, survivors: Mapping[Slot, SlotState]) -> str:
    names = ", ".join(map(str, survivors))
    return f"{names} may still be running, stop the run with: stoker job stop {run.id}"


def _previous_attempts(status: JobStatus) -> tuple[tuple[Attempt, ...], int]:
    """Return the attempts before a restart, including one lost with its supervisor, and the next attempt's number."""
    if not status.next_attempt:
        return (), 0
    recorded = {attempt.number for attempt in status.attempts}
    if status.attempt in recorded:
        return status.attempts, status.next_attempt
    began = max(status.began, *(attempt.ended for attempt in status.attempts), 0.0)
    lost = Attempt(number=status.attempt, began=began, ended=time.time(), cause="lost with its supervisor")
    return (*status.attempts, lost), status.next_attempt


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


def run_supervisor(run: RunFolder, *, reattach: bool) -> None:
    """Supervise a run to its end in this process, which has a session of its own."""
    wakeup = Wakeup()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop_flag = StopFlag()  # before the lock publishes our process id
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with supervisor_lock(run):
        if reattach and (run.read_status().state.is_final or (run.folder / STOP_REQUEST_FILE).exists()):
            return  # another process has finished it while we waited for the lock
        become_subreaper()
        backend = BACKENDS.get(run.handle.partition("://")[0])(run, wakeup.notify)
        Supervisor(run, backend, stop_flag, pause=wakeup.pause, reattach=reattach).run()


def main() -> None:
    """Supervise the run in the given folder, as a daemon."""
    if os.fork():  # so that the process that started us need not wait for us
        os._exit(0)
    os.setsid()
    run_supervisor(RunFolder(Path(sys.argv[1])), reattach="--continue" in sys.argv)


if __name__ == "__main__":
    main()
