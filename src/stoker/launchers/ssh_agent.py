"""What works for us on a host: looks around there, and keeps one slot, which never outlives the one that asked for it.

One file on the standard library alone, for Python 3.8 and later: it is sent through `ssh` and needs nothing of ours
there. It answers in frames: a letter, a length, so many bytes. What it is asked comes as lines of JSON; an empty line
says that somebody is still there. When those stop, or standard input ends, it ends all that it started.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"\0stoker agent\n"
"""Comes before the first frame; a login may print anything before that."""
ANSWER, OUTPUT, ALIVE, EXIT, REFUSAL = b"a", b"o", b"k", b"x", b"f"
BEAT_S = 2.0
LEFTOVER_S = 0.5
POLL_S = 0.02
DIAL_S = 3.0
_SIOCGIFADDR = 0x8915
_PR_SET_PDEATHSIG = 1

# What the job's own Python says of itself; nothing is imported, for that can take seconds.
_ASK = """
import importlib.metadata, importlib.util, json, sys
def version(name):
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
print(json.dumps({"python": sys.executable, "version": sys.version.split()[0],
                  "modules": {name: version(name) for name in sys.argv[1:]}}))
"""


class Frames:
    """Writes frames, from any thread."""

    def __init__(self, fd: int) -> None:
        self._fd, self._lock = fd, threading.Lock()

    def send(self, kind: bytes, data: bytes = b"") -> None:
        """Send one frame."""
        rest = memoryview(kind + struct.pack(">I", len(data)) + data)
        with self._lock:
            while rest:
                rest = rest[os.write(self._fd, rest) :]


# --- One slot


class Keeper:
    """Runs one slot until it ends, is to end, or nobody asks for it any more."""

    def __init__(self, request: dict[str, Any], frames: Frames) -> None:
        self._request, self._frames = request, frames
        self._marks = dict(request["marks"])
        self._heard = time.monotonic()
        self._is_alone = False
        self._terms = 0

    def keep(self, requests: BinaryIO) -> None:
        """Start the slot, and stay until nothing of it is left."""
        end_marked(self._marks, LEFTOVER_S)  # of an attempt from which we were cut off
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        ours, theirs = os.pipe()
        try:
            child = self._start(theirs)
        except OSError as error:
            self._frames.send(REFUSAL, str(error.strerror or error).encode())
            return
        os.close(theirs)
        pump = threading.Thread(target=self._pump, args=(ours,), daemon=True)
        pump.start()
        threading.Thread(target=self._beat, daemon=True).start()
        threading.Thread(target=self._hear, args=(requests,), daemon=True).start()
        code = self._watch(child)
        end_marked(self._marks, 0 if self._terms > 1 else LEFTOVER_S)
        if not self._is_alone:
            pump.join(2)
            self._frames.send(EXIT, json.dumps({"code": code}).encode())

    def _start(self, output: int) -> subprocess.Popen[bytes]:
        libc, agent = ctypes.CDLL(None), os.getpid()

        def die_with_us() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != agent:
                os._exit(128 + signal.SIGTERM)

        request = self._request
        return subprocess.Popen(
            request["argv"],
            env={**os.environ, **request["env"], **self._marks},
            cwd=request["cwd"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
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
            if not self._is_alone and now - self._heard > self._request["silence_s"]:
                self._is_alone = True
            if self._is_alone and not self._terms:
                self._terms = 1
                deadline = now + self._request["grace_s"]
            elif self._is_alone and deadline == float("inf"):
                self._terms = 2  # its time was given already
            if now > deadline:
                self._terms = 2
            if self._terms > told:
                told = self._terms
                child.send_signal(signal.SIGTERM if told == 1 else signal.SIGKILL)
            time.sleep(POLL_S)

    def _pump(self, ours: int) -> None:
        """Carry what the slot prints; also when nobody takes it any more, so that it does not wait."""
        broken = False
        while True:
            data = os.read(ours, 1 << 16)
            if not data:
                return
            if not broken:
                try:
                    self._frames.send(OUTPUT, data)
                except OSError:
                    broken = True

    def _beat(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._frames.send(ALIVE)
                time.sleep(BEAT_S)

    def _hear(self, requests: BinaryIO) -> None:
        for line in iter(requests.readline, b""):
            self._heard = time.monotonic()
            if line.strip():
                self._obey(json.loads(line))
        self._is_alone = True

    def _obey(self, request: dict[str, Any]) -> None:
        if request["do"] == "end":
            self._terms += 1
        elif request["do"] == "signal":
            _signal_marked(request["pid"], self._marks, request["number"])

    def _on_signal(self, number: int, frame: Any) -> None:  # noqa: ARG002
        self._is_alone = True


# --- Processes that are known by variables in their environment


def end_marked(marks: dict[str, str], grace_s: float) -> int:
    """End all processes with these variables: TERM, some time, KILL until none is left; tell how many there were."""
    found = _marked(marks)
    for pid in found:
        _signal_marked(pid, marks, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while _marked(marks):
        if time.monotonic() >= deadline:
            for pid in _marked(marks):
                _signal_marked(pid, marks, signal.SIGKILL)
        time.sleep(POLL_S)
    return len(found)


def _marked(marks: dict[str, str]) -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _bears(int(name), marks)]


def _bears(pid: int, marks: dict[str, str]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read().split(b"\0")
    except OSError:
        return False
    return all(f"{name}={value}".encode() in environ for name, value in marks.items())


def _signal_marked(pid: int, marks: dict[str, str], number: int) -> None:
    with contextlib.suppress(OSError):
        if _bears(pid, marks):
            os.kill(pid, number)


# --- What there is on this host


class Surveyor:
    """Answers questions about the host; changes nothing."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one question."""
        answers = {"look": self._look, "listen": self._listen, "dial": self._dial, "python": self._python}
        return answers[request["do"]](request)

    def _look(self, request: dict[str, Any]) -> dict[str, Any]:
        workdir = _workdir(request["workdir"])
        return {
            **self._python(request),
            "workdir": workdir,
            "workdir_fault": _unwritable(workdir),
            "identity": _identity(workdir),
            "cores": len(os.sched_getaffinity(0)),
            "gpus": sum(name[6:].isdigit() for name in os.listdir("/dev") if name.startswith("nvidia")),
            "rsync": shutil.which("rsync") is not None,
            "addresses": addresses(),
            "there": [path for path in request["paths"] if Path(workdir, path).exists()],
            "programs": [name for name in request["programs"] if shutil.which(name) is not None],
            "clock": time.time(),
        }

    def _python(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ask the Python that will run the program; a relative path with a slash starts at the working folder."""
        workdir, name = _workdir(request["workdir"]), request["python"]
        program = str(Path(workdir, name)) if "/" in name else name
        where = workdir if Path(workdir).is_dir() else "/"
        try:
            argv = [program, "-c", _ASK, *request["modules"]]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=where, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            return {"python": None, "python_fault": getattr(error, "strerror", None) or str(error)}
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            return {"python": None, "python_fault": last}
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found

    def _listen(self, request: dict[str, Any]) -> dict[str, Any]:
        """Take a port for a moment, and greet whoever comes with a word that only this host knows."""
        try:
            self._listener = socket.create_server(("", request["port"]))
        except OSError as error:
            return {"fault": os.strerror(error.errno) if error.errno else str(error)}
        threading.Thread(target=_greet, args=(self._listener, request["token"].encode()), daemon=True).start()
        return {"port": self._listener.getsockname()[1]}

    def _dial(self, request: dict[str, Any]) -> dict[str, Any]:
        """Find for each of some listening hosts the first address that leads to it, and by which interface."""
        answers: list[dict[str, Any]] = [{"address": None} for _ in request["targets"]]

        def try_all(index: int, target: dict[str, Any]) -> None:
            found: dict[str, dict[str, Any]] = {}
            every = [
                threading.Thread(target=_try, args=(one, target, found), daemon=True) for one in target["addresses"]
            ]
            _together(every)
            answers[index] = next((found[one] for one in target["addresses"] if one in found), {"address": None})

        _together([threading.Thread(target=try_all, args=item, daemon=True) for item in enumerate(request["targets"])])
        return {"answers": answers}


def _together(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _try(address: str, target: dict[str, Any], found: dict[str, dict[str, Any]]) -> None:
    """Dial one address, and keep how it was reached if the one who greets is the one that is meant."""
    with contextlib.suppress(OSError), socket.create_connection((address, target["port"]), timeout=DIAL_S) as sock:
        if sock.makefile("rb").readline().strip() == target["token"].encode():
            mine = sock.getsockname()[0]
            names = [name for name, one in addresses() if one == mine]
            found[address] = {"address": address, "mine": mine, "interface": names[0] if names else None}


def _greet(listener: socket.socket, token: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            caller, _ = listener.accept()
            with caller:
                caller.sendall(token + b"\n")


def addresses() -> list[tuple[str, str]]:
    """List the interfaces with their IPv4 addresses, the machine's own loop left out."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                packed = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                address = socket.inet_ntoa(packed[20:24])
                if not address.startswith("127."):
                    found.append((name, address))
    return found


def _workdir(given: str) -> str:
    """Give the working folder as an absolute path; a relative one starts at the home."""
    return os.path.normpath(Path.home() / given)


def _unwritable(folder: str) -> str:
    """Say why a folder cannot be made or written; nothing when it can."""
    place = Path(folder)
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        return f"{place} is not a folder"
    return "" if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written"


def _identity(folder: str) -> list[int]:
    """Tell by what a folder is known again on another host that shares it."""
    try:
        found = os.stat(folder)
    except OSError:
        return []
    return [found.st_ino, found.st_mtime_ns]


def main() -> None:
    """Do what standard input asks for."""
    requests, frames = sys.stdin.buffer, Frames(1)
    os.write(1, MAGIC)
    surveyor = Surveyor()
    for line in iter(requests.readline, b""):
        if not line.strip():
            continue
        request = json.loads(line)
        if request["do"] == "keep":
            Keeper(request, frames).keep(requests)
            break
        frames.send(ANSWER, json.dumps(surveyor.answer(request)).encode())
    os._exit(0)  # whatever thread still waits for a network that is gone


if __name__ == "__main__":
    main()
