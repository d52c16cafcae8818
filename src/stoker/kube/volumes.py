"""Volumes: claims and the PersistentVolumes behind them. What would be made or deleted is a value first.

A volume is a PersistentVolumeClaim of the namespace: of a StorageClass that is there, or bound to a PersistentVolume
that a file describes or that is a folder of a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from stoker.core.units import format_bytes
from stoker.errors import AccessError, ConflictError, Fault, InputError, NotFoundError, SpecError, UnavailableError
from stoker.kube.claims import (
    CLAIM,
    NAME_RULE,
    SINGLE_NODE_PROVISIONERS,
    check_claim_name,
    find_default_storage_class,
    find_mounting_pods,
    find_storage_class,
    format_access_modes,
    format_pod_names,
    get_claim,
    get_release_hint,
    is_object_name,
)
from stoker.kube.conditions import get_phase, is_terminating
from stoker.kube.ephemeral_pod import wait_deleted
from stoker.kube.manifest_files import load_documents
from stoker.kube.objects import ACCESS_MODES, LABEL_DOMAIN, MANAGED_BY, PART_LABEL, Manifest, build_claim, build_object
from stoker.kube.quantity import format_quantity, quantity_to_bytes

if TYPE_CHECKING:
    from stoker.kube.client import KubeClient

VOLUME = "PersistentVolume"
LABELS = {PART_LABEL: "volume"}
CLAIM_ANNOTATION = f"{LABEL_DOMAIN}/claim"
"""Annotation of a PersistentVolume that `create` made: the claim it is for, `namespace/name`."""
EFS, FSX = "efs.csi.aws.com", "fsx.csi.aws.com"
DELETE_TIMEOUT_S = 60.0
GIB = 2**30


# --- Making: what is wanted, what there is, and what follows


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeRequest:
    """What `create` was asked for; None: whatever follows from the rest."""

    name: str
    namespace: str
    size: int | None = None
    access: str | None = None
    storage_class: str | None = None
    host_path: str | None = None
    volumes: Sequence[Manifest] = ()
    """PersistentVolumes of a file, of which the claim gets the smallest that is large enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExistingObjects:
    """What the cluster has of it already."""

    claim: Manifest | None = None
    classes: Sequence[Manifest] | None = ()
    """None: they may not be listed."""
    volumes: Mapping[str, Manifest] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumePlan:
    """What `create` would do: objects to apply, or a claim to let grow; and what is worth knowing."""

    apply: Sequence[Manifest] = ()
    expand: Manifest | None = None
    remarks: Sequence[str] = ()

    @property
    def objects(self) -> list[Manifest]:
        """All of it, as `kubectl apply` takes it."""
        return [*self.apply, *([self.expand] if self.expand else [])]


def plan_volume(request: VolumeRequest, existing: ExistingObjects) -> VolumePlan:
    """Decide what has to be made so that there is such a claim; refuses what cannot be, every fault at once."""
    if faults := [*_faults(request), *(fault for one in request.volumes for fault in check_persistent_volume(one))]:
        raise SpecError(faults)
    if request.host_path is not None and request.access is None and existing.claim is not None:
        request = replace(request, access=format_access_modes(existing.claim["spec"]["accessModes"]).split(",")[0])
    volumes, live = _own_volumes(request), existing.volumes or {}
    chosen = _chosen(request, [_as_it_will_be(one, live.get(one["metadata"]["name"])) for one in volumes])
    access = request.access or (format_access_modes(chosen["spec"]["accessModes"]).split(",")[0] if chosen else "rwo")
    size = _size(request, chosen)
    bound, remarks = _of_class(request, size, access, existing) if chosen is None else (_bound_to(chosen), [])
    made = build_claim(request.name, size, access, LABELS, namespace=request.namespace, **bound)
    made["spec"]["resources"]["requests"]["storage"] = format_quantity(size)
    # One that somebody else made is taken as it is, and stays theirs; so does one that another claim got from us.
    ours = [
        one for one in volumes if _is_ours(has := live.get(one["metadata"]["name"], one)) and _is_free(has, request)
    ]
    applied = [_kept_for(one, request) if one["metadata"]["name"] == bound.get("volume") else one for one in ours]
    if existing.claim is None:
        return VolumePlan(apply=[*applied, made], remarks=remarks)
    return VolumePlan(apply=applied, expand=_growth(existing.claim, made, request, existing.classes), remarks=remarks)


