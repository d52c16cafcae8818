"""The cache of a namespace as it is there: made, awaited, looked at, filled and removed."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from stoker.errors import InputError, JobFailedError, NotFoundError, StokerError, UnavailableError
from stoker.kube.client import Cluster
from stoker.kube.conditions import condition, holds, is_ending, own
from stoker.kube.ephemeral_pod import events_of, wait_gone
from stoker.kube.objects import CACHE, CACHE_PORT, CONTAINER, Manifest, owned, via_url
from stoker.kube.pods import main_status, why_pending
from stoker.kube.quantity import quantity
from stoker.serve.cluster.manifests import KINDS, OURS, SERVER, Filling, check_claim, filling_objects, version_of
from stoker.serve.nginx.engine import count

READY_S = 180.0
STOP_S = 120.0
HOPELESS = 3
"""Times that a container may end before nobody waits for it any more."""
BROKEN = 5
"""Times in a row that a question may fail while a Job is followed."""
POLL_S = 1.0
JOB_NAME = "batch.kubernetes.io/job-name"

Tell = Callable[[str], None]


# --- Make


def claimed_size(cluster: Cluster, name: str, replicas: int) -> int:
    """Give what each pod may use of a claim; refuse one that is not there, or that the pods cannot write to."""
    found = cluster.get("PersistentVolumeClaim", name)
    if found is None:
        there = ", ".join(one["metadata"]["name"] for one in cluster.every("PersistentVolumeClaim"))
        hint = f"there are {there}" if there else f"make it with: stoker volume create {name} --size 200Gi"
        raise NotFoundError(f"there is no claim {name}", where=cluster, hint=hint)
    check_claim(found, replicas)
    asked = found["spec"]["resources"]["requests"]["storage"]
    has = ((found.get("status") or {}).get("capacity") or {}).get("storage") or asked
    return int(quantity(has)) // replicas


def deploy(cluster: Cluster, objects: Sequence[Manifest]) -> None:
    """Make or change the objects; what keeps the pods of a former kind running goes.

    The server looks at all of them first: a wish that it refuses leaves the cache that is there as it is.
    """
    for one in objects:
        _show(cluster, one)
    for kind in {"Deployment", "StatefulSet"} - {one["kind"] for one in objects}:
        cluster.delete(kind, CACHE)
    for one in objects:
        cluster.apply(one)


def _show(cluster: Cluster, one: Manifest) -> None:
    try:
        cluster.apply(one, dry_run=True)
    except InputError as error:
        if one["kind"] != "StatefulSet" or not re.search("are forbidden|field is immutable", error.what):
            raise
        hint = "remove it first: stoker data cache --on k8s --stop"
        raise InputError("a cache's claims cannot be changed", where=cluster, hint=hint) from error


def await_ready(cluster: Cluster, kind: str, *, timeout_s: float = READY_S, tell: Tell = lambda _: None) -> None:
    """Wait until every pod of the cache answers; else say why not."""
    deadline, told, next_look = time.monotonic() + timeout_s, "", 0.0
    while True:
        owner = cluster.get(kind, CACHE)
        if owner is None:
            raise UnavailableError("somebody has removed the cache", where=cluster)
        ready, wanted = readiness(owner)
        if ready == wanted:
            return
        late = time.monotonic() > deadline
        if late or time.monotonic() > next_look:  # why asks for more than it is nice to ask for each second
            next_look = time.monotonic() + 3 * POLL_S
            why = _why_unready(cluster, owner)
            state = f"{ready} of {wanted} pods answer{f': {why}' if why else ''}"
            if late or _is_hopeless(cluster, owner):
                hint = "see `stoker data cache --on k8s --status`; --stop removes it"
                raise UnavailableError(f"the cache is not ready: {state}", where=cluster, hint=hint)
            if state != told:
                tell(told := state)
        time.sleep(POLL_S)


def readiness(owner: Manifest) -> tuple[int, int]:
    """Tell how many pods of the newest version answer, and how many should; none before the cluster has seen it."""
    status, wanted = owner.get("status") or {}, int(owner["spec"].get("replicas", 1))
    if status.get("observedGeneration", 0) < owner["metadata"].get("generation", 0):
        return 0, wanted
    # Pods of the former version answer too, until they are gone.
    new, every = int(status.get("updatedReplicas") or 0), int(status.get("replicas") or 0)
    ready = int(status.get("readyReplicas") or 0)
    return max(0, min(new, ready - (every - new))), wanted


def _why_unready(cluster: Cluster, owner: Manifest) -> str:
    pods = [pod for pod in _newest(cluster, owner) if not _is_ready(pod)]
    events = events_of(cluster)
    if not pods:
        return _why_no_pods(owner, events)
    sentences = (_why(cluster, pod, events) for pod in sorted(pods, key=_age, reverse=True))
    return next(filter(None, sentences), "")


def _why(cluster: Cluster, pod: Manifest, events: Sequence[Manifest]) -> str:
    """Tell why a pod does not answer, with the last words of its log where those tell more."""
    why = why_pending(pod, events)
    if not _has_run(pod):
        return why
    last = _last_line(cluster, pod)
    if not why and (end := (main_status(pod).get("lastState") or {}).get("terminated")):
        why = f"it ended with exit code {end.get('exitCode')}"
    if not why and any(one.get("reason") == "Unhealthy" for one in own(pod, "Pod", events)):
        why = "it runs and does not answer"
    return ": ".join(part for part in (why, last) if part) if why else ""


def _why_no_pods(owner: Manifest, events: Sequence[Manifest]) -> str:
    if holds(owner, "ReplicaFailure"):
        said = condition(owner, "ReplicaFailure").get("message")
        return why_pending({}, [{"reason": "FailedCreate", "message": said}])
    sets = [one for one in events if one["involvedObject"].get("kind") == "ReplicaSet"]
    makers = [one for one in sets if one["involvedObject"]["name"].startswith(f"{CACHE}-")]
    return why_pending({}, [*own(owner, owner["kind"], events), *makers])


def _newest(cluster: Cluster, owner: Manifest) -> list[Manifest]:
    """Give the pods of the newest version: the former ones may be what is being repaired."""
    version = version_of(owner["spec"]["template"])
    return [pod for pod in cluster.every("Pod", SERVER) if version_of(pod) == version and not is_ending(pod)]


def _is_hopeless(cluster: Cluster, owner: Manifest) -> bool:
    """Tell whether waiting will not help: it was started some times and ended each time, or its image has no name."""
    for pod in _newest(cluster, owner):
        status = main_status(pod)
        waiting = (status.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in ("InvalidImageName", "ErrImageNeverPull"):
            return True
        if waiting and int(status.get("restartCount") or 0) >= HOPELESS:
            return True
    return False


def _last_line(cluster: Cluster, pod: Manifest) -> str:
    """Give the last line that is no count of nginx's, without its time."""
    totals: Counter[str] = Counter()
    last = ""
    with suppress(StokerError):
        for line in _lines(cluster, pod):
            before = sum(totals.values())
            count(line, totals)
            if sum(totals.values()) == before and line.strip():
                last = line.decode(errors="replace").strip()
    return last[:200]


