"""Rollouts: wait until the pods of a Deployment or StatefulSet are ready, and explain why they are not."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from stoker.errors import StokerError, UnavailableError
from stoker.kube.client import KubeClient
from stoker.kube.conditions import filter_events, get_condition, has_condition, is_terminating
from stoker.kube.ephemeral_pod import list_events
from stoker.kube.objects import LABEL_DOMAIN, MAIN_CONTAINER, Manifest, strategic_merge
from stoker.kube.pending import explain_pending
from stoker.kube.pods import main_container_status

READY_TIMEOUT_S = 180.0
MAX_RESTARTS = 3
"""Restarts of a container after which waiting for it is pointless."""
POLL_S = 1.0
CONFIG_ANNOTATION = f"{LABEL_DOMAIN}/config"

ProgressCallback = Callable[[str], None]
LineFilter = Callable[[bytes], bool]
"""Whether a line of a log says nothing about a failure, as those of an access log."""


def annotate_config(workload: Manifest, config: Any = None) -> Manifest:
    """Annotate the pods with a hash of their configuration: a change starts new pods, recognizable as such."""
    content = json.dumps([config, workload["spec"]["template"]["spec"]], sort_keys=True)
    annotation = {CONFIG_ANNOTATION: hashlib.sha256(content.encode()).hexdigest()}
    annotated: Manifest = strategic_merge(workload, {"spec": {"template": {"metadata": {"annotations": annotation}}}})
    return annotated


def pod_version(template: Manifest) -> str:
    """Return the configuration hash of a pod or pod template."""
    return str((template["metadata"].get("annotations") or {}).get(CONFIG_ANNOTATION) or "")


def wait_ready(
    cluster: KubeClient,
    kind: str,
    name: str,
    *,
    what: str,
    hint: str,
    timeout_s: float = READY_TIMEOUT_S,
    on_progress: ProgressCallback = lambda _: None,
    is_noise: LineFilter = lambda _: False,
) -> None:
    """Wait until every pod is ready; raise with the reason if that fails. `what` names the workload in errors."""
    deadline, reported, next_check = time.monotonic() + timeout_s, "", 0.0
    while True:
        owner = cluster.get(kind, name)
        if owner is None:
            raise UnavailableError(f"{what} was deleted", where=cluster)
        ready, expected = count_ready_pods(owner)
        if ready == expected:
            return
        late = time.monotonic() > deadline
        if late or time.monotonic() > next_check:  # the explanation needs several API requests
            next_check = time.monotonic() + 3 * POLL_S
            why = explain_unready(cluster, owner, is_noise)
            state = f"{ready} of {expected} pods are ready{f': {why}' if why else ''}"
            if late or has_failed_permanently(cluster, owner):
                raise UnavailableError(f"{what} is not ready: {state}", where=cluster, hint=hint)
            if state != reported:
                on_progress(reported := state)
        time.sleep(POLL_S)


def count_ready_pods(owner: Manifest) -> tuple[int, int]:
    """Return the ready pods of the current version, 0 until the controller has observed it, and the expected number."""
    status, expected = owner.get("status") or {}, int(owner["spec"].get("replicas", 1))
    if status.get("observedGeneration", 0) < owner["metadata"].get("generation", 0):
        return 0, expected
    # Pods of the previous version are counted as ready until they are gone.
    new, total = int(status.get("updatedReplicas") or 0), int(status.get("replicas") or 0)
    ready = int(status.get("readyReplicas") or 0)
    return max(0, min(new, ready - (total - new))), expected


def explain_unready(cluster: KubeClient, owner: Manifest, is_noise: LineFilter = lambda _: False) -> str:
    """Return why pods of the current version are not ready; empty if nothing is known."""
    pods = [pod for pod in _list_current_pods(cluster, owner) if not is_ready(pod)]
    events = list_events(cluster)
    if not pods:
        return _explain_missing_pods(owner, events)
    sentences = (explain_pod(cluster, pod, events, is_noise) for pod in sorted(pods, key=creation_time, reverse=True))
    return next(filter(None, sentences), "")


def explain_pod(
    cluster: KubeClient, pod: Manifest, events: Sequence[Manifest], is_noise: LineFilter = lambda _: False
) -> str:
    """Return why a pod is not ready, with the last line of its log if that helps."""
    why = explain_pending(pod, events)
    if not has_started(pod):
        return why
    last = _last_log_line(cluster, pod, is_noise)
    if not why and (end := (main_container_status(pod).get("lastState") or {}).get("terminated")):
        why = f"exited with code {end.get('exitCode')}"
    if not why and any(event.get("reason") == "Unhealthy" for event in filter_events(pod, "Pod", events)):
        why = "running, but not responding"
    return ": ".join(part for part in (why, last) if part) if why else ""


def _explain_missing_pods(owner: Manifest, events: Sequence[Manifest]) -> str:
    """Return why a Deployment or StatefulSet has no pods, from its condition or the events of its ReplicaSets."""
    if has_condition(owner, "ReplicaFailure"):
        message = get_condition(owner, "ReplicaFailure").get("message")
        return explain_pending({}, [{"reason": "FailedCreate", "message": message}])
    from_sets = [event for event in events if event["involvedObject"].get("kind") == "ReplicaSet"]
    own_sets = [
        event for event in from_sets if event["involvedObject"]["name"].startswith(f"{owner['metadata']['name']}-")
    ]
    return explain_pending({}, [*filter_events(owner, owner["kind"], events), *own_sets])


def _list_current_pods(cluster: KubeClient, owner: Manifest) -> list[Manifest]:
    """List the pods of the current version; previous ones may be the broken ones being replaced."""
    version = pod_version(owner["spec"]["template"])
    return [
        pod
        for pod in cluster.list_objects("Pod", owner["spec"]["selector"]["matchLabels"])
        if pod_version(pod) == version and not is_terminating(pod)
    ]


def has_failed_permanently(cluster: KubeClient, owner: Manifest) -> bool:
    """Return whether waiting is pointless: a container keeps crashing, or its image name is invalid."""
    for pod in _list_current_pods(cluster, owner):
        status = main_container_status(pod)
        waiting = (status.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in ("InvalidImageName", "ErrImageNeverPull"):
            return True
        if waiting and int(status.get("restartCount") or 0) >= MAX_RESTARTS:
            return True
    return False


def _last_log_line(cluster: KubeClient, pod: Manifest, is_noise: LineFilter) -> str:
    last = b""
    with suppress(StokerError):
        for line in read_log(cluster, pod):
            if line.strip() and not is_noise(line):
                last = line
    return last.decode(errors="replace").strip()[:200]


def read_log(cluster: KubeClient, pod: Manifest, *, follow: bool = False) -> Iterator[bytes]:
    """Yield the lines of a pod's log, without timestamps."""
    for stamped in cluster.stream_log(pod["metadata"]["name"], MAIN_CONTAINER, follow=follow):
        yield stamped.rstrip(b"\n").partition(b" ")[2]


def has_started(pod: Manifest) -> bool:
    """Return whether the container was started at least once, so that it has a log."""
    status = main_container_status(pod)
    state = {**(status.get("lastState") or {}), **(status.get("state") or {})}
    return "running" in state or "terminated" in state


def is_ready(pod: Manifest) -> bool:
    """Return whether the container passes its readiness probe."""
    return bool(main_container_status(pod).get("ready"))


def creation_time(pod: Manifest) -> str:
    """Return the creation time, which sorts as text."""
    return str(pod["metadata"].get("creationTimestamp") or "")
