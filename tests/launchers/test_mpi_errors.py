"""What mpirun says, as it says it, and what is made of it."""

from __future__ import annotations

import pytest

from stoker.launchers.mpi_errors import code_of, complaint, noticed, why

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
    ("text", "words", "code"),
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
def test_why_mpirun_gave_up(text: str, words: str | None, code: int) -> None:
    found = complaint(text.splitlines())
    assert (found, code_of(found, 1)) == (words, code)


def test_an_end_for_a_rank_is_known_from_one_of_mpiruns_own() -> None:
    assert why(RANK.splitlines()) == "mpirun has ended all, for another rank is gone"
    assert why(OPTION.splitlines()) == 'mpirun: unknown option "--nosuch"'
    assert why(["a line of a program"]) is None


def test_a_rank_that_a_signal_ended() -> None:
    assert noticed(RANK.splitlines()) == (1, -9)
    assert noticed(SLOTS.splitlines()) is None