def _faults(wish: VolumeRequest) -> Iterator[Fault]:
    """Find what is wrong with a wish by itself."""
    if not is_object_name(wish.name):
        yield Fault("NAME", f"{wish.name!r} is no name of a volume: {NAME_RULE}")
    if wish.volumes and wish.host_path is not None:
        yield Fault("--host-path", "goes without --pv")
    if wish.size is None and not wish.volumes:
        yield Fault("--size", "is missing; say how large it is to be, like --size 10Gi")
    if wish.size is not None and wish.size < 2**20:
        what = f"is {format_bytes(wish.size)}, too little to be meant: write its unit, for example 10Gi"
        yield Fault("--size", what)
    if wish.access is not None and wish.access not in ACCESS_MODES:
        yield Fault("--access", f"expected {', '.join(ACCESS_MODES)}, got {wish.access!r}")
    if wish.host_path is not None:
        if wish.storage_class:
            yield Fault("--class", "goes without --host-path: such a volume is of no class")
        path = PurePosixPath(wish.host_path)
        if not path.is_absolute() or ".." in path.parts:
            yield Fault("--host-path", f"expected an absolute path without .., got {wish.host_path!r}")
        if len(_folder_name(wish)) > 253:
            yield Fault("NAME", "is too long for a PersistentVolume named after it and its namespace")
    names = [_named(one) for one in wish.volumes]
    for name in sorted({name for name in names if name and names.count(name) > 1}):
        yield Fault(f"PersistentVolume {name}", "is there twice")


def _own_volumes(wish: VolumeRequest) -> list[Manifest]:
    """Give the PersistentVolumes to make, marked as ours."""
    given = [_folder(wish)] if wish.host_path is not None else wish.volumes
    return [_marked(one, wish) for one in given]


def _folder(wish: VolumeRequest) -> Manifest:
    """Give a folder of the nodes as a PersistentVolume."""
    spec = {
        "capacity": {"storage": format_quantity(wish.size or 0)},
        "accessModes": [ACCESS_MODES[wish.access or "rwo"]],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "hostPath": {"path": wish.host_path, "type": "DirectoryOrCreate"},
    }
    return build_object("v1", VOLUME, _folder_name(wish), {}, spec=spec)


def _folder_name(wish: VolumeRequest) -> str:
    """Tell namespaces apart, in whose names there are no dots."""
    return f"stoker.{wish.namespace}.{wish.name}"


def _marked(one: Manifest, wish: VolumeRequest) -> Manifest:
    metadata = one["metadata"]
    marked = {
        **metadata,
        "labels": {**(metadata.get("labels") or {}), **LABELS, **MANAGED_BY},
        "annotations": {**(metadata.get("annotations") or {}), CLAIM_ANNOTATION: f"{wish.namespace}/{wish.name}"},
    }
    return {**one, "metadata": marked}


def _kept_for(volume: Manifest, wish: VolumeRequest) -> Manifest:
    """Let no other claim have a volume."""
    own = {"apiVersion": "v1", "kind": CLAIM, "namespace": wish.namespace, "name": wish.name}
    return {**volume, "spec": {**volume["spec"], "claimRef": own}}


def _named(one: Manifest) -> str:
    """Give the name of an object that may be of any shape."""
    metadata = one.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else ""


def _is_ours(volume: Manifest) -> bool:
    return CLAIM_ANNOTATION in (volume["metadata"].get("annotations") or {})


