"""Stacks of all ranks for the dashboard, requested from the supervisor of a run."""

from __future__ import annotations

import msgspec

from stoker.dashboard.runs import DashboardRun
from stoker.errors import ConflictError, StokerError
from stoker.launchers.stack_request import request_stacks

TIMEOUT_S = 30.0
MAX_CHARS = 4_000_000


class Stacks(msgspec.Struct, frozen=True):
    """The stacks of all ranks as text, and whether the text was cut."""

    text: str
    is_cut: bool


def read_stacks(run: DashboardRun) -> Stacks:
    """Request the stacks of all ranks and return them; raise ConflictError with the reason if there are none."""
    if run.is_followed:
        raise ConflictError(f"the run was started elsewhere: run `stoker job stacks {run.id}` there")
    if not run.stacks_lock.acquire(blocking=False):  # each request occupies a thread of the server
        raise ConflictError("the stacks of this run are being requested already")
    try:
        text = request_stacks(run.folder, TIMEOUT_S)
    except ConflictError:
        raise
    except (StokerError, OSError) as error:
        raise ConflictError(f"no stacks: {error}") from error
    finally:
        run.stacks_lock.release()
    if not text:
        raise ConflictError("no process prints its stacks; call stoker.telemetry.recorder() in the program")
    return Stacks(text[:MAX_CHARS], len(text) > MAX_CHARS)
