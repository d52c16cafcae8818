"""Paths of a job, as they are where it runs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stoker.jobs.spec import Job


def inside(path: str | None) -> str | None:
    """Give a path in the working folder as one that starts there: so it means the same on every machine."""
    if path is None or not Path(path).is_absolute() or not Path(path).is_relative_to(Path.cwd()):
        return path
    return str(Path(path).relative_to(Path.cwd()))


def placed(job: Job, workdir: str) -> Job:
    """Make relative paths absolute, as they are there."""

    def absolute(path: str | None) -> str | None:
        return path if path is None or "://" in path else str(Path(workdir, path))

    change, data = msgspec.structs.replace, job.data
    return change(
        job,
        program=change(job.program, script=absolute(job.program.script), cwd=absolute(job.program.cwd or ".")),
        data=change(
            data,
            train=absolute(data.train),
            val=absolute(data.val),
            cache=change(data.cache, dir=absolute(data.cache.dir)),
            via=None if data.via == "cluster" else data.via,
        ),
        checkpoint=change(job.checkpoint, dir=absolute(job.checkpoint.dir)),
    )
