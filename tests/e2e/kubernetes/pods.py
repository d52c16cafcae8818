"""Pods without an image registry: an empty image, into which this machine's own programs are mounted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import stoker

IMAGE = "docker.io/library/hostpy:local"
BUSYBOX = "docker.io/library/busybox:local"
SOURCE = str(Path(stoker.__file__).parents[1])


def mounted(*folders: str) -> dict[str, Any]:
    """Give a pod's part that mounts this machine's programs, Python and further folders where they are here."""
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


def keys(namespace: str, /, *folders: str, **kubernetes: Any) -> dict[str, Any]:
    """Give the keys of a job that runs so."""
    return {
        "image": IMAGE,
        "env": {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "PYTHONPATH": SOURCE, "HOME": "/tmp"},
        "kubernetes": {
            "namespace": namespace,
            "patch": [{"kind": "Job", "spec": {"template": {"spec": mounted(*folders)}}}],
            **kubernetes,
        },
    }
