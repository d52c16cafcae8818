"""Stands between mpirun and one rank: makes a rank of it, carries its output whole, and tells how it ended.

One file on the standard library alone, for Python 3.8 and later, importing nothing of ours: it goes where mpirun does.

    mpirun … python3 mpi_rank.py --ranks 2 --first 6 -- [what only the first of a worker's ranks has] PROGRAM …

- The rank finds the variables that torchrun would give it, and those of its slot: mpirun gives all ranks the same.
- `mpirun --tag-output` loses bytes where short lines come in bursts, and a program may print what looks like a tag. So
  ends of lines and tags are written in another way where they would be misread; `telemetry.mpi_output` undoes it.
- mpirun ends all ranks two seconds after one has failed. Once it was told to end, a rank therefore ends well, and how
  it really ended is an event. So others have their time for a last checkpoint.
- When mpirun itself is gone, the rank is told to end, and is ended after its grace.

    python3 mpi_rank.py --around mpirun …     python3 mpi_rank.py --around orted …

Around mpirun and its daemons it passes the wish to end on to the ranks, which have their grace, and not to these. There
mpirun reaches other hosts by `$STOKER_ASK`, and what a rank prints goes where its daemon's output goes, past mpirun and
line by line.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
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
EXIT = "rank_exit"
"""The mark by which a rank's end is told."""
ESCAPE, NEWLINE, NOTHING = b"\x10", b"n", b"-"
"""What stands for an end of line, and for nothing, behind the escape; an end of line behind it is none."""
LONGEST_LINE = 1 << 20
"""Bytes after which a line that does not end is given as it is."""
APART = 64
"""Bytes between two ends of lines as mpirun sees them: it has room for about one in fourteen."""
PAUSE_S = 0.1
NOT_STARTED = 3
DRAIN_S = 1.0
POLL_S = 0.05
SECRETS = "STOKER_SECRETS"
"""The folder with a file for each secret, where nobody else gives the rank any."""
OUTPUT = "STOKER_OUTPUT"
"""The file that ranks print into, where mpirun does not carry it."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
AGENT = "--agent"
SCRATCH = "orte_tmpdir_base"
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


class Encoder:
    """Writes bytes so that mpirun can tag them without loss; bytes may come in any pieces."""

    def __init__(self) -> None:
        self._since, self.last = 0, b"\n"

    def encode(self, data: bytes) -> bytes:
        """Give what is to be written."""
        start = ESCAPE + NOTHING if self.last == b"]" and data[:1] == b"<" else b""
        self.last = data[-1:] or self.last
        data = start + data.replace(ESCAPE, ESCAPE * 2).replace(b"]<", b"]" + ESCAPE + NOTHING + b"<")
        first, *lines = data.split(b"\n")
        parts = [first]
        self._since += len(first)
        for line in lines:
            near = self._since < APART
            parts += [ESCAPE + NEWLINE if near else b"\n", line]
            self._since = len(line) + (self._since + 2 if near else 0)
        return b"".join(parts)

    def pause(self) -> bytes:
        """Give what ends the line for mpirun alone, so that its own words are not taken for the rank's."""
        if not self._since:
            return b""
        self._since = 0
        return ESCAPE + b"\n"


