"""Checkpoint files: their names, and which of them a directory or bucket has. Imports neither torch nor TensorFlow."""

from __future__ import annotations

import re

from stoker.storage import Store, local_path, open_store

TORCH_SUFFIX, TF_SUFFIX = ".pt", ".npz"
BEST_NAME = f"best{TORCH_SUFFIX}"
BEST_NAMES = (BEST_NAME, f"best{TF_SUFFIX}")
"""Names of the checkpoint with the best validation, by trainer."""
_STEP_NAME = re.compile(r"step-(\d{10})\.(pt|npz)")


def step_name(step: int, suffix: str = TORCH_SUFFIX) -> str:
    """Return the name of the checkpoint of a step; names sort like their steps."""
    return f"step-{step:010d}{suffix}"


def is_step_name(name: str) -> bool:
    """Return whether a file name is that of the checkpoint of a step."""
    return _STEP_NAME.fullmatch(name) is not None


def list_step_names(store: Store, suffix: str = "") -> list[str]:
    """List the checkpoints by step, oldest first; without the best one."""
    names = (entry.name for entry in store.list("step-"))
    return sorted(name for name in names if is_step_name(name) and name.endswith(suffix))


def find_best(store: Store, suffix: str = "") -> str | None:
    """Return the name of the checkpoint with the best validation; None if there is none."""
    found = {entry.name for entry in store.list("best.")}
    return next((name for name in BEST_NAMES if name in found and name.endswith(suffix)), None)


def find_checkpoint(url: str, which: str) -> str | None:
    """Return the name of the `best` or `newest` checkpoint at `url`, or of the one with this name, if there is one.

    Without a validated checkpoint, the best is the newest.
    """
    path = local_path(url)
    store = open_store(url if path is None else str(path.expanduser()))
    if which not in ("best", "newest"):
        return which if any(entry.name == which for entry in store.list(which)) else None
    best = find_best(store) if which == "best" else None
    return best or next(reversed(list_step_names(store)), None)
