"""Pods without an image registry: an empty image, with this machine's programs mounted as hostPath volumes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import stoker

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
