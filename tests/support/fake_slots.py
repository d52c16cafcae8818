"""Slots that follow a script instead of running, and a clock that moves only when somebody sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from stoker.jobs.topology import Slot
from stoker.launchers.supervise.slot_handle import Exited, Running, SlotHandle, SlotState, StackRequest


class FakeClock:
    """The time of `time.monotonic` and `time.sleep`, from 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.01)


class FakeSlot:
    """A slot in a given state, or in those of a script: the state by time, until it is terminated."""

    reads_local_sources = False

    def __init__(self, state: SlotState | Callable[[], SlotState], on_terminate: SlotState | None = None) -> None:
        self._state, self._on_terminate = state, on_terminate
        self.stops: list[tuple[float, bool]] = []
        """When it was asked to stop, and whether by force."""

    def poll(self) -> SlotState:
        """Return the state at this time."""
        return self._state() if callable(self._state) else self._state

    def has_process(self, pid: int) -> bool:
        """Whether it runs."""
        return not isinstance(self.poll(), Exited)

    def dump_stacks(self) -> Iterator[StackRequest]:
        """Print nothing."""
        return iter(())

    def terminate(self, *, force: bool = False) -> None:
        """Exit, if that is how it reacts."""
        self.stops.append((time.monotonic(), force))
        if isinstance(self.poll(), Running) and self._on_terminate is not None:
            self._state = self._on_terminate


class FakeBackend:
    """Backend of fake slots, for each attempt and restart those that a function returns."""

    report_delay_s = 0.0
    is_detached = False

    def __init__(self, *attempts: Mapping[Slot, FakeSlot], restarted: Sequence[FakeSlot] = ()) -> None:
        self.attempts, self._restarted = attempts, iter(restarted)
        self.started: list[float] = []
        self.restarts: list[tuple[Slot, float]] = []

    def prepare(self, grace_s: float, *, reattach: bool = False) -> None:
        """Find nothing to stop."""

    def start(self, attempt: int, *, reattach: bool = False) -> Mapping[Slot, SlotHandle]:
        """Return the slots of the attempt."""
        self.started.append(time.monotonic())
        return self.attempts[attempt]

    def can_restart(self, slot: Slot) -> bool:
        """Whether a slot can be started again: always."""
        return True

    def restart_slot(self, slot: Slot) -> SlotHandle:
        """Return the next slot that was prepared for a restart."""
        self.restarts.append((slot, time.monotonic()))
        return next(self._restarted)

    def close(self, grace_s: float) -> None:
        """Leave nothing behind."""
