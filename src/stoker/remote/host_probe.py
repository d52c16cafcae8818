"""Remote agent: probes an ssh host (Python, GPUs, addresses, ports), and attaches to slots there.

Standard library only, Python 3.8 or later: the source is sent through `ssh`, together with `slot_daemon`, and needs no
stoker on the host. Requests arrive on standard input as lines of JSON; an empty line is a keep-alive.
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

from stoker.remote.frames import MAGIC, RESPONSE, FrameWriter, pack_json

DIAL_TIMEOUT_S = 3.0
PYTHON_TIMEOUT_S = 60.0
_SIOCGIFADDR = 0x8915

# Run by the job's own Python. It imports none of the modules, which can take seconds, and no importlib.metadata.
_PYTHON_FACTS = """
import importlib.util, json, os, re, sys
paths = [path for path in sys.path if os.path.isdir(path) and os.access(path, os.R_OK)]
folders = [name for path in paths for name in os.listdir(path)]
def version(name):
    if importlib.util.find_spec(name) is None:
        return None
    pattern = re.compile(name + r"-(\\d[^-]*)(-.*)?\\.(dist|egg)-info", re.IGNORECASE)
    return next((match[1] for match in map(pattern.fullmatch, folders) if match), "unknown")
print(json.dumps({"python": sys.executable, "version": sys.version.split()[0],
                  "modules": {name: version(name) for name in sys.argv[1:]}}))
