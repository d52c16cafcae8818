"""Diagnosis of failed slots, from logs as torchrun and programs really write them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stoker.errors import InputError
from stoker.jobs.topology import Slot
from stoker.launchers.supervise.diagnosis import LOST_EXIT_CODE, diagnose_slot
from stoker.launchers.supervise.slot_handle import Exited
from stoker.telemetry.events import Recorder

TABLE = """\
W1116 10:00:08.935000 1 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 5 closing signal SIGTERM
E1116 10:00:08.951000 1 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank: 1
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
t.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-16_10:00:08
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : {other} (pid: 21825)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 21825
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-16_10:00:08
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 21826)
  error_file: <N/A>
  traceback : To enable traceback see: ...
============================================================
"""
CLOSED = "[rank0]: RuntimeError: [gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:12986."


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        ("", 7, "worker/0 exited with code 7"),
        ("", -11, "worker/0 was killed by SIGSEGV"),
        ("", 137, "worker/0 was killed by SIGKILL"),
        ("Traceback (most recent call last):\nKeyError: 'x'\n", 1, "worker/0 failed: KeyError: 'x'"),
        ("my.module.OddError: of mine\nbye\n", 1, "worker/0 failed: my.module.OddError: of mine"),
        ("", 170, "worker/0 was killed by signal 42"),
        ("", 255, "worker/0 exited with code 255"),
        ("hello\nboom: bad value\n", 1, "worker/0 exited with code 1; last output: boom: bad value;"),
        (f"boom\n{TABLE.format(code=1, other=-15)}", 1, "(rank 1) exited with code 1; last output: boom;"),
        ("hello\n", 7, "worker/0 exited with code 7;"),
        ("Error: earlier warning\nworking\n", 3, "worker/0 exited with code 3: earlier warning;"),
        ("Error: No such option '-x'.\nTry 'x.py --help'\n", 2, "worker/0 could not start: No such option '-x';"),
        ("Error rate: 0.12 (fine)\n", 1, "worker/0 exited with code 1;"),
        ("Epoch 3 train: error: 0.123\n", 1, "worker/0 exited with code 1;"),
        ("Epoch 3 train: error: rate 0.123\n", 1, "worker/0 exited with code 1;"),
        ("error: 0.12\nError: -1e-3\nval: error: nan\n", 1, "worker/0 exited with code 1;"),
        ("error: '3' is not a shard\n", 1, "worker/0 failed: '3' is not a shard;"),
        ('Traceback (most recent call last):\n  File "x"\nBad: of mine\n', 1, "worker/0 failed: Bad: of mine"),
        ("/usr/bin/python3: No module named nope\n", 1, "worker/0 failed: No module named nope"),
        ("x.py: error: unrecognized arguments: --epochz 3\n", 2, "could not start: unrecognized arguments: --epochz"),
        ("usage: x.py fit [-h]\nx.py fit: error: argument --lr: invalid\n", 2, "not start: argument --lr: invalid;"),
        ("Usage: x.py\n\nError: No such option '--epochz'.\n", 2, "could not start: No such option '--epochz';"),
        (
            "╭─ Error ──────────╮\n│ No such option:  │\n│ --epochz         │\n╰──────────────────╯\n",
            2,
            "could not start: No such option: --epochz;",
        ),
        ("\x1b[1;35mx.py: \x1b[31merror: \x1b[0mbad --lr\n", 2, "worker/0 could not start: bad --lr;"),
        (
            "FATAL Flags parsing error: Unknown command line flag 'epochz'\nPass --helpshort to see help on flags.\n",
            1,
            "worker/0 failed: Unknown command line flag 'epochz';",
        ),
        ("unknown option --foo\nusage: python [option] ...\n", 2, "could not start: unknown option --foo;"),
        (
            "ls: unrecognized option '--epochz'\nTry 'ls --help'.\n",
            2,
            "could not start: unrecognized option '--epochz';",
        ),
        ("ERROR:root:out of disk\n", 1, "worker/0 failed: out of disk;"),
        # what a rank prints has no prefix, unlike torch's own warnings
        (
            f"x.py: error: bad --lr\n[rank1]:[W1116 10:00 x.cpp:1] Warning\n{TABLE.format(code=2, other=-15)}",
            1,
            "worker/0 (rank 1) could not start: bad --lr;",
        ),
        (
            'Traceback (most recent call last):\n  File "torch/distributed/elastic/multiprocessing/errors/x.py"\n'
            f"ValueError: under @record\n{TABLE.format(code=1, other=-15)}",
            1,
            "(rank 1) failed: ValueError: under @record",
        ),
        (
            'Traceback (most recent call last):\n  File "torch/distributed/run.py"\n'
            "torch.distributed.DistNetworkError: port 29500 in use\n",
            1,
            "failed: torch.distributed.DistNetworkError: port 29500 in use",
        ),
        ("error: --lr must be above 0\n", 2, "worker/0 could not start: --lr must be above 0"),
        (
            f"[rank1]: ValueError: bad\n{CLOSED}\n{TABLE.format(code=1, other=-15)}",
            1,
            "worker/0 (rank 1) failed: ValueError: bad",
        ),
        (f"{CLOSED}\n{TABLE.format(code=7, other=-15)}", 1, "worker/0 (rank 1) exited with code 7"),
        (f"{CLOSED}\n{TABLE.format(code=-9, other=1)}", 1, "worker/0 (rank 1) was killed by SIGKILL"),
        # torchrun saw the peer's failure first
        (
            f"{CLOSED.replace('rank0', 'rank1')}\n{TABLE.format(code=1, other=-9)}",
            1,
            "worker/0 (rank 0) was killed by SIGKILL",
        ),
        (f"TypeError: before torch knew its rank\n{TABLE.format(code=1, other=-15)}", 1, "(rank 1) failed: TypeError"),
    ],
)
def test_diagnosis_from_a_log(text: str, code: int, expected: str, tmp_path: Path) -> None:
    log = tmp_path / "worker-0.0.log"
    log.write_text(text)
    message = diagnose_slot(Slot("worker", 0), Exited(code), log).message
    assert expected in message
    assert message.endswith(f"; log: {log}")


def test_error_mark_takes_precedence_over_the_log(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.0.log"
    with log.open("ab") as file:
        Recorder(rank=0, fd=file.fileno()).mark("error", "RuntimeError: Connection closed by peer")
        Recorder(rank=1, fd=file.fileno()).mark("error", "VerificationError: shard 7 is damaged (loader.py:10)")
        file.write(TABLE.format(code=1, other=1).encode())
    diagnosis = diagnose_slot(Slot("worker", 0), Exited(1), log)
    assert (diagnosis.rank, diagnosis.error) == (1, "VerificationError: shard 7 is damaged (loader.py:10)")


def test_mpirun_usage_error_is_bad_input(tmp_path: Path) -> None:
    """Its exit code prevents a retry; horizontal rules in the output of a worker are not mpirun's."""
    log = tmp_path / "log"
    log.write_text("mpirun: Error: unknown option \"--nosuch\"\nType 'mpirun --help' for usage.\n")
    diagnosis = diagnose_slot(Slot("launcher", 0), Exited(1), log)
    assert re.fullmatch(rf'launcher/0 .*: mpirun: unknown option "--nosuch"; log: {log}', diagnosis.message)
    assert diagnosis.error == 'mpirun: unknown option "--nosuch"'
    assert diagnosis.code == InputError.exit_code
    log.write_text(f"{'-' * 60}\nan invalid table\n{'-' * 60}\n")
    diagnosis = diagnose_slot(Slot("worker", 0), Exited(1), log)
    assert (diagnosis.code, diagnosis.error) == (1, None)