class Lines:
    """Gives whole lines, each with its rank, where nobody tags them: ranks of a worker share a file."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._rest, self.last = b"", b"\n"

    def encode(self, data: bytes) -> bytes:
        """Give the lines that are whole now; one that does not end comes in pieces."""
        self.last = data[-1:] or self.last
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            whole, self._rest = [*whole, self._rest], b""
        return b"".join(marked(line, self._rank, self._ranks) + b"\n" for line in whole)

    def pause(self) -> bytes:
        """Give nothing: half a line waits for its end."""
        return b""


def marked(line: bytes, rank: int, ranks: int) -> bytes:
    """Say whose a line is, where its worker has several ranks; events say it themselves."""
    return line if ranks == 1 or PREFIX.encode() in line else b"[rank%d]: %s" % (rank, line)


class Output:
    """The standard output of the rank, as mpirun gets it, or as it is written past mpirun."""

    def __init__(self, encoder: Encoder | Lines) -> None:
        self._encoder, self._broken = encoder, False

    def pump(self, ours: int) -> None:
        """Carry all that the program prints; also when nobody takes it any more, so that it does not wait."""
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # they must wake the thread that waits for the program
        while True:
            if not select.select([ours], [], [], PAUSE_S)[0]:
                self._put(self._encoder.pause())
                select.select([ours], [], [])
            data = os.read(ours, 1 << 16)
            if not data:
                return
            self.write(data)

    def end_line(self) -> None:
        """Go to the beginning of a line."""
        if self._encoder.last != b"\n":
            self.write(b"\n")

    def write(self, data: bytes) -> None:
        """Write it all, or nothing where mpirun is gone."""
        self._put(self._encoder.encode(data))

    def _put(self, rest: bytes) -> None:
        try:
            while rest and not self._broken:
                rest = rest[os.write(1, rest) :]
        except OSError:
            self._broken = True


class Ending:
    """Whether the rank was told to end: by a signal to its group, or because mpirun is gone."""

    def __init__(self, grace_s: float) -> None:
        self.told, self._alone = 0, False
        self._grace_s, self._starter = grace_s, os.getppid()
        for number in ENDING:
            signal.signal(number, self._hear)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)

    def _hear(self, number: int, frame: Any) -> None:  # noqa: ARG002
        self.told = self.told or number
        if not self._alone and os.getppid() != self._starter and os.getpgrp() == os.getpid():
            self._alone = True
            os.killpg(0, signal.SIGTERM)  # it came to us alone, from the kernel
            threading.Thread(target=self._kill_later, daemon=True).start()

    def _kill_later(self) -> None:
        time.sleep(self._grace_s)
        os.killpg(0, signal.SIGKILL)


def main(argv: list[str]) -> int:
    """Run one rank to its end, or what was asked for instead."""
    if argv[0] == "--around":
        return around(argv[1:])
    if argv[0] == AGENT:
        return ask(argv[1], argv[2:])
    take_secrets(os.environ)
    ranks, gpus, first, command = _arguments(argv)
    rank = seat(os.environ, ranks, gpus)
    if rank % ranks:
        command = command[first:]
    ending = Ending(float(os.environ.get("STOKER_GRACE_S", "30")))
    own = os.environ.get(OUTPUT)
    if own:
        os.dup2(os.open(own, os.O_WRONLY | os.O_APPEND), 1)
    output = Output(Lines(rank, ranks) if own else Encoder())
    ours, theirs = os.pipe()
    try:
        child = _start(command, theirs)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        output.write(f"stoker: cannot start the program {command[0]!r}: {reason}\n".encode())
        return _over(output, rank, NOT_STARTED, ending)
    os.close(theirs)
    if ending.told:  # perhaps before the program was there
        with contextlib.suppress(OSError):
            child.send_signal(ending.told)
    pump = threading.Thread(target=output.pump, args=(ours,), daemon=True)
    pump.start()
    code = child.wait()
    pump.join(DRAIN_S)  # what the program left behind may still hold its output
    return _over(output, rank, code, ending)


def take_secrets(environ: Any) -> None:
    """Set the variables whose values are in files: they must not travel with mpirun's own messages."""
    folder = environ.get(SECRETS, "")
    for name in os.listdir(folder) if folder else ():
        with open(os.path.join(folder, name), encoding="utf-8", errors="surrogateescape") as file:
            environ[name] = file.read()


