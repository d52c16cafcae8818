"""Wrapper between mpirun and one rank: sets the rank's environment, keeps its output intact, reports its exit code.

One file, standard library only, Python 3.8 or later, no import of stoker: it runs wherever mpirun does.

    mpirun … python3 mpi_rank.py --ranks 2 --first 6 -- [words only for the first rank of a worker] PROGRAM …

- The rank gets the variables that torchrun would set, and those of its slot: mpirun gives all ranks the same ones.
- mpirun loses output when short lines come in bursts, and when it kills the ranks. So a process of its own writes the
  output of the rank to `$STOKER_OUTPUT`; it outlives the rank, whose process group mpirun kills.
- mpirun kills all ranks two seconds after one has failed. So a rank that was asked to stop exits with 0, and its real
  exit code is an event; the other ranks keep their grace period for a last checkpoint.
- When mpirun itself dies, the rank gets SIGTERM, and after its grace period SIGKILL.

    python3 mpi_rank.py --around mpirun …     python3 mpi_rank.py --around orted …

Around mpirun and its daemons it passes SIGTERM on to the ranks, which have a grace period, instead of to mpirun. There
mpirun reaches other hosts by `$STOKER_ASK`, and ranks print to the output file of their daemon, not through mpirun.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

PREFIX = "@stoker "
VERSION = 1
RANK_EXIT_MARK = "rank_exit"
"""The mark with the exit code of a rank."""
MAX_LINE_BYTES = 1 << 20
"""Size after which a line without a newline is written as is."""
NOT_STARTED_CODE = 3
DRAIN_S = 1.0
POLL_S = 0.05
SECRETS_ENV = "STOKER_SECRETS"
"""The folder with a file for each secret, if the environment has none."""
OUTPUT_ENV = "STOKER_OUTPUT"
"""The file that ranks print to, else their standard output; with `{slot}` in its path, one file per worker."""
GPUS_ENV = "CUDA_VISIBLE_DEVICES"
AGENT_FLAG = "--agent"
TMPDIR_OPTION = "orte_tmpdir_base"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


class LineEncoder:
    """Encoder that writes complete lines, each with its rank: the ranks of a worker share a file."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._rest, self.last = b"", b"\n"

    def encode(self, data: bytes) -> bytes:
        """Return the lines that are complete now, and a line that is too long in pieces."""
        self.last = data[-1:] or self.last
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        return b"".join(prefix_rank(line, self._rank, self._ranks) + b"\n" for line in lines)


def prefix_rank(line: bytes, rank: int, ranks: int) -> bytes:
    """Prefix a line with its rank if the worker has several ranks; events carry their own."""
    return line if ranks == 1 or PREFIX.encode() in line else b"[rank%d]: %s" % (rank, line)


class Output:
    """The output of the rank, in complete lines."""

    def __init__(self, encoder: LineEncoder) -> None:
        self._encoder = encoder

    def start_copying(self, read_fd: int, write_fd: int) -> int:
        """Copy a pipe in a process that ends with the last writer; return its ID."""
        pid = os.fork()
        if pid:
            return pid
        os.setsid()  # mpirun kills the process group of the rank, and what is still in the pipe must not be lost
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        os.close(write_fd)
        os.dup2(1, 2)  # mpirun waits until nobody has the streams that it gave to the rank
        self._copy(read_fd)
        os._exit(0)

    def _copy(self, pipe: int) -> None:
        """Copy the output of the program; read it even if it cannot be written, so that the program does not block."""
        while True:
            data = os.read(pipe, 1 << 16)
            if not data:
                break
            self.write(data)
        if self._encoder.last != b"\n":
            self.write(b"\n")

    def write(self, data: bytes) -> None:
        """Write all of the data; drop what a full disk or a closed pipe does not take."""
        rest = self._encoder.encode(data)
        with contextlib.suppress(OSError):
            while rest:
                rest = rest[os.write(1, rest) :]


class StopRequest:
    """Whether the rank was asked to stop: by a signal to its process group, or because mpirun died."""

    def __init__(self, grace_s: float) -> None:
        self.signal, self._is_orphan = 0, False
        self._grace_s, self._parent = grace_s, os.getppid()
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)

    def _on_signal(self, number: int, frame: Any) -> None:  # noqa: ARG002
        self.signal = self.signal or number
        if not self._is_orphan and os.getppid() != self._parent and os.getpgrp() == os.getpid():
            self._is_orphan = True
            os.killpg(0, signal.SIGTERM)  # the kernel has sent it to this process only
            threading.Thread(target=self._kill_after_grace, daemon=True).start()

    def _kill_after_grace(self) -> None:
        time.sleep(self._grace_s)
        os.killpg(0, signal.SIGKILL)


