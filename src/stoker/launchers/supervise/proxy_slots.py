"""Slots on other machines that local processes represent: one process for each slot, or one for all of them.

A local process ends with the exit code of its slot, stops the slot on its first SIGTERM, and kills it on the second.
Facts that an exit code cannot express are marks and lines in the log.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from stoker.core.processes import terminate_by_env, wait_until
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.topology import Slot
from stoker.launchers.plan import read_plan
from stoker.launchers.supervise.diagnosis import TAIL_BYTES
from stoker.launchers.supervise.process_group import LocalBackend, LocalSlot
from stoker.launchers.supervise.slot_handle import Exited, Running, SlotHandle, StackRequest
from stoker.telemetry.log_times import LogTimesSampler
from stoker.telemetry.reader import LogTail, find_marks, read_log

LOST_MARK = "slot_lost"
"""Mark in the log of a slot that it was lost, with the reason."""
OOM_NOTICE = "out of memory: the kernel killed processes"
"""Text in the log of a slot whose host reported OOM kills."""
SLOT_EXIT_MARK = "slot_exit"
"""Mark in the log of a slot with its exit code, written by the process that manages all slots."""
PENDING_MARK = "waiting"
"""Mark with the reason why slots are not placed yet; a mark without a reason means that they are."""
PROXY_ENV = {"STOKER_STANDS_IN": "1"}
"""Environment that identifies the local process of a remote slot, which has no processes of the slot below it."""
REPORT_S = 12.0
"""Time for remote slots to report their own failure and their exit."""


class ProxySlot:
    """A remote slot with a local process of its own."""

    reads_local_sources = False

    def __init__(self, local: LocalSlot, run: RunFolder, attempt: int, log: Path) -> None:
        self.local, self._run, self._attempt, self._log = local, run, attempt, log
        self._exit: Exited | None = None
        self._level, self._killed_at = 0, float("inf")

    def poll(self) -> Running | Exited:
        """Return the exit record, with what the log tells about it."""
        if time.monotonic() > self._killed_at + REPORT_S:
            self.local.terminate(force=True)
        state = self.local.poll()
        if isinstance(state, Exited) and self._exit is None:
            self._exit = explain_exit(state.code, self._log)
        return self._exit or state

    def has_process(self, pid: int) -> bool:  # noqa: ARG002
        """Whether the slot has not exited: of its processes nothing is known here."""
        return isinstance(self.poll(), Running)

    def dump_stacks(self) -> Iterator[StackRequest]:
        """Signal the local process, which forwards the signal to the ranks."""
        with suppress(ProcessLookupError):
            os.kill(self.local.process.pid, signal.SIGUSR1)
        yield StackRequest()

    def terminate(self, *, force: bool = False) -> None:
        """Ask the local process once to stop the slot, and with `force` once more to kill it."""
        # Tells the local processes of detached slots to stop those instead of leaving them.
        self._run.write(f"ending.{self._attempt}", b"")
        if self._level <= force:
            self._level = force + 1
            self._killed_at = time.monotonic() if force else float("inf")
            self.local.terminate()


class ManagedSlot:
    """A remote slot that one local process manages together with all others."""

    reads_local_sources = False

    def __init__(self, manager: ProxySlot, log: Path, placement: Placement, *, is_first: bool) -> None:
        self._manager, self._log, self._placement, self._is_first = manager, log, placement, is_first
        self._tail = LogTail(log)
        self._exit: Exited | None = None

    def poll(self) -> Running | Exited:
        """Return the exit record once its mark is in the log, or else that of the manager."""
        if self._exit is not None:
            return self._exit
        state = self._manager.poll()
        if marks := find_marks(self._tail.read().events, SLOT_EXIT_MARK):
            self._exit = explain_exit(int(marks[-1].fields["code"]), self._log)
        elif isinstance(state, Exited):
            self._exit = state
        return self._exit or self._placement.poll()

    def has_process(self, pid: int) -> bool:  # noqa: ARG002
        """Whether the slot has not exited."""
        return isinstance(self.poll(), Running)

    def dump_stacks(self) -> Iterator[StackRequest]:
        """Signal the manager once, which forwards the signal to the ranks of all slots."""
        return self._manager.dump_stacks() if self._is_first else iter(())

    def terminate(self, *, force: bool = False) -> None:
        """Stop the manager, and with it all slots."""
        self._manager.terminate(force=force)


class Placement:
    """Whether the slots have been placed, from the log of the process that manages them."""

    def __init__(self, log: Path) -> None:
        self._tail, self._times = LogTail(log), LogTimesSampler([log])
        self._state = Running(is_placed=False)

    def poll(self) -> Running:
        """Return the state of slots that have not exited."""
        self._times.sample()
        for mark in find_marks(self._tail.read().events, PENDING_MARK):
            reason = str(mark.fields.get("detail") or "")
            self._state = Running(is_placed=not reason, pending_reason=reason)
        return self._state


class ProxyBackend(LocalBackend):
    """Backend for slots on other machines that local processes represent."""

    report_delay_s = REPORT_S

    def __init__(self, run: RunFolder) -> None:
        super().__init__(run, read_plan(run))
        self.is_detached = self._plan.detached

    def prepare(self, grace_s: float, *, reattach: bool = False) -> None:
        """Stop leftover local processes; with `reattach`, only those that represent slots."""
        terminate_by_env({"STOKER_RUN": self._run.id, **(PROXY_ENV if reattach else {})}, grace_s)

    def start(self, attempt: int, *, reattach: bool = False) -> Mapping[Slot, SlotHandle]:
        """Start the local processes; with `reattach` they connect to slots that are running already."""
        self._start_all(attempt, self._plan.commands, {"STOKER_CONTINUES": "1"} if reattach else {})
        if not self._plan.delegated:
            return {slot: self._proxy(slot, local) for slot, local in self._slots.items()}
        ((slot, local),) = self._slots.items()
        manager, placement = self._proxy(slot, local), Placement(self._run.log_path(slot, attempt))
        slots = list(map(Slot.parse, self._plan.delegated))
        return {
            slot: ManagedSlot(manager, self._run.log_path(slot, attempt), placement, is_first=slot == slots[0])
            for slot in slots
        }

    def _proxy(self, slot: Slot, local: LocalSlot) -> ProxySlot:
        return ProxySlot(local, self._run, self._attempt, self._run.log_path(slot, self._attempt))

    def restart_slot(self, slot: Slot) -> SlotHandle:
        """Start the local process of a slot again, and with it the slot."""
        self._env.pop("STOKER_CONTINUES", None)
        super().restart_slot(slot)
        return self._proxy(slot, self._slots[slot])

    def close(self, grace_s: float) -> None:
        """Let the local processes remove what they have started for their slots, and stop those that do not exit."""
        wait_until(lambda: all(local.process.poll() is not None for local in self._slots.values()), REPORT_S)
        super().close(grace_s)


def explain_exit(code: int, log: Path) -> Exited:
    """Return the exit record of a slot: its exit code, and what its log tells about it."""
    if not code:
        return Exited(0)
    content = read_log(log, last=TAIL_BYTES)
    if marks := find_marks(content.events, LOST_MARK):
        return Exited(code, str(marks[-1].fields.get("detail")), is_lost=True)
    is_oom = any(line.startswith("---") and OOM_NOTICE in line for line in content.lines[-400:])
    return Exited(code, out_of_memory=is_oom)
