"""The shared cache of a Kubernetes namespace: deploy it, wait for it, read its status, warm it, remove it."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from stoker.errors import InputError, JobFailedError, NotFoundError, StokerError, UnavailableError
from stoker.kube.client import KubeClient
from stoker.kube.conditions import get_condition, has_condition, is_terminating
from stoker.kube.ephemeral_pod import list_events, wait_deleted
from stoker.kube.objects import CACHE_PORT, CACHE_SERVICE, MAIN_CONTAINER, Manifest, cache_url, with_owner
from stoker.kube.pending import explain_pending
from stoker.kube.pods import main_container_status
from stoker.kube.quantity import parse_quantity
from stoker.kube.rollout import (
    POLL_S,
    ProgressCallback,
    count_ready_pods,
    creation_time,
    explain_pod,
    explain_unready,
    has_started,
    is_ready,
    read_log,
    wait_ready,
)
from stoker.serve.cluster.manifests import (
    CACHE_LABELS,
    KINDS,
    SERVER_LABELS,
    WarmJob,
    build_warm_objects,
    check_claim_writable,
)
from stoker.serve.nginx.stats import count_log_line

STOP_TIMEOUT_S = 120.0
MAX_POLL_FAILURES = 5
"""Consecutive API failures that are tolerated while a Job is followed."""
JOB_NAME_LABEL = "batch.kubernetes.io/job-name"

# --- Deploy


def claim_bytes_per_pod(cluster: KubeClient, name: str, replicas: int) -> int:
    """Return the bytes of a claim that each pod may use; raise if it does not exist or is not writable for them."""
    claim = cluster.get("PersistentVolumeClaim", name)
    if claim is None:
        names = ", ".join(other["metadata"]["name"] for other in cluster.list_objects("PersistentVolumeClaim"))
        hint = f"claims are {names}" if names else f"create it with: stoker volume create {name} --size 200Gi"
        raise NotFoundError(f"claim {name} not found", where=cluster, hint=hint)
    check_claim_writable(claim, replicas)
    requested = claim["spec"]["resources"]["requests"]["storage"]
    capacity = ((claim.get("status") or {}).get("capacity") or {}).get("storage") or requested
    return int(parse_quantity(capacity)) // replicas


def deploy_cache(cluster: KubeClient, objects: Sequence[Manifest]) -> None:
    """Create or update the objects; delete the workload of the other kind, if there is one.

    All objects are applied as a dry run first, so that a rejected one leaves the running cache unchanged.
    """
    for manifest in objects:
        _dry_run(cluster, manifest)
    for kind in {"Deployment", "StatefulSet"} - {manifest["kind"] for manifest in objects}:
        cluster.delete(kind, CACHE_SERVICE)
    for manifest in objects:
        cluster.apply(manifest)


def _dry_run(cluster: KubeClient, manifest: Manifest) -> None:
    try:
        cluster.apply(manifest, dry_run=True)
    except InputError as error:
        if manifest["kind"] != "StatefulSet" or not re.search("are forbidden|field is immutable", error.what):
            raise
        hint = "remove the cache first with: stoker data cache --on k8s --stop"
        raise InputError("the claims of a deployed cache cannot be changed", where=cluster, hint=hint) from error


def wait_cache_ready(
    cluster: KubeClient, kind: str, *, timeout_s: float, on_progress: ProgressCallback = lambda _: None
) -> None:
    """Wait until every pod of the cache is ready; raise with the reason if that fails."""
    wait_ready(
        cluster,
        kind,
        CACHE_SERVICE,
        what="the cache",
        hint="for details, run: stoker data cache --on k8s --status; to remove the cache, pass --stop",
        timeout_s=timeout_s,
        on_progress=on_progress,
        is_noise=is_access_line,
    )


def is_access_line(line: bytes) -> bool:
    """Return whether a line is one of nginx's access log."""
    totals: Counter[str] = Counter()
    count_log_line(line, totals)
    return totals.total() > 0


# --- Status


@dataclass(frozen=True, kw_only=True)
class CachePodStatus:
    """One pod of the cache; `log` has the counters of its access log, as far back as the cluster keeps it."""

    name: str
    node: str | None
    ready: bool
    restarts: int
    why: str
    log: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class CacheStatus:
    """The cache of a namespace."""

    url: str
    kind: str
    image: str
    ready: int
    replicas: int
    budget: int
    """Bytes per pod."""
    origins: list[dict[str, str]]
    pods: list[CachePodStatus]


LOG_COUNTERS = ("requests", "bytes", "errors", "hits", "misses", "origin_bytes")


