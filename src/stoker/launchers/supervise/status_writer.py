"""Write the status of a run to its folder as it changes, and remarks of the supervisor to its log."""

from __future__ import annotations

import time
from contextlib import suppress

import msgspec

from stoker.core.spec import to_json
from stoker.jobs.run_folder import STATUS_FILE, RunFolder

RESERVE_FILE = "state.reserve"
RESERVE_BYTES = 256 << 10
"""More than the status of a thousand slots takes."""


class StatusWriter:
    """The status of a run, of which the supervisor is the only writer."""

    def __init__(self, run: RunFolder) -> None:
        """Read the status, and reserve disk space for the final one."""
        self._run = run
        self.current = run.read_status()
        self._is_written = True
        with suppress(OSError):
            run.write(RESERVE_FILE, b" " * RESERVE_BYTES)

    def update(self, **changes: object) -> None:
        """Change the status and write it if it differs from the file; a write error must not stop the training."""
        changed = msgspec.structs.replace(self.current, **changes)
        if changed != self.current or not self._is_written:
            self.current, self._is_written = changed, False
            with suppress(OSError):
                self._run.write_status(changed)
                self._is_written = True

    def finish(self, **changes: object) -> None:
        """Write the final status, into the reserved space if the disk is full; nobody would write it later."""
        self.current = msgspec.structs.replace(self.current, **changes)
        reserve = self._run.folder / RESERVE_FILE
        with suppress(OSError):
            try:
                self._run.write_status(self.current)
            except OSError:
                with open(reserve, "r+b") as file:
                    file.write(to_json(self.current))
                    file.truncate()
                reserve.replace(self._run.folder / STATUS_FILE)
            reserve.unlink(missing_ok=True)


def try_write(run: RunFolder, name: str, data: bytes) -> None:
    """Write a file of a run that no command depends on; a full disk is a remark, and must not stop the training."""
    try:
        run.write(name, data)
    except OSError as error:
        log_remark(f"cannot write {name}: {error.strerror}")


def log_remark(text: str) -> None:
    """Write a remark to `supervisor.log`, which is the standard output of the supervisor; the disk may be full."""
    with suppress(OSError):
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}", flush=True)  # noqa: T201
