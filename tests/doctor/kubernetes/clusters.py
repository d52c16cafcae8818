"""Nodes, pods, claims and facts of a Kubernetes cluster, and the checks of a job on it, for the tests of the doctor."""

from __future__ import annotations

from typing import Any

from stoker.core.spec import decode
from stoker.doctor.checks import Check
from stoker.doctor.kubernetes.collect import render_objects
from stoker.doctor.kubernetes.findings import ClusterFacts, find_requirements
from stoker.doctor.kubernetes.rules import check_cluster
from stoker.errors import AccessDeniedError
from stoker.jobs.spec import JobSpec
from stoker.kube.client import ServerInfo

GPU = "nvidia.com/gpu"
DENIED = AccessDeniedError("user bob may not list nodes")
GIB = 1 << 30


def make_job(**keys: Any) -> JobSpec:
    base = {
        "name": "pets",
        "image": "acme/trainer:v1",
        "program": {"module": "this"},
        "kubernetes": {"namespace": "team"},
    }
    return decode({**base, **keys}, JobSpec)


def node(
    name: str, *, cpu: str = "16", memory: str = "64Gi", gpu: int = 8, gpu_type: str = "", **spec: Any
) -> dict[str, Any]:
    allocatable = {"cpu": cpu, "memory": memory, "pods": "110", **({GPU: str(gpu)} if gpu else {})}
    labels = {"cloud.google.com/gke-accelerator": gpu_type} if gpu_type else {}
    labels |= spec.pop("labels", {})
    ready = {"type": "Ready", "status": spec.pop("ready", "True")}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
        "status": {"allocatable": allocatable, "conditions": [ready]},
    }


def pod(on: str, *, phase: str = "Running", claim: str = "", **requests: str) -> dict[str, Any]:
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}] if claim else []
    spec = {"nodeName": on, "containers": [{"resources": {"requests": requests}}], "volumes": volumes}
    return {"metadata": {"name": f"pod-on-{on}"}, "spec": spec, "status": {"phase": phase}}


TWO_NODES = (node("n1"), node("n2"))
NAMESPACE = {"metadata": {"name": "team", "labels": {}}, "status": {"phase": "Active"}}


def check_job_with(job: JobSpec, **facts: Any) -> dict[str, Check]:
    """Check a job on a cluster without issues except for the given facts; return the worst check of each name."""
    objects, checks = render_objects(job)
    defaults = {"nodes": TWO_NODES, "namespace_object": NAMESPACE, "server_info": ServerInfo("v1.37.0", 0.01, 0.0)}
    cluster = ClusterFacts(namespace="team", server="https://k", **{**defaults, **facts})
    checks = [*check_cluster(job, find_requirements(objects), cluster), *checks]
    return {check.what: check for check in sorted(checks, key=lambda check: check.fine is not False, reverse=True)}


def storage_class(
    name: str, *, default: bool = False, provisioner: str = "efs.csi.aws.com", mode: str = "Immediate"
) -> Any:
    notes = {"storageclass.kubernetes.io/is-default-class": "true"} if default else {}
    return {"metadata": {"name": name, "annotations": notes}, "provisioner": provisioner, "volumeBindingMode": mode}


def claim(mode: str = "ReadWriteOnce", phase: str = "Bound", **more: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "c", **more},
        "spec": {"accessModes": [mode], "storageClassName": "late"},
        "status": {"phase": phase, "accessModes": [mode], "capacity": {"storage": "10Gi"}},
    }


NEW_CLAIM = {"dir": "/c", "claim": "c", "create": True, "size": "10Gi"}
EXISTING_CLAIM = {"dir": "/c", "claim": "c"}
SHARED_VOLUME = [{"claim": "c", "path": "/d"}]


def volume(name: str, size: str, phase: str = "Available") -> dict[str, Any]:
    spec = {"capacity": {"storage": size}, "accessModes": ["ReadWriteOnce", "ReadWriteMany"]}
    return {"metadata": {"name": name}, "spec": spec, "status": {"phase": phase}}
