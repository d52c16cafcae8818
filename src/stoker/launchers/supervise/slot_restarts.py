"""Restarts of single slots: lost workers of elastic jobs, and failed slots of roles that restart slot by slot."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from stoker.errors import InputError, MissingError
from stoker.jobs.retry_policy import backoff_s
from stoker.jobs.spec import JobSpec
from stoker.jobs.status import signal_from_exit_code
from stoker.jobs.topology import Slot, get_topology
from stoker.launchers.supervise.diagnosis import LOST_EXIT_CODE
from stoker.launchers.supervise.slot_handle import Exited, Running, SlotState, Unreachable


class RestartChoice(NamedTuple):
    """Which failed slots do not fail the attempt, and the one to restart now."""

    tolerated: frozenset[Slot] = frozenset()
    restart: Slot | None = None


class SlotRestarts:
    """Counts the restarts of single slots in all attempts of a run, at most `retries`, with a pause before each."""

    def __init__(self, job: JobSpec) -> None:
        self._job = job
        self._slot_roles = {role.name for role in get_topology(job).roles(job) if role.restart == "slot"}
        self.count = 0
        self._next_at: float | None = None

    @property
    def charged(self) -> int:
        """How many of the job's retries are used up; an elastic job has the same number of each kind."""
        return 0 if self._job.is_elastic else self.count

    def begin_attempt(self) -> None:
        """Forget a restart that was planned in the previous attempt."""
        self._next_at = None

    def choose(self, states: Mapping[Slot, SlotState], can_restart: Callable[[Slot], bool]) -> RestartChoice:
        """Return what to do about the slots that have failed so far, as far as they can be restarted."""
        failed = [slot for slot, state in states.items() if self._may_restart(slot, state) and can_restart(slot)]
        if not failed:
            return RestartChoice()
        # A slot that may still be running is not started a second time.
        gone = [slot for slot in failed if _is_gone(states[slot])]
        never_gone = [slot for slot in failed if _has_no_lease(states[slot])]
        if self.count >= self._job.retries or len(never_gone) == len(failed):
            has_enough = self._job.is_elastic and len(states) - len(failed) >= self._job.min_workers
            return RestartChoice(frozenset(failed) if has_enough else frozenset())
        tolerated = frozenset(failed)
        if self._next_at is None:
            self._next_at = time.monotonic() + backoff_s(self.count)
        elif gone and time.monotonic() >= self._next_at:
            self._next_at = None
            self.count += 1
            return RestartChoice(tolerated, gone[0])
        return RestartChoice(tolerated)

    def _may_restart(self, slot: Slot, state: SlotState) -> bool:
        """Whether a slot has failed in a way that a restart of it alone may help."""
        if isinstance(state, Running) or (isinstance(state, Unreachable) and not state.is_lost):
            return False
        code = state.code if isinstance(state, Exited) else LOST_EXIT_CODE
        if slot.role in self._slot_roles:
            return code not in (0, InputError.exit_code, MissingError.exit_code)
        # Not the first worker of an elastic job, which hosts the rendezvous; torchrun itself restarts failed ranks.
        is_replaceable = self._job.is_elastic and slot.index > 0
        return is_replaceable and bool(state.is_lost or signal_from_exit_code(code))


def _is_gone(state: SlotState) -> bool:
    return not isinstance(state, Unreachable) or state.is_gone(time.monotonic())


def _has_no_lease(state: SlotState) -> bool:
    return isinstance(state, Unreachable) and state.gone_by is None
