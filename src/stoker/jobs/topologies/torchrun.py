"""PyTorch's own launcher on every worker: a fixed world, or one that grows and shrinks.

A fixed world has a static rendezvous, so that rank 0 is on worker 0, and torchrun restarts nothing: whoever started the
gang does. An elastic world meets by c10d at worker 0, where torchrun restarts its ranks itself.
"""

from __future__ import annotations

from stoker.jobs.spec import Job
from stoker.jobs.topology import AddressBook, Command, Role, Slot


class Torchrun:
    """`torch.distributed.run` on every worker."""

    def roles(self, job: Job) -> tuple[Role, ...]:
        """List the workers; as many as there can be, where that may change."""
        return (Role("worker", job.max_workers),)

    def command(self, job: Job, slot: Slot, book: AddressBook) -> Command:
        """Run the program's script or module under torchrun."""
        first = book.hosts[Slot("worker", 0)]
        env = {}
        if not job.is_elastic:
            world = ["--nnodes", str(job.max_workers), "--node-rank", str(slot.index)]
            meeting = ["--master-addr", first, "--master-port", str(book.port), "--max-restarts", "0"]
        else:
            world = ["--nnodes", f"{job.min_workers}:{job.max_workers}"]
            meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{book.port}", "--rdzv-id", job.name]
            # Each would find by itself who holds the meeting; on one machine any of them could take it.
            meeting += ["--rdzv-conf", f"is_host={int(slot.index == 0)}", "--max-restarts", str(job.retries)]
            # Whoever has rank 0 tells the others where it is, by a host name that may lead nowhere.
            meeting += ["--local-addr", book.hosts[slot]]
            # A second restart would dial the store of a worker that is gone, and hang.
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        ranks = ["--nproc-per-node", str(job.ranks_per_worker)]
        program = job.program
        start = ["-m", program.module] if program.module is not None else [str(program.script)]
        argv = [book.python, "-m", "torch.distributed.run", *world, *ranks, *meeting, *start, *program.args]
        return Command(tuple(argv), env)
