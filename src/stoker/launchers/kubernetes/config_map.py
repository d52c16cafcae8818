"""The ConfigMap of a job: scripts, the job file, and the user's code files."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from stoker.core.units import format_bytes
from stoker.errors import InputError
from stoker.jobs.spec import JobSpec, to_yaml
from stoker.kube.objects import Manifest
from stoker.launchers.kubernetes.addresses import MPI_RANK, PROFILER
from stoker.launchers.kubernetes.labels import build_job_object
from stoker.launchers.kubernetes.mpijob import build_worker_script
from stoker.launchers.kubernetes.scripts import Script

JOB_FILE = "job.yaml"
CONFIG_MAP_MAX_BYTES = (1 << 20) - (1 << 14)
"""Limit of the API server for one ConfigMap, less its metadata."""


@dataclass(frozen=True, slots=True)
class JobFiles:
    """The files that pods of a job mount from its ConfigMap."""

    texts: Mapping[str, str]
    """Scripts and shared texts, by file name."""
    code: Mapping[str, bytes]
    """The user's files, by path."""


def collect_files(job: JobSpec, scripts: Mapping[str, Script], code: Mapping[str, bytes]) -> JobFiles:
    """Collect the files of a job; `scripts` are by role."""
    texts = {f"{role}.sh": script.text for role, script in scripts.items()}
    for script in scripts.values():
        texts |= script.files
    if job.profile.every > 0:
        texts[PROFILER] = files("stoker.remote").joinpath(PROFILER).read_text()
    if job.traits.has_standby_workers:
        texts[MPI_RANK] = files("stoker.remote").joinpath(MPI_RANK).read_text()
        texts["worker.sh"] = build_worker_script(job)
    return JobFiles(texts, code)


def get_code_key(index: int) -> str:
    """Return the ConfigMap key of a code file: keys cannot contain slashes, so files are numbered."""
    return f"code-{index}"


def build_config_map(job: JobSpec, job_files: JobFiles) -> Manifest:
    """Build the ConfigMap; raise InputError if it would be larger than the API server accepts."""
    texts = {**job_files.texts, JOB_FILE: to_yaml(job)}
    binary = {get_code_key(index): b64encode(data).decode() for index, data in enumerate(job_files.code.values())}
    size = sum(len(text.encode()) for text in (*texts.values(), *binary.values()))
    if size > CONFIG_MAP_MAX_BYTES:
        code = job_files.code
        largest = max(code, key=lambda path: len(code[path]), default="the addresses of the TensorFlow cluster")
        raise InputError(
            f"files copied with the job take {format_bytes(size)} in a ConfigMap, which can hold 1 MiB "
            f"(largest: {largest})",
            where=f"job {job.name!r} on k8s",
            hint="copy fewer files, or put the code into the image or onto a volume",
        )
    data = {"data": texts, **({"binaryData": binary} if binary else {})}
    return build_job_object("v1", "ConfigMap", job.name, job, {}, **data)
