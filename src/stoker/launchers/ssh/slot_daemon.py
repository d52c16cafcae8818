"""Keeps one slot on a host, also while nobody is connected, and relays it to whoever asks for it.

On the standard library alone, for Python 3.8 and later: it is sent through `ssh` and needs nothing of ours there. The
keeper is a daemon with a folder of its own; the relay is at the other end of `ssh`, and comes and goes:

    key     by which a slot is known again; who comes with another one starts anew
    pid     of the keeper
    log     all that the slot printed, written by itself
    lease   touched while somebody listens; when it is too old, the keeper ends the slot. None for who left for good
    exit    how it ended; its room on the disk is taken before the slot starts
    ask, asks/   by which the slot has commands started on other hosts

The relay tells the keeper by signals that the slot is to end: a disk may be full.
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

MAGIC = b"\0stoker agent\n"
"""Comes before the first frame; a login may print anything before that."""
ANSWER, OUTPUT, ALIVE, EXIT, GONE, HELD, ASK = b"a", b"o", b"k", b"x", b"g", b"h", b"q"
BEAT_S = 2.0
LEFTOVER_S = 0.5
POLL_S = 0.02
IDLE_S = 0.25
"""Between two looks of a relay while nothing happens: the folder may lie on a disk that many hosts share."""
LEASE_S = 0.5
DEATH_S = 20.0
"""How long processes may take to be gone that were killed."""
START_S = 10.0
ROOM = 4096
TO_END, AT_ONCE = signal.SIGUSR1, signal.SIGUSR2
CHUNK = 1 << 16
_PR_SET_PDEATHSIG = 1


class Frames:
    """Writes frames, from any thread: a letter, a length, so many bytes."""

    def __init__(self, fd: int) -> None:
        self._fd, self._lock = fd, threading.Lock()

    def send(self, kind: bytes, data: bytes = b"") -> None:
        """Send one frame."""
        rest = memoryview(kind + struct.pack(">I", len(data)) + data)
        with self._lock:
            while rest:
                rest = rest[os.write(self._fd, rest) :]

    def send_json(self, kind: bytes, data: Any) -> None:
        """Send a frame of JSON."""
        self.send(kind, json.dumps(data).encode())


# --- The keeper


class Keeper:
    """Runs one slot until it ends, is to end, or has not been asked for within its lease."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request, self._folder = request, Path(request["folder"])
        self._marks = dict(request["marks"])
        self._lease, self._heard = 0, time.monotonic()
        self._is_alone = self._is_told = False
        self._terms = 0

    def keep(self) -> None:
        """Start the slot, and stay until nothing of it is left, and somebody knows."""
        self._listen()
        write(self._folder / ".exit", " " * ROOM)
        write(self._folder / "pid", str(os.getpid()))
        kills = oom_kills()
        try:
            child = self._start()
        except OSError as error:
            self._tell({"refusal": str(error.strerror or error)})
            return
        code = self._watch(child)
        left = end_marked(self._marks, 0 if self._terms > 1 else LEFTOVER_S)
        if self._is_alone:
            remove(self._folder)
        else:
            self._tell({"code": code, "oom": oom_kills() > kills, "left": left})

    def _listen(self) -> None:
        """Take signals for wishes; any of them, the end of the slot too, ends a pause."""
        self._woken, wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, TO_END, AT_ONCE):
            signal.signal(number, self._on_signal)

    def _pause(self) -> None:
        select.select([self._woken], [], [], LEASE_S)
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, CHUNK)

    def _start(self) -> subprocess.Popen[bytes]:
        libc, keeper = ctypes.CDLL(None), os.getpid()

        def die_with_us() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != keeper:
                os._exit(128 + signal.SIGTERM)

        request = self._request
        with open(self._folder / "log", "ab", buffering=0) as log:
            return subprocess.Popen(
                request["argv"],
                env={**os.environ, **request["env"], **self._marks},
                cwd=request["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_us,
            )

    def _watch(self, child: subprocess.Popen[bytes]) -> int:
        """Wait for the end of the slot, or bring it about: TERM, the time for a last checkpoint, KILL."""
        told, deadline = 0, float("inf")
        while True:
            code = child.poll()
            if code is not None:
                return code
            now = time.monotonic()
            self._is_alone = self._is_alone or self._is_silent()
            if (self._is_alone or self._is_told) and deadline == float("inf"):
                # Who was told to end had its time already.
                self._terms = 2 if self._terms else 1
                deadline = now + self._request["grace_s"]
            if now > deadline:
                self._terms = 2
            if self._terms > told:
                told = self._terms
                child.send_signal(signal.SIGTERM if told == 1 else signal.SIGKILL)
            self._pause()

    def _is_silent(self) -> bool:
        """Whether the lease has run out. Only its changes count, so that clocks may be set."""
        limit = self._request["lost_after_s"]
        if limit is None:
            return False
        with contextlib.suppress(OSError):
            lease = os.stat(self._folder / "lease").st_mtime_ns
            if lease != self._lease:
                self._lease, self._heard = lease, time.monotonic()
        return time.monotonic() - self._heard > float(limit)

    def _tell(self, how: dict[str, Any]) -> None:
        """Leave word of the end until it was taken; one that is left for good is not waited for."""
        with open(self._folder / ".exit", "r+") as file:
            file.write(json.dumps(how)[:ROOM])
        (self._folder / ".exit").rename(self._folder / "exit")
        if self._request["lost_after_s"] is None:
            return
        while self._folder.exists():
            if self._is_silent():
                remove(self._folder)
            self._pause()

    def _on_signal(self, number: int, frame: Any) -> None:  # noqa: ARG002
        if number in (TO_END, AT_ONCE):
            self._terms = max(self._terms, 1 if number == TO_END else 2)
        elif number != signal.SIGCHLD:
            self._is_told = True


def _become_keeper(request: dict[str, Any]) -> None:
    """Start a keeper that neither the end of `ssh` nor of its session touches."""
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
        trouble = os.open(str(Path(request["folder"], "trouble")), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for fd, source in ((0, null), (1, trouble), (2, trouble)):
            os.dup2(source, fd)
        os.closerange(3, max(trouble, null, 64) + 1)
        Keeper(request).keep()
        status = 0
    finally:
        os._exit(status)


# --- The relay


class Gone(Exception):  # noqa: N818
    """What is asked for is not there any more."""


class Relay:
    """Starts a keeper, or finds it again, and carries between it and who asks."""

    def __init__(self, request: dict[str, Any], frames: Frames) -> None:
        self._request, self._frames = request, frames
        self._folder = Path(request["folder"])
        self._offset = int(request["offset"])
        self._log: BinaryIO | None = None
        self._asked: set[str] = set()
        self._has_listed = False
        self._is_over = threading.Event()

    def run(self, requests: BinaryIO) -> None:
        """Carry until the end of the slot was told and heard, or nobody listens."""
        try:
            self._find()
            self._frames.send(HELD)
            threading.Thread(target=self._hear, args=(requests,), daemon=True).start()
            self._carry()
            while not self._is_over.wait(IDLE_S) and self._folder.exists():
                pass  # until it was heard, or nobody is there who could say so
        except Gone as gone:
            self._frames.send(GONE, str(gone).encode())
        except (OSError, ValueError) as error:
            self._frames.send(GONE, f"could not be kept there: {error}".encode())

    def _find(self) -> None:
        """Find the keeper of this very slot, or start one; who still keeps an earlier life of it is ended."""
        lock = _locked(self._folder.parent)
        try:
            if read(self._folder / "key") == self._request["key"]:
                return
            if not self._request["starts"]:
                raise Gone("has ended what ran there, as nobody was heard of")
            self._clear()
            self._folder.mkdir(mode=0o700, parents=True)
            write(self._folder / "key", self._request["key"])
            write(self._folder / "lease", "")
            if self._request.get("ask"):
                self._offer(self._request["ask"])
            _become_keeper(self._request)
            deadline = time.monotonic() + START_S
            while not read(self._folder / "pid"):
                if time.monotonic() > deadline:
                    raise Gone(f"could not keep the slot: {read(self._folder / 'trouble') or 'no reason was given'}")
                time.sleep(POLL_S)
        finally:
            os.close(lock)

    def _clear(self) -> None:
        """End what is left of earlier lives of the slot."""
        if not self._request["clears"]:
            return
        for folder in self._folder.parent.glob(f"{self._folder.name.split('.')[0]}.*"):
            _end_keeper(folder)
            remove(folder)
        if left := end_marked(self._request["marks"], LEFTOVER_S):
            raise Gone(f"cannot end what is left there of an earlier attempt: {_numbered(left)}")

    def _offer(self, program: str) -> None:
        """Put the program there by which the slot asks for commands on other hosts."""
        (self._folder / "asks").mkdir()
        write(self._folder / "ask", f"#!{sys.executable}\n{program}", mode=0o700)
        self._request["env"]["STOKER_ASK"] = str(self._folder / "ask")

    def _carry(self) -> None:
        """Send what is printed, what is asked, and how it ends."""
        beat, pause, pid = float("-inf"), POLL_S, _pid(self._folder)
        while not self._is_over.is_set():
            now = time.monotonic()
            if now - beat >= BEAT_S:
                beat = now
                self._frames.send(ALIVE)
            is_kept = _is_keeper(pid)
            how = read(self._folder / "exit")  # looked at before the last of the log
            is_busy = self._pass_output() | self._pass_asks()
            if how:
                self._frames.send(EXIT, how.strip().encode())
                return
            if not is_kept and not (self._folder / "exit").exists():
                left = end_marked(self._request["marks"], LEFTOVER_S)
                remove(self._folder)
                and_left = f"; what cannot be ended there: {_numbered(left)}" if left else ""
                raise Gone(f"has lost what ran there: its keeper was killed, or the host was started anew{and_left}")
            pause = POLL_S if is_busy else min(2 * pause, IDLE_S)
            self._is_over.wait(pause)

    def _pass_output(self) -> bool:
        """Send what is new; tell whether anything was."""
        if self._log is None:
            try:
                self._log = open(self._folder / "log", "rb")  # noqa: SIM115 (for as long as we are)
            except FileNotFoundError:
                return False
        begin = self._offset
        while os.fstat(self._log.fileno()).st_size > self._offset:
            self._log.seek(self._offset)
            data = self._log.read(CHUNK)
            if not data:
                break
            self._frames.send(OUTPUT, data)
            self._offset += len(data)
        return self._offset > begin

    def _pass_asks(self) -> bool:
        """Tell of new asks, and of those that were taken back; give whether there were any."""
        if not self._request.get("ask"):
            return False
        there = {path.name[:-5]: path for path in (self._folder / "asks").glob("*.json")}
        is_new = False
        if not self._has_listed:  # what was taken back while nobody was connected is not among them
            self._has_listed = True
            self._frames.send_json(ASK, {"all": list(there)})
        for name, path in there.items():
            if name not in self._asked and not path.with_suffix(".exit").exists():
                if words := read(path):  # else it was just taken back
                    self._asked.add(name)
                    is_new = True
                    self._frames.send_json(ASK, {"id": name, **json.loads(words)})
            elif name in self._asked and not _is_asking(path):
                with contextlib.suppress(OSError):
                    path.unlink()
        for name in self._asked - set(there):
            self._asked.discard(name)
            self._frames.send_json(ASK, {"id": name, "back": True})
            is_new = True
        return is_new

    def _hear(self, requests: BinaryIO) -> None:
        """Renew the lease with every line, and do what it says; the end of them all says nothing about who asked."""
        for line in iter(requests.readline, b""):
            with contextlib.suppress(OSError):
                os.utime(self._folder / "lease")
            with contextlib.suppress(OSError):
                if line.strip():
                    self._obey(json.loads(line))
        os._exit(0)

    def _obey(self, request: dict[str, Any]) -> None:
        if request["do"] == "end":
            _signal_keeper(self._folder, TO_END if request["times"] == 1 else AT_ONCE)
        elif request["do"] == "signal":
            signal_marked(request["pid"], self._request["marks"], request["number"])
        elif request["do"] == "answer":
            write(self._folder / "asks" / f"{request['id']}.exit", str(request["code"]))
            self._asked.discard(request["id"])
        elif request["do"] == "bye":
            pid = _pid(self._folder)
            remove(self._folder)
            if _is_keeper(pid):  # which looks whether it is still needed
                os.kill(pid, signal.SIGCHLD)
            self._is_over.set()


def _locked(folder: Path) -> int:
    """Be alone in the folder of a run; another slot that ends may just be removing it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(str(folder), os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return lock
            os.close(lock)


def sweep(request: dict[str, Any]) -> dict[str, Any]:
    """End all that is left of a run on this host, its keepers too."""
    # Only those of its own slots: on a shared disk there are others.
    folders = [folder for name in request["slots"] for folder in Path(request["folder"]).glob(f"{name}.*")]
    for folder in folders:
        _end_keeper(folder)
    left = end_marked(request["marks"], request["grace_s"])
    for folder in folders:
        remove(folder)
    return {"left": left}


def _end_keeper(folder: Path) -> None:
    _signal_keeper(folder, signal.SIGKILL)


def _signal_keeper(folder: Path, number: int) -> None:
    pid = _pid(folder)
    if _is_keeper(pid):
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _pid(folder: Path) -> int:
    return int(read(folder / "pid") or 0)


def _is_keeper(pid: int) -> bool:
    """Whether a keeper has this number, on this host; it could be another's by now, and ours after a new start."""
    try:
        if pid == os.getpid():
            return False
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return sys.argv[-1].encode() in file.read().split(b"\0")
    except OSError:
        return False


def _is_asking(path: Path) -> bool:
    """Whether the one that asked still waits."""
    try:
        pid = json.loads(read(path) or "{}").get("pid", 0)
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"ask" in file.read()
    except (OSError, ValueError):
        return False


# --- Processes that are known by variables in their environment


def end_marked(marks: dict[str, str], grace_s: float) -> list[int]:
    """End all processes with these variables: TERM, some time, KILL; give those that a disk or a driver holds fast."""
    for pid in marked(marks):
        signal_marked(pid, marks, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while left := marked(marks):
        late = time.monotonic() - deadline
        if late > DEATH_S:
            break
        if late >= 0:
            for pid in left:
                signal_marked(pid, marks, signal.SIGKILL)
        time.sleep(POLL_S)
    return left


def _numbered(pids: list[int]) -> str:
    return f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"


def marked(marks: dict[str, str]) -> list[int]:
    """List the processes with these variables."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _bears(int(name), marks)]


def _bears(pid: int, marks: dict[str, str]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read().split(b"\0")
    except OSError:
        return False
    return all(f"{name}={value}".encode() in environ for name, value in marks.items())


def signal_marked(pid: int, marks: dict[str, str], number: int) -> None:
    """Signal a process, if it is one of ours."""
    with contextlib.suppress(OSError):
        if _bears(pid, marks):
            os.kill(pid, number)


def oom_kills() -> int:
    """Count what the kernel of this host has killed for want of memory."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


# --- Files


def read(path: Path) -> str:
    """Read a small file; nothing when it is not there."""
    try:
        return path.read_text()
    except OSError:
        return ""


def write(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a small file at once: whoever reads sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(str(temporary), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
    temporary.replace(path)


def remove(folder: Path) -> None:
    """Remove the folder of a slot, and those above it that are empty then: checkpoints stay."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
        folder.parent.parent.rmdir()


def lines(requests: BinaryIO) -> Iterator[dict[str, Any]]:
    """Give what is asked, a line of JSON each."""
    for line in iter(requests.readline, b""):
        if line.strip():
            yield json.loads(line)
