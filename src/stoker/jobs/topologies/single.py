"""Topology `single`: one process without a rendezvous."""

from __future__ import annotations

from typing import ClassVar

from stoker.jobs.spec import JobSpec
from stoker.jobs.topology import AddressBook, Command, Role, Slot, program_argv
from stoker.jobs.topology_traits import TopologyTraits


class Single:
    """The program itself, in one worker."""

    traits: ClassVar[TopologyTraits] = TopologyTraits(max_workers=1)

    def roles(self, job: JobSpec) -> tuple[Role, ...]:
        """List the workers."""
        return (Role("worker", job.max_workers),)

    def command(self, job: JobSpec, slot: Slot, book: AddressBook) -> Command:  # noqa: ARG002
        """Return the command of the program."""
        return Command(tuple(program_argv(job.program, book.python)))