def main(argv: list[str]) -> int:
    """Run one rank to its end, or the other modes of this file."""
    if argv[0] == "--around":
        return run_around(argv[1:])
    if argv[0] == AGENT_FLAG:
        return start_daemon(argv[1], argv[2:])
    load_secrets(os.environ)
    options, command = _parse_arguments(argv)
    rank = set_rank_env(os.environ, options)
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if int(os.environ["LOCAL_RANK"]):
        command = command[options["--first"][0] :]
    stop = StopRequest(float(os.environ.get("STOKER_GRACE_S", "30")))
    output_file = os.environ.get(OUTPUT_ENV)
    if output_file:
        os.dup2(open_output(output_file), 1)
    output = Output(LineEncoder(rank, ranks))
    read_fd, write_fd = os.pipe()
    copier = output.start_copying(read_fd, write_fd)
    os.close(read_fd)
    try:
        child = _start(command, write_fd)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        output.write(f"stoker: cannot start the program {command[0]!r}: {reason}\n".encode())
        return _report_exit(output, rank, NOT_STARTED_CODE, stop)
    os.close(write_fd)
    if stop.signal:  # it may have come before the program was started
        with contextlib.suppress(OSError):
            child.send_signal(stop.signal)
    return _report_exit(output, rank, wait_for_program(child, copier), stop)


def wait_for_program(child: subprocess.Popen[bytes], copier: int) -> int:
    """Wait for the program and for its output; kill it if the process that copies its output was killed."""
    is_copying = True
    while child.returncode is None:
        pid, status = os.wait()
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if pid == child.pid:
            child.returncode = code
        elif pid == copier:
            is_copying = False
            if code:
                os.kill(child.pid, signal.SIGKILL)
    deadline = time.monotonic() + DRAIN_S  # a process that the program left behind may keep the pipe open
    while is_copying and time.monotonic() < deadline:
        is_copying = os.waitpid(copier, os.WNOHANG)[0] == 0
        time.sleep(POLL_S if is_copying else 0)
    return child.returncode


def open_output(path: str) -> int:
    """Open the file that the rank prints to; `{slot}` in its path stands for the slot, whose ranks share the file."""
    own = path.replace("{slot}", os.environ["STOKER_SLOT"].replace("/", "-"))
    return os.open(own, os.O_WRONLY | os.O_APPEND | (os.O_CREAT if own != path else 0), 0o644)


def load_secrets(environ: Any) -> None:
    """Set the variables whose values are in files: secrets must not be part of mpirun's messages."""
    folder = environ.get(SECRETS_ENV, "")
    for name in os.listdir(folder) if folder else ():
        with open(os.path.join(folder, name), encoding="utf-8", errors="surrogateescape") as file:
            environ[name] = file.read()


