"""What the Kubernetes launcher starts, as a value: the objects, and where they go."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stoker.core.spec import load
from stoker.core.yaml_io import to_yaml_stream
from stoker.errors import Fault
from stoker.jobs.run_folder import Run
from stoker.jobs.spec import Job, ProgramSpec
from stoker.kube.objects import Manifest
from stoker.launchers.kubernetes.scripts import CODE_DIR
from stoker.launchers.upload import DEFAULT_PATTERNS, IgnorePatterns


class KubernetesPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The objects of a job, in the order in which they are made."""

    objects: list[dict[str, Any]]
    context: str | None = None
    """None: whichever is current when it is started."""
    namespace: str | None = None
    notes: tuple[str, ...] = ()

    def to_text(self) -> str:
        """Write what `kubectl apply -f -` takes."""
        return to_yaml_documents(self.objects)


def to_yaml_documents(objects: Sequence[Manifest]) -> str:
    """Write objects as one stream of YAML documents."""
    return to_yaml_stream(objects)


def read_plan(run: Run) -> KubernetesPlan:
    """Read what a run was started with."""
    path = run.folder / "plan.json"
    return load(path.read_bytes(), KubernetesPlan, path)


# --- Code that travels


def resolve_code_files(job: Job) -> tuple[Job, dict[str, Path], list[Fault]]:
    """Find the files that travel with a job, by their paths there; give the job as it names them there."""
    files: dict[str, Path] = {}
    faults: list[Fault] = []
    for index, given in enumerate(job.kubernetes.copy):
        key, found = f"kubernetes.copy[{index}]", dict(_found(given))
        if not found:
            faults.append(Fault(key, f"there is nothing at {Path.cwd() / given}"))
        for name, path in found.items():
            if files.setdefault(name, path) != path:
                faults.append(Fault(key, f"{path} and {files[name]} would both be {name} there: rename one"))
    change = msgspec.structs.replace
    program, more = _carried("program", job.program, files)
    faults += more
    roles = dict(job.roles)
    for name, role in job.roles.items():
        if role.program is not None:
            own, more = _carried(f"roles.{name}.program", role.program, files)
            roles[name], faults = change(role, program=own), [*faults, *more]
    return change(job, program=program, roles=roles), files, faults


def _carried(key: str, program: ProgramSpec, files: dict[str, Path]) -> tuple[ProgramSpec, list[Fault]]:
    """Take a script of this machine along; one with an absolute path is in the image."""
    if program.script is None or Path(program.script).is_absolute():
        return program, []
    here = Path.cwd() / program.script
    if not here.is_file():
        why = f"there is no file {here}, and a file of the image is named by its absolute path"
        return program, [Fault(f"{key}.script", why)]
    name = _name(program.script)
    files.setdefault(name, here)
    return msgspec.structs.replace(program, script=f"{CODE_DIR}/{name}"), []


def _found(given: str) -> Iterator[tuple[str, Path]]:
    """Give a file, or those of a folder but for what never travels."""
    start, ignored = Path.cwd() / given, IgnorePatterns(DEFAULT_PATTERNS)
    if start.is_file():
        yield _name(given), start
    for path in sorted(start.rglob("*")) if start.is_dir() else ():
        inner = path.relative_to(start)
        above = [ignored(str(one), is_folder=True) for one in inner.parents if str(one) != "."]
        if path.is_file() and not any(above) and not ignored(str(inner), is_folder=False):
            yield str(Path(_name(given), inner)), path


def _name(given: str) -> str:
    """Name what travels as in the working folder; what is outside of it lies at the top, by its own name."""
    full = Path(os.path.normpath(Path.cwd() / given))
    if full == Path.cwd():
        return ""
    return str(full.relative_to(Path.cwd())) if full.is_relative_to(Path.cwd()) else full.name


def read_code_files(files: Mapping[str, Path]) -> dict[str, bytes]:
    """Read the files that travel."""
    return {name: path.read_bytes() for name, path in sorted(files.items())}
