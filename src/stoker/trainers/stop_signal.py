"""Stop signals: a training finishes its step, writes a checkpoint and exits."""

from __future__ import annotations

import signal
import time

FORCE_AFTER_S = 3.0


class StoppedImmediately(Exception):  # noqa: N818 - an event, not an error
    """Raised on a rank that received a stop signal and does not wait for the others."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.signal_number = number


class StopSignal:
    """Whether this rank received a signal to stop: SIGTERM or SIGINT (Ctrl-C).

    A signal often arrives twice, from the terminal and from torchrun, so only a later Ctrl-C stops immediately.
    """

    def __init__(self) -> None:
        self.received, self._immediate, self._since = 0, False, 0.0

    def install(self, *, immediate: bool) -> None:
        """Install the signal handlers; until then, signals terminate the process as usual."""
        self._immediate = immediate
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: object) -> None:
        first, self.received = not self.received, self.received or number
        if first:
            self._since = time.monotonic()
        impatient = number == signal.SIGINT and time.monotonic() - self._since > FORCE_AFTER_S
        if (first and self._immediate) or impatient:
            raise StoppedImmediately(number)
