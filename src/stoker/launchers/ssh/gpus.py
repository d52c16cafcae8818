"""GPUs of the workers on SSH hosts: those that the job requests, or an equal share of those that a host has. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

import msgspec

from stoker.jobs.spec import JobSpec, WorkerGroupSpec


def share_gpus(job: JobSpec, worker_hosts: Sequence[str], gpus: Mapping[str, int]) -> JobSpec:
    """Return the job with the GPUs of each worker, if it leaves them open and runs a rank on each.

    `worker_hosts` is the host of each worker, `gpus` the number of GPUs of each host. The workers of a host share its
    GPUs; with fewer GPUs than workers, each of them is one rank that sees all GPUs, as without this function.
    """
    is_open = job.resources.gpu is None and job.processes_per_worker == "auto" and not isinstance(job.workers, tuple)
    if not is_open or job.is_elastic or not job.traits.runs_ranks:
        return job
    workers, assigned, counts = Counter(worker_hosts), Counter[str](), list[int]()
    for host in worker_hosts:
        share, rest = divmod(gpus.get(host, 0), workers[host])
        counts.append(share + (assigned[host] < rest) if share else 0)
        assigned[host] += 1
    change = msgspec.structs.replace
    groups = [
        WorkerGroupSpec(count=len(list(equal)), resources=change(job.resources, gpu=count))
        for count, equal in groupby(counts)
    ]
    return change(job, workers=tuple(groups)) if any(counts) else job


def count_needed_gpus(job: JobSpec, worker_hosts: Sequence[str]) -> Counter[str]:
    """Return how many GPUs the workers need on each host; a host beyond the last worker counts as one like it."""
    needed = Counter[str]()
    for index, host in enumerate(worker_hosts):
        needed[host] += job.resources_of(min(index, job.max_workers - 1)).gpus
    return needed


def describe_ranks(job: JobSpec, worker_hosts: Sequence[str]) -> str:
    """Return how many ranks run on each host if the hosts differ; empty otherwise."""
    ranks = Counter[str]()
    for host, count in zip(worker_hosts, job.ranks, strict=True):
        ranks[host] += count
    if len(set(ranks.values())) < 2:
        return ""
    return ", ".join(f"{count} on {host}" for host, count in ranks.items())
