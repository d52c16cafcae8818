"""One process, or several that do not know of each other."""

from __future__ import annotations

from stoker.jobs.spec import Job
from stoker.jobs.topology import AddressBook, Command, Role, Slot, program_words


class Single:
    """The program itself, once for each worker."""

    def roles(self, job: Job) -> tuple[Role, ...]:
        """List the workers."""
        return (Role("worker", job.max_workers),)

    def command(self, job: Job, slot: Slot, book: AddressBook) -> Command:  # noqa: ARG002
        """Run the program as it is."""
        return Command(tuple(program_words(job.program, book.python)))
