"""Checkpoint files: their names, and which of them a directory or bucket has. Imports no torch."""

from __future__ import annotations

import re

from stoker.storage import Store, local_path, open_store

BEST_NAME = "best.pt"
_STEP_NAME = re.compile(r"step-(\d{10})\.pt")


def step_name(step: int) -> str:
    """Return the name of the checkpoint of a step; names sort like their steps."""
    return f"step-{step:010d}.pt"


def is_step_name(name: str) -> bool:
    """Return whether a file name is that of the checkpoint of a step."""
    return _STEP_NAME.fullmatch(name) is not None


def list_step_names(store: Store) -> list[str]:
    """List the checkpoints by step, oldest first; without the best one."""
    return sorted(entry.name for entry in store.list("step-") if is_step_name(entry.name))


def has_best(store: Store) -> bool:
    """Return whether there is a checkpoint with the best validation."""
    return any(entry.name == BEST_NAME for entry in store.list(BEST_NAME))


def find_checkpoint(url: str, which: str) -> str | None:
    """Return the name of the `best` or `newest` checkpoint at `url`; the newest if none was validated yet."""
    path = local_path(url)
    store = open_store(url if path is None else str(path.expanduser()))
    if which == "best" and has_best(store):
        return BEST_NAME
    return next(reversed(list_step_names(store)), None)
