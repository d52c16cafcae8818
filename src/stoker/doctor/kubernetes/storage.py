"""Check storage classes and claims: whether each claim has or gets a volume that all its pods can mount."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stoker.core.units import format_bytes, pluralize
from stoker.doctor.checks import Check, format_names
from stoker.doctor.kubernetes.capacity import PodGroup
from stoker.doctor.kubernetes.findings import ClusterFacts, JobRequirements, failed_check, unknown_check
from stoker.errors import StokerError
from stoker.kube.claims import (
    CLAIM,
    MULTI_NODE_ACCESS_MODES,
    find_mounting_pods,
    format_access_modes,
    is_warning,
    waits_for_first_consumer,
)
from stoker.kube.conditions import filter_events, get_phase, is_terminating, newest_first
from stoker.kube.objects import ACCESS_MODES, Manifest
from stoker.kube.quantity import parse_quantity
from stoker.kube.storage_classes import SINGLE_NODE_PROVISIONERS, find_default_storage_class, find_storage_class

NO_PROVISIONER = "kubernetes.io/no-provisioner"
"""The provisioner of classes without dynamic provisioning."""


def check_storage_classes(facts: ClusterFacts) -> Iterator[Check]:
    """Check the storage classes, and whether one is the default."""
    if isinstance(facts.classes, StokerError):
        yield unknown_check("storage", facts.classes)
        return
    names = [storage_class["metadata"]["name"] for storage_class in facts.classes]
    default = find_default_storage_class(facts.classes)
    if not names:
        yield Check("storage", None, "no storage classes: create volumes manually (stoker volume create --pv)")
    elif default is None:
        fix = "set the class of each claim: stoker volume create --storage-class …"
        yield Check("storage", None, f"classes: {', '.join(sorted(names))}; no default class", fix)
    else:
        others = sorted(set(names) - {default["metadata"]["name"]})
        note = f"; also {', '.join(others)}" if others else ""
        yield Check("storage", True, f"{default['metadata']['name']} is the default class{note}")


def check_claims(requirements: JobRequirements, facts: ClusterFacts) -> Iterator[Check]:
    """Check each claim: whether it exists or can be created, and whether all its pods can mount it."""
    mounts = requirements.mounts
    for name in dict.fromkeys([*mounts, *requirements.new_claims]):
        what, claim, mounting = f"claim {name}", facts.claims.get(name), mounts.get(name, [])
        if isinstance(claim, StokerError):
            yield unknown_check(what, claim)
        elif claim is None and name in requirements.new_claims:
            yield _check_new_claim(what, requirements.new_claims[name], mounting, facts)
        elif claim is None:
            fix = f"stoker volume create {name} --size …, or set checkpoint.create: true for checkpoints"
            yield failed_check(what, f"claim {name} not found in {facts.namespace}", fix)
        else:
            yield _check_claim(what, claim, mounting, facts)


def _check_new_claim(
    what: str, claim: Manifest, mounting: Sequence[tuple[PodGroup, bool]], facts: ClusterFacts
) -> Check:
    """Check whether a claim that is created with the job would get a volume."""
    modes = claim["spec"]["accessModes"]
    if conflict := _check_access_mode(what, modes, mounting):
        return conflict
    size = parse_quantity(claim["spec"]["resources"]["requests"]["storage"])
    detail = f"created with the job: {format_bytes(float(size))}, {format_access_modes(modes)}"
    if isinstance(facts.classes, StokerError):
        return Check(what, None, f"{detail}; storage classes unknown: {facts.classes.what}")
    class_name = claim["spec"].get("storageClassName")
    storage_class = (
        find_default_storage_class(facts.classes)
        if class_name is None
        else find_storage_class(facts.classes, class_name)
    )
    if class_name and storage_class is None:
        known = ", ".join(sorted(known_class["metadata"]["name"] for known_class in facts.classes)) or "none"
        return failed_check(what, f"storage class {class_name} not found", f"use one of: {known}")
    if storage_class is None or storage_class.get("provisioner") == NO_PROVISIONER:
        return _check_static_volume(what, detail, claim, storage_class, facts)
    if ACCESS_MODES["rwx"] in modes and storage_class.get("provisioner") in SINGLE_NODE_PROVISIONERS:
        name = storage_class["metadata"]["name"]
        fix = (
            "use a class with shared storage (EFS, Filestore, NFS): stoker volume create --storage-class … --access rwx"
        )
        return failed_check(what, f"is rwx, but volumes of class {name} can be mounted on only one node", fix)
    return Check(what, True, f"{detail}, of class {storage_class['metadata']['name']}")


def _check_static_volume(
    what: str, detail: str, claim: Manifest, storage_class: Manifest | None, facts: ClusterFacts
) -> Check:
    """Check for an existing volume that fits."""
    if isinstance(facts.volumes, StokerError):
        return Check(what, None, f"{detail}; no class provisions a volume for it, and existing volumes are unknown")
    name = "" if storage_class is None else storage_class["metadata"]["name"]
    size, modes = parse_quantity(claim["spec"]["resources"]["requests"]["storage"]), set(claim["spec"]["accessModes"])
    for volume in facts.volumes:
        spec = volume["spec"]
        if (
            get_phase(volume) == "Available"
            and (spec.get("storageClassName") or "") == name
            and modes <= set(spec.get("accessModes") or ())
            and parse_quantity((spec.get("capacity") or {}).get("storage", "0")) >= size
        ):
            return Check(what, True, f"{detail}, using volume {volume['metadata']['name']}")
    reason = (
        "there is no default storage class" if storage_class is None else f"class {name} does not provision volumes"
    )
    fix = "stoker volume create … --storage-class …, or --pv for an existing volume"
    return failed_check(what, f"would stay pending: {reason}, and no existing volume fits", fix)


def _check_claim(what: str, claim: Manifest, mounting: Sequence[tuple[PodGroup, bool]], facts: ClusterFacts) -> Check:
    """Check an existing claim."""
    name, status = claim["metadata"]["name"], claim.get("status") or {}
    modes = status.get("accessModes") or claim["spec"].get("accessModes") or []
    if is_terminating(claim):
        return failed_check(what, "is being deleted", "wait until it is deleted, or use another")
    if conflict := _check_access_mode(what, modes, mounting):
        return conflict
    access, phase = format_access_modes(modes), get_phase(claim)
    if phase == "Lost":
        return failed_check(what, "has lost its volume", "create another claim: stoker volume create")
    if phase == "Pending":
        return _check_pending_claim(what, claim, access, facts)
    size = parse_quantity((status.get("capacity") or {}).get("storage", "0"))
    pods = pluralize(sum(group.count for group, _ in mounting), "pod")
    detail = f"{format_bytes(float(size))}, {access}; {pods} would mount it"
    if set(modes) <= {ACCESS_MODES["rox"]} and not all(read_only for _, read_only in mounting):
        return Check(what, None, detail, "it is read-only: set read_only: true")
    holders = [] if isinstance(facts.own_pods, StokerError) else find_mounting_pods(facts.own_pods, name)
    if holders and not MULTI_NODE_ACCESS_MODES & set(modes):
        pods = format_names([f"{pod.pod} on {pod.node}" if pod.node else pod.pod for pod in holders])
        return Check(
            what, None, f"{detail}; in use by {pods}", "the job would wait for that node, or until these pods finish"
        )
    return Check(what, True, detail)


def _check_pending_claim(what: str, claim: Manifest, access: str, facts: ClusterFacts) -> Check:
    """Check a pending claim; waiting for its first consumer is fine."""
    name = claim["metadata"]["name"]
    classes = () if isinstance(facts.classes, StokerError) else facts.classes
    storage_class = find_storage_class(classes, claim["spec"].get("storageClassName")) or {}
    claim_events = facts.claim_events.get(name, ())
    events = (
        [] if isinstance(claim_events, StokerError) else list(newest_first(filter_events(claim, CLAIM, claim_events)))
    )
    warnings = [event for event in events if is_warning(event)]
    if waits_for_first_consumer(claim, classes) and storage_class.get("provisioner") != NO_PROVISIONER and not warnings:
        return Check(what, True, f"{access}; bound when its first pod is scheduled")
    texts = [str(event.get("message", "")).strip() for event in warnings or events]
    reason = texts[0] if texts else "no event explains it"
    return failed_check(what, f"is pending: {reason}", f"kubectl describe pvc {name} -n {facts.namespace}")


def _check_access_mode(what: str, modes: Sequence[str], mounting: Sequence[tuple[PodGroup, bool]]) -> Check | None:
    """Return a failed check if more pods mount the claim than its access mode allows."""
    pods = sum(group.count for group, _ in mounting)
    if pods < 2 or not modes or MULTI_NODE_ACCESS_MODES & set(modes):
        return None
    roles = ", ".join(f"{group.count} × {group.role}" for group, _ in mounting)
    unit = "pod" if modes == [ACCESS_MODES["rwop"]] else "node"
    detail = (
        f"is {format_access_modes(modes)}: only one {unit} can mount it, but {pods} pods of the job mount it ({roles})"
    )
    fix = "use an rwx claim (stoker volume create --access rwx), or a bucket"
    return failed_check(what, detail, fix)
