"""What the ssh launcher starts, as a value."""

from __future__ import annotations

import msgspec

from stoker.core.spec import load
from stoker.jobs.runs import Run
from stoker.launchers.plan import LocalPlan
from stoker.launchers.ssh_hosts import Client


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What is used of one host."""

    workdir: str
    python: str
    copies: bool
    """Whether the working folder is copied there; not where it is that very folder."""
    rsync: bool = False
    profiler: bool = False
    """Whether the profiler is sent along, for want of stoker there."""


class SshPlan(LocalPlan, frozen=True, kw_only=True):
    """The command of every slot, on which host, and what is copied there before."""

    places: dict[str, Place]
    client: Client
    source: str
    exclude: tuple[str, ...] = ()
    setup: str | None = None
    modules: tuple[str, ...] = ()
    """What Python must have there once `setup` is done."""
    secrets: tuple[str, ...] = ()
    grace_s: float = 30.0


def read_ssh_plan(run: Run) -> SshPlan:
    """Read what a run was started with."""
    path = run.folder / "plan.json"
    return load(path.read_bytes(), SshPlan, path)
