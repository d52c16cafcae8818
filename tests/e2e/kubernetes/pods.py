"""Pods without an image registry: an empty image, with this machine's programs mounted as hostPath volumes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import stoker
from stoker.kube.client import KubeClient
from stoker.kube.objects import build_claim, build_object

IMAGE = "docker.io/library/hostpy:local"
BUSYBOX = "docker.io/library/busybox:local"
SOURCE = str(Path(stoker.__file__).parents[1])


def build_host_mounts(*folders: str) -> dict[str, Any]:
    """Build a pod spec patch that mounts this machine's programs, Python and other folders at the same paths."""
    paths = dict.fromkeys(
        ["/usr", "/etc/ld.so.cache", "/etc/alternatives", sys.base_prefix, sys.prefix, SOURCE, *folders]
    )
    names = {path: f"host-{index}" for index, path in enumerate(paths)}
    return {
        "volumes": [{"name": name, "hostPath": {"path": path}} for path, name in names.items()],
        "containers": [
            {"name": "main", "volumeMounts": [{"name": name, "mountPath": path} for path, name in names.items()]}
        ],
    }


def build_job_keys(namespace: str, /, *folders: str, **kubernetes: Any) -> dict[str, Any]:
    """Build the keys of a job whose pods use the host's programs."""
    return {
        "image": IMAGE,
        "env": {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "PYTHONPATH": SOURCE, "HOME": "/tmp"},
        "kubernetes": {
            "namespace": namespace,
            "patch": [{"kind": "Job", "spec": {"template": {"spec": build_host_mounts(*folders)}}}],
            **kubernetes,
        },
    }


@contextmanager
def claim_of_folder(cluster: KubeClient, claim: str, folder: Path) -> Iterator[Path]:
    """Create a ReadWriteOnce claim whose volume is a folder of this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{cluster.namespace}-{claim}"
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "hostPath": {"path": str(folder)},
        "storageClassName": "",
        "persistentVolumeReclaimPolicy": "Retain",
    }
    cluster.create(build_object("v1", "PersistentVolume", name, {}, spec=spec))
    cluster.create(build_claim(claim, 1 << 30, "rwo", {}, storage_class="", volume=name))
    yield folder
    cluster.delete("PersistentVolumeClaim", claim)
    cluster.delete("PersistentVolume", name)
