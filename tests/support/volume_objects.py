"""StorageClasses, claims, volumes and the pods that mount them, for tests without a cluster."""

from __future__ import annotations

from typing import Any

from stoker.kube.objects import Manifest
from stoker.kube.storage_classes import EFS

GIB = 2**30


def build_storage_class(
    name: str, provisioner: str = "example.com/disks", *, default: bool = False, **fields: Any
) -> Manifest:
    """Build a StorageClass."""
    annotations = {"storageclass.kubernetes.io/is-default-class": "true"} if default else {}
    return {"metadata": {"name": name, "annotations": annotations}, "provisioner": provisioner, **fields}


STORAGE_CLASSES = [
    build_storage_class("disks", default=True, allowVolumeExpansion=True),
    build_storage_class("files", EFS),
]


def build_claim(
    name: str = "data", *, phase: str = "Bound", size: str = "10Gi", mode: str = "ReadWriteOnce", **spec: Any
) -> Manifest:
    """Build a claim of class `disks` in namespace ns."""
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": size}}, "storageClassName": "disks", **spec}
    return {"metadata": {"name": name, "namespace": "ns"}, "spec": spec, "status": {"phase": phase}}


def build_volume(name: str = "pv", storage: str = "10Gi", mode: str = "ReadWriteOnce", **spec: Any) -> Manifest:
    """Build a hostPath PersistentVolume."""
    spec = {"capacity": {"storage": storage}, "accessModes": [mode], "hostPath": {"path": "/d"}, **spec}
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}


def build_mounting_pod(name: str, claim: str, phase: str = "Running", **labels: str) -> Manifest:
    """Build a pod that mounts a claim."""
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]
    return {"metadata": {"name": name, "labels": labels}, "spec": {"volumes": volumes}, "status": {"phase": phase}}
