"""Attempts that prove that they do not overlap: their processes hold a lock for as long as any of them lives."""

from __future__ import annotations

from pathlib import Path

OVERLAP = "overlap with the previous attempt"


def with_attempt_lock(folder: Path, script: str) -> str:
    """Return a shell script that prints `OVERLAP` if any process of the previous attempt of any slot is alive.

    All processes of a slot inherit the descriptor of its lock, so the lock is free once the last of them has exited.
    The hosts of the tests share the file system, and so the locks.
    """
    return (
        f"exec 9> {folder}/lock.$STOKER_ATTEMPT.$STOKER_INDEX; flock 9\n"
        f"for previous in {folder}/lock.$((STOKER_ATTEMPT - 1)).*; do\n"
        f'    test ! -e "$previous" || flock -n "$previous" true || echo {OVERLAP}\n'
        f"done\n{script}"
    )