"""


# --- Facts about this host


class HostProbe:
    """Handler of requests about the host; it leaves nothing behind."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the response to one request."""
        handlers = {"facts": self._facts, "listen": self._listen, "dial": self._dial, "python": self._python_facts}
        return handlers[request["op"]](request)

    def _facts(self, request: dict[str, Any]) -> dict[str, Any]:
        workdir = _resolve_workdir(request["workdir"])
        return {
            **self._python_facts(request),
            "workdir": workdir,
            "workdir_error": _check_writable(workdir),
            "identity": _folder_identity(workdir),
            "cores": len(os.sched_getaffinity(0)),
            "gpus": sum(name[6:].isdigit() for name in os.listdir("/dev") if name.startswith("nvidia")),
            "rsync": shutil.which("rsync") is not None,
            "addresses": list_addresses(),
            "existing_paths": [path for path in request["paths"] if Path(workdir, path).exists()],
            "programs": [name for name in request["programs"] if shutil.which(name) is not None],
            "clock": time.time(),
        }

    def _python_facts(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run the job's Python; a relative path with a slash is relative to the working directory."""
        workdir, name = _resolve_workdir(request["workdir"]), request["python"]
        program = str(Path(workdir, name)) if "/" in name else name
        cwd = workdir if Path(workdir).is_dir() else "/"
        try:
            argv = [program, "-c", _PYTHON_FACTS, *request["modules"]]
            # Our own standard input is for the next request.
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "timeout": PYTHON_TIMEOUT_S, "cwd": cwd}
            process = subprocess.run(argv, capture_output=True, text=True, check=False, **options)
        except (OSError, subprocess.SubprocessError) as error:
            return {"python": None, "python_error": getattr(error, "strerror", None) or str(error)}
        if process.returncode:
            last_line = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            return {"python": None, "python_error": last_line}
        try:
            facts: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
        except (IndexError, ValueError):
            return {"python": None, "python_error": "it does not run Python code"}
        return facts

    def _listen(self, request: dict[str, Any]) -> dict[str, Any]:
        """Listen on a port, and send every client a token that identifies this host."""
        try:
            self._listener = socket.create_server(("", request["port"]))
        except OSError as error:
            return {"error": os.strerror(error.errno) if error.errno else str(error)}
        threading.Thread(target=_send_token, args=(self._listener, request["token"].encode()), daemon=True).start()
        return {"port": self._listener.getsockname()[1]}

    def _dial(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return, for each listening host, its first reachable address and the interface used to reach it."""
        routes: list[dict[str, Any]] = [{"address": None} for _ in request["targets"]]

        def dial_target(index: int, target: dict[str, Any]) -> None:
            reached: dict[str, dict[str, Any]] = {}
            threads = [
                threading.Thread(target=_dial_address, args=(address, target, reached), daemon=True)
                for address in target["addresses"]
            ]
            _run_threads(threads)
            routes[index] = next((reached[name] for name in target["addresses"] if name in reached), {"address": None})

        targets = enumerate(request["targets"])
        _run_threads([threading.Thread(target=dial_target, args=item, daemon=True) for item in targets])
        return {"routes": routes}


def _run_threads(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _dial_address(address: str, target: dict[str, Any], reached: dict[str, dict[str, Any]]) -> None:
    """Connect to one address; add it to `reached` if the token is that of the target."""
    connection = (address, target["port"])
    with contextlib.suppress(OSError), socket.create_connection(connection, timeout=DIAL_TIMEOUT_S) as sock:
        if sock.makefile("rb").readline().strip() == target["token"].encode():
            own = sock.getsockname()[0]
            interfaces = [name for name, interface_address in list_addresses() if interface_address == own]
            interface = interfaces[0] if interfaces else None
            reached[address] = {"address": address, "own_address": own, "interface": interface}


def _send_token(listener: socket.socket, token: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            with client:
                client.sendall(token + b"\n")


def list_addresses() -> list[tuple[str, str]]:
    """List the interfaces with their IPv4 addresses, without the loopback."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                packed = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                address = socket.inet_ntoa(packed[20:24])
                if not address.startswith("127."):
                    addresses.append((name, address))
    return addresses


def _resolve_workdir(path: str) -> str:
    """Return the working directory as an absolute path; a relative one is relative to the home directory."""
    return os.path.normpath(Path.home() / path)


def _check_writable(folder: str) -> str:
    """Return why a directory cannot be created or written to, or an empty string if it can."""
    parent = Path(folder)
    while not os.path.lexists(parent):
        parent = parent.parent
    if not parent.is_dir():
        return f"{parent} is not a directory"
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"{parent} is not writable"
    return _try_mkdir(parent)


def _try_mkdir(parent: Path) -> str:
    """Return why a directory takes no new entries: for some, such as /proc, only a trial shows it."""
    before = os.stat(parent)
    try:
        trial = parent / f".stoker-{os.urandom(8).hex()}"
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        reason = "" if error.errno == errno.ENOENT else f": {os.strerror(error.errno or 0).lower()}"
        return f"{parent} is not writable{reason}"
    with contextlib.suppress(OSError):  # the mtime is part of the folder's identity
        os.utime(parent, ns=(before.st_atime_ns, before.st_mtime_ns))
    return ""


def _folder_identity(folder: str) -> list[int]:
    """Return the inode and mtime of a directory, equal on all hosts that share it."""
    try:
        stat = os.stat(folder)
    except OSError:
        return []
    return [stat.st_ino, stat.st_mtime_ns]


def exchange_markers(request: dict[str, Any]) -> dict[str, Any]:
    """Create, find and remove marker files in the working directory, which is created if necessary.

    Hosts that see each other's markers share the directory, even if inodes or clocks differ.
    """
    folder = Path(_resolve_workdir(request["workdir"]), ".stoker")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for marker in request["create"]:
            (folder / marker).touch()
        existing = [marker for marker in request["find"] if (folder / marker).exists()]
        for marker in request["remove"]:
            with contextlib.suppress(FileNotFoundError):
                (folder / marker).unlink()
    except OSError as error:
        return {"error": f"cannot use the directory {folder}: {error.strerror}"}
    return {"found": existing}


def _clean_up_run(request: dict[str, Any]) -> dict[str, Any]:
    from stoker.remote.attach_session import clean_up_run

    return clean_up_run(request)


def main() -> None:
    """Handle the requests on standard input."""
    requests, frames = sys.stdin.buffer, FrameWriter(1)
    os.write(1, MAGIC)
    probe = HostProbe()
    handlers = {"cleanup": _clean_up_run, "markers": exchange_markers}
    for line in iter(requests.readline, b""):
        request = json.loads(line)
        if request["op"] == "attach":
            from stoker.remote.attach_session import attach

            attach(request, requests, frames)
            break
        frames.write(pack_json(RESPONSE, handlers.get(request["op"], probe.handle)(request)))
    os._exit(0)  # without waiting for threads that wait for an unreachable network
