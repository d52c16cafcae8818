"""Ask the supervisor of a run for the stacks of all ranks."""

from __future__ import annotations

from stoker.core.processes import wait_until
from stoker.errors import ConflictError, InputError, UnavailableError
from stoker.jobs.run_files import STACKS_REQUEST_FILE, stacks_file
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.run_lookup import launcher_of

TIMEOUT_S = 60.0
POLL_S = 0.2


def request_stacks(run: RunFolder, timeout_s: float = TIMEOUT_S) -> str:
    """Return the stacks of all Python processes of a run that print them on SIGUSR1; no other process is signalled."""
    launcher = launcher_of(run)
    if not launcher.traits.prints_stacks:
        raise InputError(f"run {run.id} has no supervisor that prints stacks", where=run.handle)
    status = launcher.status(run.handle)
    if status.state != "running":
        raise ConflictError(f"run {run.id} is not running (state: {status.state})")
    request = run.folder / STACKS_REQUEST_FILE
    request.touch()
    try:
        if not wait_until(lambda: not request.exists(), timeout_s, max_interval_s=POLL_S):
            raise UnavailableError(f"the supervisor did not answer within {timeout_s:g} s", where=run.id)
    finally:
        request.unlink(missing_ok=True)
    return (run.folder / stacks_file(run.read_status().attempt)).read_text(errors="replace")