def set_rank_env(environ: Any, options: dict[str, list[int]]) -> int:
    """Set the variables of a rank and its slot from those of mpirun, as torchrun would; return the rank."""
    rank = _number(environ, "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    worker, local = find_worker(options["--ranks"], rank)
    ranks = _of_worker(options["--ranks"], worker)
    environ["RANK"] = str(rank)
    environ["WORLD_SIZE"] = str(_number(environ, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"] = str(local), str(ranks)
    environ["STOKER_SLOT"], environ["STOKER_ROLE"], environ["STOKER_INDEX"] = f"worker/{worker}", "worker", str(worker)
    if "--threads" in options:
        environ["OMP_NUM_THREADS"] = str(_of_worker(options["--threads"], worker))
    if "--gpus" in options:
        # The workers of a node share its GPUs in their order.
        first_rank = rank - _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
        first_worker = find_worker(options["--ranks"], first_rank)[0]
        start = sum(_of_worker(options["--gpus"], other) for other in range(first_worker, worker))
        gpus = _of_worker(options["--gpus"], worker)
        own_gpus = [gpu for gpu in environ.get(GPUS_ENV, "").split(",") if gpu][start : start + gpus]
        if len(own_gpus) == gpus:  # otherwise the job has set the variable itself
            environ[GPUS_ENV] = ",".join(own_gpus)
    return rank


def find_worker(ranks: list[int], rank: int) -> tuple[int, int]:
    """Return the worker of a rank and the rank's number in it; `ranks` has the count of each worker, or one for all."""
    if len(ranks) == 1:
        return divmod(rank, ranks[0])
    worker = 0
    while rank >= ranks[worker]:
        rank -= ranks[worker]
        worker += 1
    return worker, rank


def _of_worker(numbers: list[int], worker: int) -> int:
    return numbers[worker if len(numbers) > 1 else 0]


def _number(environ: Any, *names: str) -> int:
    return int(next((environ[name] for name in names if name in environ), 0))


def _parse_arguments(argv: list[str]) -> tuple[dict[str, list[int]], list[str]]:
    """Parse `--ranks 2,1 --gpus 2,1 --first 6 -- COMMAND`, as the MPI topology writes it: numbers by worker."""
    at = argv.index("--")
    texts = {"--first": "0", **dict(zip(argv[:at:2], argv[1:at:2]))}  # noqa: B905 (Python 3.8 has no strict)
    return {name: [int(number) for number in text.split(",")] for name, text in texts.items()}, argv[at + 1 :]


def _start(command: list[str], output: int) -> subprocess.Popen[bytes]:
    libc, parent = ctypes.CDLL(None), os.getpid()
    # In our process group, which gets all signals that mpirun sends.
    return subprocess.Popen(
        command, stdout=output, stderr=output, preexec_fn=lambda: _set_parent_death_signal(libc, parent, signal.SIGKILL)
    )


def _set_parent_death_signal(libc: Any, parent: int, number: int) -> None:
    libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + number)


def run_around(command: list[str]) -> int:
    """Run mpirun or one of its daemons; pass stop signals on to its ranks."""
    received: list[int] = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: received.append(number))  # noqa: ARG005
    has_ranks = command[0] != "mpirun"  # mpirun starts daemons on other hosts, which get signals of their own
    folder = None
    if has_ranks:
        environ = {**os.environ, OUTPUT_ENV: os.path.realpath("/proc/self/fd/1")}
        if TMPDIR_OPTION not in command:  # two daemons on one host must not remove each other's files
            folder = tempfile.mkdtemp(prefix="stoker-mpi-")
            command = [*command, "-mca", TMPDIR_OPTION, folder]
    else:
        environ = {
            **os.environ,
            "OMPI_MCA_plm_rsh_agent": f"{sys.executable} {os.path.realpath(__file__)} {AGENT_FLAG}",
        }
    parent, libc = os.getpid(), ctypes.CDLL(None)
    child = subprocess.Popen(
        command, env=environ, preexec_fn=lambda: _set_parent_death_signal(libc, parent, signal.SIGTERM)
    )
    signalled: set[int] = set()
    while child.poll() is None:
        for pid in _children(child.pid) if received and has_ranks else ():
            if pid not in signalled:
                with contextlib.suppress(OSError):  # each leads a process group of its own, soon after its start
                    os.killpg(pid, signal.SIGTERM)
                    signalled.add(pid)
        time.sleep(POLL_S)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    code = child.returncode
    return code if code >= 0 else 128 - code


def start_daemon(node: str, argv: list[str]) -> int:
    """Start a daemon on the host of the worker that a node name stands for, as `ssh` would."""
    role, _, index = node.rpartition("-")
    program = os.environ["STOKER_ASK"]
    os.execv(program, [program, f"{role}/{index}", *argv])


def _children(parent: int) -> list[int]:
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == parent:
                    pids.append(int(name))
    return pids


def _report_exit(output: Output, rank: int, code: int, stop: StopRequest) -> int:
    """Write the event with the exit code of the rank; return the exit code for mpirun."""
    event = {
        "v": VERSION,
        "t": round(time.time(), 6),
        "slot": os.environ["STOKER_SLOT"],
        "rank": rank,
        "attempt": _number(os.environ, "STOKER_ATTEMPT"),
        "pid": os.getpid(),
        "seq": 0,
        "k": "mark",
        "name": RANK_EXIT_MARK,
        "code": code,
    }
    output.write(f"{PREFIX}{json.dumps(event)}\n".encode())
    if stop.signal:
        return 0
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
