"""Job paths: make them relative to the working directory, or absolute on the machine where the job runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from stoker.jobs.spec import JobSpec, ProgramSpec


def relative_to_workdir(path: str | None) -> str | None:
    """Return a path inside the working directory relative to it, so that it is valid on every machine."""
    if path is None or not Path(path).is_absolute() or not Path(path).is_relative_to(Path.cwd()):
        return path
    return str(Path(path).relative_to(Path.cwd()))


def map_programs(job: JobSpec, change: Callable[[ProgramSpec], ProgramSpec]) -> JobSpec:
    """Return the job with `change` applied to the program of the workers and of every other role."""
    replace = msgspec.structs.replace
    roles = {
        name: role if role.program is None else replace(role, program=change(role.program))
        for name, role in job.roles.items()
    }
    return replace(job, program=change(job.program), roles=roles)


def programs_by_key(job: JobSpec) -> dict[str, ProgramSpec]:
    """Return every program of a job by its key in the job file."""
    of_roles = {f"roles.{name}.program": role.program for name, role in job.roles.items() if role.program is not None}
    return {"program": job.program, **of_roles}


def resolve_job_paths(job: JobSpec, workdir: str) -> JobSpec:
    """Return the job with relative paths resolved against `workdir`."""

    def absolute(path: str | None) -> str | None:
        return path if path is None or "://" in path else str(Path(workdir, path))

    change, data = msgspec.structs.replace, job.data
    job = map_programs(
        job, lambda program: change(program, script=absolute(program.script), cwd=absolute(program.cwd or "."))
    )
    return change(
        job,
        roles={name: change(role, logdir=absolute(role.logdir)) for name, role in job.roles.items()},
        data=change(
            data,
            train=absolute(data.train),
            val=absolute(data.val),
            cache=change(data.cache, dir=absolute(data.cache.dir)),
        ),
        checkpoint=change(job.checkpoint, dir=absolute(job.checkpoint.dir)),
    )
