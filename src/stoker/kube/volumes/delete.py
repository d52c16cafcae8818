"""Plan and run `stoker volume delete`: the claim, the PersistentVolumes created for it, and its data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.errors import AccessDeniedError, ConflictError, UnavailableError
from stoker.kube.claims import (
    CLAIM,
    check_claim_name,
    find_mounting_pods,
    format_pod_names,
    get_claim,
    get_release_hint,
)
from stoker.kube.ephemeral_pod import wait_deleted
from stoker.kube.objects import Manifest
from stoker.kube.volumes.persistent_volumes import (
    LABELS,
    PERSISTENT_VOLUME,
    get_annotated_claim,
    get_claim_key,
    get_reclaim_policy,
)

if TYPE_CHECKING:
    from stoker.kube.client import KubeClient

DELETE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeDeletion:
    """The claim and PersistentVolumes to delete, and a note on what happens to the data."""

    claim: str | None
    volumes: Sequence[str] = ()
    data_note: str = ""


def plan_deletion(
    name: str, namespace: str, claim: Manifest | None, volumes: Sequence[Manifest] | None, pods: Iterable[Manifest]
) -> VolumeDeletion:
    """Plan the deletion of a claim; raise ConflictError while a pod mounts it.

    `volumes` None: we are not allowed to list them.
    """
    key = f"{namespace}/{name}"
    _check_unmounted(name, namespace, list(pods))
    created = [
        volume
        for volume in volumes or ()
        if get_annotated_claim(volume) == key and get_claim_key(volume) in (None, key)
    ]
    bound_name = _get_bound_name(claim)
    bound = next((volume for volume in volumes or () if volume["metadata"]["name"] == bound_name), None)
    # With reclaim policy Delete the cluster deletes the volume; if we did, the storage behind it would be left over.
    own = [volume for volume in created if not (volume is bound and get_reclaim_policy(volume) == "Delete")]
    return VolumeDeletion(
        claim=name if claim is not None else None,
        volumes=[str(volume["metadata"]["name"]) for volume in own],
        data_note=_describe_data(bound_name, bound, own, is_known=volumes is not None),
    )


def _check_unmounted(name: str, namespace: str, pods: Sequence[Manifest]) -> None:
    if holders := find_mounting_pods(pods, name):
        raise ConflictError(f"volume {name} is mounted by {format_pod_names(holders)}", hint=get_release_hint(holders))
    if finished := find_mounting_pods(pods, name, finished=True):
        # The pvc-protection finalizer keeps a claim as long as any pod refers to it, even a finished one.
        names = " ".join(pod.pod for pod in finished)
        hint = f"delete them, with their logs: kubectl -n {namespace} delete pod {names}"
        raise ConflictError(f"volume {name} is still referenced by finished {format_pod_names(finished)}", hint=hint)


def _get_bound_name(claim: Manifest | None) -> str | None:
    name: str | None = (claim or {"spec": {}})["spec"].get("volumeName")
    return name


def _describe_data(bound_name: str | None, bound: Manifest | None, own: Sequence[Manifest], *, is_known: bool) -> str:
    """Return what happens to the data."""
    if not bound_name and not own:
        return "It was never bound, so it contains no data."
    if bound is None and not own:
        if is_known:
            return f"PersistentVolume {bound_name} was deleted; it is not known whether its data was kept."
        return f"PersistentVolume {bound_name} cannot be read; it is not known whether its data will be kept."
    sentences = []
    if bound is not None and bound not in own:
        sentences.append(f"PersistentVolume {bound_name} {_POLICY_EFFECTS[get_reclaim_policy(bound)]}.")
    for volume in own:
        policy = get_reclaim_policy(volume)
        is_kept = policy == "Retain"
        effect = (
            f"is deleted too; its data is kept {_describe_location(volume['spec'])}"
            if is_kept
            else f"and its data are deleted too (reclaim policy {policy})"
        )
        sentences.append(f"PersistentVolume {volume['metadata']['name']} {effect}.")
    return " ".join(sentences)


_POLICY_EFFECTS = {
    "Delete": "and its data are deleted too (reclaim policy Delete)",
    "Recycle": "is kept, but its data is deleted (reclaim policy Recycle)",
    "Retain": "and its data are kept (reclaim policy Retain)",
}


def _describe_location(spec: Manifest) -> str:
    """Return where the data of a PersistentVolume is stored."""
    if "hostPath" in spec:
        return f"in {spec['hostPath']['path']} on the nodes"
    if "csi" in spec:
        return f"in {spec['csi'].get('volumeHandle')} ({spec['csi'].get('driver')})"
    if "nfs" in spec:
        return f"in {spec['nfs'].get('server')}:{spec['nfs'].get('path')}"
    return "in its storage"


def find_deletion(client: KubeClient, name: str) -> VolumeDeletion:
    """Read the claim and its PersistentVolumes from the cluster, and plan their deletion."""
    check_claim_name(name)
    claim = client.get(CLAIM, name)
    try:
        volumes: list[Manifest] | None = client.list_objects(PERSISTENT_VOLUME, LABELS)
        bound_name = _get_bound_name(claim)
        known = {volume["metadata"]["name"] for volume in volumes or ()}
        if bound_name and bound_name not in known:
            bound = client.get(PERSISTENT_VOLUME, bound_name)
            volumes = [*(volumes or ()), *([bound] if bound is not None else [])]
    except AccessDeniedError:
        volumes = None
    deletion = plan_deletion(name, client.namespace, claim, volumes, client.list_objects("Pod"))
    if deletion.claim is None and not deletion.volumes:
        get_claim(client, name)  # raises NotFoundError
    return deletion


def delete_volume(client: KubeClient, deletion: VolumeDeletion, seconds: float = DELETE_TIMEOUT_S) -> None:
    """Delete the claim and, once it is gone, the PersistentVolumes created for it."""
    if deletion.claim is not None:
        client.delete(CLAIM, deletion.claim)
        _wait_deleted(client, CLAIM, deletion.claim, seconds)
    for name in deletion.volumes:
        client.delete(PERSISTENT_VOLUME, name)
        _wait_deleted(client, PERSISTENT_VOLUME, name, seconds)


def _wait_deleted(client: KubeClient, kind: str, name: str, seconds: float) -> None:
    if not wait_deleted(client, kind, name, seconds) and (obj := client.get(kind, name)) is not None:
        finalizers = ", ".join(obj["metadata"].get("finalizers") or ()) or "unknown"
        what = f"{kind} {name} is still terminating after {seconds:g} s (finalizers: {finalizers})"
        raise UnavailableError(what, where=client, hint="check which pods mount it: stoker volume list")
