"""Start programs and stop them with their whole process group; find processes by environment variables.

Each process leads its own session. The leader is reaped only by `Process.stop`: until then the kernel cannot reuse its
pid, so a signal to the group never reaches an unrelated process.
"""

from __future__ import annotations

import ctypes
import os
import select
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, NamedTuple, Self

from stoker.core.units import format_duration
from stoker.errors import MissingProgramError, NotFoundError, StokerError, UnavailableError

KILL_TIMEOUT_S = 30.0
"""How long to wait for a process to disappear after SIGKILL."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Process:
    """A running program and its process group; a context manager that stops both on exit."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid
        """The pid of the leader, which is also the process group ID."""

    def poll(self) -> int | None:
        """Return the leader's exit code (negative: the signal that killed it), or None while it runs."""
        if self._popen.returncode is not None:
            return self._popen.returncode
        try:
            state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # another thread is in `stop` and has reaped it
            return self._popen.wait()
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the leader to exit and return its exit code; raise TimeoutError after `timeout_s`."""
        wait_until(lambda: self.poll() is not None, timeout_s)
        code = self.poll()
        if code is None:
            raise TimeoutError(f"process {self.pid} is still running after {timeout_s} s")
        return code

    def terminate(self) -> None:
        """Send SIGTERM to the leader only, which stops its own children."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def stop(self, grace_s: float = 5.0) -> int:
        """Stop the whole group: SIGTERM, wait up to `grace_s`, SIGKILL; return the leader's exit code.

        Also stops a group whose leader has exited already; a second call does nothing.
        """
        if self._popen.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGTERM)
                wait_until(self._is_gone, grace_s)
            finally:  # also when a second Ctrl-C interrupts the grace period
                os.killpg(self.pid, signal.SIGKILL)
                if not wait_until(self._is_gone, KILL_TIMEOUT_S):
                    raise _unkillable([self.pid])
                self._popen.wait()
        return self._popen.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _is_gone(self) -> bool:
        """Return whether no process of the group is running; zombies do not count."""
        return self.poll() is not None and not _has_members(self.pid)


class CompletedProcess(NamedTuple):
    """The output and the exit code of a program."""

    stdout: str
    stderr: str
    exit_code: int


def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    terminate_with_parent: bool = False,
) -> Process:
    """Start a program in its own session; `env` replaces the environment, as in `subprocess`.

    With `terminate_with_parent` it gets SIGTERM when the thread that started it exits or is killed.
    """
    libc, parent = ctypes.CDLL(None), os.getpid()  # before the fork: few calls are safe between fork and exec
    try:
        popen = subprocess.Popen(
            argv,
            env=env,
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=(lambda: _set_parent_death_signal(libc, parent)) if terminate_with_parent else None,
        )
    except OSError as error:
        reason = (error.strerror or "not found").lower()
        if cwd is not None and error.filename == cwd:
            raise NotFoundError(f"cannot use as working directory: {reason}", where=cwd) from error
        is_missing = isinstance(error, FileNotFoundError)
        raise MissingProgramError(
            f"cannot start the program {argv[0]!r}: {reason}",
            hint="install it, or add its directory to PATH" if is_missing else None,
        ) from error
    return Process(popen)


def run(
    argv: Sequence[str],
    *,
    input: str | None = None,  # noqa: A002 (as in subprocess.run)
    timeout_s: float | None = None,
    check: bool = True,
) -> CompletedProcess:
    """Run a program to completion and return its output; with `check`, raise on a non-zero exit code.

    Output goes through files, not pipes, so a child that stays in the background cannot block the call.
    """
    with TemporaryFile() as stdin, TemporaryFile() as stdout, TemporaryFile() as stderr:
        stdin.write((input or "").encode())
        stdin.seek(0)
        with start(argv, stdin=stdin, stdout=stdout, stderr=stderr) as process:
            try:
                code = process.wait(timeout_s)
            except TimeoutError as error:
                limit = format_duration(timeout_s or 0)
                raise UnavailableError(f"did not finish within {limit}", where=shlex.join(argv)) from error
        completed = CompletedProcess(_read_text(stdout), _read_text(stderr), code)
    if check and code != 0:
        failure = f"failed with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        output = completed.stderr.strip() or completed.stdout.strip()
        raise StokerError(f"{failure}: {output}" if output else failure, where=shlex.join(argv))
    return completed


def _set_parent_death_signal(libc: ctypes.CDLL, parent: int) -> None:
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent exited before prctl
        os._exit(128 + signal.SIGTERM)


def _read_text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


