"""Bound waits that cannot be interrupted: end the process with one sentence if it makes no progress."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

POLL_S = 0.25
EXIT_CODE = 1
_KEPT: list[object] = []


def exit_now(code: int) -> None:
    """End the process without waiting for threads of TensorFlow, which may wait for a task that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def keep_alive(*objects: object) -> None:
    """Keep objects of TensorFlow until the process exits: deleting one may wait for a task that does not respond."""
    _KEPT.extend(objects)


class Watchdog:
    """A deadline for the next sign of progress; the process exits if it passes."""

    def __init__(self, on_expiry: Callable[[str], None], *, end: Callable[[int], None] = exit_now) -> None:
        self._on_expiry, self._end = on_expiry, end
        self._deadline, self._sentence = float("inf"), ""
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="stoker-watchdog", daemon=True).start()

    def expect(self, within_s: float, sentence: str) -> None:
        """Expect the next call of a method within this time; otherwise report the sentence and exit."""
        self._sentence, self._deadline = sentence, time.monotonic() + within_s

    def relax(self) -> None:
        """Expect nothing until the next call of `expect`."""
        self._deadline = float("inf")

    @contextmanager
    def bound(self, within_s: float, sentence: str) -> Iterator[None]:
        """Report the sentence and exit if the body takes longer than this."""
        before = self._sentence, self._deadline
        self.expect(within_s, sentence)
        try:
            yield
        finally:
            self._sentence, self._deadline = before

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(POLL_S):
            if time.monotonic() > self._deadline:
                self._on_expiry(self._sentence)
                self._end(EXIT_CODE)
                return
