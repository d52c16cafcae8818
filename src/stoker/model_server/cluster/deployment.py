"""A model server in a Kubernetes namespace: deploy it, wait for it, remove it."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.errors import ConflictError, NotFoundError
from stoker.kube.client import KubeClient
from stoker.kube.objects import Manifest
from stoker.kube.rollout import ProgressCallback, wait_ready
from stoker.model_server.cluster.manifests import MODEL_LABEL, MODEL_PART, ClusterModel, model_labels, object_name

KINDS = ("Deployment", "Service")


def deploy_model(cluster: KubeClient, model: ClusterModel, objects: Sequence[Manifest]) -> None:
    """Create or update the objects; a rejected one leaves a running server unchanged."""
    if cluster.get("PersistentVolumeClaim", model.claim) is None:
        raise NotFoundError(f"claim {model.claim} not found", where=cluster)
    for manifest in objects:
        existing = cluster.get(manifest["kind"], manifest["metadata"]["name"])
        if existing is not None and not _is_ours(existing, model.name):
            what = f"{manifest['kind']} {manifest['metadata']['name']} exists and is not a model server of stoker"
            raise ConflictError(what, where=cluster, hint="choose another --name")
    for is_dry_run in (True, False):
        for manifest in objects:
            cluster.apply(manifest, dry_run=is_dry_run)


def wait_model_ready(
    cluster: KubeClient, name: str, *, timeout_s: float, on_progress: ProgressCallback = lambda _: None
) -> None:
    """Wait until every pod has loaded the model; raise with the reason if that fails."""
    wait_ready(
        cluster,
        "Deployment",
        object_name(name),
        what=f"model server {name}",
        hint=f"to remove it, run: stoker model stop {name} --on k8s",
        timeout_s=timeout_s,
        on_progress=on_progress,
    )


def remove_model(cluster: KubeClient, name: str) -> list[str]:
    """Delete the objects of a model server and return them; raise NotFoundError if there are none."""
    found = {kind: cluster.list_objects(kind, model_labels(name)) for kind in KINDS}
    removed = [f"{kind} {each['metadata']['name']}" for kind, objects in found.items() for each in objects]
    if not removed:
        others = {
            each["metadata"]["labels"].get(MODEL_LABEL) for each in cluster.list_objects("Deployment", MODEL_PART)
        }
        names = ", ".join(sorted(filter(None, others)))
        raise NotFoundError(
            f"no model server {name} in this namespace", where=cluster, hint=f"there are {names}" if names else None
        )
    for kind, objects in found.items():
        for each in objects:
            cluster.delete(kind, each["metadata"]["name"])
    return removed


def _is_ours(manifest: Manifest, name: str) -> bool:
    return model_labels(name).items() <= (manifest["metadata"].get("labels") or {}).items()
