"""Claims as they are: who mounts them, whether they are bound and what they wait for."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.core.units import format_bytes
from stoker.errors import AccessError, ConflictError, InputError, NotFoundError
from stoker.kube.conditions import FINISHED_PHASES, get_phase, is_terminating, newest_first
from stoker.kube.ephemeral_pod import list_events
from stoker.kube.objects import ACCESS_MODES, JOB_LABEL, PART_LABEL, RUN_LABEL, Manifest
from stoker.kube.pods import list_claim_names
from stoker.kube.quantity import quantity_to_bytes

if TYPE_CHECKING:
    from stoker.kube.client import KubeClient

CLAIM = "PersistentVolumeClaim"
FIRST_CONSUMER = "WaitForFirstConsumer"
MULTI_NODE_ACCESS_MODES = frozenset({ACCESS_MODES["rwx"], ACCESS_MODES["rox"]})
"""Access modes of what pods on several nodes can mount."""
SINGLE_NODE_PROVISIONERS = (
    "cinder.csi.openstack.org",
    "disk.csi.azure.com",
    "ebs.csi.aws.com",
    "kubernetes.io/aws-ebs",
    "kubernetes.io/azure-disk",
    "kubernetes.io/gce-pd",
    "pd.csi.storage.gke.io",
)
"""Provisioners of disks, which never are on several nodes at once to be written to."""
BIND_TIMEOUT_S = 10.0
"""How long a new claim may take to be bound before it is told what it waits for."""
POLL_S = 0.25
NAME_RULE = "expected lower-case letters, digits, - and ., at most 253 of them"
_DEFAULT = ("storageclass.kubernetes.io/is-default-class", "storageclass.beta.kubernetes.io/is-default-class")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


# --- Words


def format_access_modes(modes: Iterable[str]) -> str:
    """Write access modes as `--access` takes them."""
    words = {long: short for short, long in ACCESS_MODES.items()}
    return ",".join(words.get(mode, mode) for mode in modes)


# --- Claims as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class MountingPod:
    """A pod that mounts a claim, or will."""

    pod: str
    job: str | None = None
    run: str | None = None
    part: str | None = None
    node: str | None = None

    def __str__(self) -> str:
        return f"pod {self.pod}" + (f" of job {self.job}" if self.job else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimInfo:
    """A claim, as the list shows it."""

    name: str
    size: int | None
    access: str
    storage_class: str | None
    phase: str
    volume: str | None
    mounted_by: tuple[MountingPod, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Give it for JSON."""
        mounters = [
            {key: value for key, value in (("pod", one.pod), ("job", one.job), ("run", one.run)) if value}
            for one in self.mounted_by
        ]
        return {
            "name": self.name,
            "size": self.size,
            "access": self.access,
            "class": self.storage_class,
            "phase": self.phase,
            "volume": self.volume,
            "mounted_by": mounters,
        }


def find_mounting_pods(pods: Iterable[Manifest], name: str, *, finished: bool = False) -> list[MountingPod]:
    """List the pods that hold a claim, or those that ended and are only not forgotten yet."""
    holding = (pod for pod in pods if name in _claims(pod) and (get_phase(pod) in FINISHED_PHASES) is finished)
    return sorted((_mounter(pod) for pod in holding), key=lambda one: one.pod)


def _claims(pod: Manifest) -> Iterator[str]:
    yield from list_claim_names(pod)
    for one in (pod.get("spec") or {}).get("volumes") or ():
        if one.get("ephemeral"):  # a claim that lives as long as its pod, named after both
            yield f"{pod['metadata']['name']}-{one['name']}"


def _mounter(pod: Manifest) -> MountingPod:
    labels: Mapping[str, str] = pod["metadata"].get("labels") or {}
    name, node = pod["metadata"]["name"], pod["spec"].get("nodeName")
    return MountingPod(
        pod=name, job=labels.get(JOB_LABEL), run=labels.get(RUN_LABEL), part=labels.get(PART_LABEL), node=node
    )


def check_mountable(cluster: KubeClient, specs: Iterable[Manifest], *, created: Collection[str] = ()) -> None:
    """Refuse claims of pods that are not there, nor made along with them, or that one node alone can have and has."""
    names = [name for spec in specs for name in list_claim_names({"spec": spec}) if name not in created]
    if not names:
        return
    pods = cluster.list_objects("Pod")
    for name in dict.fromkeys(names):
        found = cluster.get(CLAIM, name)
        if found is None:
            hint = f"make it with: stoker volume create {name} --size 10Gi --on {cluster.url}"
            raise NotFoundError(f"there is no claim {name}", where=cluster, hint=hint)
        if not is_shared(found) and (holders := find_mounting_pods(pods, name)):
            what = f"claim {name} is mounted by {format_pod_names(holders)}, and one node alone can have it"
            raise ConflictError(what, where=cluster, hint=get_release_hint(holders))


def is_shared(one: Manifest) -> bool:
    """Whether pods on several nodes can mount a claim."""
    return bool(MULTI_NODE_ACCESS_MODES & set(one["spec"].get("accessModes") or ()))


def get_claim_info(one: Manifest, pods: Iterable[Manifest]) -> ClaimInfo:
    """Give what the list shows of a claim."""
    spec = one["spec"]
    name = one["metadata"]["name"]
    size = ((one.get("status") or {}).get("capacity") or {}).get("storage") or spec["resources"]["requests"]["storage"]
    return ClaimInfo(
        name=name,
        size=quantity_to_bytes(size),
        access=format_access_modes(spec.get("accessModes") or ()),
        storage_class=spec.get("storageClassName") or None,
        phase="Terminating" if is_terminating(one) else get_phase(one),
        volume=spec.get("volumeName"),
        mounted_by=tuple(find_mounting_pods(pods, name)),
    )


