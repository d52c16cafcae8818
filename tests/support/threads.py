"""Threads that start together."""

from __future__ import annotations

import threading
from collections.abc import Callable


def run_parallel(tasks: list[Callable[[], None]]) -> None:
    """Run all tasks concurrently, each in its own thread, and wait for them."""
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
