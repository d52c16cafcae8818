"""The result of a check, and the checks of this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import NamedTuple

from stoker.core.units import format_bytes
from stoker.errors import MissingError, install_command
from stoker.load import native

SHM_DIR = "/dev/shm"
MIN_SHM_BYTES = 1 << 30
"""Shared memory of a few DataLoader workers with prefetched batches of ImageNet."""


class Check(NamedTuple):
    """What was checked, what was found, and how to fix it if the check failed.

    `fine` is None for what does not prevent a run: a warning or an option if there is a fix, else a skipped check.
    """

    what: str
    fine: bool | None
    found: str
    fix: str = ""
    host: str = ""
    code: int = MissingError.exit_code
    """The exit code of the command if this check fails."""


def check_machine() -> list[Check]:
    """Check this machine without starting anything."""
    return [
        _check_cores(),
        _check_shared_memory(),
        _check_decoder(),
        *(_check_framework(name) for name in ("torch", "tensorflow")),
        _check_nginx(),
    ]


def _check_cores() -> Check:
    return Check("cores", True, f"{len(os.sched_getaffinity(0))} available to this process")


def _check_shared_memory() -> Check:
    try:
        free = shutil.disk_usage(SHM_DIR).free
    except OSError:
        return Check("shared memory", None, f"{SHM_DIR} not found", "needed by DataLoader workers, not by threads")
    fine = True if free >= MIN_SHM_BYTES else None
    fix = "" if fine else f"use threads instead of DataLoader workers, or enlarge {SHM_DIR} (docker run --shm-size)"
    return Check("shared memory", fine, f"{format_bytes(free)} free in {SHM_DIR}", fix)


def _check_decoder() -> Check:
    if why_not := native.why_not_preferred():
        fix = native.INSTALL_HINT if native.why_unavailable() else "optional: decoder='native' uses it anyway"
        return Check("decoder", None, f"python: the native decoder {why_not}", fix)
    return Check("decoder", True, "native: decodes only the cropped region of an image")


def _check_framework(name: str) -> Check:
    extra = {"torch": "torch", "tensorflow": "tf"}[name]
    if find_spec(name) is None:
        return Check(name, None, "not installed", f"to train with it: {install_command(extra)}")
    packages = metadata.packages_distributions().get(name, [])  # TensorFlow is distributed under several names
    return Check(name, True, metadata.version(packages[0]) if packages else "installed")


def _check_nginx() -> Check:
    path = shutil.which("nginx")
    if path is None:
        return Check(
            "nginx", None, "not found on the PATH", "optional, to serve shards with nginx: apt-get install nginx-light"
        )
    return Check("nginx", True, path)


def format_names(names: Sequence[str]) -> str:
    """Join names, abbreviated if there are many."""
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"
