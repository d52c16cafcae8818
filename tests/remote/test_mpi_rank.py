"""The wrapper of a rank of mpirun, without mpirun."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

from stoker.core.processes import child_pids
from stoker.remote import mpi_rank
from stoker.remote.mpi_rank import MAX_LINE_BYTES, LineEncoder
from stoker.telemetry.events import parse
from tests.support.waiting import wait_until

WRAPPER = [sys.executable, "-I", "-S", mpi_rank.__file__, "--ranks", "2"]


def wait_for_copier(wrapper: subprocess.Popen[bytes]) -> int:
    """Wait until the program runs, and return the process that copies its output."""
    wait_until(lambda: sorted(pid == os.getpgid(pid) for pid in child_pids(wrapper.pid)) == [False, True])
    return next(pid for pid in child_pids(wrapper.pid) if pid == os.getpgid(pid))


def test_line_encoder_writes_complete_lines_with_their_rank() -> None:
    encoder = LineEncoder(3, 2)
    pieces = [b"half", b" a line", b'\n@stoker {"k": 1}\n\nmore', b"", b"\n"]
    output = [encoder.encode(piece) for piece in pieces]
    assert output == [b"", b"", b'[rank3]: half a line\n@stoker {"k": 1}\n[rank3]: \n', b"", b"[rank3]: more\n"]
    assert LineEncoder(0, 1).encode(b"a\nb\n") == b"a\nb\n"
    assert len(encoder.encode(b"x" * (MAX_LINE_BYTES + 1))) > MAX_LINE_BYTES


def test_file_runs_alone_on_python_3_8() -> None:
    source = Path(mpi_rank.__file__).read_text()
    ast.parse(source, feature_version=(3, 8))
    assert not any(line.startswith(("import stoker", "from stoker")) for line in source.splitlines())


def test_environment_and_exit_of_a_rank_started_by_pmi() -> None:
    env = {"PMI_RANK": "3", "PMI_SIZE": "4", "STOKER_ATTEMPT": "2"}
    words = [*WRAPPER, "--first", "1", "--", "nosuch"]
    script = 'printf "$RANK of $WORLD_SIZE in $STOKER_SLOT"; exit 7'
    done = subprocess.run([*words, "/bin/sh", "-c", script], env=env, capture_output=True, text=True, check=False)
    output, event_line = done.stdout.splitlines()
    assert (done.returncode, output) == (7, "[rank3]: 3 of 4 in worker/1")
    event = parse(event_line)
    assert event is not None
    assert (event.slot, event.rank, event.attempt) == ("worker/1", 3, 2)
    assert (event.fields["name"], event.fields["code"]) == (mpi_rank.RANK_EXIT_MARK, 7)


def test_output_before_a_kill_of_the_process_group_is_complete(tmp_path: Path) -> None:
    """mpirun kills the group of each rank after another rank has failed."""
    log, mark = tmp_path / "worker-0.0.log", tmp_path / "mark"
    script = f"until test -e {mark}; do sleep 0.02; done; seq 1000; touch {mark}.end; sleep 100"
    env = {**os.environ, "OMPI_COMM_WORLD_RANK": "0", "STOKER_OUTPUT": str(tmp_path / "{slot}.0.log")}
    wrapper = subprocess.Popen([*WRAPPER, "--", "/bin/sh", "-c", script], env=env, process_group=0)
    copier = wait_for_copier(wrapper)
    os.kill(copier, signal.SIGSTOP)
    mark.touch()
    wait_until((tmp_path / "mark.end").exists)
    os.killpg(wrapper.pid, signal.SIGKILL)
    wrapper.wait()
    os.kill(copier, signal.SIGCONT)
    wait_until(lambda: log.read_text() == "".join(f"[rank0]: {number}\n" for number in range(1, 1001)))
    wait_until(lambda: not Path(f"/proc/{copier}").exists())


def test_program_ends_with_the_process_that_copies_its_output() -> None:
    with subprocess.Popen([*WRAPPER, "--", "sleep", "100"], process_group=0, stdout=subprocess.DEVNULL) as wrapper:
        os.kill(wait_for_copier(wrapper), signal.SIGKILL)
        assert wrapper.wait() == 128 + signal.SIGKILL
