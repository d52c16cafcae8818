"""Topology `torchrun`: PyTorch's launcher on every worker, with a fixed or an elastic world size.

A fixed world uses a static rendezvous, so that rank 0 is on worker 0, and torchrun restarts nothing: the launcher
restarts the whole gang. An elastic world uses the c10d rendezvous at worker 0, and torchrun restarts its ranks itself.
"""

from __future__ import annotations

from typing import ClassVar

from stoker.jobs.spec import JobSpec
from stoker.jobs.topology import AddressBook, Command, Role, Slot
from stoker.jobs.topology_traits import TopologyTraits


class Torchrun:
    """`torch.distributed.run` on every worker."""

    traits: ClassVar[TopologyTraits] = TopologyTraits(
        runs_ranks=True,
        supports_elastic=True,
        supports_commands=False,
        has_rendezvous=True,
        required_modules=("torch",),
    )

    def roles(self, job: JobSpec) -> tuple[Role, ...]:
        """List the workers; the maximum number for an elastic job."""
        return (Role("worker", job.max_workers),)

    def command(self, job: JobSpec, slot: Slot, book: AddressBook) -> Command:
        """Return the command that runs the script or module under torchrun."""
        head = book.hosts[Slot("worker", 0)]
        env = {}
        if not job.is_elastic:
            world = ["--nnodes", str(job.max_workers), "--node-rank", str(slot.index)]
            rendezvous = ["--master-addr", head, "--master-port", str(book.port), "--max-restarts", "0"]
        else:
            world = ["--nnodes", f"{job.min_workers}:{job.max_workers}"]
            rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head}:{book.port}", "--rdzv-id", job.name]
            # By default each agent guesses whether it hosts the store; on one machine any of them could.
            rendezvous += ["--rdzv-conf", f"is_host={int(slot.index == 0)}", "--max-restarts", str(job.retries)]
            # By default rank 0 announces its host name, which other machines may not resolve.
            rendezvous += ["--local-addr", book.hosts[slot]]
            # Otherwise a second restart connects to the store of a lost worker, and hangs.
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        ranks = ["--nproc-per-node", str(job.ranks_of(slot.index))]
        program = job.program
        entry_point = ["-m", program.module] if program.module is not None else [str(program.script)]
        argv = [book.python, "-m", "torch.distributed.run", *world, *ranks, *rendezvous, *entry_point, *program.args]
        return Command(tuple(argv), env)
