"""PersistentVolumes of a file: read and validate them; capacity, claim reference and reclaim policy of a volume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stoker.errors import Fault, InputError, SpecError
from stoker.kube.claims import NAME_RULE, is_object_name
from stoker.kube.manifest_files import load_documents
from stoker.kube.objects import ACCESS_MODES, LABEL_DOMAIN, PART_LABEL, Manifest
from stoker.kube.quantity import quantity_to_bytes
from stoker.kube.storage_classes import FSX

PERSISTENT_VOLUME = "PersistentVolume"
LABELS = {PART_LABEL: "volume"}
CLAIM_ANNOTATION = f"{LABEL_DOMAIN}/claim"
"""Annotation of a PersistentVolume created by stoker: its claim as `namespace/name`."""


# --- Reading


def read_persistent_volumes(path: Path) -> list[Manifest]:
    """Read the PersistentVolumes of a YAML or JSON file; raise SpecError for any other object."""
    return flatten_lists(load_documents(path), path)


def flatten_lists(documents: Sequence[Any], where: object) -> list[Manifest]:
    """Return the items of `List` documents and the other documents; raise if one is not a PersistentVolume."""
    objects: list[Any] = []
    for document in documents:
        is_list = isinstance(document, dict) and str(document.get("kind", "")).endswith("List")
        items = document.get("items") if is_list else None
        objects += items if isinstance(items, list) else [] if is_list and items is None else [document]
    types = [(obj.get("apiVersion"), obj.get("kind")) if isinstance(obj, dict) else (None, None) for obj in objects]
    faults = [
        Fault(
            f"object {number}",
            f"must be a v1 {PERSISTENT_VOLUME}, got {kind or 'no kind'}{f' of {version}' if version else ''}",
        )
        for number, (version, kind) in enumerate(types, 1)
        if (version, kind) != ("v1", PERSISTENT_VOLUME)
    ]
    if faults:
        raise SpecError(faults, where=where)
    if not objects:
        raise InputError(f"contains no {PERSISTENT_VOLUME}", where=where)
    return objects


# --- Validation


def check_persistent_volume(volume: Manifest) -> Iterator[Fault]:
    """Yield faults of a PersistentVolume that the API server would report late or never."""
    name, metadata, spec = get_name(volume), volume.get("metadata"), volume.get("spec")
    where = f"PersistentVolume {name}" if name else "a PersistentVolume"
    if not is_object_name(name):
        yield Fault(f"{where}: metadata.name", f"{NAME_RULE}, got {name!r}")
    for key in ("labels", "annotations"):
        if isinstance(metadata, dict) and not isinstance(metadata.get(key) or {}, dict):
            yield Fault(f"{where}: metadata.{key}", "must be a mapping")
    if not isinstance(spec, dict):
        yield Fault(f"{where}: spec", "must be a mapping")
        return
    capacity = spec.get("capacity")
    storage = capacity.get("storage") if isinstance(capacity, dict) else None
    if not quantity_to_bytes(storage):
        yield Fault(f"{where}: spec.capacity.storage", f"must be a size such as 10Gi, got {storage!r}")
    modes = spec.get("accessModes")
    if not isinstance(modes, list) or not modes or not set(map(str, modes)) <= set(ACCESS_MODES.values()):
        yield Fault(
            f"{where}: spec.accessModes", f"must be a list of {', '.join(ACCESS_MODES.values())}, got {modes!r}"
        )
    if spec.get("volumeMode", "Filesystem") != "Filesystem":
        yield Fault(f"{where}: spec.volumeMode", "must be Filesystem: jobs cannot mount block devices")
    if not isinstance(spec.get("claimRef") or {}, dict):
        yield Fault(f"{where}: spec.claimRef", "must be a mapping")
    if isinstance(spec.get("csi"), dict):
        yield from _check_csi(where, spec)


def _check_csi(where: str, spec: Manifest) -> Iterator[Fault]:
    csi = spec["csi"]
    if spec.get("persistentVolumeReclaimPolicy") == "Recycle":
        what = "CSI drivers do not support Recycle; use Retain or Delete"
        yield Fault(f"{where}: spec.persistentVolumeReclaimPolicy", what)
    for key in ("driver", "volumeHandle"):
        if not csi.get(key):
            yield Fault(f"{where}: spec.csi.{key}", "is required")
    attributes = csi.get("volumeAttributes")
    if csi.get("driver") == FSX:
        for key in ("dnsname", "mountname"):
            if not isinstance(attributes, dict) or not attributes.get(key):
                what = "is required: FSx mounts by dnsname and mountname"
                yield Fault(f"{where}: spec.csi.volumeAttributes.{key}", what)


# --- Fields


def get_name(obj: Manifest) -> str:
    """Return the name of an unvalidated object; "" if it has none."""
    metadata = obj.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else ""


def get_capacity(volume: Manifest) -> int:
    """Return the capacity in bytes."""
    return quantity_to_bytes(volume["spec"]["capacity"]["storage"]) or 0


def get_claim_key(volume: Manifest) -> str | None:
    """Return the claim that a volume is reserved for or bound to, as `namespace/name`; None if it is available."""
    claim_ref = volume["spec"].get("claimRef")
    return f"{claim_ref.get('namespace')}/{claim_ref.get('name')}" if claim_ref else None


def get_annotated_claim(volume: Manifest) -> str | None:
    """Return the claim that stoker created a volume for, as `namespace/name`; None if stoker did not create it."""
    claim: str | None = (volume["metadata"].get("annotations") or {}).get(CLAIM_ANNOTATION)
    return claim


def get_reclaim_policy(volume: Manifest) -> str:
    """Return the reclaim policy: Retain, Delete or Recycle."""
    return str(volume["spec"].get("persistentVolumeReclaimPolicy", "Retain"))
