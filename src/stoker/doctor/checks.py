"""One check's outcome, and those of this machine."""

from __future__ import annotations

import os
import shutil
from importlib import metadata
from importlib.util import find_spec
from typing import NamedTuple

from stoker.core.units import format_bytes
from stoker.errors import MissingError
from stoker.load import native

SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_NEEDED = 1 << 30
"""What a few DataLoader workers with prefetched batches of ImageNet take."""


class Check(NamedTuple):
    """What was looked at, what was found, and the command or sentence that mends it when it is not as it should be.

    `fine` is None for what stands in no way: with a fix, it is odd or an option; without one, it was not tried.
    """

    what: str
    fine: bool | None
    found: str
    fix: str = ""
    host: str = ""
    code: int = MissingError.exit_code
    """The exit code that it gives when it is not fine."""


def check_machine() -> list[Check]:
    """Look at this machine: all that is cheap to know, nothing is started."""
    return [_cores(), _shared_memory(), _decoder(), *(_framework(name) for name in ("torch", "tensorflow")), _nginx()]


def _cores() -> Check:
    return Check("cores", True, f"{len(os.sched_getaffinity(0))} for this process")


def _shared_memory() -> Check:
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return Check(
            "shared memory", None, f"there is no {SHARED_MEMORY}", "DataLoader workers need it; threads do not"
        )
    fine = True if free >= SHARED_MEMORY_NEEDED else None
    fix = "" if fine else f"use threads, not DataLoader workers, or make {SHARED_MEMORY} larger (docker: --shm-size)"
    return Check("shared memory", fine, f"{format_bytes(free)} free in {SHARED_MEMORY}", fix)


def _decoder() -> Check:
    if why_not := native.drawback():
        fix = native.HINT if native.problem() else "nothing to do; decoder='native' uses it all the same"
        return Check("decoder", None, f"python: the native one {why_not}", fix)
    return Check("decoder", True, "native: decodes only what is seen of an image")


def _framework(name: str) -> Check:
    extra = {"torch": "torch", "tensorflow": "tf"}[name]
    if find_spec(name) is None:
        return Check(name, None, "not installed", f"if you train with it: pip install 'stoker[{extra}]'")
    packages = metadata.packages_distributions().get(name, [])  # TensorFlow's has several names
    return Check(name, True, metadata.version(packages[0]) if packages else "installed")


def _nginx() -> Check:
    where = shutil.which("nginx")
    if where is None:
        return Check("nginx", None, "not on the PATH", "stoker serves shards itself; or: apt-get install nginx-light")
    return Check("nginx", True, where)