def read_status(cluster: KubeClient) -> CacheStatus:
    """Return the status of the namespace's cache."""
    config, owner = _get_deployed(cluster)
    ready, expected = count_ready_pods(owner)
    events = list_events(cluster)
    container = next(each for each in owner["spec"]["template"]["spec"]["containers"] if each["name"] == MAIN_CONTAINER)
    return CacheStatus(
        url=cache_url(cluster.namespace),
        kind=owner["kind"],
        image=container["image"],
        ready=ready,
        replicas=expected,
        budget=_read_budget(config),
        origins=_read_origins(config),
        pods=[_read_pod_status(cluster, pod, events) for pod in cluster.list_objects("Pod", SERVER_LABELS)],
    )


def _read_pod_status(cluster: KubeClient, pod: Manifest, events: Sequence[Manifest]) -> CachePodStatus:
    ready = is_ready(pod) and not is_terminating(pod)
    return CachePodStatus(
        name=pod["metadata"]["name"],
        node=pod["spec"].get("nodeName"),
        ready=ready,
        restarts=int(main_container_status(pod).get("restartCount") or 0),
        why=""
        if ready
        else "terminating"
        if is_terminating(pod)
        else explain_pod(cluster, pod, events, is_access_line),
        log=_count_log(cluster, pod) if has_started(pod) else {},
    )


def _count_log(cluster: KubeClient, pod: Manifest) -> dict[str, int]:
    totals: Counter[str] = Counter()
    with suppress(StokerError):
        for line in read_log(cluster, pod):
            count_log_line(line, totals)
    return {name: totals[name] for name in LOG_COUNTERS}


def _get_deployed(cluster: KubeClient) -> tuple[Manifest, Manifest]:
    config = cluster.get("ConfigMap", CACHE_SERVICE)
    owner = cluster.get("Deployment", CACHE_SERVICE) or cluster.get("StatefulSet", CACHE_SERVICE)
    if config is None or owner is None:
        hint = "create one with: stoker data cache --on k8s --origin URL --size 200Gi"
        raise NotFoundError("no cache in this namespace", where=cluster, hint=hint)
    return config, owner


def _read_budget(config: Manifest) -> int:
    return int(json.loads(config["data"]["stats.json"])["budget"])


def _read_origins(config: Manifest) -> list[dict[str, str]]:
    origins: list[dict[str, str]] = json.loads(config["data"]["origins.json"])
    return origins


# --- Remove


def remove_cache(cluster: KubeClient, *, timeout_s: float = STOP_TIMEOUT_S) -> list[str]:
    """Delete all objects of the cache and wait until its pods are gone; return what was deleted."""
    removed = [
        f"{kind} {each['metadata']['name']}" for kind in KINDS for each in cluster.list_objects(kind, CACHE_LABELS)
    ]
    for kind in dict.fromkeys(name.split(" ")[0] for name in removed):
        cluster.delete_all(kind, CACHE_LABELS)
    deadline = time.monotonic() + timeout_s
    while remaining := [pod["metadata"]["name"] for pod in cluster.list_objects("Pod", CACHE_LABELS)]:
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"pod {remaining[0]} does not terminate", where=cluster, hint="check whether its node is up"
            )
        time.sleep(POLL_S)
    return removed


# --- Warm


@dataclass(frozen=True)
class WarmTarget:
    """A cache to warm: its origins as {URL: name}, its size in bytes, and the URLs of its pods."""

    origins: dict[str, str]
    budget: int
    caches: tuple[str, ...]


def find_warm_target(cluster: KubeClient) -> WarmTarget:
    """Return the cache to warm; with several replicas, each pod has its own storage and is warmed separately."""
    config, owner = _get_deployed(cluster)
    pods = [pod for pod in cluster.list_objects("Pod", SERVER_LABELS) if is_ready(pod) and not is_terminating(pod)]
    if not pods:
        why = explain_unready(cluster, owner, is_access_line)
        raise UnavailableError(f"no pod of the cache is ready{f': {why}' if why else ''}", where=cluster)
    service = (cache_url(cluster.namespace),)
    caches = (
        service
        if len(pods) == 1
        else tuple(sorted(f"http://{_format_address(pod['status']['podIP'])}" for pod in pods))
    )
    origins = {entry["url"].rstrip("/"): entry["name"] for entry in _read_origins(config)}
    return WarmTarget(origins, _read_budget(config), caches)


def _format_address(address: str) -> str:
    return f"[{address}]:{CACHE_PORT}" if ":" in address else f"{address}:{CACHE_PORT}"


