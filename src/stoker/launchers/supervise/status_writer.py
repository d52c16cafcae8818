"""Write the status of a run to its folder as it changes, and remarks of the supervisor to its log."""

from __future__ import annotations

import time
from contextlib import suppress

import msgspec

from stoker.jobs.run_folder import RunFolder


class StatusWriter:
    """The status of a run, of which the supervisor is the only writer."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self.current = run.read_status()

    def update(self, **changes: object) -> None:
        """Change the status and write it if it differs; a write error must not stop the training."""
        changed = msgspec.structs.replace(self.current, **changes)
        if changed != self.current:
            self.current = changed
            with suppress(OSError):
                self._run.write_status(changed)


def log_remark(text: str) -> None:
    """Write a remark to `supervisor.log`, which is the standard output of the supervisor; the disk may be full."""
    with suppress(OSError):
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}", flush=True)  # noqa: T201
