"""The plan of the Kubernetes launcher: the rendered objects, and the code files that are copied into pods."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stoker.core.spec import load
from stoker.core.yaml_io import to_yaml_stream
from stoker.errors import Fault
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.spec import JobSpec, ProgramSpec
from stoker.launchers.kubernetes.scripts import CODE_DIR
from stoker.launchers.upload import DEFAULT_PATTERNS, IgnorePatterns


class KubernetesPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The objects of a job in creation order, and their context and namespace."""

    objects: list[dict[str, Any]]
    context: str | None = None
    """None: the current context at the time of the start."""
    namespace: str | None = None
    notes: tuple[str, ...] = ()

    def to_text(self) -> str:
        """Return the objects as `kubectl apply -f -` takes them."""
        return to_yaml_stream(self.objects)


def read_kubernetes_plan(run: RunFolder) -> KubernetesPlan:
    """Read the plan that a run was started with."""
    path = run.folder / "plan.json"
    return load(path.read_bytes(), KubernetesPlan, path)


# --- Code files


def resolve_code_files(job: JobSpec) -> tuple[JobSpec, dict[str, Path], list[Fault]]:
    """Find the files to copy into pods, by their path below CODE_DIR.

    Return the job with its scripts' paths in the pod, the local files, and the faults.
    """
    files: dict[str, Path] = {}
    faults: list[Fault] = []
    for index, pattern in enumerate(job.kubernetes.copy):
        key, matches = f"kubernetes.copy[{index}]", dict(_find_files(pattern))
        if not matches:
            faults.append(Fault(key, f"no such file or directory, or an empty directory: {Path.cwd() / pattern}"))
        for name, path in matches.items():
            if files.setdefault(name, path) != path:
                faults.append(Fault(key, f"{path} and {files[name]} would both be copied to {name}: rename one"))
    replace = msgspec.structs.replace
    program, script_faults = _resolve_script("program", job.program, files)
    faults += script_faults
    roles = dict(job.roles)
    for name, role in job.roles.items():
        if role.program is not None:
            role_program, script_faults = _resolve_script(f"roles.{name}.program", role.program, files)
            roles[name] = replace(role, program=role_program)
            faults += script_faults
    return replace(job, program=program, roles=roles), files, faults


def _resolve_script(key: str, program: ProgramSpec, files: dict[str, Path]) -> tuple[ProgramSpec, list[Fault]]:
    """Add a local script to the files; a script with an absolute path is in the image."""
    if program.script is None or Path(program.script).is_absolute():
        return program, []
    path = Path.cwd() / program.script
    if not path.is_file():
        what = f"no such file or directory: {path}; use an absolute path for a script in the image"
        return program, [Fault(f"{key}.script", what)]
    name = _get_copy_name(program.script)
    files.setdefault(name, path)
    return msgspec.structs.replace(program, script=f"{CODE_DIR}/{name}"), []


def _find_files(pattern: str) -> Iterator[tuple[str, Path]]:
    """Yield a file, or the files of a folder that are not ignored, with their names in the pod."""
    start, is_ignored = Path.cwd() / pattern, IgnorePatterns(DEFAULT_PATTERNS)
    if start.is_file():
        yield _get_copy_name(pattern), start
    for path in sorted(start.rglob("*")) if start.is_dir() else ():
        relative = path.relative_to(start)
        in_ignored_folder = any(
            is_ignored(str(parent), is_folder=True) for parent in relative.parents if str(parent) != "."
        )
        if path.is_file() and not in_ignored_folder and not is_ignored(str(relative), is_folder=False):
            yield str(Path(_get_copy_name(pattern), relative)), path


def _get_copy_name(path_in_spec: str) -> str:
    """Return the path of a copy: relative to the working directory, or only the name for paths outside of it."""
    path = Path(os.path.normpath(Path.cwd() / path_in_spec))
    if path == Path.cwd():
        return ""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def read_code_files(files: Mapping[str, Path]) -> dict[str, bytes]:
    """Read the files to copy into pods."""
    return {name: path.read_bytes() for name, path in sorted(files.items())}
