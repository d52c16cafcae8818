"""One attempt of a run: start its slots, poll them until it is over, find out why, and stop what is left of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from stoker.core.processes import wait_until
from stoker.core.spec import to_json
from stoker.jobs.run_files import STACKS_REQUEST_FILE
from stoker.jobs.run_folder import RunFolder, list_packages
from stoker.jobs.spec import JobSpec
from stoker.jobs.status import STOPPED_MESSAGE, Attempt, JobState, SlotStatus
from stoker.jobs.topology import Slot, lead_slots, observer_slots
from stoker.launchers.supervise.diagnosis import LOST_EXIT_CODE, Diagnosis, diagnose_slot
from stoker.launchers.supervise.monitor import AttemptMonitor
from stoker.launchers.supervise.slot_handle import (
    Exited,
    Running,
    SlotBackend,
    SlotHandle,
    SlotState,
    Unreachable,
)
from stoker.launchers.supervise.slot_restarts import SlotRestarts
from stoker.launchers.supervise.status_writer import StatusWriter, log_remark, try_write
from stoker.telemetry.log_times import LogTimesSampler

POLL_S = 0.05
SETTLE_S = 0.3
"""Wait after the first failure: the slot with the root cause may still be writing its error."""
FAILED_GRACE_S = 10.0
"""Grace period of slots whose peers have failed: they cannot finish another step."""
KILL_REPORT_S = 13.0
"""How long the exit of a killed slot may take to be reported."""

Exits = Mapping[Slot, Exited | None]


@dataclass(frozen=True, slots=True)
class RunContext:
    """What all attempts of a run share."""

    run: RunFolder
    job: JobSpec
    backend: SlotBackend
    status: StatusWriter
    restarts: SlotRestarts
    should_stop: Callable[[], bool]
    pause: Callable[[float], object]
    """Wait before the next poll, for at most so many seconds."""


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """Why an attempt is over, and the grace period of the slots that are still running."""

    cause: str
    grace_s: float
    code: int = 0
    hung: bool = False
    lost: bool = False


class AttemptRunner:
    """The slots of one attempt, from their start until all of them are gone."""

    def __init__(self, context: RunContext, number: int, handles: Mapping[Slot, SlotHandle]) -> None:
        """Take over the slots that were just started."""
        self._context, self.number = context, number
        self._run, self._job, self._status = context.run, context.job, context.status
        self._handles = dict(handles)
        self.monitor = AttemptMonitor(self._run, number, self._job)
        self._log_times = LogTimesSampler(self._run.log_path(slot, number) for slot in handles)

    def run(self, began: float) -> Attempt:
        """Poll the slots until the attempt is over, stop them, and return its record."""
        outcome: AttemptOutcome | None = None
        self._context.restarts.begin_attempt()
        try:
            states = self._poll_slots()
            self._update_slots(states, self._exits(states), job=_describe(states))
            if self.number == 0:  # for `job report`; listing them takes a moment, so after the slots have started
                try_write(self._run, "packages.json", to_json(list_packages()))
            while (outcome := self.poll()) is None:
                self._context.pause(POLL_S)
        finally:
            self._stop(outcome)
        return Attempt(
            number=self.number,
            began=began,
            ended=time.time(),
            code=outcome.code,
            cause=outcome.cause,
            hung=outcome.hung,
            lost=outcome.lost,
            steps=self.monitor.last_step,
        )

    def poll(self) -> AttemptOutcome | None:
        """Check events, exits, hangs and the stop flag once; return the outcome when the attempt is over."""
        self._log_times.sample()
        self.monitor.read_events()
        self._answer_stack_request()
        states = self._poll_slots()
        exits = self._exits(states)
        self._update_slots(states, exits, job=_describe(states))
        grace = float(self._job.grace)
        tolerated = observer_slots(self._job) | self._restart_slots(states)
        if self._job.is_elastic and any(exited and not exited.code for exited in exits.values()):
            self._wait_for_exits(
                grace
            )  # the last step is done; a slot still running then waits for a peer that is gone
            return AttemptOutcome("", 0.0)
        if failed := _find_failed(exits, tolerated):
            diagnosis = self._diagnose_failure(failed, tolerated)
            failed_grace = min(grace, FAILED_GRACE_S)
            return AttemptOutcome(diagnosis.message, failed_grace, code=diagnosis.code, lost=diagnosis.lost)
        if all(_has_succeeded(exits[slot]) for slot in lead_slots(self._job)):
            return AttemptOutcome("", grace)
        if silent := self.monitor.find_silent_ranks(self._handles):
            cause = self.monitor.explain_hang(silent, self._handles)
            return AttemptOutcome(cause, min(grace, FAILED_GRACE_S), hung=True)
        return AttemptOutcome(STOPPED_MESSAGE, grace) if self._context.should_stop() else None

    def _answer_stack_request(self) -> None:
        """Save the stacks of all ranks if `stoker job stacks` has asked for them."""
        request = self._run.folder / STACKS_REQUEST_FILE
        if request.exists():
            self.monitor.save_stacks(self._handles)
            request.unlink(missing_ok=True)

    # --- States

    def _poll_slots(self) -> dict[Slot, SlotState]:
        return {slot: handle.poll() for slot, handle in self._handles.items()}

    def _exits(self, states: Mapping[Slot, SlotState]) -> dict[Slot, Exited | None]:
        """Return the exit records of the slots; those of lost slots, and None while a slot runs."""
        exits = {slot: _exit_record(state) for slot, state in states.items()}
        if any(exited and exited.code for exited in exits.values()):
            self.monitor.read_events()  # the last events of a slot may have arrived since
            for slot, code in self.monitor.rank_failures.items():
                if not (exited := exits[slot]) or not exited.code:  # a standby slot exits with 0 when its ranks fail
                    exits[slot] = Exited(code)
        return exits

    def _update_slots(
        self,
        states: Mapping[Slot, SlotState],
        exits: Exits,
        *,
        stopped: Collection[Slot] = (),
        job: Mapping[str, object] | None = None,
    ) -> None:
        """Record the states of all slots, those that we have stopped as such, and of the job if it has changed."""
        pids = {status.slot: status.pid for status in self._status.current.slots}
        slots = []
        for slot, state in states.items():
            exited = None if isinstance(state, Unreachable) else exits[slot]
            slots.append(
                SlotStatus(
                    slot=str(slot),
                    state=JobState.STOPPED if slot in stopped else _slot_state(state, exited),
                    pid=state.pid if isinstance(state, Running) else pids.get(str(slot)),
                    code=exited.code if exited else None,
                )
            )
        self._status.update(slots=tuple(slots), **(job or {}))

    # --- Failures

    def _restart_slots(self, states: Mapping[Slot, SlotState]) -> frozenset[Slot]:
        """Restart a slot that can be restarted alone, and return those whose failure does not end the attempt."""
        choice = self._context.restarts.choose(states, self._context.backend.can_restart)
        if choice.restart is not None:
            log_remark(f"attempt {self.number}: restarting {choice.restart}: {states[choice.restart]}")
            self.monitor.reset_slot(choice.restart)
            self._handles[choice.restart] = self._context.backend.restart_slot(choice.restart)
        return choice.tolerated

    def _diagnose_failure(self, failed: Mapping[Slot, Exited], tolerated: Collection[Slot]) -> Diagnosis:
        """Return the diagnosis of a failed attempt, waiting a moment for a slot that names the root cause."""
        time.sleep(SETTLE_S)
        self.monitor.read_events()
        diagnosis = self._diagnose(failed, tolerated)
        deadline = time.monotonic() + self._context.backend.report_delay_s
        while not diagnosis.is_conclusive and not self._have_exited() and time.monotonic() < deadline:
            time.sleep(POLL_S)
            diagnosis = self._diagnose(failed, tolerated)
        return diagnosis

    def _diagnose(self, failed: Mapping[Slot, Exited], tolerated: Collection[Slot]) -> Diagnosis:
        """Choose the root cause among the failed slots: an error of its own before one caused by a peer.

        A lost slot stays failed in this attempt, although its host may have reconnected since.
        """
        failed = {**failed, **_find_failed(self._exits(self._poll_slots()), tolerated)}
        diagnoses = (
            diagnose_slot(slot, exited, self._run.log_path(slot, self.number)) for slot, exited in failed.items()
        )
        return min(diagnoses, key=lambda diagnosis: diagnosis.sort_key)

    # --- The end

    def _stop(self, outcome: AttemptOutcome | None) -> None:
        """Stop all slots and record their final states: SIGTERM, SIGKILL after the grace period."""
        running = [slot for slot, exited in self._exits(self._poll_slots()).items() if exited is None]
        grace_s = outcome.grace_s if outcome else float(self._job.grace)
        deadline = time.monotonic() + grace_s
        self._terminate()
        if not self._wait_for_exits(grace_s):
            self._terminate(force=True)
            self._wait_for_exits(KILL_REPORT_S)
        self._context.backend.close(max(0.0, deadline - time.monotonic()))
        self._log_times.sample()
        self.monitor.read_events()
        states = {slot: _give_up(state) for slot, state in self._poll_slots().items()}
        exits = self._exits(states)
        stopped: Collection[Slot] = ()
        if outcome is not None and outcome.cause == STOPPED_MESSAGE:
            stopped = [slot for slot in running if isinstance(states[slot], Exited)]
        elif outcome is not None and not outcome.cause:
            # The lead role is done; roles that never exit by themselves were stopped, which is no failure.
            stopped = [slot for slot in running if (exited := exits[slot]) and exited.code]
        self._update_slots(states, exits, stopped=stopped)

    def _terminate(self, *, force: bool = False) -> None:
        for handle in self._handles.values():
            handle.terminate(force=force)

    def _wait_for_exits(self, timeout_s: float) -> bool:
        """Wait until all slots have exited, for at most `timeout_s`, and return whether they have."""

        def have_exited() -> bool:
            self._log_times.sample()
            return self._have_exited()

        return wait_until(have_exited, timeout_s)

    def _have_exited(self) -> bool:
        return all(isinstance(state, Exited) for state in self._poll_slots().values())

    def find_survivors(self) -> dict[Slot, SlotState]:
        """Return the slots that may still be running: those without an exit record whose lease has not expired."""
        now = time.monotonic()
        states = self._poll_slots()
        return {
            slot: state
            for slot, state in states.items()
            if not isinstance(state, Exited) and not (isinstance(state, Unreachable) and state.is_gone(now))
        }


def _exit_record(state: SlotState) -> Exited | None:
    """Return the exit record of a slot; of a lost one, what takes its place."""
    if isinstance(state, Unreachable):
        return Exited(LOST_EXIT_CODE, state.reason, is_lost=True) if state.is_lost else None
    return state if isinstance(state, Exited) else None


def _find_failed(exits: Exits, tolerated: Collection[Slot]) -> dict[Slot, Exited]:
    """Return the exit records of the slots whose failure ends the attempt."""
    return {slot: exited for slot, exited in exits.items() if exited and exited.code and slot not in tolerated}


def _give_up(state: SlotState) -> SlotState:
    """Return the state at the end of an attempt, when an unreachable slot is lost."""
    return replace(state, is_lost=True) if isinstance(state, Unreachable) else state


def _has_succeeded(exited: Exited | None) -> bool:
    return exited is not None and exited.code == 0


def _slot_state(state: SlotState, exited: Exited | None) -> JobState:
    if exited is not None:
        return JobState.FAILED if exited.code else JobState.SUCCEEDED
    if isinstance(state, Unreachable) and state.is_lost:
        return JobState.LOST
    return JobState.PENDING if isinstance(state, Running) and not state.is_placed else JobState.RUNNING


def _describe(states: Mapping[Slot, SlotState]) -> dict[str, object]:
    """Return the state of the job, and why slots are pending or their hosts cannot be reached."""
    pending = [state for state in states.values() if isinstance(state, Running) and not state.is_placed]
    reasons = [f"{slot}: {state.reason}" for slot, state in states.items() if isinstance(state, Unreachable)]
    reasons += [state.pending_reason for state in pending]
    state = JobState.PENDING if pending else JobState.RUNNING
    return {"state": state, "message": reasons[0] if reasons else ""}