def _as_it_will_be(one: Manifest, live: Manifest | None) -> Manifest:
    """Give a volume as it is, changed by ours where it is ours."""
    if live is None or not _is_ours(live):
        return live or one
    kept = {"claimRef": live["spec"]["claimRef"]} if live["spec"].get("claimRef") else {}
    return {**live, "spec": {**one["spec"], **kept}}


def check_persistent_volume(one: Manifest) -> Iterator[Fault]:
    """Find what is wrong with a PersistentVolume of a file, as far as a cluster would tell late or never."""
    name, metadata, spec = _named(one), one.get("metadata"), one.get("spec")
    here = f"PersistentVolume {name}" if name else "a PersistentVolume"
    if not is_object_name(name):
        yield Fault(f"{here}: metadata.name", f"{NAME_RULE}, got {name!r}")
    for key in ("labels", "annotations"):
        if isinstance(metadata, dict) and not isinstance(metadata.get(key) or {}, dict):
            yield Fault(f"{here}: metadata.{key}", "expected a mapping")
    if not isinstance(spec, dict):
        yield Fault(f"{here}: spec", "expected a mapping")
        return
    capacity = spec.get("capacity")
    storage = capacity.get("storage") if isinstance(capacity, dict) else None
    if not quantity_to_bytes(storage):
        yield Fault(f"{here}: spec.capacity.storage", f"expected a size such as 10Gi, got {storage!r}")
    modes = spec.get("accessModes")
    if not isinstance(modes, list) or not modes or not set(map(str, modes)) <= set(ACCESS_MODES.values()):
        yield Fault(
            f"{here}: spec.accessModes", f"expected a list of {', '.join(ACCESS_MODES.values())}, got {modes!r}"
        )
    if spec.get("volumeMode", "Filesystem") != "Filesystem":
        yield Fault(f"{here}: spec.volumeMode", "only a Filesystem can be mounted by a job")
    if not isinstance(spec.get("claimRef") or {}, dict):
        yield Fault(f"{here}: spec.claimRef", "expected a mapping")
    if isinstance(spec.get("csi"), dict):
        yield from _csi_faults(here, spec)


def _csi_faults(here: str, spec: Manifest) -> Iterator[Fault]:
    csi = spec["csi"]
    if spec.get("persistentVolumeReclaimPolicy") == "Recycle":
        yield Fault(
            f"{here}: spec.persistentVolumeReclaimPolicy", "Recycle is not for CSI drivers; use Retain or Delete"
        )
    for key in ("driver", "volumeHandle"):
        if not csi.get(key):
            yield Fault(f"{here}: spec.csi.{key}", "is missing")
    attributes = csi.get("volumeAttributes")
    if csi.get("driver") == FSX:
        for key in ("dnsname", "mountname"):
            if not isinstance(attributes, dict) or not attributes.get(key):
                yield Fault(
                    f"{here}: spec.csi.volumeAttributes.{key}", "is missing; FSx mounts by dnsname and mountname"
                )


def _chosen(wish: VolumeRequest, volumes: Sequence[Manifest]) -> Manifest | None:
    """Choose the volume for the claim: the smallest one that has everything that was asked for."""
    if not volumes:
        return None
    misfits = {one["metadata"]["name"]: list(_misfit(wish, one)) for one in volumes}
    fitting = [one for one in volumes if not misfits[one["metadata"]["name"]]]
    if not fitting:
        raise SpecError([Fault(f"PersistentVolume {name}", "; ".join(why)) for name, why in misfits.items()])
    return min(fitting, key=_capacity)


