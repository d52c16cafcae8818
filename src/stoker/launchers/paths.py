"""Paths of a job, as they are where it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from stoker.jobs.spec import Job, Program


def inside(path: str | None) -> str | None:
    """Give a path in the working folder as one that starts there: so it means the same on every machine."""
    if path is None or not Path(path).is_absolute() or not Path(path).is_relative_to(Path.cwd()):
        return path
    return str(Path(path).relative_to(Path.cwd()))


def with_programs(job: Job, change: Callable[[Program], Program]) -> Job:
    """Change the program of the workers, and those of other roles."""
    replace = msgspec.structs.replace
    roles = {
        name: role if role.program is None else replace(role, program=change(role.program))
        for name, role in job.roles.items()
    }
    return replace(job, program=change(job.program), roles=roles)


def programs(job: Job) -> dict[str, Program]:
    """Give every program of a job, by its key."""
    own = {f"roles.{name}.program": role.program for name, role in job.roles.items() if role.program is not None}
    return {"program": job.program, **own}


def placed(job: Job, workdir: str) -> Job:
    """Make relative paths absolute, as they are there."""

    def absolute(path: str | None) -> str | None:
        return path if path is None or "://" in path else str(Path(workdir, path))

    change, data = msgspec.structs.replace, job.data
    job = with_programs(job, lambda one: change(one, script=absolute(one.script), cwd=absolute(one.cwd or ".")))
    return change(
        job,
        roles={name: change(role, logdir=absolute(role.logdir)) for name, role in job.roles.items()},
        data=change(
            data,
            train=absolute(data.train),
            val=absolute(data.val),
            cache=change(data.cache, dir=absolute(data.cache.dir)),
            via=None if data.via == "cluster" else data.via,
        ),
        checkpoint=change(job.checkpoint, dir=absolute(job.checkpoint.dir)),
    )
