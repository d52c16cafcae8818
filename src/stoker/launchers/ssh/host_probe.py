"""What works for us on a host: looks around there, and has slots kept.

On the standard library alone, for Python 3.8 and later: it is sent through `ssh`, with `keeper`, and needs nothing
of ours there. What it is asked comes as lines of JSON; an empty line says that somebody is still there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from stoker.launchers.ssh.slot_daemon import ANSWER, MAGIC, Frames, Relay, lines, sweep

DIAL_S = 3.0
_SIOCGIFADDR = 0x8915

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


# --- What there is on this host


class Surveyor:
    """Answers questions about the host; leaves nothing there."""

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
            # Our standard input is where the next question comes.
            how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "timeout": 60, "cwd": where, "check": False}
            done = subprocess.run(argv, capture_output=True, text=True, **how)
        except (OSError, subprocess.SubprocessError) as error:
            return {"python": None, "python_fault": getattr(error, "strerror", None) or str(error)}
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            return {"python": None, "python_fault": last}
        try:
            found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        except (IndexError, ValueError):
            return {"python": None, "python_fault": "it does not run what it is given"}
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
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} cannot be written"
    return _untakable(place)


def _untakable(place: Path) -> str:
    """Say why a folder takes nothing new: of some, as /proc, that is known only once it was tried."""
    before = os.stat(place)
    try:
        trial = place / f".stoker-{os.urandom(8).hex()}"
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        why = "" if error.errno == errno.ENOENT else f": {os.strerror(error.errno or 0).lower()}"
        return f"{place} cannot be written{why}"
    with contextlib.suppress(OSError):  # as if nobody had been there
        os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))
    return ""


def _identity(folder: str) -> list[int]:
    """Tell by what a folder is known again on another host that shares it."""
    try:
        found = os.stat(folder)
    except OSError:
        return []
    return [found.st_ino, found.st_mtime_ns]


def signs(request: dict[str, Any]) -> dict[str, Any]:
    """Leave a sign in the working folder, which is made for it, and tell which others are seen there.

    So hosts are known that share a folder, whatever their disks and clocks say.
    """
    folder = Path(_workdir(request["workdir"]), ".stoker")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for sign in request["leave"]:
            (folder / sign).touch()
        found = [sign for sign in request["find"] if (folder / sign).exists()]
        for sign in request["take"]:
            with contextlib.suppress(FileNotFoundError):
                (folder / sign).unlink()
    except OSError as error:
        return {"fault": f"cannot use the folder {folder}: {error.strerror}"}
    return {"found": found}


def main() -> None:
    """Do what standard input asks for."""
    requests, frames = sys.stdin.buffer, Frames(1)
    os.write(1, MAGIC)
    surveyor = Surveyor()
    others = {"sweep": sweep, "signs": signs}
    for request in lines(requests):
        if request["do"] == "keep":
            Relay(request, frames).run(requests)
            break
        frames.send_json(ANSWER, others.get(request["do"], surveyor.answer)(request))
    os._exit(0)  # whatever thread still waits for a network that is gone