# --- Look


@dataclass(frozen=True, kw_only=True)
class PodState:
    """One pod of the cache; `log` counts what its log tells, as far back as the cluster keeps it."""

    name: str
    node: str | None
    ready: bool
    restarts: int
    why: str
    log: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class CacheState:
    """A namespace's cache."""

    url: str
    kind: str
    image: str
    ready: int
    replicas: int
    budget: int
    """Of each pod."""
    origins: list[dict[str, str]]
    pods: list[PodState]


COUNTS = ("requests", "bytes", "errors", "hits", "misses", "origin_bytes")


def look(cluster: Cluster) -> CacheState:
    """Tell how the cache of a namespace is."""
    config, owner = _deployed(cluster)
    ready, wanted = readiness(owner)
    events = events_of(cluster)
    container = next(one for one in owner["spec"]["template"]["spec"]["containers"] if one["name"] == CONTAINER)
    return CacheState(
        url=via_url(cluster.namespace),
        kind=owner["kind"],
        image=container["image"],
        ready=ready,
        replicas=wanted,
        budget=_budget(config),
        origins=_origins(config),
        pods=[_pod_state(cluster, pod, events) for pod in cluster.every("Pod", SERVER)],
    )


def _pod_state(cluster: Cluster, pod: Manifest, events: Sequence[Manifest]) -> PodState:
    ready = _is_ready(pod) and not is_ending(pod)
    return PodState(
        name=pod["metadata"]["name"],
        node=pod["spec"].get("nodeName"),
        ready=ready,
        restarts=int(main_status(pod).get("restartCount") or 0),
        why="" if ready else "it is being ended" if is_ending(pod) else _why(cluster, pod, events),
        log=_counts(cluster, pod) if _has_run(pod) else {},
    )