def _misfit(wish: VolumeRequest, volume: Manifest) -> Iterator[str]:
    """Tell why a volume cannot be the claim's."""
    spec = volume["spec"]
    if wish.size is not None and _capacity(volume) < wish.size:
        yield f"has {spec['capacity']['storage']}, which is less than --size {format_quantity(wish.size)}"
    if wish.access is not None and ACCESS_MODES[wish.access] not in spec["accessModes"]:
        yield f"has access {format_access_modes(spec['accessModes'])}, not {wish.access}"
    kind = spec.get("storageClassName") or ""
    if wish.storage_class is not None and wish.storage_class != kind:
        yield f"is of class {kind or 'none'!r}, not {wish.storage_class!r}; leave --class away"
    if not _is_free(volume, wish):
        owner = spec["claimRef"]
        yield f"is kept for claim {owner.get('name')} in namespace {owner.get('namespace')}"
    elif get_phase(volume) == "Released":
        again = f"to use its data again: kubectl delete pv {volume['metadata']['name']}"
        yield f"belonged to a claim of this name that is gone, and no other gets it; {again}"
    elif is_terminating(volume):
        yield "is being deleted"


def _is_free(volume: Manifest, wish: VolumeRequest) -> bool:
    """Whether a volume is kept for no other claim."""
    return _holder(volume) in (None, f"{wish.namespace}/{wish.name}")


def _capacity(volume: Manifest) -> int:
    return quantity_to_bytes(volume["spec"]["capacity"]["storage"]) or 0


def _size(wish: VolumeRequest, chosen: Manifest | None) -> int:
    if wish.size is not None:
        return wish.size
    assert chosen is not None
    return _capacity(chosen)


def _bound_to(volume: Manifest) -> dict[str, Any]:
    # "" keeps the cluster's default class away from it.
    return {"storage_class": volume["spec"].get("storageClassName") or "", "volume": volume["metadata"]["name"]}


def _of_class(wish: VolumeRequest, size: int, access: str, found: ExistingObjects) -> tuple[dict[str, Any], list[str]]:
    """Check a claim against its class; give the class to name in it, and remarks."""
    asked: dict[str, Any] = {} if wish.storage_class is None else {"storage_class": wish.storage_class}
    if found.classes is None:
        return asked, ["the storage classes may not be listed, so they were not looked at"]
    if found.claim is not None and wish.storage_class is None:
        kind = find_storage_class(found.classes, found.claim["spec"].get("storageClassName"))
    else:
        kind = _need_class(wish.storage_class, found.classes)
    if kind is None:
        return asked, []
    if faults := list(check_storage_class(kind, size, access)):
        raise SpecError(faults)
    return asked, list(_class_remarks(kind))


def _need_class(name: str | None, classes: Sequence[Manifest]) -> Manifest:
    default = find_default_storage_class(classes)
    chosen = default if name is None else find_storage_class(classes, name)
    if chosen is not None:
        return chosen
    marks = {str(one["metadata"]["name"]): " (default)" if one is default else "" for one in classes}
    known = ", ".join(f"{one}{mark}" for one, mark in sorted(marks.items())) or "none"
    if name is None:
        hint = f"name one with --class (known: {known}), or bring a volume: --pv FILE, --host-path DIR"
        raise InputError("the cluster has no default storage class", hint=hint)
    raise NotFoundError(f"there is no storage class {name!r}", hint=f"known: {known}")


def check_storage_class(kind: Manifest, size: int, access: str) -> Iterator[Fault]:
    """Find what a class's provisioner would refuse, round up to something dearer, or leave pending for ever."""
    provisioner = kind.get("provisioner")
    if provisioner in SINGLE_NODE_PROVISIONERS and access == "rwx":
        what = f"{provisioner} makes disks, which one node at a time can write to; take rwo, or a class of shared files"
        yield Fault("--access", what)
    if provisioner == FSX and (larger := round_up_fsx_size(size, kind.get("parameters") or {})) != size:
        told = f"FSx has no file system of {format_quantity(size)}; the next larger one is {larger // GIB}Gi"
        yield Fault("--size", told)


