"""Slots as the supervisor sees them; where and how they run is known only to the backend of a launcher.

The supervisor asks a backend to start the slots of an attempt and gets a handle for each. It polls the handles, and
stops them when the attempt is over. Slots write their output to their logs in the run folder; the supervisor writes
nothing there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from stoker.jobs.topology import Slot


@dataclass(frozen=True, slots=True)
class Running:
    """The slot has not exited, as far as is known at this moment."""

    pid: int | None = None
    """The process id, for a process of this machine."""
    is_placed: bool = True
    """Whether it has a machine; a scheduler such as Ray's may let it wait for one."""
    pending_reason: str = ""
    """Why it waits for a machine, if that is known."""


@dataclass(frozen=True, slots=True)
class Exited:
    """The exit record of a slot: no process of it is running."""

    code: int
    """The exit code; negative for the signal that killed it."""
    reason: str = ""
    """A cause that the program itself cannot report: it could not be started, or its machine restarted."""
    is_lost: bool = False
    """Whether it was lost with its machine, through no fault of its own."""
    out_of_memory: bool = False
    """Whether the kernel killed processes on its machine because memory ran out, shortly before it exited."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Nothing is known of the slot at the moment: it may be running. This is never an exit."""

    since: float
    """When it was heard of last, in the time of `time.monotonic`."""
    reason: str
    gone_by: float | None
    """When its lease has expired and it was surely killed, in the time of `time.monotonic`; None: it has no lease."""
    is_lost: bool = False
    """Whether the backend has waited long enough for it: the attempt fails. It may still be running until `gone_by`."""

    def is_gone(self, now: float) -> bool:
        """Whether its lease has expired, so that no process of it can be running."""
        return self.gone_by is not None and now >= self.gone_by


SlotState = Running | Exited | Unreachable


@dataclass(frozen=True, slots=True)
class StackRequest:
    """A request to print Python stacks that was just sent: to one process, or to all of a slot that can print them."""

    pid: int | None = None
    """The process; None: all processes of the slot."""
    rank: int | None = None
    """The rank that this process is according to its environment; not set for children of such a process."""


class SlotHandle(Protocol):
    """One started slot. No method blocks for long or raises because the slot or its machine is gone."""

    reads_local_sources: bool
    """Whether the source files of its program are those of this machine."""

    def poll(self) -> SlotState:
        """Return the state of the slot; once it is `Exited`, it stays so."""
        ...

    def has_process(self, pid: int) -> bool:
        """Whether a process of the slot is alive; where that cannot be known, whether the slot has not exited."""
        ...

    def dump_stacks(self) -> Iterator[StackRequest]:
        """Ask the processes that handle SIGUSR1 for their stacks, and yield after each request.

        The caller reads the log before it resumes the iterator, so that it can tell the stacks of processes apart.
        """
        ...

    def terminate(self, *, force: bool = False) -> None:
        """Send SIGTERM to the slot, or with `force` SIGKILL to all its processes; a second call does nothing.

        The request is kept for a slot that is unreachable, until it is delivered or the lease expires.
        """
        ...


class SlotBackend(Protocol):
    """The slots of one run, in one kind of place; created for the run folder by the launcher."""

    report_delay_s: float
    """How much later than the failure of one slot the failures of its peers may be reported."""
    is_detached: bool
    """Whether the slots keep running without a supervisor, so that a shutdown of this machine does not stop the run."""

    def prepare(self, grace_s: float, *, reattach: bool = False) -> None:
        """Stop what an earlier supervisor left behind on this machine; with `reattach`, not the slots themselves."""
        ...

    def start(self, attempt: int, *, reattach: bool = False) -> Mapping[Slot, SlotHandle]:
        """Start all slots of an attempt, also those that another slot starts; raise StokerError if that fails.

        With `reattach`, return handles of the slots of that attempt, which kept running without a supervisor.
        """
        ...

    def can_restart(self, slot: Slot) -> bool:
        """Whether `restart_slot` works for a slot that has failed; otherwise its failure ends the attempt."""
        ...

    def restart_slot(self, slot: Slot) -> SlotHandle:
        """Start a slot again that has exited, while the others keep running; leftovers of it are stopped first."""
        ...

    def close(self, grace_s: float) -> None:
        """End the attempt: stop what its slots have left behind where it can be reached, SIGTERM first.

        Its handles can be polled until the next start: a slot that was unreachable may report its exit later.
        """
        ...
