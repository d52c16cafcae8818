"""Signal dispositions of processes that tests start."""

from __future__ import annotations

import signal


def restore_signals() -> None:
    """Restore the default actions of SIGHUP, SIGINT and SIGQUIT, for `preexec_fn`.

    Under nohup, and in background jobs of a shell, they are ignored, and child processes inherit that.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