def _lines(cluster: Cluster, pod: Manifest, *, follow: bool = False) -> Iterator[bytes]:
    """Give the lines of a pod's log, without their times and ends."""
    for stamped in cluster.log(pod["metadata"]["name"], CONTAINER, follow=follow):
        yield stamped.rstrip(b"\n").partition(b" ")[2]


def _counts(cluster: Cluster, pod: Manifest) -> dict[str, int]:
    totals: Counter[str] = Counter()
    with suppress(StokerError):
        for line in _lines(cluster, pod):
            count(line, totals)
    return {name: totals[name] for name in COUNTS}


def _deployed(cluster: Cluster) -> tuple[Manifest, Manifest]:
    config = cluster.get("ConfigMap", CACHE)
    owner = cluster.get("Deployment", CACHE) or cluster.get("StatefulSet", CACHE)
    if config is None or owner is None:
        hint = "make one: stoker data cache --on k8s --origin URL --size 200Gi"
        raise NotFoundError("there is no cache in this namespace", where=cluster, hint=hint)
    return config, owner


def _budget(config: Manifest) -> int:
    return int(json.loads(config["data"]["stats.json"])["budget"])


def _origins(config: Manifest) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(config["data"]["origins.json"])
    return found


# --- Remove


def remove(cluster: Cluster, *, timeout_s: float = STOP_S) -> list[str]:
    """Remove all that belongs to the cache, and wait until its pods are gone; give what it was."""
    found = [f"{kind} {one['metadata']['name']}" for kind in KINDS for one in cluster.every(kind, OURS)]
    for kind in dict.fromkeys(one.split(" ")[0] for one in found):
        cluster.delete_all(kind, OURS)
    deadline = time.monotonic() + timeout_s
    while left := [pod["metadata"]["name"] for pod in cluster.every("Pod", OURS)]:
        if time.monotonic() > deadline:
            raise UnavailableError(f"pod {left[0]} does not end", where=cluster, hint="is its node up?")
        time.sleep(POLL_S)
    return found


# --- Fill


@dataclass(frozen=True)
class Target:
    """What a cache that is to be filled has: its origins' names by URL, its size, and where its pods answer."""

    origins: dict[str, str]
    budget: int
    caches: tuple[str, ...]


def target(cluster: Cluster) -> Target:
    """Find the cache to be filled; several pods each have a store of their own, and are filled one by one."""
    config, owner = _deployed(cluster)
    pods = [pod for pod in cluster.every("Pod", SERVER) if _is_ready(pod) and not is_ending(pod)]
    if not pods:
        why = _why_unready(cluster, owner)
        raise UnavailableError(f"no pod of the cache answers{f': {why}' if why else ''}", where=cluster)
    one = (via_url(cluster.namespace),)
    caches = one if len(pods) == 1 else tuple(sorted(f"http://{_host(pod['status']['podIP'])}" for pod in pods))
    origins = {entry["url"].rstrip("/"): entry["name"] for entry in _origins(config)}
    return Target(origins, _budget(config), caches)


def _host(address: str) -> str:
    return f"[{address}]:{CACHE_PORT}" if ":" in address else f"{address}:{CACHE_PORT}"


def fill(
    cluster: Cluster,
    filling: Filling,
    *,
    patches: Sequence[Manifest] = (),
    done: Callable[[int], None] = lambda _: None,
    tell: Tell = lambda _: None,
) -> None:
    """Run the Job that reads everything once, and wait for it; `done` is told the place of each that was read."""
    config, job = filling_objects(filling, patches)
    former = cluster.get("Job", filling.name)
    if former is not None and _outcome(former) is not None:
        cluster.delete("Job", filling.name, foreground=True)
        if not wait_gone(cluster, "Job", filling.name, STOP_S):
            raise UnavailableError(f"the former Job {filling.name} does not end", where=cluster)
        former = None
    if former is None:
        _begin(cluster, config, job)
    try:
        _follow(cluster, filling, done, tell)
    except KeyboardInterrupt:
        cluster.delete("Job", filling.name)
        raise


