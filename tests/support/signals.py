"""Signal dispositions of processes that tests start."""

from __future__ import annotations

import signal


def restore_sighup() -> None:
    """Restore the default action of SIGHUP, for `preexec_fn`: under nohup, children inherit that it is ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def restore_sigint() -> None:
    """Restore the default action of SIGINT, for `preexec_fn`: background jobs of a shell inherit that it is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