@contextmanager
def defer_signal(number: signal.Signals) -> Iterator[None]:
    """Block a signal in processes started meanwhile, so that it stays pending until they unblock it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_until(condition: Callable[[], bool], timeout_s: float | None, *, max_interval_s: float = 0.05) -> bool:
    """Poll, quickly at first, until the condition is true or the timeout expires; return whether it is true."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    interval = 0.001
    while not condition():
        if deadline is not None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            interval = min(interval, remaining)
        time.sleep(interval)
        interval = min(interval * 2, max_interval_s)
    return True


def _has_members(group: int) -> bool:
    """Return whether a running process belongs to the group.

    /proc shows which processes are zombies; `killpg(group, 0)` counts them, and in a container whose init process does
    not reap children they stay forever.
    """
    for pid in _pids():
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == group and _is_running(pid):
                return True
    return False


# --- Processes found by environment variables, which their children inherit


def find_processes_by_env(env: Mapping[str, str]) -> list[int]:
    """List the running processes that were started with these environment variables."""
    return [pid for pid in _pids() if _has_env(pid, env)]


def terminate_by_env(env: Mapping[str, str], grace_s: float) -> None:
    """Stop all processes with these variables: SIGTERM, wait up to `grace_s`, SIGKILL until none is left."""
    pids = find_processes_by_env(env)
    for pid in pids:
        _signal_by_env(pid, env, signal.SIGTERM)
    if wait_until(lambda: not find_processes_by_env(env), grace_s) and not pids:
        return
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while pids := find_processes_by_env(env):  # a process may fork while we iterate
        if time.monotonic() > deadline:
            raise _unkillable(pids)
        for pid in pids:
            _signal_by_env(pid, env, signal.SIGKILL)
        wait_until(lambda: not find_processes_by_env(env), 1.0)


def become_subreaper() -> None:
    """Make this process the subreaper of its descendants: orphans become its children, whatever their group or env."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_children() -> None:
    """Kill all children of this process, for a subreaper that has no other children."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while _has_children() and (pids := child_pids(os.getpid())):
        if time.monotonic() > deadline:
            raise _unkillable(pids)
        for pid in pids:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def exit_with_process(pid: int) -> None:
    """Exit this process, without cleanup, when another process exits or is killed.

    A thread waits for it: a parent death signal would also be sent when only the thread that forked this process exits.
    """

    def watch() -> None:
        wait_for_exit(pid)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="stoker-exit-with-process", daemon=True).start()


def wait_for_exit(pid: int, timeout_s: float | None = None) -> None:
    """Wait until a process, which need not be a child of this one, exits or is killed; for at most `timeout_s`."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # an old C library or kernel, or a container that forbids the call
        wait_until(lambda: not _is_running(pid), timeout_s, max_interval_s=1.0)
        return
    try:
        exited = select.poll()
        exited.register(pidfd, select.POLLIN)  # readable from the moment the process exits, even if nobody reaps it
        exited.poll(None if timeout_s is None else 1000 * timeout_s)
    finally:
        os.close(pidfd)


def _is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def handles_signal(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has installed a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def parent_pid(pid: int) -> int | None:
    """Return the parent of a process; None if the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])


def child_pids(parent: int) -> list[int]:
    """List the children of a process, including orphans it has adopted."""
    return [pid for pid in _pids() if parent_pid(pid) == parent]


def read_env(pid: int) -> dict[str, str]:
    """Return the variables that a process was started with; empty for zombies and other users' processes."""
    pairs = (entry.partition("=") for entry in map(os.fsdecode, _read_environ(pid)))
    return {name: value for name, equals, value in pairs if equals}


def _read_environ(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            return file.read().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def _unkillable(pids: Sequence[int]) -> UnavailableError:
    return UnavailableError(
        f"processes still running after SIGKILL: {', '.join(map(str, pids))}",
        hint="they are blocked in the kernel, on a device or a network file system",
    )


def _signal_by_env(pid: int, env: Mapping[str, str], number: signal.Signals) -> None:
    """Signal a process through a pidfd opened before its environment is read: its pid may be reused meanwhile."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _has_env(pid, env):
            signal.pidfd_send_signal(pidfd, number)
    except (ProcessLookupError, PermissionError):
        pass
    finally:
        os.close(pidfd)


def _has_env(pid: int, env: Mapping[str, str]) -> bool:
    """Return whether a process was started with these variables; False for zombies and other users' processes."""
    entries = _read_environ(pid)
    return all(os.fsencode(f"{name}={value}") in entries for name, value in env.items())


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
