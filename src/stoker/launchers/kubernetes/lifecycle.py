"""Create and delete the objects of a run in a cluster.

The lead is created suspended and gets everything else as dependents, then it is resumed: deleting it deletes all, and
nothing runs half-created.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from stoker.core.processes import wait_until
from stoker.errors import ConflictError, MissingError, StokerError, UnavailableError
from stoker.jobs.run_folder import RunFolder
from stoker.kube.claims import check_mountable
from stoker.kube.client import KubeClient
from stoker.kube.conditions import is_terminating, true_conditions
from stoker.kube.objects import (
    JOB_LABEL,
    MANAGED_BY,
    QUEUE_LABEL,
    RUN_LABEL,
    Manifest,
    strategic_merge,
    with_owner,
)
from stoker.launchers.kubernetes.run_objects import (
    PERSISTENT_KINDS,
    find_lead,
    get_lead_kind,
    get_pod_templates,
)

POLL_S = 0.5
DELETE_TIMEOUT_S = 30.0
"""How long the cluster may take to delete a job, beyond its grace period."""


def create_objects(client: KubeClient, objects: Sequence[Manifest]) -> None:
    """Create all objects of a run; if one is rejected, delete all but the persistent ones."""
    lead = find_lead(objects)
    queue = lead["metadata"]["labels"].get(QUEUE_LABEL)
    _delete_previous(client, lead)
    persistent = [obj for obj in objects if obj["kind"] in PERSISTENT_KINDS]
    missing = [obj for obj in persistent if client.get(obj["kind"], obj["metadata"]["name"]) is None]
    specs = [template["spec"] for obj in objects for template in get_pod_templates(obj)]
    check_mountable(client, specs, created=[obj["metadata"]["name"] for obj in missing])
    if queue and not client.list_api_versions("kueue.x-k8s.io"):
        what = f"queue {queue} cannot admit the job: Kueue is not installed in the cluster"
        raise MissingError(
            what, where=client, hint="remove kubernetes.queue, or ask the cluster administrator to install Kueue"
        )
    for obj in missing:
        client.create(obj)
    owner = client.create(strategic_merge(lead, _build_suspend_patch(lead["kind"], True)))
    try:
        for obj in objects:
            if obj is not lead and obj not in persistent:
                _create_dependent(client, with_owner(obj, owner))
        if not queue:  # otherwise Kueue resumes it
            client.patch(lead["kind"], lead["metadata"]["name"], _build_suspend_patch(lead["kind"], False))
    except BaseException:
        with suppress(StokerError):
            client.delete(lead["kind"], lead["metadata"]["name"])
        raise


def _create_dependent(client: KubeClient, obj: Manifest) -> None:
    """Create an object of the run; raise ConflictError if one of that name exists, which is not ours to change."""
    try:
        client.create(obj)
    except ConflictError as error:
        what = f"{obj['kind']} {obj['metadata']['name']} already exists and does not belong to this run"
        raise ConflictError(what, where=client, hint="delete it, or rename the job") from error


def _delete_previous(client: KubeClient, lead: Manifest) -> None:
    """Delete a finished job of the same name; raise ConflictError if it is still running or not ours."""
    kind, name = lead["kind"], lead["metadata"]["name"]
    try:
        existing = client.get(kind, name)
    except MissingError as error:
        hint = "topology mpi needs the Kubeflow MPI operator, 0.6 or later"
        what = f"the cluster has no API for {kind} ({lead['apiVersion']})"
        raise MissingError(what, where=client, hint=hint) from error
    if existing is None:
        return
    labels = existing["metadata"].get("labels") or {}
    if not MANAGED_BY.items() <= labels.items():
        raise ConflictError(f"{kind} {name} already exists and is not managed by stoker", where=client)
    if not true_conditions(existing) & {"Complete", "Failed", "Succeeded"} and not is_terminating(existing):
        run = labels.get(RUN_LABEL) or name
        hint = f"stop it with: stoker job stop {client.url}/{run}; or rename this job"
        raise ConflictError(f"job {name} already exists and has not finished", where=client, hint=hint)
    client.delete(kind, name, foreground=True)

    def is_deleted() -> bool:
        """Return whether the dependents are gone too: they are garbage collected a moment later."""
        selector = {JOB_LABEL: labels[JOB_LABEL]}
        return not any(client.list_objects(each, selector) for each in (kind, "Service", "ConfigMap"))

    if not wait_until(is_deleted, DELETE_TIMEOUT_S, max_interval_s=POLL_S):
        what = f"the previous {kind} {name} is still terminating after {DELETE_TIMEOUT_S:g} s"
        raise UnavailableError(what, where=client)


def _build_suspend_patch(kind: str, suspend: bool) -> Manifest:
    return {"spec": {"runPolicy": {"suspend": suspend}}} if kind == "MPIJob" else {"spec": {"suspend": suspend}}


def delete_objects(client: KubeClient, run: RunFolder) -> list[str]:
    """Delete the objects of a run and wait for its pods; return the pods that remain after the grace period."""
    labels = {RUN_LABEL: run.id}
    # The lead owns the others, unless creation was interrupted.
    for kind in (get_lead_kind(run.job), "Service", "ConfigMap"):
        for obj in client.list_objects(kind, labels):
            client.delete(kind, obj["metadata"]["name"])

    def list_pods() -> list[str]:
        return [pod["metadata"]["name"] for pod in client.list_objects("Pod", labels)]

    try:
        wait_until(lambda: not list_pods(), float(run.job.grace) + DELETE_TIMEOUT_S, max_interval_s=POLL_S)
    except KeyboardInterrupt:  # a second Ctrl-C skips the grace period
        for name in list_pods():
            client.delete("Pod", name, grace_s=0)
        wait_until(lambda: not list_pods(), DELETE_TIMEOUT_S, max_interval_s=POLL_S)
    return list_pods()
