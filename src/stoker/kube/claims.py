"""PersistentVolumeClaims: list them, the pods that mount them, and whether they are bound or why not."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.core.units import format_bytes
from stoker.errors import AccessDeniedError, ConflictError, InputError, NotFoundError
from stoker.kube.conditions import FINISHED_PHASES, get_phase, is_terminating, newest_first
from stoker.kube.ephemeral_pod import list_events
from stoker.kube.objects import ACCESS_MODES, JOB_LABEL, PART_LABEL, RUN_LABEL, Manifest
from stoker.kube.pods import list_claim_names
from stoker.kube.quantity import quantity_to_bytes
from stoker.kube.storage_classes import WAIT_FOR_FIRST_CONSUMER, find_storage_class

if TYPE_CHECKING:
    from stoker.kube.client import KubeClient

CLAIM = "PersistentVolumeClaim"
MULTI_NODE_ACCESS_MODES = frozenset({ACCESS_MODES["rwx"], ACCESS_MODES["rox"]})
BIND_TIMEOUT_S = 10.0
"""How long to wait for a new claim to be bound before reporting why it is not."""
POLL_S = 0.25
NAME_RULE = "must be at most 253 lowercase letters, digits, '-' and '.'"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def format_access_modes(modes: Iterable[str]) -> str:
    """Format access modes as `--access` takes them."""
    abbreviations = {mode: short for short, mode in ACCESS_MODES.items()}
    return ",".join(abbreviations.get(mode, mode) for mode in modes)


# --- Names


def check_claim_name(name: str) -> None:
    """Raise InputError if a name is not a valid claim name."""
    if not is_object_name(name):
        raise InputError(f"{name!r} is not a valid volume name: {NAME_RULE}")


def is_object_name(name: object) -> bool:
    """Whether a name is a valid object name (DNS subdomain)."""
    return isinstance(name, str) and len(name) <= 253 and _NAME.fullmatch(name) is not None


# --- Mounts


@dataclass(frozen=True, slots=True, kw_only=True)
class MountingPod:
    """A pod that mounts a claim, or will once it runs."""

    pod: str
    job: str | None = None
    run: str | None = None
    part: str | None = None
    node: str | None = None

    def __str__(self) -> str:
        return f"pod {self.pod}" + (f" of job {self.job}" if self.job else "")


def find_mounting_pods(pods: Iterable[Manifest], name: str, *, finished: bool = False) -> list[MountingPod]:
    """List the pods that hold a claim, or those that have finished and only still exist."""
    mounting = (pod for pod in pods if name in _claim_names(pod) and (get_phase(pod) in FINISHED_PHASES) is finished)
    return sorted((_to_mounting_pod(pod) for pod in mounting), key=lambda mounting_pod: mounting_pod.pod)


def _claim_names(pod: Manifest) -> Iterator[str]:
    yield from list_claim_names(pod)
    for volume in (pod.get("spec") or {}).get("volumes") or ():
        if volume.get("ephemeral"):  # its claim is named after the pod and the volume, and deleted with the pod
            yield f"{pod['metadata']['name']}-{volume['name']}"


def _to_mounting_pod(pod: Manifest) -> MountingPod:
    labels: Mapping[str, str] = pod["metadata"].get("labels") or {}
    return MountingPod(
        pod=pod["metadata"]["name"],
        job=labels.get(JOB_LABEL),
        run=labels.get(RUN_LABEL),
        part=labels.get(PART_LABEL),
        node=pod["spec"].get("nodeName"),
    )


def check_mountable(client: KubeClient, specs: Iterable[Manifest], *, created: Collection[str] = ()) -> None:
    """Raise if a claim of pod specs does not exist, or is single-node and already mounted.

    `created` are claims that will be created with the pods.
    """
    names = [name for spec in specs for name in list_claim_names({"spec": spec}) if name not in created]
    if not names:
        return
    pods = client.list_objects("Pod")
    for name in dict.fromkeys(names):
        claim = client.get(CLAIM, name)
        if claim is None:
            hint = f"create it with: stoker volume create {name} --size 10Gi --on {client.url}"
            raise NotFoundError(f"claim {name} not found", where=client, hint=hint)
        if not is_shared(claim) and (holders := find_mounting_pods(pods, name)):
            what = f"claim {name} can be mounted on only one node, and {format_pod_names(holders)} is using it"
            raise ConflictError(what, where=client, hint=get_release_hint(holders))


def is_shared(claim: Manifest) -> bool:
    """Whether pods on several nodes can mount a claim."""
    return bool(MULTI_NODE_ACCESS_MODES & set(claim["spec"].get("accessModes") or ()))


def format_pod_names(pods: Sequence[MountingPod]) -> str:
    """Format the names of pods, at most three of them."""
    names = ", ".join(map(str, pods[:3]))
    return names if len(pods) <= 3 else f"{names} and {len(pods) - 3} more"


def get_release_hint(pods: Sequence[MountingPod]) -> str:
    """Return how to make pods release a claim."""
    pod = next((pod for pod in pods if pod.job), pods[0])
    if pod.job:
        return f"wait until the job has finished, or stop it: stoker job stop {pod.run or pod.job}"
    if pod.part == "inspector":
        return f"another `stoker volume inspect` is running; if its pod was left behind: kubectl delete pod {pod.pod}"
    return f"delete the pod first: kubectl delete pod {pod.pod}"


# --- Listing


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimInfo:
    """A claim, as `stoker volume list` shows it."""

    name: str
    size: int | None
    access: str
    storage_class: str | None
    phase: str
    volume: str | None
    mounted_by: tuple[MountingPod, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON output."""
        mounted_by = [
            {key: value for key, value in (("pod", pod.pod), ("job", pod.job), ("run", pod.run)) if value}
            for pod in self.mounted_by
        ]
        return {
            "name": self.name,
            "size": self.size,
            "access": self.access,
            "class": self.storage_class,
            "phase": self.phase,
            "volume": self.volume,
            "mounted_by": mounted_by,
        }


