"""Thread pools that leave nothing behind."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

PATIENCE_S = 1.0


class Threads(ThreadPoolExecutor):
    """A pool whose threads are truly gone once it is shut down, so that the process may fork then.

    Python has joined a thread before the system has ended it; on its last steps it may hold a lock of some library, and
    a child that is forked at that moment would wait for it for ever.
    """

    def __init__(self, count: int, name: str) -> None:
        natives: list[int] = []
        super().__init__(count, name, initializer=lambda: natives.append(threading.get_native_id()))
        self._natives = natives

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads, and wait until the system has ended them too."""
        super().shutdown(wait=wait, cancel_futures=cancel_futures)
        deadline = time.monotonic() + PATIENCE_S
        for native in self._natives if wait else ():
            while os.path.exists(f"/proc/self/task/{native}") and time.monotonic() < deadline:  # noqa: PTH110
                time.sleep(0.0005)