def list_claims(cluster: KubeClient) -> list[ClaimInfo]:
    """List the claims of the namespace."""
    claims = cluster.list_objects(CLAIM)
    pods = cluster.list_objects("Pod") if claims else []
    if not claims:
        _need_namespace(cluster)
    return [get_claim_info(one, pods) for one in sorted(claims, key=lambda one: str(one["metadata"]["name"]))]


def _need_namespace(cluster: KubeClient) -> None:
    """Tell a namespace that is empty from one that does not exist, where we may know."""
    try:
        found = cluster.get("Namespace", cluster.namespace)
    except AccessError:
        return
    if found is None:
        raise NotFoundError(f"there is no namespace {cluster.namespace!r}", where=cluster)


def get_claim(cluster: KubeClient, name: str) -> Manifest:
    """Give a claim, or say which there are."""
    check_claim_name(name)
    if (found := cluster.get(CLAIM, name)) is not None:
        return found
    known = sorted(str(one["metadata"]["name"]) for one in cluster.list_objects(CLAIM))
    hint = f"known: {', '.join(known)}" if known else f"make it with: stoker volume create {name} --size …"
    raise NotFoundError(f"there is no volume {name!r}", where=cluster, hint=hint)


def check_claim_name(name: str) -> None:
    """Refuse what can be no claim's name."""
    if not is_object_name(name):
        raise InputError(f"{name!r} is no name of a volume: {NAME_RULE}")


def is_object_name(name: object) -> bool:
    """Whether it can be the name of an object."""
    return isinstance(name, str) and len(name) <= 253 and _NAME.fullmatch(name) is not None


# --- Classes


def find_storage_class(classes: Sequence[Manifest] | None, name: str | None) -> Manifest | None:
    """Give the class of a name."""
    return next((one for one in classes or () if one["metadata"]["name"] == name), None)


def find_default_storage_class(classes: Sequence[Manifest]) -> Manifest | None:
    """Give the class of claims that name none: of several defaults, the newest."""
    marked = [
        one for one in classes if any((one["metadata"].get("annotations") or {}).get(key) == "true" for key in _DEFAULT)
    ]
    return max(marked, key=lambda one: str(one["metadata"].get("creationTimestamp")), default=None)


# --- Whether they are bound


def wait_until_bound(
    cluster: KubeClient, name: str, classes: Sequence[Manifest] | None, seconds: float
) -> tuple[Manifest, str]:
    """Wait a little for a claim to be bound; give it, and in a sentence how it is with it."""
    deadline = time.monotonic() + seconds
    while True:
        one = get_claim(cluster, name)
        events = [] if get_phase(one) == "Bound" else list(newest_first(list_events(cluster, one)))
        is_final = get_phase(one) == "Bound" or waits_for_first_consumer(one, classes) or any(map(is_warning, events))
        if is_final or time.monotonic() >= deadline:
            return one, describe_binding(one, events, classes)
        time.sleep(POLL_S)


def is_warning(event: Manifest) -> bool:
    """Whether an event tells of a fault."""
    return event.get("type") == "Warning"


def waits_for_first_consumer(one: Manifest, classes: Sequence[Manifest] | None) -> bool:
    """Whether a claim gets its volume with the first pod that mounts it."""
    kind = find_storage_class(classes, one["spec"].get("storageClassName"))
    return (kind or {}).get("volumeBindingMode") == FIRST_CONSUMER and not one["spec"].get("volumeName")


def describe_binding(one: Manifest, events: Sequence[Manifest], classes: Sequence[Manifest] | None) -> str:
    """Say whether a claim is bound, and if not, what it waits for; of its events, the newest comes first."""
    name, phase, spec = one["metadata"]["name"], get_phase(one), one["spec"]
    if phase == "Bound":
        size = quantity_to_bytes(((one["status"].get("capacity") or {}).get("storage")) or 0) or 0
        return f"volume {name} is bound to PersistentVolume {spec.get('volumeName')} ({format_bytes(size)})"
    if phase == "Lost":
        return f"volume {name} has lost its PersistentVolume {spec.get('volumeName')}: it was deleted"
    if warnings := [event for event in events if is_warning(event)]:
        return f"volume {name} is not bound: {_one_line(str(warnings[0].get('message')))}"
    if waits_for_first_consumer(one, classes):
        return f"volume {name} waits for the first pod that mounts it, as its class says ({FIRST_CONSUMER})"
    if spec.get("volumeName"):
        return f"volume {name} waits to be bound to PersistentVolume {spec['volumeName']}"
    said = f": {_one_line(str(events[0].get('message')))}" if events else ""
    return f"volume {name} is not bound yet{said}"


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")[:300]


def format_pod_names(holders: Sequence[MountingPod]) -> str:
    """Name pods, the first few of them."""
    first = ", ".join(map(str, holders[:3]))
    return first if len(holders) <= 3 else f"{first} and {len(holders) - 3} more"


def get_release_hint(holders: Sequence[MountingPod]) -> str:
    """Say how to make pods let go of a claim."""
    one = next((one for one in holders if one.job), holders[0])
    if one.job:
        return f"wait until the job ends, or stop it: stoker job stop {one.run or one.job}"
    if one.part == "inspector":
        return f"somebody looks into it; if that pod was left behind: kubectl delete pod {one.pod}"
    return f"end it first: kubectl delete pod {one.pod}"
