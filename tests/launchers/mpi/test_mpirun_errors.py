"""Messages of mpirun, as it prints them, and what is parsed from them."""

from __future__ import annotations

import pytest

from stoker.launchers.mpi.mpirun_errors import (
    PEER_EXITED,
    STOPPED_BY_MPIRUN,
    classify_exit_code,
    explain_exit,
    find_killed_rank,
    find_mpirun_error,
)

RULE = "-" * 74
SLOTS = f"""{RULE}
There are not enough slots available in the system to satisfy the 8
slots that were requested by the application:

  true

Either request fewer slots for your application, or make more slots
available for use.
{RULE}"""
EXECUTABLE = f"""{RULE}
mpirun was unable to find the specified executable file, and therefore
did not launch the job.  This error was first reported for process
rank 0; it may have occurred for other processes as well.

NOTE: A common cause for this error is misspelling a mpirun command
      line parameter option.

Node:       vm
Executable: nosuch
{RULE}"""
DAEMONS = f"""ssh: Could not resolve hostname nosuchhost: Name or service not known
{RULE}
ORTE was unable to reliably start one or more daemons.
This usually is caused by:

* not finding the required libraries and/or binaries on
  one or more nodes.
{RULE}"""
RANK = f"""{RULE}
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
{RULE}
{RULE}
mpirun noticed that process rank 1 with PID 21559 on node vm exited on signal 9 (Killed).
{RULE}"""
OPTION = "mpirun: Error: unknown option \"--nosuch\"\nType 'mpirun --help' for usage."


@pytest.mark.parametrize(
    ("text", "error", "code"),
    [
        (
            SLOTS,
            "There are not enough slots available in the system to satisfy the 8 slots that were requested by the "
            "application",
            2,
        ),
        (
            EXECUTABLE,
            "mpirun was unable to find the specified executable file, and therefore did not launch the job "
            "(node vm, executable nosuch)",
            2,
        ),
        (DAEMONS, "ORTE was unable to reliably start one or more daemons", 1),
        (OPTION, 'unknown option "--nosuch"', 2),
        (RANK, None, 1),
        ("", None, 1),
    ],
)
def test_error_of_mpirun_itself(text: str, error: str | None, code: int) -> None:
    assert find_mpirun_error(text.splitlines()) == error
    assert classify_exit_code(error, 1) == code


def test_exit_because_of_a_rank_is_not_an_mpirun_error() -> None:
    assert explain_exit(RANK.splitlines()) == STOPPED_BY_MPIRUN
    assert PEER_EXITED in STOPPED_BY_MPIRUN
    assert explain_exit(OPTION.splitlines()) == 'mpirun: unknown option "--nosuch"'
    assert explain_exit(["a line of a program"]) is None


def test_rank_killed_by_a_signal() -> None:
    assert find_killed_rank(RANK.splitlines()) == (1, -9)
    assert find_killed_rank(SLOTS.splitlines()) is None
