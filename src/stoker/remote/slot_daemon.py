"""Slot daemon: runs one slot on a remote host and keeps it running while the ssh connection is down.

Standard library only, Python 3.8 or later: the source is sent over `ssh`, together with `remote.tagged_processes`, and
needs no stoker on the host.

There are two processes. The slot daemon owns the slot and outlives connections. An attach session is the remote process
of one `ssh` connection and exits with it. They share the folder of the slot:

    key     identifies the slot; a request with another key starts the slot again
    pid     of the daemon
    log     the slot's output, written by the slot itself
    lease   touched while a client is connected; the daemon stops the slot when it expires (never for a detached run)
    exit    the exit record; its disk space is allocated before the slot starts
    rsh-agent, exec/   run commands on the hosts of other slots

The attach session asks the daemon to stop the slot by signals, because the disk may be full.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from stoker.remote.tagged_processes import format_survivors, signal_tagged, terminate_tagged

MAGIC = b"\0stoker agent\n"
"""Precedes the first frame; a login shell may print anything before it."""
RESPONSE, OUTPUT, ALIVE, EXIT, GONE, ATTACHED, EXEC = b"a", b"o", b"k", b"x", b"g", b"h", b"q"
ALIVE_INTERVAL_S = 2.0
LEFTOVER_GRACE_S = 0.5
POLL_S = 0.02
MAX_POLL_S = 0.25
"""Poll interval of an idle attach session: the folder may be on a file system that many hosts share."""
LEASE_CHECK_S = 0.5
START_TIMEOUT_S = 10.0
EXIT_RECORD_BYTES = 4096
STOP_SIGNAL, KILL_SIGNAL = signal.SIGUSR1, signal.SIGUSR2
CHUNK_BYTES = 1 << 16
DAEMON_GONE = "the slot daemon was killed, or the host was rebooted"
_PR_SET_PDEATHSIG = 1


class FrameWriter:
    """Thread-safe writer of frames: one byte for the kind, the payload length, the payload."""

    def __init__(self, fd: int) -> None:
        self._fd, self._lock = fd, threading.Lock()

    def send(self, kind: bytes, data: bytes = b"") -> None:
        """Send one frame."""
        rest = memoryview(kind + struct.pack(">I", len(data)) + data)
        with self._lock:
            while rest:
                rest = rest[os.write(self._fd, rest) :]

    def send_json(self, kind: bytes, data: Any) -> None:
        """Send a frame with a JSON payload."""
        self.send(kind, json.dumps(data).encode())


# --- The slot daemon


class SlotDaemon:
    """Daemon of one slot, until the slot exits, is stopped, or its lease expires."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request, self._folder = request, Path(request["folder"])
        self._tags = dict(request["tags"])
        self._lease_mtime_ns, self._lease_renewed = 0, time.monotonic()
        self._is_abandoned = self._is_terminated = False
        self._stop_level = 0
        """How the slot was asked to stop: 0 not at all, 1 by SIGTERM, 2 by SIGKILL."""

    def run(self) -> None:
        """Run the slot, terminate its remaining processes, and publish its exit record."""
        self._install_signal_handlers()
        write_atomic(self._folder / ".exit", " " * EXIT_RECORD_BYTES)
        write_atomic(self._folder / "pid", str(os.getpid()))
        oom_kills_before = oom_kills()
        try:
            child = self._start()
        except OSError as error:
            self._publish_exit({"start_error": str(error.strerror or error)})
            return
        code = self._wait(child)
        survivors = terminate_tagged(self._tags, 0 if self._stop_level > 1 else LEFTOVER_GRACE_S)
        if self._is_abandoned:
            remove_slot_folder(self._folder)
        else:
            self._publish_exit({"code": code, "oom": oom_kills() > oom_kills_before, "survivors": survivors})

    def _install_signal_handlers(self) -> None:
        """Handle stop requests; any signal, SIGCHLD included, wakes up `_sleep`."""
        self._wakeup_fd, write_fd = os.pipe()
        os.set_blocking(self._wakeup_fd, False)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, STOP_SIGNAL, KILL_SIGNAL):
            signal.signal(number, self._on_signal)

    def _sleep(self) -> None:
        select.select([self._wakeup_fd], [], [], LEASE_CHECK_S)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup_fd, CHUNK_BYTES)

    def _start(self) -> subprocess.Popen[bytes]:
        libc, daemon_pid = ctypes.CDLL(None), os.getpid()

        def set_parent_death_signal() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != daemon_pid:
                os._exit(128 + signal.SIGTERM)

        request = self._request
        with open(self._folder / "log", "ab", buffering=0) as log:
            return subprocess.Popen(
                request["argv"],
                env={**os.environ, **request["env"], **self._tags},
                cwd=request["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=set_parent_death_signal,
            )

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        """Wait until the slot exits, and return its exit code; stop it by SIGTERM, a grace period and SIGKILL."""
        signalled_level, deadline = 0, float("inf")
        while True:
            code = child.poll()
            if code is not None:
                return code
            now = time.monotonic()
            self._is_abandoned = self._is_abandoned or self._has_lease_expired()
            if (self._is_abandoned or self._is_terminated) and deadline == float("inf"):
                # A slot that was already asked to stop has had its grace period.
                self._stop_level = 2 if self._stop_level else 1
                deadline = now + self._request["grace_s"]
            if now > deadline:
                self._stop_level = 2
            if self._stop_level > signalled_level:
                signalled_level = self._stop_level
                child.send_signal(signal.SIGTERM if signalled_level == 1 else signal.SIGKILL)
            self._sleep()

    def _has_lease_expired(self) -> bool:
        """Whether the lease has expired. Only changes of its mtime count, so that the clock may be set."""
        limit_s = self._request["lost_after_s"]
        if limit_s is None:
            return False
        with contextlib.suppress(OSError):
            mtime_ns = os.stat(self._folder / "lease").st_mtime_ns
            if mtime_ns != self._lease_mtime_ns:
                self._lease_mtime_ns, self._lease_renewed = mtime_ns, time.monotonic()
        return time.monotonic() - self._lease_renewed > float(limit_s)

    def _publish_exit(self, record: dict[str, Any]) -> None:
        """Publish the exit record until it is acknowledged; that of a detached run stays without waiting."""
        with open(self._folder / ".exit", "r+") as file:
            file.write(json.dumps(record)[:EXIT_RECORD_BYTES])
        (self._folder / ".exit").rename(self._folder / "exit")
        if self._request["lost_after_s"] is None:
            return
        while self._folder.exists():
            if self._has_lease_expired():
                remove_slot_folder(self._folder)
            self._sleep()

    def _on_signal(self, number: int, frame: Any) -> None:  # noqa: ARG002
        if number in (STOP_SIGNAL, KILL_SIGNAL):
            self._stop_level = max(self._stop_level, 1 if number == STOP_SIGNAL else 2)
        elif number != signal.SIGCHLD:
            self._is_terminated = True


def _start_daemon(request: dict[str, Any]) -> None:
    """Start a slot daemon that survives the end of `ssh` and of its session."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    status = 1
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        null = os.open(os.devnull, os.O_RDWR)
        errors = os.open(str(Path(request["folder"], "daemon.log")), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for fd, source in ((0, null), (1, errors), (2, errors)):
            os.dup2(source, fd)
        os.closerange(3, max(errors, null, 64) + 1)
        SlotDaemon(request).run()
        status = 0
    finally:
        os._exit(status)


# --- The attach session


class SlotGoneError(Exception):
    """The slot is no longer on this host, or could not be started."""


class AttachSession:
    """Session of one `ssh` connection to a slot: starts or finds its daemon, streams output, passes on requests."""

    def __init__(self, request: dict[str, Any], frames: FrameWriter) -> None:
        self._request, self._frames = request, frames
        self._folder = Path(request["folder"])
        self._offset = int(request["offset"])
        self._log: BinaryIO | None = None
        self._reported: set[str] = set()
        self._has_listed = False
        self._is_done = threading.Event()

    def run(self, requests: BinaryIO) -> None:
        """Stream until the exit record is acknowledged or the connection ends."""
        try:
            self._find_or_start_daemon()
            self._frames.send(ATTACHED)
            threading.Thread(target=self._handle_requests, args=(requests,), daemon=True).start()
            self._stream()
            while not self._is_done.wait(MAX_POLL_S) and self._folder.exists():
                pass  # until the exit record is acknowledged, or the daemon has given up waiting for that
        except SlotGoneError as error:
            self._frames.send(GONE, str(error).encode())
        except (OSError, ValueError) as error:
            self._frames.send(GONE, f"could not run the slot: {error}".encode())

    def _find_or_start_daemon(self) -> None:
        """Find the daemon with the key of the request, or stop those of earlier attempts and start one."""
        lock = _lock_folder(self._folder.parent)
        try:
            if read_text(self._folder / "key") == self._request["key"]:
                return
            if not self._request["can_start"]:
                raise SlotGoneError("slot stopped: no client was connected")
            self._clear_previous()
            self._folder.mkdir(mode=0o700, parents=True)
            write_atomic(self._folder / "key", self._request["key"])
            write_atomic(self._folder / "lease", "")
            if self._request.get("rsh_agent"):
                self._install_rsh_agent(self._request["rsh_agent"])
            _start_daemon(self._request)
            self._wait_for_pid()
        finally:
            os.close(lock)

    def _wait_for_pid(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not read_text(self._folder / "pid"):
            if time.monotonic() > deadline:
                reason = read_text(self._folder / "daemon.log") or f"no pid after {START_TIMEOUT_S:g} s"
                raise SlotGoneError(f"could not start the slot daemon: {reason}")
            time.sleep(POLL_S)

    def _clear_previous(self) -> None:
        """Kill what is left of earlier attempts of the slot."""
        if not self._request["clear_previous"]:
            return
        for folder in self._folder.parent.glob(f"{self._folder.name.split('.')[0]}.*"):
            _signal_daemon(folder, signal.SIGKILL)
            remove_slot_folder(folder)
        if survivors := terminate_tagged(self._request["tags"], LEFTOVER_GRACE_S):
            raise SlotGoneError(f"cannot kill {format_survivors(survivors)} of an earlier attempt")

    def _install_rsh_agent(self, source: str) -> None:
        """Write the program by which the slot runs commands on the hosts of other slots."""
        (self._folder / "exec").mkdir()
        path = self._folder / "rsh-agent"
        write_atomic(path, f"#!{sys.executable}\n{source}", mode=0o700)
        self._request["env"]["STOKER_ASK"] = str(path)

    def _stream(self) -> None:
        """Send output, exec requests and, at last, the exit record."""
        last_alive, pause_s, pid = float("-inf"), POLL_S, _read_pid(self._folder)
        while not self._is_done.is_set():
            now = time.monotonic()
            if now - last_alive >= ALIVE_INTERVAL_S:
                last_alive = now
                self._frames.send(ALIVE)
            is_running = _is_daemon(pid)
            exit_record = read_text(self._folder / "exit")  # before the last of the log, so that nothing is missed
            is_busy = self._send_output() | self._send_exec_requests()
            if exit_record:
                self._frames.send(EXIT, exit_record.strip().encode())
                return
            if not is_running and not (self._folder / "exit").exists():
                self._raise_daemon_gone()
            pause_s = POLL_S if is_busy else min(2 * pause_s, MAX_POLL_S)
            self._is_done.wait(pause_s)

    def _raise_daemon_gone(self) -> None:
        """Kill what the daemon left behind, and report that it is gone."""
        survivors = terminate_tagged(self._request["tags"], LEFTOVER_GRACE_S)
        remove_slot_folder(self._folder)
        note = f"; {format_survivors(survivors)} cannot be killed" if survivors else ""
        raise SlotGoneError(f"{DAEMON_GONE}{note}")

    def _send_output(self) -> bool:
        """Send new output; return whether there was any."""
        if self._log is None:
            try:
                self._log = open(self._folder / "log", "rb")  # noqa: SIM115 (stays open for the whole session)
            except FileNotFoundError:
                return False
        begin = self._offset
        while os.fstat(self._log.fileno()).st_size > self._offset:
            self._log.seek(self._offset)
            data = self._log.read(CHUNK_BYTES)
            if not data:
                break
            self._frames.send(OUTPUT, data)
            self._offset += len(data)
        return self._offset > begin

    def _send_exec_requests(self) -> bool:
        """Send new and cancelled exec requests; return whether there were any."""
        if not self._request.get("rsh_agent"):
            return False
        pending = {path.name[:-5]: path for path in (self._folder / "exec").glob("*.json")}
        has_sent = False
        if not self._has_listed:  # requests that were cancelled while no client was connected are not in the list
            self._has_listed = True
            self._frames.send_json(EXEC, {"pending": list(pending)})
        for name, path in pending.items():
            if name not in self._reported and not path.with_suffix(".exit").exists():
                if text := read_text(path):  # empty: cancelled a moment ago
                    self._reported.add(name)
                    has_sent = True
                    self._frames.send_json(EXEC, {"id": name, **json.loads(text)})
            elif name in self._reported and not _is_requester_alive(path):
                with contextlib.suppress(OSError):
                    path.unlink()
        for name in self._reported - set(pending):
            self._reported.discard(name)
            self._frames.send_json(EXEC, {"id": name, "cancelled": True})
            has_sent = True
        return has_sent

    def _handle_requests(self, requests: BinaryIO) -> None:
        """Renew the lease with every line and handle its request; at EOF, exit and leave the slot running."""
        for line in iter(requests.readline, b""):
            with contextlib.suppress(OSError):
                os.utime(self._folder / "lease")
            with contextlib.suppress(OSError):
                if line.strip():
                    self._handle(json.loads(line))
        os._exit(0)

    def _handle(self, request: dict[str, Any]) -> None:
        if request["op"] == "stop":
            _signal_daemon(self._folder, STOP_SIGNAL if request["level"] == 1 else KILL_SIGNAL)
        elif request["op"] == "signal":
            signal_tagged(request["pid"], self._request["tags"], request["number"])
        elif request["op"] == "exec_exit":
            write_atomic(self._folder / "exec" / f"{request['id']}.exit", str(request["code"]))
            self._reported.discard(request["id"])
        elif request["op"] == "acknowledge":
            pid = _read_pid(self._folder)
            remove_slot_folder(self._folder)
            if _is_daemon(pid):  # wake it up, so that it sees that its folder is gone
                os.kill(pid, signal.SIGCHLD)
            self._is_done.set()


def _lock_folder(folder: Path) -> int:
    """Return an exclusive lock on the folder of a run; another slot that exits may be removing the folder."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(str(folder), os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return lock
            os.close(lock)


def clean_up_run(request: dict[str, Any]) -> dict[str, Any]:
    """Kill all daemons and processes of a run on this host; return the pids that could not be killed."""
    # Only the folders of this host's slots: others may be on the same shared disk.
    folders = [folder for name in request["slots"] for folder in Path(request["folder"]).glob(f"{name}.*")]
    for folder in folders:
        _signal_daemon(folder, signal.SIGKILL)
    survivors = terminate_tagged(request["tags"], request["grace_s"])
    for folder in folders:
        remove_slot_folder(folder)
    return {"survivors": survivors}


def _signal_daemon(folder: Path, number: int) -> None:
    pid = _read_pid(folder)
    if _is_daemon(pid):
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _read_pid(folder: Path) -> int:
    return int(read_text(folder / "pid") or 0)


def _is_daemon(pid: int) -> bool:
    """Whether a process is a slot daemon of this run on this host; after a reboot the pid may be any process's."""
    try:
        if pid == os.getpid():
            return False
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return sys.argv[-1].encode() in file.read().split(b"\0")
    except OSError:
        return False


def _is_requester_alive(path: Path) -> bool:
    """Whether the process that wrote an exec request still waits for its exit code."""
    try:
        pid = json.loads(read_text(path) or "{}").get("pid", 0)
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"rsh-agent" in file.read()
    except (OSError, ValueError):
        return False


def oom_kills() -> int:
    """Return how many processes the OOM killer of this host has killed."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


# --- Files


def read_text(path: Path) -> str:
    """Read a small file; return an empty string if there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def write_atomic(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a small file atomically: a reader sees the old content or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(str(temporary), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
    temporary.replace(path)


def remove_slot_folder(folder: Path) -> None:
    """Remove the folder of a slot and its parents if they are empty then; checkpoints stay."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
        folder.parent.parent.rmdir()


def read_requests(requests: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield requests, one line of JSON each; empty lines are keep-alives."""
    for line in iter(requests.readline, b""):
        if line.strip():
            yield json.loads(line)