def round_up_fsx_size(size: int, parameters: Mapping[str, str]) -> int:
    """Round a size up to what FSx for Lustre has, by the kind of the file system."""
    if parameters.get("storageType") == "HDD":
        step = 6000 if str(parameters.get("perUnitStorageThroughput")) == "12" else 1800
    else:
        large = 3600 if parameters.get("deploymentType", "SCRATCH_1") == "SCRATCH_1" else 2400
        step = 1200 if size <= (2400 if large == 3600 else 1200) * GIB else large
    return max(1, -(-size // (step * GIB))) * step * GIB


def _class_remarks(kind: Manifest) -> Iterator[str]:
    provisioner = kind.get("provisioner")
    if provisioner == EFS:
        yield "EFS takes no notice of the size: the volume grows with what is in it"
    if provisioner == FSX:
        yield "FSx makes a file system of its own for it, which takes minutes, and costs until the volume is deleted"


def _growth(old: Manifest, new: Manifest, wish: VolumeRequest, classes: Sequence[Manifest] | None) -> Manifest | None:
    """Compare a claim with the wanted one: None if it is the same, the larger one if it can grow, else a refusal."""
    name = old["metadata"]["name"]
    if is_terminating(old):
        raise ConflictError(f"volume {name} is being deleted", hint="wait until it is gone; `stoker volume list` tells")
    has, asked = (quantity_to_bytes(one["spec"]["resources"]["requests"]["storage"]) or 0 for one in (old, new))
    grows = wish.size is not None and asked > has
    faults = list(_differences(old["spec"], new["spec"], wish))
    if wish.size is not None and asked < has:
        faults.append(f"has {format_quantity(has)}, and no volume can shrink to {format_quantity(asked)}")
    if grows and (why := _no_growth(old, classes)):
        faults.append(f"has {format_quantity(has)}, and {why} to {format_quantity(asked)}")
    if faults:
        hint = f"take another name and copy what is in it, or delete it first: stoker volume delete {name}"
        raise ConflictError(f"volume {name} is there already: it {'; it '.join(faults)}", hint=hint)
    return _grown(old, new) if grows else None


def _differences(has: Manifest, wanted: Manifest, wish: VolumeRequest) -> Iterator[str]:
    """Tell in what a claim is not as it was asked for, apart from its size."""
    if wish.access is not None and ACCESS_MODES[wish.access] not in has["accessModes"]:
        yield f"has access {format_access_modes(has['accessModes'])}, not {wish.access}"
    if "storageClassName" in wanted and (kind := has.get("storageClassName") or "") != wanted["storageClassName"]:
        yield f"is of class {kind or 'none'}, not {wanted['storageClassName'] or 'none'}"
    if "volumeName" in wanted and has.get("volumeName") != wanted["volumeName"]:
        yield f"is bound to PersistentVolume {has.get('volumeName') or 'none'}, not {wanted['volumeName']}"


def _no_growth(old: Manifest, classes: Sequence[Manifest] | None) -> str:
    """Tell why a claim cannot grow; "": it can, or the cluster will tell."""
    if get_phase(old) != "Bound":
        return "cannot grow before it is bound,"
    kind = find_storage_class(classes, old["spec"].get("storageClassName"))
    if classes is None or (kind or {}).get("allowVolumeExpansion"):
        return ""
    of = f"its class {old['spec']['storageClassName']}" if old["spec"].get("storageClassName") else "one of no class"
    return f"{of} does not let it grow"


def _grown(old: Manifest, new: Manifest) -> Manifest:
    kept = {key: old["spec"][key] for key in ("accessModes", "storageClassName", "volumeName") if key in old["spec"]}
    metadata = {"name": old["metadata"]["name"], "namespace": old["metadata"].get("namespace")}
    spec = {**kept, "resources": new["spec"]["resources"]}
    return {"apiVersion": "v1", "kind": CLAIM, "metadata": metadata, "spec": spec}


def read_persistent_volumes(path: Path) -> list[Manifest]:
    """Read the PersistentVolumes of a YAML or JSON file; anything else in it is refused."""
    return flatten_lists(load_documents(path), path)


def flatten_lists(given: Sequence[Any], where: object) -> list[Manifest]:
    """Take lists apart, and refuse what is no PersistentVolume."""
    found: list[Any] = []
    for one in given:
        is_list = isinstance(one, dict) and str(one.get("kind", "")).endswith("List")
        items = one.get("items") if is_list else None
        found += items if isinstance(items, list) else [] if is_list and items is None else [one]
    kinds = [(one.get("apiVersion"), one.get("kind")) if isinstance(one, dict) else (None, None) for one in found]
    faults = [
        Fault(
            f"object {number}", f"expected a v1 {VOLUME}, got {kind or 'no kind'}{f' of {version}' if version else ''}"
        )
        for number, (version, kind) in enumerate(kinds, 1)
        if (version, kind) != ("v1", VOLUME)
    ]
    if faults:
        raise SpecError(faults, where=where)
    if not found:
        raise InputError(f"has no {VOLUME} in it", where=where)
    return found


# --- Making: carried out


def find_existing_objects(cluster: KubeClient, wish: VolumeRequest) -> ExistingObjects:
    """Ask the cluster for what a plan needs to know."""
    try:
        classes: list[Manifest] | None = cluster.list_objects("StorageClass")
    except AccessError:
        classes = None
    names = [_folder_name(wish)] if wish.host_path is not None else [_named(one) for one in wish.volumes]
    found = {name: cluster.get(VOLUME, name) for name in names if is_object_name(name)}
    old = cluster.get(CLAIM, wish.name) if is_object_name(wish.name) else None
    return ExistingObjects(
        claim=old, classes=classes, volumes={name: one for name, one in found.items() if one is not None}
    )


def apply_plan(cluster: KubeClient, decided: VolumePlan) -> bool:
    """Make what is planned; tell whether anything changed. The server looks at all of it before any of it is made."""
    for one in decided.apply:
        cluster.apply(one, dry_run=True)
    changed = False
    for one in decided.apply:
        old = cluster.get(one["kind"], one["metadata"]["name"])
        new = cluster.apply(one)
        changed |= old is None or old["metadata"]["resourceVersion"] != new["metadata"]["resourceVersion"]
    if decided.expand is not None:
        # Only the size: the rest of a claim may be somebody else's, such as Helm's.
        patch = {"spec": {"resources": decided.expand["spec"]["resources"]}}
        cluster.patch(CLAIM, decided.expand["metadata"]["name"], patch)
        changed = True
    return changed


# --- Deleting


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeDeletion:
    """What `delete` would do, and what becomes of the data."""

    claim: str | None
    volumes: Sequence[str] = ()
    data_note: str = ""


def plan_deletion(
    name: str, namespace: str, one: Manifest | None, volumes: Sequence[Manifest] | None, pods: Iterable[Manifest]
) -> VolumeDeletion:
    """Decide what goes with a claim; refuses while a pod mounts it. `volumes` None: they may not be listed."""
    seen = list(pods)
    if holders := find_mounting_pods(seen, name):
        raise ConflictError(f"volume {name} is mounted by {format_pod_names(holders)}", hint=get_release_hint(holders))
    if over := find_mounting_pods(seen, name, finished=True):
        # Kubernetes keeps a claim for as long as there is any pod that names it.
        hint = f"delete them, with their logs: kubectl -n {namespace} delete pod {' '.join(one.pod for one in over)}"
        raise ConflictError(
            f"volume {name} is held by {format_pod_names(over)}, which has ended but is still there", hint=hint
        )
    own = [
        volume
        for volume in volumes or ()
        if (volume["metadata"].get("annotations") or {}).get(CLAIM_ANNOTATION) == f"{namespace}/{name}"
        and _holder(volume) in (None, f"{namespace}/{name}")
    ]
    bound = (one or {"spec": {}})["spec"].get("volumeName")
    behind = next((volume for volume in volumes or () if volume["metadata"]["name"] == bound), None)
    # The cluster itself deletes what has the policy Delete; without its object it would forget the data behind it.
    ours = [volume for volume in own if not (volume is behind and _policy(volume) == "Delete")]
    fate = _fate(bound, behind, ours, is_known=volumes is not None)
    names = [str(volume["metadata"]["name"]) for volume in ours]
    return VolumeDeletion(claim=name if one is not None else None, volumes=names, data_note=fate)


def _holder(volume: Manifest) -> str | None:
    """Tell which claim has a volume."""
    owner = volume["spec"].get("claimRef")
    return f"{owner.get('namespace')}/{owner.get('name')}" if owner else None


def _policy(volume: Manifest) -> str:
    return str(volume["spec"].get("persistentVolumeReclaimPolicy", "Retain"))


def _fate(bound: str | None, behind: Manifest | None, ours: Sequence[Manifest], *, is_known: bool) -> str:
    """Tell what becomes of the data."""
    if not bound and not ours:
        return "It was never bound, so there is no data."
    if behind is None and not ours:
        why = "was deleted" if is_known else "may not be looked at"
        return f"PersistentVolume {bound} {why}: whether the data stays is not known."
    told = []
    if behind is not None and behind not in ours:
        told.append(f"PersistentVolume {bound} {_FATES[_policy(behind)]}.")
    for volume in ours:
        policy, spec = _policy(volume), volume["spec"]
        data = f"the data stays {_source(spec)}" if policy == "Retain" else f"its data too, by its policy {policy}"
        told.append(f"PersistentVolume {volume['metadata']['name']} goes too; {data}.")
    return " ".join(told)


_FATES = {
    "Delete": "and all data in it are deleted with it",
    "Recycle": "stays, and all data in it are deleted (policy Recycle)",
    "Retain": "and its data stay (policy Retain)",
}


def _source(spec: Manifest) -> str:
    """Say where the data of a PersistentVolume lies."""
    if "hostPath" in spec:
        return f"in {spec['hostPath']['path']} on the nodes"
    if "csi" in spec:
        return f"in {spec['csi'].get('volumeHandle')} ({spec['csi'].get('driver')})"
    if "nfs" in spec:
        return f"in {spec['nfs'].get('server')}:{spec['nfs'].get('path')}"
    return "where it is"


def find_deletion(cluster: KubeClient, name: str) -> VolumeDeletion:
    """Ask the cluster what there is to delete."""
    check_claim_name(name)
    one = cluster.get(CLAIM, name)
    try:
        volumes: list[Manifest] | None = cluster.list_objects(VOLUME, LABELS)
        bound = (one or {"spec": {}})["spec"].get("volumeName")
        known = {volume["metadata"]["name"] for volume in volumes or ()}
        if bound and bound not in known and (behind := cluster.get(VOLUME, bound)) is not None:
            volumes = [*(volumes or ()), behind]
    except AccessError:
        volumes = None
    decided = plan_deletion(name, cluster.namespace, one, volumes, cluster.list_objects("Pod"))
    if decided.claim is None and not decided.volumes:
        get_claim(cluster, name)
    return decided


def delete_volume(cluster: KubeClient, decided: VolumeDeletion, seconds: float = DELETE_TIMEOUT_S) -> None:
    """Delete a claim, and when it is gone what was made for it."""
    if decided.claim is not None:
        cluster.delete(CLAIM, decided.claim)
        _wait_gone(cluster, CLAIM, decided.claim, seconds)
    for name in decided.volumes:
        cluster.delete(VOLUME, name)
        _wait_gone(cluster, VOLUME, name, seconds)


def _wait_gone(cluster: KubeClient, kind: str, name: str, seconds: float) -> None:
    if not wait_deleted(cluster, kind, name, seconds) and (one := cluster.get(kind, name)) is not None:
        held = ", ".join(one["metadata"].get("finalizers") or ()) or "something"
        what = f"{kind} {name} is marked as deleted, but {held} still holds it"
        raise UnavailableError(what, where=cluster, hint="does a pod mount it? `stoker volume list` tells")
