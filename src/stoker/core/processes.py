"""Processes that are ended with their group, so that nothing a program started outlives it.

Each process leads a session of its own. Its leader is reaped only by `end`: until then the kernel cannot give
its number to anyone else, so a signal to the group never reaches a stranger.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, NamedTuple, Self

from stoker.core.units import format_duration
from stoker.errors import MissingProgramError, NotFoundError, StokerError, UnavailableError

DEATH_S = 30.0
"""How long a killed process may take to be gone."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Process:
    """A started program and its group; a context manager that ends them on the way out, however that is."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid
        """Also the id of the group."""

    def poll(self) -> int | None:
        """Return the leader's exit code (negative: the signal that ended it), or None while it runs."""
        if self._popen.returncode is not None:
            return self._popen.returncode
        try:
            state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # another thread is in `end` and has reaped it
            return self._popen.wait()
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until the leader exits and return its code; TimeoutError when it takes longer."""
        until(lambda: self.poll() is not None, timeout_s)
        code = self.poll()
        if code is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout_s} s")
        return code

    def terminate(self) -> None:
        """Ask the leader alone to end; it knows best how to end its own."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def end(self, grace_s: float = 5.0) -> int:
        """End the whole group: TERM, up to `grace_s` to leave, KILL; return the leader's exit code.

        Works on what is left of the group when the leader is gone already; a second call does nothing.
        """
        if self._popen.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGTERM)
                until(self._is_gone, grace_s)
            finally:  # also when a second Ctrl-C cuts the grace short
                os.killpg(self.pid, signal.SIGKILL)
                until(self._is_gone, DEATH_S)
                if not self._is_gone():
                    raise _undying([self.pid])
                self._popen.wait()
        return self._popen.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _is_gone(self) -> bool:
        """Whether nothing in the group runs; dead processes that nobody has reaped do not count."""
        return self.poll() is not None and not _has_members(self.pid)


class Completed(NamedTuple):
    """What a program printed, and its exit code."""

    stdout: str
    stderr: str
    code: int


def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    dies_with_us: bool = False,
) -> Process:
    """Start a program in its own session; `env` replaces the environment, as in `subprocess`.

    With `dies_with_us` it gets a TERM when the thread that started it is gone, however that came.
    """
    try:
        popen = subprocess.Popen(
            argv,
            env=env,
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=_die_with_parent(os.getpid()) if dies_with_us else None,
        )
    except OSError as error:
        reason = (error.strerror or "not found").lower()
        if cwd is not None and error.filename == cwd:
            raise NotFoundError(f"cannot work in this folder: {reason}", where=cwd) from error
        is_missing = isinstance(error, FileNotFoundError)
        raise MissingProgramError(
            f"cannot start the program {argv[0]!r}: {reason}",
            hint="install it, or add its folder to the PATH" if is_missing else None,
        ) from error
    return Process(popen)


def run(
    argv: Sequence[str],
    *,
    input: str | None = None,  # noqa: A002 (the name that subprocess taught everyone)
    timeout_s: float | None = None,
    check: bool = True,
) -> Completed:
    """Run a program to its end and return what it printed; with `check`, a bad exit code is an error.

    Files and not pipes carry the text, so a child left in the background cannot keep us waiting.
    """
    with TemporaryFile() as stdin, TemporaryFile() as stdout, TemporaryFile() as stderr:
        stdin.write((input or "").encode())
        stdin.seek(0)
        with start(argv, stdin=stdin, stdout=stdout, stderr=stderr) as process:
            try:
                code = process.wait(timeout_s)
            except TimeoutError as error:
                limit = format_duration(timeout_s or 0)
                raise UnavailableError(f"no end within {limit}", where=shlex.join(argv)) from error
        done = Completed(_text(stdout), _text(stderr), code)
    if check and code != 0:
        ended = f"failed with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
        said = done.stderr.strip() or done.stdout.strip()
        raise StokerError(f"{ended}: {said}" if said else ended, where=shlex.join(argv))
    return done


def _die_with_parent(parent: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None)  # here: little may be done between fork and exec

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # gone before it could be asked
            os._exit(128 + signal.SIGTERM)

    return ask


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


@contextmanager
def held_back(number: signal.Signals) -> Iterator[None]:
    """Have what is started meanwhile get a signal only once it asks for it: before, there is nobody to take it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def until(condition: Callable[[], bool], timeout_s: float | None, *, pause_s: float = 0.05) -> bool:
    """Poll, quickly at first, until the condition holds or the time is over; tell whether it holds."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    pause = 0.001
    while not condition():
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            pause = min(pause, left)
        time.sleep(pause)
        pause = min(pause * 2, pause_s)
    return True


def _has_members(group: int) -> bool:
    """Whether a live process belongs to the group.

    /proc tells the dead from the living; `killpg(group, 0)` does not, and in a container whose first process
    reaps nobody, the dead stay for ever.
    """
    for pid in _pids():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The name, in parentheses, may hold spaces and parentheses itself.
        state, _parent, its_group = stat.rpartition(")")[2].split()[:3]
        if int(its_group) == group and state not in "ZX":
            return True
    return False


# --- Processes that are known by a variable in their environment, which all that they start inherit


def marked(marks: Mapping[str, str]) -> list[int]:
    """List the live processes that were started with these variables, or by one that was."""
    return [pid for pid in _pids() if _bears(pid, marks)]


def end_marked(marks: Mapping[str, str], grace_s: float) -> None:
    """End all processes with these variables: TERM, up to `grace_s` to leave, KILL until none is left."""
    for pid in marked(marks):
        _signal_marked(pid, marks, signal.SIGTERM)
    until(lambda: not marked(marks), grace_s)
    deadline = time.monotonic() + DEATH_S
    while found := marked(marks):  # one may start another while we look
        if time.monotonic() > deadline:
            raise _undying(found)
        for pid in found:
            _signal_marked(pid, marks, signal.SIGKILL)
        until(lambda: not marked(marks), 1.0)


def adopt_orphans() -> None:
    """Become the parent of whatever our processes leave behind, also of what hides from its group and its marks."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children() -> None:
    """Kill all that came of us, whatever it is; for a process that has adopted orphans and started no other."""
    deadline = time.monotonic() + DEATH_S
    while found := children(os.getpid()):
        if time.monotonic() > deadline:
            raise _undying(found)
        for pid in found:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def children(parent: int) -> list[int]:
    """List the processes that a process has started itself, and what it has adopted."""
    found = []
    for pid in _pids():
        with suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            if int(stat.rpartition(")")[2].split()[1]) == parent:
                found.append(pid)
    return found


def _undying(pids: Sequence[int]) -> UnavailableError:
    return UnavailableError(
        f"processes that do not end, not even by SIGKILL: {', '.join(map(str, pids))}",
        hint="they wait in the kernel, for a device or a file server",
    )


def _signal_marked(pid: int, marks: Mapping[str, str], number: signal.Signals) -> None:
    """Signal a process by a handle that was had before its marks were read: its number may be another's by now."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _bears(pid, marks):
            signal.pidfd_send_signal(handle, number)
    except (ProcessLookupError, PermissionError):
        pass
    finally:
        os.close(handle)


def _bears(pid: int, marks: Mapping[str, str]) -> bool:
    """Whether a process began with these variables; not for the dead, nor for other users'."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return all(f"{name}={value}".encode() in environ for name, value in marks.items())


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
