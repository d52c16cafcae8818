"""Builders of Kubernetes objects and their strategic merge; labels, annotations and names shared by all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.errors import InputError

Manifest = dict[str, Any]

LABEL_DOMAIN = "stoker.dev"
JOB_LABEL, RUN_LABEL, ROLE_LABEL, INDEX_LABEL = (f"{LABEL_DOMAIN}/{name}" for name in ("job", "run", "role", "index"))
"""Job name, run id, and the role and index of a pod's slot."""
FIRST_INDEX_ANNOTATION = f"{LABEL_DOMAIN}/first"
"""Slot index of a Job's pod 0, set when another Job runs the slots before it."""
PART_LABEL = f"{LABEL_DOMAIN}/part"
"""Component of an object that belongs to no job: `cache`, `volume`, `inspector`, `shell`."""
MANAGED_BY = {"app.kubernetes.io/managed-by": "stoker"}
MAIN_CONTAINER = "main"
"""Name of the container that runs the program."""
GPU_RESOURCE = "nvidia.com/gpu"
GPU_TYPE_LABELS = ("cloud.google.com/gke-accelerator", "k8s.amazonaws.com/accelerator", "nvidia.com/gpu.product")
"""Node labels for the GPU type: GKE, eksctl node groups, NVIDIA GPU feature discovery."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label of workloads that Kueue keeps suspended until it admits them."""
CACHE_SERVICE, CACHE_PORT = "stoker-cache", 3128
"""Service and port of the caching proxy in a namespace, used by `data.via: cluster`."""
ACCESS_MODES = {"rwo": "ReadWriteOnce", "rwx": "ReadWriteMany", "rox": "ReadOnlyMany", "rwop": "ReadWriteOncePod"}


def build_object(
    version: str, kind: str, name: str, labels: Mapping[str, str], *, namespace: str | None = None, **body: Any
) -> Manifest:
    """Build an object with `labels` and the managed-by label."""
    metadata: Manifest = {"name": name, "labels": {**labels, **MANAGED_BY}}
    if namespace:
        metadata["namespace"] = namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}


def cache_url(namespace: str | None) -> str:
    """Return the URL of the caching proxy in a namespace; None is the namespace of the client."""
    return f"http://{CACHE_SERVICE}{f'.{namespace}' if namespace else ''}:{CACHE_PORT}"


def with_owner(obj: Manifest, owner: Manifest) -> Manifest:
    """Return the object with an owner reference, so that it is garbage collected with its owner."""
    metadata = owner["metadata"]
    reference = {"apiVersion": owner.get("apiVersion", "v1"), "kind": owner["kind"]}
    reference |= {"name": metadata["name"], "uid": metadata["uid"]}
    return {**obj, "metadata": {**obj["metadata"], "ownerReferences": [reference]}}


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
    """Build a PersistentVolumeClaim of a storage class (None: the default class, "": no class) or for one volume."""
    spec: Manifest = {"accessModes": [ACCESS_MODES[access]], "resources": {"requests": {"storage": str(size)}}}
    if storage_class is not None:
        spec["storageClassName"] = storage_class
    if volume is not None:
        spec["volumeName"] = volume
    return build_object("v1", "PersistentVolumeClaim", name, labels, namespace=namespace, spec=spec)


def restricted_security_context() -> Manifest:
    """Return a container security context without privilege escalation and capabilities."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def restricted_pod(user: int) -> Manifest:
    """Return a pod spec with a user that is not root and without the privileges that a server does not need."""
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


# --- Patches

_MERGE_KEYS = ("mountPath", "devicePath", "containerPort", "name", "ip")
"""Keys that identify list entries, in order of precedence."""


def strategic_merge(value: Any, patch: Any) -> Any:
    """Apply a strategic merge patch: null removes a key, lists merge by a merge key, other lists are replaced.

    A patch can add one volume or variable without repeating the others.
    """
    if isinstance(patch, list) and isinstance(value, list) and (key := _find_merge_key([*value, *patch])):
        return _merge_lists(value, patch, key)
    if not isinstance(patch, Mapping):
        return patch
    base = value if isinstance(value, Mapping) else {}
    kept = {key: inner for key, inner in base.items() if key not in patch}
    return {**kept, **{key: strategic_merge(base.get(key), inner) for key, inner in patch.items() if inner is not None}}


def patch_matches(patch: Mapping[str, Any], obj: Manifest) -> bool:
    """Whether a patch applies to an object: same kind and, if the patch has one, same name."""
    name = (patch.get("metadata") or {}).get("name")
    return patch.get("kind") == obj["kind"] and name in (None, obj["metadata"]["name"])


def apply_patches(objects: Sequence[Manifest], patches: Sequence[Manifest]) -> list[Manifest]:
    """Merge patches into the objects with their kind and name, if set; raise InputError for a patch without a match."""
    merged = list(objects)
    for patch in patches:
        matches = [index for index, manifest in enumerate(merged) if patch_matches(patch, manifest)]
        if not matches:
            kind, name = patch.get("kind"), (patch.get("metadata") or {}).get("name")
            existing = ", ".join(f"{manifest['kind']} {manifest['metadata']['name']}" for manifest in merged)
            raise InputError(f"--patch: no object {kind} {name or ''}".rstrip(), hint=f"objects are {existing}")
        for index in matches:
            merged[index] = strategic_merge(merged[index], patch)
    return merged


def _find_merge_key(entries: list[Any]) -> str | None:
    return next(
        (key for key in _MERGE_KEYS if all(isinstance(entry, Mapping) and key in entry for entry in entries)), None
    )


def _merge_lists(value: list[Any], patch: list[Any], key: str) -> list[Any]:
    changes = {entry[key]: entry for entry in patch}
    deleted = {name for name, entry in changes.items() if entry.get("$patch") == "delete"}
    kept = [
        strategic_merge(entry, changes[entry[key]]) if entry[key] in changes else entry
        for entry in value
        if entry[key] not in deleted
    ]
    known = {entry[key] for entry in value}
    return [*kept, *(entry for name, entry in changes.items() if name not in known and name not in deleted)]
