"""Compare an existing claim with a requested one: unchanged, to be expanded, or in conflict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stoker.errors import ConflictError
from stoker.kube.claims import CLAIM, format_access_modes
from stoker.kube.conditions import get_phase, is_terminating
from stoker.kube.objects import ACCESS_MODES, Manifest
from stoker.kube.quantity import format_quantity, quantity_to_bytes
from stoker.kube.storage_classes import find_storage_class
from stoker.kube.volumes.request import VolumeRequest


def plan_expansion(
    old: Manifest, new: Manifest, request: VolumeRequest, classes: Sequence[Manifest] | None
) -> Manifest | None:
    """Return the expanded claim, or None if nothing changes; raise ConflictError if the claim cannot be changed."""
    name = old["metadata"]["name"]
    if is_terminating(old):
        hint = "wait until it is gone; check with: stoker volume list"
        raise ConflictError(f"volume {name} is being deleted", hint=hint)
    old_size, new_size = (
        quantity_to_bytes(claim["spec"]["resources"]["requests"]["storage"]) or 0 for claim in (old, new)
    )
    is_larger = request.size is not None and new_size > old_size
    conflicts = list(_find_differences(old["spec"], new["spec"], request))
    if request.size is not None and new_size < old_size:
        conflicts.append(f"has {format_quantity(old_size)} and cannot shrink to {format_quantity(new_size)}")
    if is_larger and (reason := _explain_not_expandable(old, classes)):
        conflicts.append(
            f"has {format_quantity(old_size)} and cannot be expanded to {format_quantity(new_size)}: {reason}"
        )
    if conflicts:
        hint = f"use another name and copy the data, or delete it first: stoker volume delete {name}"
        raise ConflictError(f"volume {name} already exists: it {'; it '.join(conflicts)}", hint=hint)
    return _build_expanded_claim(old, new) if is_larger else None


def _find_differences(old: Manifest, new: Manifest, request: VolumeRequest) -> Iterator[str]:
    """Yield how the spec of a claim differs from the request, other than in its size."""
    if request.access is not None and ACCESS_MODES[request.access] not in old["accessModes"]:
        yield f"has access {format_access_modes(old['accessModes'])}, not {request.access}"
    if "storageClassName" in new and (class_name := old.get("storageClassName") or "") != new["storageClassName"]:
        yield f"has storage class {class_name or 'none'}, not {new['storageClassName'] or 'none'}"
    if "volumeName" in new and old.get("volumeName") != new["volumeName"]:
        yield f"is bound to PersistentVolume {old.get('volumeName') or 'none'}, not {new['volumeName']}"


def _explain_not_expandable(claim: Manifest, classes: Sequence[Manifest] | None) -> str:
    """Return why a claim cannot be expanded; "" if it can, or if only the cluster knows."""
    if get_phase(claim) != "Bound":
        return "it is not bound yet"
    class_name = claim["spec"].get("storageClassName")
    storage_class = find_storage_class(classes, class_name)
    if classes is None or (storage_class or {}).get("allowVolumeExpansion"):
        return ""
    if class_name:
        return f"storage class {class_name} does not set allowVolumeExpansion"
    return "it has no storage class"


def _build_expanded_claim(old: Manifest, new: Manifest) -> Manifest:
    kept = {key: old["spec"][key] for key in ("accessModes", "storageClassName", "volumeName") if key in old["spec"]}
    metadata = {"name": old["metadata"]["name"], "namespace": old["metadata"].get("namespace")}
    spec = {**kept, "resources": new["spec"]["resources"]}
    return {"apiVersion": "v1", "kind": CLAIM, "metadata": metadata, "spec": spec}