def _begin(cluster: Cluster, config: Manifest, job: Manifest) -> None:
    """Make the Job, and then its list as the Job's own: its pod waits for that, and nothing stays without the other."""
    made = cluster.apply(job)
    try:
        cluster.apply(owned(config, made))
    except BaseException:
        cluster.delete("Job", job["metadata"]["name"])
        raise


def _follow(cluster: Cluster, filling: Filling, done: Callable[[int], None], tell: Tell) -> None:
    read: set[int] = set()
    failed: dict[int, str] = {}
    told, broken = "", 0
    while True:
        try:
            job = cluster.get("Job", filling.name)
            outcome = None if job is None else _outcome(job)
            pods = cluster.every("Pod", {JOB_NAME: filling.name})
            for pod in sorted(pods, key=_age):
                for word, number, text in _words(cluster, pod):
                    if word == "failed":
                        failed[number] = text
                    elif number not in read:
                        read.add(number)
                        done(number - 1)
            why = "" if outcome is not None else _why_idle(cluster, job, pods)
            broken = 0
        except UnavailableError:
            broken += 1
            if broken >= BROKEN:
                raise
            time.sleep(POLL_S * broken)
            continue
        if job is None:
            raise UnavailableError("somebody has removed the Job", where=f"{cluster.url} {filling.name}")
        if outcome is not None:
            _judge(outcome, len(read), failed, filling, cluster)
            return
        if why and why != told:
            tell(told := why)
        time.sleep(POLL_S)


def _judge(outcome: str, read: int, failed: dict[int, str], filling: Filling, cluster: Cluster) -> None:
    """Refuse an end that is not the end of everything."""
    where = f"{cluster.url} {filling.name}"
    if not outcome:  # what a pod could not read before it was replaced, another has read
        return
    if failed:
        number, text = min(failed.items())
        what = f"{filling.paths[number - 1]}: {text.strip() or 'it could not be read'}" if number else text
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        hint = "does the origin have it, and can the cluster reach it? `stoker data cache --on k8s --status` tells more"
        raise JobFailedError(f"{read:,} of {len(filling.paths):,} were read; {what}{more}", where=where, hint=hint)
    raise JobFailedError(f"{read:,} of {len(filling.paths):,} were read; {outcome}", where=where)


def _words(cluster: Cluster, pod: Manifest) -> Iterator[tuple[str, int, str]]:
    """Read what a filling pod says, until it ends; nothing if it has not begun."""
    if not _has_run(pod):
        return
    follow = pod["status"].get("phase") == "Running"
    with suppress(NotFoundError):  # it was deleted since it was listed, with its node for example
        for line in _lines(cluster, pod, follow=follow):
            word, number, text = [*line.decode(errors="replace").split(" ", 2), "", ""][:3]
            if word in ("read", "failed") and number.isdecimal():
                yield word, int(number), text


def _why_idle(cluster: Cluster, job: Manifest | None, pods: Sequence[Manifest]) -> str:
    events = events_of(cluster)
    if not pods:
        return why_pending(job or {}, events)
    return next(filter(None, (why_pending(pod, events) for pod in pods)), "")


def _outcome(job: Manifest) -> str | None:
    """Tell how a Job ended: "" well, else why not; None: it has not."""
    if holds(job, "Failed"):
        failed = condition(job, "Failed")
        return str(failed.get("message") or failed.get("reason") or "it failed")
    return "" if holds(job, "Complete") else None


# --- Reading objects


def _has_run(pod: Manifest) -> bool:
    """Tell whether its container has begun at least once, so that it has a log."""
    status = main_status(pod)
    state = {**(status.get("lastState") or {}), **(status.get("state") or {})}
    return "running" in state or "terminated" in state


def _is_ready(pod: Manifest) -> bool:
    return bool(main_status(pod).get("ready"))


def _age(pod: Manifest) -> str:
    return str(pod["metadata"].get("creationTimestamp") or "")
