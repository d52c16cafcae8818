"""Thread pool whose threads are gone after shutdown, so that the process can fork safely."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

EXIT_TIMEOUT_S = 1.0


class ThreadPool(ThreadPoolExecutor):
    """A ThreadPoolExecutor whose kernel threads have exited when `shutdown` returns, so that the process may fork.

    `Thread.join` returns before the kernel thread has exited. In its last steps the thread may hold a lock of a C
    library, and a child forked at that moment would deadlock on it.
    """

    def __init__(self, count: int, name: str) -> None:
        native_ids: list[int] = []
        super().__init__(count, name, initializer=lambda: native_ids.append(threading.get_native_id()))
        self._native_ids = native_ids

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut down the pool and wait until the kernel threads have exited."""
        super().shutdown(wait=wait, cancel_futures=cancel_futures)
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        for native_id in self._native_ids if wait else ():
            while os.path.exists(f"/proc/self/task/{native_id}") and time.monotonic() < deadline:  # noqa: PTH110
                time.sleep(0.0005)