def get_claim_info(claim: Manifest, pods: Iterable[Manifest]) -> ClaimInfo:
    """Return what the list shows of a claim."""
    spec, name = claim["spec"], claim["metadata"]["name"]
    capacity = (claim.get("status") or {}).get("capacity") or {}
    return ClaimInfo(
        name=name,
        size=quantity_to_bytes(capacity.get("storage") or spec["resources"]["requests"]["storage"]),
        access=format_access_modes(spec.get("accessModes") or ()),
        storage_class=spec.get("storageClassName") or None,
        phase="Terminating" if is_terminating(claim) else get_phase(claim),
        volume=spec.get("volumeName"),
        mounted_by=tuple(find_mounting_pods(pods, name)),
    )


def list_claims(client: KubeClient) -> list[ClaimInfo]:
    """List the claims of the namespace by name."""
    claims = client.list_objects(CLAIM)
    pods = client.list_objects("Pod") if claims else []
    if not claims:
        _check_namespace_exists(client)
    return [get_claim_info(claim, pods) for claim in sorted(claims, key=lambda claim: str(claim["metadata"]["name"]))]


def _check_namespace_exists(client: KubeClient) -> None:
    """Raise NotFoundError if the namespace does not exist; pass if we are not allowed to read it."""
    try:
        namespace = client.get("Namespace", client.namespace)
    except AccessDeniedError:
        return
    if namespace is None:
        raise NotFoundError(f"namespace {client.namespace!r} not found", where=client)


def get_claim(client: KubeClient, name: str) -> Manifest:
    """Return a claim; raise NotFoundError with the existing ones if there is none."""
    check_claim_name(name)
    if (claim := client.get(CLAIM, name)) is not None:
        return claim
    known = sorted(str(claim["metadata"]["name"]) for claim in client.list_objects(CLAIM))
    hint = f"known: {', '.join(known)}" if known else f"create it with: stoker volume create {name} --size …"
    raise NotFoundError(f"volume {name!r} not found", where=client, hint=hint)


# --- Binding


def wait_until_bound(
    client: KubeClient, name: str, classes: Sequence[Manifest] | None, seconds: float
) -> tuple[Manifest, str]:
    """Wait until a claim is bound, fails, or waits for a pod; return it and a sentence about its state."""
    deadline = time.monotonic() + seconds
    while True:
        claim = get_claim(client, name)
        is_bound = get_phase(claim) == "Bound"
        events = [] if is_bound else list(newest_first(list_events(client, claim)))
        is_final = is_bound or waits_for_first_consumer(claim, classes) or any(map(is_warning, events))
        if is_final or time.monotonic() >= deadline:
            return claim, describe_binding(claim, events, classes)
        time.sleep(POLL_S)


def is_warning(event: Manifest) -> bool:
    """Whether an event is of type Warning."""
    return event.get("type") == "Warning"


def waits_for_first_consumer(claim: Manifest, classes: Sequence[Manifest] | None) -> bool:
    """Whether a claim is bound only once a pod mounts it."""
    storage_class = find_storage_class(classes, claim["spec"].get("storageClassName")) or {}
    return storage_class.get("volumeBindingMode") == WAIT_FOR_FIRST_CONSUMER and not claim["spec"].get("volumeName")


def describe_binding(claim: Manifest, events: Sequence[Manifest], classes: Sequence[Manifest] | None) -> str:
    """Return whether a claim is bound, and if not, why; `events` are sorted, newest first."""
    name, phase, spec = claim["metadata"]["name"], get_phase(claim), claim["spec"]
    if phase == "Bound":
        size = quantity_to_bytes(((claim["status"].get("capacity") or {}).get("storage")) or 0) or 0
        return f"volume {name} is bound to PersistentVolume {spec.get('volumeName')} ({format_bytes(size)})"
    if phase == "Lost":
        return f"volume {name} is lost: its PersistentVolume {spec.get('volumeName')} was deleted"
    if warnings := [event for event in events if is_warning(event)]:
        return f"volume {name} is not bound: {_to_line(str(warnings[0].get('message')))}"
    if waits_for_first_consumer(claim, classes):
        return f"volume {name} will be bound when the first pod mounts it ({WAIT_FOR_FIRST_CONSUMER})"
    if spec.get("volumeName"):
        return f"volume {name} is not bound to PersistentVolume {spec['volumeName']} yet"
    detail = f": {_to_line(str(events[0].get('message')))}" if events else ""
    return f"volume {name} is not bound yet{detail}"


def _to_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")[:300]
