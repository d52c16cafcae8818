"""Stoker keeps accelerators fed."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would delay programs that run under the profiler
    from typing import Any

    from stoker.api import Job as Job
    from stoker.api import Run as Run
    from stoker.api import runs as runs
    from stoker.load.loader import Batch as Batch
    from stoker.load.loader import Loader as Loader

__version__ = "0.1.0.dev0"

# The public names, by the module that defines them: imported when they are used, so that the command line starts fast.
_EXPORTS = {
    "Batch": "stoker.load.loader",
    "Job": "stoker.api",
    "Loader": "stoker.load.loader",
    "Run": "stoker.api",
    "runs": "stoker.api",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    """Import a public name when it is used."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
