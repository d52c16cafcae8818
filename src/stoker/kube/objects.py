"""Small pure builders of Kubernetes objects, and the names that all of ours have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Manifest = dict[str, Any]

LABEL_DOMAIN = "stoker.dev"
JOB_LABEL, RUN_LABEL, ROLE_LABEL, INDEX_LABEL = (f"{LABEL_DOMAIN}/{name}" for name in ("job", "run", "role", "index"))
"""Labels: the job's name, the run's id, and which slot a pod is."""
FIRST_INDEX_ANNOTATION = f"{LABEL_DOMAIN}/first"
"""Annotation: the slot's index of a Job's pod 0, where the slots before it have another Job."""
PART_LABEL = f"{LABEL_DOMAIN}/part"
"""Label of what belongs to no job: `cache`, `volume`, `inspector`, `shell`."""
MANAGED_BY = {"app.kubernetes.io/managed-by": "stoker"}
MAIN_CONTAINER = "main"
"""The container of our pods that does the work."""
GPU_RESOURCE = "nvidia.com/gpu"
GPU_TYPE_LABELS = ("cloud.google.com/gke-accelerator", "k8s.amazonaws.com/accelerator", "nvidia.com/gpu.product")
"""By which GKE, eksctl's node groups and NVIDIA's discovery name the kind of a node's GPUs."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label of what Kueue holds back until there is room."""
CACHE_SERVICE, CACHE_PORT = "stoker-cache", 3128
"""The Service of the caching proxy in a namespace, which `data.via: cluster` means, and its port."""
ACCESS_MODES = {"rwo": "ReadWriteOnce", "rwx": "ReadWriteMany", "rox": "ReadOnlyMany", "rwop": "ReadWriteOncePod"}


def build_object(
    version: str, kind: str, name: str, labels: Mapping[str, str], *, namespace: str | None = None, **body: Any
) -> Manifest:
    """Give an object; `labels` beside the one that says that it is ours."""
    metadata: Manifest = {"name": name, "labels": {**labels, **MANAGED_BY}}
    if namespace:
        metadata["namespace"] = namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}


def cache_url(namespace: str | None) -> str:
    """Give the URL of a namespace's cache, which `data.via: cluster` means; None is the namespace of who asks."""
    return f"http://{CACHE_SERVICE}{f'.{namespace}' if namespace else ''}:{CACHE_PORT}"


def with_owner(one: Manifest, owner: Manifest) -> Manifest:
    """Have an object deleted with its owner."""
    metadata = owner["metadata"]
    reference = {"apiVersion": owner.get("apiVersion", "v1"), "kind": owner["kind"]}
    reference |= {"name": metadata["name"], "uid": metadata["uid"]}
    return {**one, "metadata": {**one["metadata"], "ownerReferences": [reference]}}


def build_claim(
    name: str,
    size: int,
    access: str,
    labels: Mapping[str, str],
    *,
    storage_class: str | None = None,
    volume: str | None = None,
    namespace: str | None = None,
) -> Manifest:
    """Ask for a volume of a class (the cluster's default if None; "" for none), or for one that is there."""
    spec: Manifest = {"accessModes": [ACCESS_MODES[access]], "resources": {"requests": {"storage": str(size)}}}
    if storage_class is not None:
        spec["storageClassName"] = storage_class
    if volume is not None:
        spec["volumeName"] = volume
    return build_object("v1", "PersistentVolumeClaim", name, labels, namespace=namespace, spec=spec)


def restricted_security_context() -> Manifest:
    """Take from a container what no training needs."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


# --- Patches

_KEYS = ("mountPath", "devicePath", "containerPort", "name", "ip")
"""By which entries of a list are known to be the same one, in this order."""


def strategic_merge(value: Any, patch: Any) -> Any:
    """Merge a patch: null removes, lists of named things are merged by name, other lists are replaced.

    Kubernetes calls it a strategic merge, so that a volume or a variable can be added without telling the others.
    """
    if isinstance(patch, list) and isinstance(value, list) and (key := _key_of([*value, *patch])):
        return _merged_lists(value, patch, key)
    if not isinstance(patch, Mapping):
        return patch
    base = value if isinstance(value, Mapping) else {}
    kept = {key: inner for key, inner in base.items() if key not in patch}
    return {**kept, **{key: strategic_merge(base.get(key), inner) for key, inner in patch.items() if inner is not None}}


def patch_matches(patch: Mapping[str, Any], one: Manifest) -> bool:
    """Whether a patch means an object: by its kind and, if it gives one, its name."""
    name = (patch.get("metadata") or {}).get("name")
    return patch.get("kind") == one["kind"] and name in (None, one["metadata"]["name"])


def _key_of(entries: list[Any]) -> str | None:
    return next((key for key in _KEYS if all(isinstance(one, Mapping) and key in one for one in entries)), None)


def _merged_lists(value: list[Any], patch: list[Any], key: str) -> list[Any]:
    changes = {one[key]: one for one in patch}
    gone = {name for name, one in changes.items() if one.get("$patch") == "delete"}
    kept = [
        strategic_merge(one, changes[one[key]]) if one[key] in changes else one for one in value if one[key] not in gone
    ]
    known = {one[key] for one in value}
    return [*kept, *(one for name, one in changes.items() if name not in known and name not in gone)]