def seat(environ: Any, ranks: int, gpus: int = 0) -> int:
    """Set the variables of a rank and of its slot from those of mpirun, as torchrun would; give the rank."""
    rank = _number(environ, "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    worker, local = divmod(rank, ranks)
    environ["RANK"] = str(rank)
    environ["WORLD_SIZE"] = str(_number(environ, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"] = str(local), str(ranks)
    environ["STOKER_SLOT"], environ["STOKER_ROLE"], environ["STOKER_INDEX"] = f"worker/{worker}", "worker", str(worker)
    before = _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID") // ranks  # workers of the same node
    mine = environ.get(VISIBLE, "").split(",")[before * gpus : (before + 1) * gpus]
    if gpus and len(mine) == gpus:  # else they are the job's own, and not for us to share out
        environ[VISIBLE] = ",".join(mine)
    return rank


def _number(environ: Any, *names: str) -> int:
    return int(next((environ[name] for name in names if name in environ), 0))


def _arguments(argv: list[str]) -> tuple[int, int, int, list[str]]:
    """Read `--ranks 2 --gpus 2 --first 6 -- COMMAND`, as our own topology writes it."""
    at = argv.index("--")
    options = dict(zip(argv[:at:2], argv[1:at:2]))  # noqa: B905 (Python 3.8 has no strict)
    return int(options["--ranks"]), int(options.get("--gpus", "0")), int(options.get("--first", "0")), argv[at + 1 :]


def _start(command: list[str], output: int) -> subprocess.Popen[bytes]:
    libc, us = ctypes.CDLL(None), os.getpid()
    # In our group: what mpirun tells the rank, it tells all of it.
    return subprocess.Popen(
        command, stdout=output, stderr=output, preexec_fn=lambda: _die_with(libc, us, signal.SIGKILL)
    )


def _die_with(libc: Any, parent: int, number: int) -> None:
    libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + number)


def around(command: list[str]) -> int:
    """Run mpirun or one of its daemons to its end; who tells it to end tells its ranks."""
    told: list[int] = []
    for number in ENDING:
        signal.signal(number, lambda number, frame: told.append(number))  # noqa: ARG005
    has_ranks = command[0] != "mpirun"  # which starts daemons elsewhere; who keeps those tells them
    folder = None
    if has_ranks:
        environ = {**os.environ, OUTPUT: os.path.realpath("/proc/self/fd/1")}
        if SCRATCH not in command:  # two daemons of one host must not clear away each other's
            folder = tempfile.mkdtemp(prefix="stoker-mpi-")
            command = [*command, "-mca", SCRATCH, folder]
    else:
        environ = {**os.environ, "OMPI_MCA_plm_rsh_agent": f"{sys.executable} {os.path.realpath(__file__)} {AGENT}"}
    us, libc = os.getpid(), ctypes.CDLL(None)
    child = subprocess.Popen(command, env=environ, preexec_fn=lambda: _die_with(libc, us, signal.SIGTERM))
    reached: set[int] = set()
    while child.poll() is None:
        for pid in _children(child.pid) if told and has_ranks else ():
            if pid not in reached:
                with contextlib.suppress(OSError):  # each leads a group of its own, soon after it was started
                    os.killpg(pid, signal.SIGTERM)
                    reached.add(pid)
        time.sleep(POLL_S)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    code = child.returncode
    return code if code >= 0 else 128 - code


def ask(node: str, words: list[str]) -> int:
    """Have a daemon started in the worker that a node stands for, as `ssh` would."""
    role, _, index = node.rpartition("-")
    program = os.environ["STOKER_ASK"]
    os.execv(program, [program, f"{role}/{index}", *words])


def _children(parent: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == parent:
                    found.append(int(name))
    return found


def _over(output: Output, rank: int, code: int, ending: Ending) -> int:
    """Tell how the rank ended; give the code that mpirun is to see."""
    event = {
        "v": VERSION,
        "t": round(time.time(), 6),
        "slot": os.environ["STOKER_SLOT"],
        "rank": rank,
        "attempt": _number(os.environ, "STOKER_ATTEMPT"),
        "pid": os.getpid(),
        "seq": 0,
        "k": "mark",
        "name": EXIT,
        "code": code,
    }
    output.end_line()
    output.write(f"{PREFIX}{json.dumps(event)}\n".encode())
    if ending.told:
        return 0
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