def test_out_of_memory_explains_only_sigkill(tmp_path: Path) -> None:
    assert (
        "out of memory" in diagnose_slot(Slot("worker", 0), Exited(-9, out_of_memory=True), tmp_path / "none").message
    )
    message = diagnose_slot(Slot("worker", 0), Exited(-15, out_of_memory=True), tmp_path / "none").message
    assert "SIGTERM" in message
    assert "out of memory" not in message


def test_program_exiting_with_255_is_not_lost(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Traceback (most recent call last):\nValueError: bad data\n")
    diagnosis = diagnose_slot(Slot("worker", 0), Exited(255), log)
    assert not diagnosis.lost
    assert "exited with code 255: ValueError: bad data" in diagnosis.message


def test_exit_record_takes_precedence_over_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("RuntimeError: Connection reset by peer\n")
    lost = Exited(LOST_EXIT_CODE, "node2 has not responded for 30 s", is_lost=True)
    diagnosis = diagnose_slot(Slot("worker", 1), lost, log)
    assert diagnosis.lost
    assert not diagnosis.is_secondary
    assert "worker/1 was lost: node2 has not responded for 30 s" in diagnosis.message
    message = diagnose_slot(Slot("worker", 1), Exited(3, "node2: cannot start 'train'"), log).message
    assert "worker/1 could not start: node2: cannot start 'train'" in message
