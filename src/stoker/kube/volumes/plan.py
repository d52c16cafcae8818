"""Plan `stoker volume create`: which PersistentVolume or StorageClass a claim uses, and which objects to apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stoker.errors import AccessDeniedError, Fault, InputError, NotFoundError, SpecError
from stoker.kube.claims import CLAIM, format_access_modes, is_object_name
from stoker.kube.conditions import get_phase, is_terminating
from stoker.kube.objects import ACCESS_MODES, MANAGED_BY, Manifest, build_claim, build_object
from stoker.kube.quantity import format_quantity
from stoker.kube.storage_classes import (
    check_storage_class,
    find_default_storage_class,
    find_storage_class,
    list_remarks,
)
from stoker.kube.volumes.expand import plan_expansion
from stoker.kube.volumes.persistent_volumes import (
    CLAIM_ANNOTATION,
    LABELS,
    PERSISTENT_VOLUME,
    get_annotated_claim,
    get_capacity,
    get_claim_key,
    get_name,
)
from stoker.kube.volumes.request import VolumeRequest, validate_request

if TYPE_CHECKING:
    from stoker.kube.client import KubeClient


@dataclass(frozen=True, slots=True, kw_only=True)
class ExistingObjects:
    """The objects in the cluster that a plan depends on."""

    claim: Manifest | None = None
    classes: Sequence[Manifest] | None = ()
    """None: we are not allowed to list them."""
    volumes: Mapping[str, Manifest] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumePlan:
    """Objects to apply, a claim to expand, and remarks for the user."""

    apply: Sequence[Manifest] = ()
    expand: Manifest | None = None
    remarks: Sequence[str] = ()

    @property
    def objects(self) -> list[Manifest]:
        """All objects, as `kubectl apply` takes them."""
        return [*self.apply, *([self.expand] if self.expand else [])]


def plan_volume(request: VolumeRequest, existing: ExistingObjects) -> VolumePlan:
    """Plan the objects for a requested volume; raise SpecError with every fault of the request."""
    validate_request(request)
    if request.host_path is not None and request.access is None and existing.claim is not None:
        request = replace(request, access=_first_access_mode(existing.claim))
    volumes, live = _build_volumes(request), existing.volumes or {}
    volume = _choose_volume(request, [_merge_live(volume, live.get(get_name(volume))) for volume in volumes])
    access = request.access or (_first_access_mode(volume) if volume else "rwo")
    size = request.size if request.size is not None or volume is None else get_capacity(volume)
    assert size is not None, "check_request requires --size without volumes"
    if volume is None:
        binding, remarks = _check_class(request, size, access, existing)
    else:
        # "" prevents the default storage class.
        binding = {"storage_class": volume["spec"].get("storageClassName") or "", "volume": get_name(volume)}
        remarks = []
    claim = build_claim(request.name, size, access, LABELS, namespace=request.namespace, **binding)
    claim["spec"]["resources"]["requests"]["storage"] = format_quantity(size)
    # Volumes that stoker did not create, or that belong to another claim, are not modified.
    own = [volume for volume in volumes if _is_own(live.get(get_name(volume), volume), request)]
    applied = [_reserve(volume, request) if get_name(volume) == binding.get("volume") else volume for volume in own]
    if existing.claim is None:
        return VolumePlan(apply=[*applied, claim], remarks=remarks)
    expansion = plan_expansion(existing.claim, claim, request, existing.classes)
    return VolumePlan(apply=applied, expand=expansion, remarks=remarks)


def _first_access_mode(obj: Manifest) -> str:
    """Return the first access mode of a claim or volume, abbreviated."""
    return format_access_modes(obj["spec"]["accessModes"]).split(",")[0]


# --- PersistentVolumes


def _build_volumes(request: VolumeRequest) -> list[Manifest]:
    """Return the requested PersistentVolumes with our labels and annotation."""
    volumes = [_build_host_path_volume(request)] if request.host_path is not None else request.volumes
    return [_annotate(volume, request) for volume in volumes]


def _build_host_path_volume(request: VolumeRequest) -> Manifest:
    spec = {
        "capacity": {"storage": format_quantity(request.size or 0)},
        "accessModes": [ACCESS_MODES[request.access or "rwo"]],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "hostPath": {"path": request.host_path, "type": "DirectoryOrCreate"},
    }
    return build_object("v1", PERSISTENT_VOLUME, request.host_path_volume_name, {}, spec=spec)


def _annotate(volume: Manifest, request: VolumeRequest) -> Manifest:
    metadata = volume["metadata"]
    annotated = {
        **metadata,
        "labels": {**(metadata.get("labels") or {}), **LABELS, **MANAGED_BY},
        "annotations": {**(metadata.get("annotations") or {}), CLAIM_ANNOTATION: request.claim_key},
    }
    return {**volume, "metadata": annotated}


def _reserve(volume: Manifest, request: VolumeRequest) -> Manifest:
    """Set the claimRef, so that no other claim is bound to the volume."""
    claim_ref = {"apiVersion": "v1", "kind": CLAIM, "namespace": request.namespace, "name": request.name}
    return {**volume, "spec": {**volume["spec"], "claimRef": claim_ref}}


def _is_own(volume: Manifest, request: VolumeRequest) -> bool:
    """Whether stoker created a volume and no other claim has it."""
    return get_annotated_claim(volume) is not None and _is_available(volume, request)


def _is_available(volume: Manifest, request: VolumeRequest) -> bool:
    return get_claim_key(volume) in (None, request.claim_key)


def _merge_live(volume: Manifest, live: Manifest | None) -> Manifest:
    """Return a volume as it will be after apply: the live one, with our spec if stoker created it."""
    if live is None or get_annotated_claim(live) is None:
        return live or volume
    claim_ref = {"claimRef": live["spec"]["claimRef"]} if live["spec"].get("claimRef") else {}
    return {**live, "spec": {**volume["spec"], **claim_ref}}


def _choose_volume(request: VolumeRequest, volumes: Sequence[Manifest]) -> Manifest | None:
    """Return the smallest volume that fits the request; raise SpecError with the reasons if none does."""
    if not volumes:
        return None
    mismatches = {get_name(volume): list(_find_mismatches(request, volume)) for volume in volumes}
    fitting = [volume for volume in volumes if not mismatches[get_name(volume)]]
    if not fitting:
        raise SpecError([Fault(f"PersistentVolume {name}", "; ".join(why)) for name, why in mismatches.items()])
    return min(fitting, key=get_capacity)


def _find_mismatches(request: VolumeRequest, volume: Manifest) -> Iterator[str]:
    """Yield why a volume does not fit the request."""
    spec = volume["spec"]
    if request.size is not None and get_capacity(volume) < request.size:
        yield f"has {spec['capacity']['storage']}, less than --size {format_quantity(request.size)}"
    if request.access is not None and ACCESS_MODES[request.access] not in spec["accessModes"]:
        yield f"has access {format_access_modes(spec['accessModes'])}, not {request.access}"
    class_name = spec.get("storageClassName") or ""
    if request.storage_class is not None and request.storage_class != class_name:
        yield f"has storage class {class_name or 'none'!r}, not {request.storage_class!r}; omit --storage-class"
    if not _is_available(volume, request):
        claim_ref = spec["claimRef"]
        yield f"is reserved for claim {claim_ref.get('name')} in namespace {claim_ref.get('namespace')}"
    elif get_phase(volume) == "Released":
        reuse = f"to reuse its data: kubectl delete pv {get_name(volume)}"
        yield f"is released: its claim was deleted, and Kubernetes does not bind it again; {reuse}"
    elif is_terminating(volume):
        yield "is being deleted"


# --- StorageClasses


def _check_class(
    request: VolumeRequest, size: int, access: str, existing: ExistingObjects
) -> tuple[dict[str, Any], list[str]]:
    """Check the request against its storage class; return arguments for `build_claim`, and remarks."""
    binding: dict[str, Any] = {} if request.storage_class is None else {"storage_class": request.storage_class}
    if existing.classes is None:
        return binding, ["storage classes were not checked: you are not allowed to list them"]
    if existing.claim is not None and request.storage_class is None:
        storage_class = find_storage_class(existing.classes, existing.claim["spec"].get("storageClassName"))
    else:
        storage_class = _get_class(request.storage_class, existing.classes)
    if storage_class is None:
        return binding, []
    if faults := list(check_storage_class(storage_class, size, access)):
        raise SpecError(faults)
    return binding, list(list_remarks(storage_class))


def _get_class(name: str | None, classes: Sequence[Manifest]) -> Manifest:
    """Return a storage class, or the default for None; raise with the existing ones if there is none."""
    default = find_default_storage_class(classes)
    chosen = default if name is None else find_storage_class(classes, name)
    if chosen is not None:
        return chosen
    suffixes = {str(each["metadata"]["name"]): " (default)" if each is default else "" for each in classes}
    known = ", ".join(f"{known}{suffix}" for known, suffix in sorted(suffixes.items())) or "none"
    if name is None:
        hint = f"set --storage-class (known: {known}), or provide a volume: --pv FILE, --host-path DIR"
        raise InputError("the cluster has no default storage class", hint=hint)
    raise NotFoundError(f"storage class {name!r} not found", hint=f"known: {known}")


# --- Reading the cluster, and applying


def find_existing_objects(client: KubeClient, request: VolumeRequest) -> ExistingObjects:
    """Read the objects that a plan depends on."""
    try:
        classes: list[Manifest] | None = client.list_objects("StorageClass")
    except AccessDeniedError:
        classes = None
    if request.host_path is not None:
        names = [request.host_path_volume_name]
    else:
        names = [get_name(volume) for volume in request.volumes]
    volumes = {name: client.get(PERSISTENT_VOLUME, name) for name in names if is_object_name(name)}
    return ExistingObjects(
        claim=client.get(CLAIM, request.name) if is_object_name(request.name) else None,
        classes=classes,
        volumes={name: volume for name, volume in volumes.items() if volume is not None},
    )


def apply_plan(client: KubeClient, plan: VolumePlan) -> bool:
    """Apply a plan after a dry run of all its objects; return whether anything changed."""
    for obj in plan.apply:
        client.apply(obj, dry_run=True)
    changed = False
    for obj in plan.apply:
        old = client.get(obj["kind"], obj["metadata"]["name"])
        new = client.apply(obj)
        changed |= old is None or old["metadata"]["resourceVersion"] != new["metadata"]["resourceVersion"]
    if plan.expand is not None:
        # Only the size: other fields of the claim may have another field manager, such as Helm.
        patch = {"spec": {"resources": plan.expand["spec"]["resources"]}}
        client.patch(CLAIM, plan.expand["metadata"]["name"], patch)
        changed = True
    return changed
