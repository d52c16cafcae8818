"""Pod specs: container, resources, volumes, security context, scheduling constraints."""

from __future__ import annotations

import math
from collections.abc import Mapping

from stoker.jobs.spec import JobSpec, ResourcesSpec, RoleSpec
from stoker.jobs.topology import Role
from stoker.kube.objects import (
    GPU_RESOURCE,
    GPU_TYPE_LABELS,
    MAIN_CONTAINER,
    RUN_LABEL,
    Manifest,
    restricted_security_context,
)
from stoker.launchers.kubernetes.config_map import JobFiles, get_code_key
from stoker.launchers.kubernetes.run_objects import (
    FAILURE_COUNT_ANNOTATION,
    IGNORED_FAILURE_COUNT_ANNOTATION,
    PREVIOUS_ATTEMPTS_ANNOTATION,
)
from stoker.launchers.kubernetes.scripts import CODE_DIR, SCRIPTS_DIR


def build_pod_spec(
    job: JobSpec,
    role: Role,
    files: JobFiles,
    env: Mapping[str, str],
    *,
    script: str,
    first: int = 0,
    mounts_claim: bool,
) -> Manifest:
    """Build the pod spec of a role, whose workers are equal.

    `env` are the variables that all its slots share, `first` the slot index of the pod with completion index 0,
    `mounts_claim` whether it mounts a checkpoint claim that only one node can mount.
    """
    settings = job.kubernetes
    role_spec = job.roles.get(role.name, RoleSpec())
    resources = job.resources_of(0) if role.name == "worker" else role_spec.resources
    volumes, mounts = _build_volumes(job, files, mounts_claim=mounts_claim)
    container: Manifest = {
        "name": MAIN_CONTAINER,
        "image": role_spec.image or job.image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["/bin/sh", f"{SCRIPTS_DIR}/{script}.sh"],
        "env": [*_build_env(env, first), *_build_secret_env(job)],
        "resources": _build_resources(resources),
        "volumeMounts": mounts,
        "securityContext": restricted_security_context(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    tolerations = [dict(toleration) for toleration in settings.tolerations]
    if resources.gpus:
        tolerations += [{"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}]
    pod: Manifest = {
        "restartPolicy": "Never",
        # The program is then not PID 1, for which signals without a handler would be ignored.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": math.ceil(float(job.grace)),
        "automountServiceAccountToken": bool(settings.service_account),
        "serviceAccountName": settings.service_account,
        "priorityClassName": settings.priority_class,
        "securityContext": _build_security_context(job),
        "enableServiceLinks": False,
        "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets],
        "nodeSelector": {**settings.node_selector, **role_spec.node_selector},
        "affinity": _build_gpu_affinity(resources.gpu_type) if resources.gpus and resources.gpu_type else None,
        "tolerations": tolerations,
        "containers": [{key: value for key, value in container.items() if value not in ({}, [])}],
        "volumes": volumes,
    }
    return {key: value for key, value in pod.items() if value not in (None, [], {})}


def _build_volumes(job: JobSpec, files: JobFiles, *, mounts_claim: bool) -> tuple[list[Manifest], list[Manifest]]:
    """Build the volumes of a pod and the mounts of its container."""
    checkpoint = job.checkpoint
    volumes: list[Manifest] = []
    mounts: list[Manifest] = []

    def add(name: str, path: str, source: Manifest, *, read_only: bool = False) -> None:
        volumes.append({"name": name, **source})
        mounts.append({"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})})

    scripts = [{"key": name, "path": name} for name in files.texts]
    add("stoker", SCRIPTS_DIR, {"configMap": {"name": job.name, "items": scripts}}, read_only=True)
    shm = {"medium": "Memory"} | ({"sizeLimit": str(int(job.kubernetes.shm))} if job.kubernetes.shm else {})
    add("shm", "/dev/shm", {"emptyDir": shm})
    if files.code:
        items = [{"key": get_code_key(index), "path": path} for index, path in enumerate(files.code)]
        add("code", CODE_DIR, {"configMap": {"name": job.name, "items": items}}, read_only=True)
    if checkpoint.claim is not None and (mounts_claim or checkpoint.access == "rwx"):
        add("checkpoint", str(checkpoint.dir), {"persistentVolumeClaim": {"claimName": checkpoint.claim}})
    for index, volume in enumerate(job.volumes):
        source = {"persistentVolumeClaim": {"claimName": volume.claim}}
        add(f"volume-{index}", volume.path, source, read_only=volume.read_only)
    for index, (path, secret_file) in enumerate(job.secret_files.items()):
        add(f"secret-{index}", path, {"secret": {"secretName": secret_file.secret}}, read_only=True)
    if job.data.cache.dir is not None:
        limit = {"sizeLimit": str(int(job.data.cache.size))} if job.data.cache.size else {}
        add("cache", job.data.cache.dir, {"emptyDir": limit})
    return volumes, mounts


def _build_security_context(job: JobSpec) -> Manifest:
    """Build the pod security context; without kubernetes.user the image's user is used."""
    user, group = job.kubernetes.user, job.kubernetes.group
    context = {
        "runAsUser": user,
        "runAsNonRoot": True if user else None,
        "runAsGroup": group,
        "fsGroup": group,
        # Without it, the kubelet visits every file of a large claim before each start.
        "fsGroupChangePolicy": None if group is None else "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return {key: value for key, value in context.items() if value is not None}


def _build_gpu_affinity(gpu_type: str) -> Manifest:
    """Build a node affinity for a GPU type, under any of the labels that clouds use."""
    terms = [{"matchExpressions": [{"key": key, "operator": "In", "values": [gpu_type]}]} for key in GPU_TYPE_LABELS]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def _build_resources(resources: ResourcesSpec) -> Manifest:
    """Build equal requests and limits: pods of QoS class Guaranteed are evicted last."""
    quantities = {
        "cpu": None if resources.cpu is None else f"{math.ceil(resources.cpu * 1000)}m",
        "memory": None if resources.memory is None else str(int(resources.memory)),
        GPU_RESOURCE: str(resources.gpus) if resources.gpus else None,
    }
    amounts = {name: amount for name, amount in quantities.items() if amount is not None}
    return {"requests": amounts, "limits": dict(amounts)} if amounts else {}


def _build_env(env: Mapping[str, str], first: int) -> list[Manifest]:
    """Build the variables that all slots of a role share, and those from the pod's own metadata."""
    fields = {
        "STOKER_RUN": f"metadata.labels['{RUN_LABEL}']",
        "STOKER_BEFORE": f"metadata.annotations['{PREVIOUS_ATTEMPTS_ANNOTATION}']",
        "STOKER_FAILED": f"metadata.annotations['{FAILURE_COUNT_ANNOTATION}']",
        "STOKER_MOVED": f"metadata.annotations['{IGNORED_FAILURE_COUNT_ANNOTATION}']",
    }
    entries: list[Manifest] = [{"name": name, "value": _escape(value)} for name, value in env.items()]
    entries += [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]
    return [*entries, *([{"name": "STOKER_FIRST", "value": str(first)}] if first else [])]


def _escape(value: str) -> str:
    """Escape `$`, so that the kubelet does not expand `$(NAME)`."""
    return value.replace("$", "$$")


def _build_secret_env(job: JobSpec) -> list[Manifest]:
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret.secret, "key": secret.key}}}
        for name, secret in job.secret_env.items()
    ]
