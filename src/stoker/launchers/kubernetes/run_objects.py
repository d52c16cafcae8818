"""Objects of a run: the lead that owns the others, pod templates, run labels and attempt counts."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.jobs.spec import JobSpec
from stoker.kube.objects import GPU_RESOURCE, ROLE_LABEL, RUN_LABEL, Manifest, strategic_merge

PERSISTENT_KINDS = ("Namespace", "PersistentVolumeClaim")
"""Kinds of objects that outlive a run."""
PREVIOUS_ATTEMPTS_ANNOTATION = "stoker.dev/before"
"""Pod annotation: how many attempts the run had before it was restarted."""
FAILURE_COUNT_ANNOTATION, IGNORED_FAILURE_COUNT_ANNOTATION = (
    f"batch.kubernetes.io/job-index-{kind}-count" for kind in ("failure", "ignored-failure")
)
"""Pod annotations in which the Job controller counts the failures of an index."""


def get_lead_kind(job: JobSpec) -> str:
    """Return the kind of the objects that hold the job's status; the first of them is the lead."""
    return "MPIJob" if job.traits.has_standby_workers else "Job"


def find_lead(objects: Sequence[Manifest]) -> Manifest:
    """Return the lead: the first Job or the MPIJob, which owns all other objects."""
    return next(obj for obj in objects if obj["kind"] in ("Job", "MPIJob"))


def get_pod_templates(obj: Manifest) -> list[Manifest]:
    """Return the pod templates of an object."""
    spec = obj.get("spec", {})
    if obj["kind"] == "MPIJob":
        return [replica["template"] for replica in spec["mpiReplicaSpecs"].values()]
    return [spec["template"]] if obj["kind"] in ("Job", "Deployment", "StatefulSet") else []


def label_run(objects: Sequence[Manifest], run: str, previous_attempts: int = 0) -> list[Manifest]:
    """Return the objects with the run id as label, and the number of previous attempts as pod annotation."""
    labels = {"metadata": {"labels": {RUN_LABEL: run}}}
    template = {
        "metadata": {
            "labels": {RUN_LABEL: run},
            "annotations": {PREVIOUS_ATTEMPTS_ANNOTATION: str(previous_attempts)},
        }
    }
    labeled = []
    for obj in objects:
        if obj["kind"] not in PERSISTENT_KINDS:
            obj = strategic_merge(obj, labels)
        if obj["kind"] == "Job":
            obj = strategic_merge(obj, {"spec": {"template": template}})
        elif obj["kind"] == "MPIJob":
            replicas = {name: {"template": template} for name in obj["spec"]["mpiReplicaSpecs"]}
            obj = strategic_merge(obj, {"spec": {"mpiReplicaSpecs": replicas}})
        labeled.append(obj)
    return labeled


def get_attempt(pod: Manifest) -> int:
    """Return the attempt of a pod, as its own environment has it."""
    annotations = pod["metadata"].get("annotations") or {}
    names = (PREVIOUS_ATTEMPTS_ANNOTATION, FAILURE_COUNT_ANNOTATION, IGNORED_FAILURE_COUNT_ANNOTATION)
    return sum(int(annotations.get(name) or 0) for name in names)


def build_shell_pod_spec(objects: Sequence[Manifest], *, role: str = "worker", gpu: bool = False) -> Manifest:
    """Build the pod spec for `stoker job shell`: that of a role, sleeping instead of running the program."""
    templates = (template for obj in objects for template in get_pod_templates(obj))
    spec = next(template["spec"] for template in templates if template["metadata"]["labels"][ROLE_LABEL] == role)
    main, *sidecars = spec["containers"]
    dropped = ("args", "lifecycle", "livenessProbe", "ports", "readinessProbe", "startupProbe")
    container = {key: value for key, value in main.items() if key not in dropped}
    container["command"] = ["/bin/sh", "-c", "trap exit TERM; while :; do sleep 1; done"]
    if not gpu:
        container["resources"] = {
            kind: {name: amount for name, amount in amounts.items() if name != GPU_RESOURCE}
            for kind, amounts in main.get("resources", {}).items()
        }
    return {**spec, "containers": [container, *sidecars]}
