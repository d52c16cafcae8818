"""Stoker keeps accelerators fed."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.api import Job, Run, runs
    from stoker.load.loader import Batch, Loader

__version__ = "0.1.0.dev0"
__all__ = ["Batch", "Job", "Loader", "Run", "runs"]

_HOMES = {
    "Batch": "stoker.load.loader",
    "Job": "stoker.api",
    "Loader": "stoker.load.loader",
    "Run": "stoker.api",
    "runs": "stoker.api",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: the command line starts without it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
