"""Stoker keeps accelerators fed."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.load.loader import Batch, Loader

__version__ = "0.1.0.dev0"
__all__ = ["Batch", "Loader"]


def __getattr__(name: str) -> Any:
    """Import the loader when it is asked for: the command line starts without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stoker.load import loader

    return getattr(loader, name)
