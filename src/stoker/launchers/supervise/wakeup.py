"""Pause of the supervisor between two polls; it ends as soon as a child exits, a signal arrives or a slot changes."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress


class Wakeup:
    """A pause that signals and other threads end early; a notification before the pause counts, too."""

    def __init__(self) -> None:
        """Let every signal with a handler end the pause, and SIGCHLD have one."""
        self._read_fd, self._write_fd = os.pipe()
        for fd in (self._read_fd, self._write_fd):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # one that was inherited as ignored would lose exit codes

    def notify(self) -> None:
        """End the pause, from any thread."""
        with suppress(BlockingIOError):  # many notifications are waiting already
            os.write(self._write_fd, b"\0")

    def pause(self, timeout_s: float) -> None:
        """Wait for a notification or a signal, for at most `timeout_s`."""
        if select.select([self._read_fd], [], [], timeout_s)[0]:
            os.read(self._read_fd, 1 << 16)