def run_warm_job(
    cluster: KubeClient,
    warm_job: WarmJob,
    *,
    patches: Sequence[Manifest] = (),
    on_read: Callable[[int], None] = lambda _: None,
    on_progress: ProgressCallback = lambda _: None,
) -> None:
    """Run the Job that reads every object once, and wait for it; `on_read` gets the index of each object."""
    config, job = build_warm_objects(warm_job, patches)
    previous = cluster.get("Job", warm_job.name)
    if previous is not None and _job_outcome(previous) is not None:
        cluster.delete("Job", warm_job.name, foreground=True)
        if not wait_deleted(cluster, "Job", warm_job.name, STOP_TIMEOUT_S):
            raise UnavailableError(f"the previous Job {warm_job.name} does not terminate", where=cluster)
        previous = None
    if previous is None:
        _create_job(cluster, config, job)
    try:
        _follow_job(cluster, warm_job, on_read, on_progress)
    except KeyboardInterrupt:
        cluster.delete("Job", warm_job.name)
        raise


def _create_job(cluster: KubeClient, config: Manifest, job: Manifest) -> None:
    """Create the Job, then its ConfigMap owned by it: the pod waits for that, and both are deleted together."""
    created = cluster.apply(job)
    try:
        cluster.apply(with_owner(config, created))
    except BaseException:
        cluster.delete("Job", job["metadata"]["name"])
        raise


def _follow_job(
    cluster: KubeClient, warm_job: WarmJob, on_read: Callable[[int], None], on_progress: ProgressCallback
) -> None:
    read: set[int] = set()
    failed: dict[int, str] = {}
    reported, failures = "", 0
    while True:
        try:
            job = cluster.get("Job", warm_job.name)
            outcome = None if job is None else _job_outcome(job)
            pods = cluster.list_objects("Pod", {JOB_NAME_LABEL: warm_job.name})
            for pod in sorted(pods, key=creation_time):
                for status, number, text in _read_progress(cluster, pod):
                    if status == "failed":
                        failed[number] = text
                    elif number not in read:
                        read.add(number)
                        on_read(number - 1)
            why = "" if outcome is not None else _explain_idle(cluster, job, pods)
            failures = 0
        except UnavailableError:
            failures += 1
            if failures >= MAX_POLL_FAILURES:
                raise
            time.sleep(POLL_S * failures)
            continue
        if job is None:
            raise UnavailableError("the Job was deleted", where=f"{cluster.url} {warm_job.name}")
        if outcome is not None:
            _check_outcome(outcome, len(read), failed, warm_job, cluster)
            return
        if why and why != reported:
            on_progress(reported := why)
        time.sleep(POLL_S)


def _check_outcome(outcome: str, read: int, failed: dict[int, str], warm_job: WarmJob, cluster: KubeClient) -> None:
    """Raise JobFailedError unless every object was read."""
    where = f"{cluster.url} {warm_job.name}"
    if not outcome:  # a replacement pod has read what an earlier one could not
        return
    if failed:
        number, text = min(failed.items())
        what = f"{warm_job.paths[number - 1]}: {text.strip() or 'read failed'}" if number else text
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        hint = "check that the origin has it and that the cluster can reach the origin"
        raise JobFailedError(f"{read:,} of {len(warm_job.paths):,} objects read; {what}{more}", where=where, hint=hint)
    raise JobFailedError(f"{read:,} of {len(warm_job.paths):,} objects read; {outcome}", where=where)


def _read_progress(cluster: KubeClient, pod: Manifest) -> Iterator[tuple[str, int, str]]:
    """Yield the progress lines of a warming pod until it exits; none if it has not started."""
    if not has_started(pod):
        return
    follow = pod["status"].get("phase") == "Running"
    with suppress(NotFoundError):  # deleted since it was listed, for example with its node
        for line in read_log(cluster, pod, follow=follow):
            status, number, text = [*line.decode(errors="replace").split(" ", 2), "", ""][:3]
            if status in ("read", "failed") and number.isdecimal():
                yield status, int(number), text


def _explain_idle(cluster: KubeClient, job: Manifest | None, pods: Sequence[Manifest]) -> str:
    events = list_events(cluster)
    if not pods:
        return explain_pending(job or {}, events)
    return next(filter(None, (explain_pending(pod, events) for pod in pods)), "")


def _job_outcome(job: Manifest) -> str | None:
    """Return None while a Job runs, "" if it succeeded, or else the reason."""
    if has_condition(job, "Failed"):
        failed = get_condition(job, "Failed")
        return str(failed.get("message") or failed.get("reason") or "Job failed")
    return "" if has_condition(job, "Complete") else None
