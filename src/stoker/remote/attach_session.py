"""Attach session: the process of one `ssh` connection on a host, which connects it to the slot daemon of a run there.

It starts the daemon if there is none, passes on everything in both directions, and exits with the connection.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from stoker.remote.frames import ALIVE, ALIVE_INTERVAL_S, FAILED, FrameWriter, pack_frame
from stoker.remote.guard import set_process_name
from stoker.remote.slot_daemon import SlotDaemon, address_of, peer_uid
from stoker.remote.slot_process import remove_folder
from stoker.remote.tagged_processes import KILL_TIMEOUT_S, terminate_tagged

POLL_S = 0.02
START_TIMEOUT_S = 10.0
CHUNK_BYTES = 1 << 16


def attach(request: dict[str, Any], requests: BinaryIO, frames: FrameWriter) -> None:
    """Connect the client to the daemon until either end is gone."""
    try:
        sock = _connect(request, frames)
    except OSError as error:
        frames.write(pack_frame(FAILED, str(error).encode()))
        return
    sock.sendall(json.dumps(request).encode() + b"\n")
    threading.Thread(target=_pass_requests, args=(requests, sock), daemon=True).start()
    while True:
        try:
            data = sock.recv(CHUNK_BYTES)
        except OSError:
            data = b""
        if not data:
            break
        frames.write(data)
    if _log_path(request).exists():  # it was killed: another one kills what it has left, even if the client is gone
        _start_daemon(request)


def _pass_requests(requests: BinaryIO, sock: socket.socket) -> None:
    """Pass on requests; at the end of the connection, exit and leave the slots to their daemon."""
    with contextlib.suppress(OSError):
        while data := requests.read1(CHUNK_BYTES):  # type: ignore[attr-defined]
            sock.sendall(data)
    os._exit(0)


def _connect(request: dict[str, Any], frames: FrameWriter) -> socket.socket:
    """Connect to the daemon; start one if there is none, which first waits for the end of the guard of the last one."""
    deadline = _start_deadline(request)
    sock, before = _try_connect(request), _read_log(request)
    if sock is None:
        _start_daemon(request)
    next_alive, pause_s = time.monotonic() + ALIVE_INTERVAL_S, POLL_S / 16
    while sock is None:
        if (error := _read_log(request)) and error != before:
            raise OSError(f"could not start the slot daemon: {error.splitlines()[-1]}")
        if time.monotonic() > deadline:
            raise OSError("could not start the slot daemon: it does not respond")
        if time.monotonic() > next_alive:
            next_alive += ALIVE_INTERVAL_S
            frames.write(pack_frame(ALIVE))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S)
        sock = _try_connect(request)
    if peer_uid(sock) != os.getuid():
        raise OSError("another user has taken the address of the slot daemon")
    return sock


def _start_deadline(request: dict[str, Any]) -> float:
    return time.monotonic() + START_TIMEOUT_S + float(request["grace_s"]) + KILL_TIMEOUT_S


def _try_connect(request: dict[str, Any]) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(f"\0{address_of(request['tags'])}")
    except OSError:
        sock.close()
        return None
    return sock


# --- The start of a daemon


def _start_daemon(request: dict[str, Any]) -> None:
    """Start a daemon that survives the end of `ssh` and of its session; it exits if there is one already."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    status = 1
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        log = _log_path(request)
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        null = os.open(os.devnull, os.O_RDWR)
        errors = os.open(str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for fd, source in ((0, null), (1, errors), (2, errors)):
            os.dup2(source, fd)
        os.closerange(3, max(errors, null, 64) + 1)
        _run_daemon(request)
        status = 0
    finally:
        if status:
            sys.excepthook(*sys.exc_info())
        os._exit(status)


def _run_daemon(request: dict[str, Any]) -> None:
    """Run a daemon once no other daemon and no guard of one is left."""
    set_process_name("stoker-daemon")
    lock = _acquire_lock(request)
    if lock is None:
        return
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{address_of(request['tags'])}")
    listener.listen(128)
    error = _read_log(request)
    os.truncate(2, 0)
    SlotDaemon(request, listener=listener, previous_error=error.splitlines()[-1] if error else "").run()
    _remove_log(request)
    lock.close()


def _acquire_lock(request: dict[str, Any]) -> socket.socket | None:
    """Bind the address that a daemon and its guard keep; None if a daemon responds, or if they keep it for too long."""
    lock, deadline = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), _start_deadline(request)
    while time.monotonic() < deadline:
        try:
            lock.bind(f"\0{address_of(request['tags'])}-lock")
            return lock
        except OSError:
            if (sock := _try_connect(request)) is not None:
                sock.close()
                break
            time.sleep(POLL_S)
    lock.close()
    return None


def _log_path(request: dict[str, Any]) -> Path:
    """Return the file with the errors of the daemon; several hosts may share the folder."""
    return Path(request["folder"], f"daemon-{address_of(request['tags'])[-8:]}.log")


def _read_log(request: dict[str, Any]) -> str:
    try:
        return _log_path(request).read_text(errors="replace").strip()
    except OSError:
        return ""


def _remove_log(request: dict[str, Any]) -> None:
    """Remove the log, and the folder of the run if it is empty then: a session sees that the daemon was not killed."""
    path = _log_path(request)
    with contextlib.suppress(OSError):
        path.unlink()
    with contextlib.suppress(OSError):
        path.parent.rmdir()
        path.parent.parent.rmdir()


# --- Cleanup without a daemon


def clean_up_run(request: dict[str, Any]) -> dict[str, Any]:
    """Kill all daemons and processes of a run on this host; return the pids that could not be killed."""
    for pid in _list_daemons():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    survivors = terminate_tagged(request["tags"], request["grace_s"])
    # Only the folders of this host's slots: others may be on the same shared disk.
    for name in request["slots"]:
        for folder in Path(request["folder"]).glob(f"{name}.*"):
            remove_folder(folder)
    _remove_log(request)
    return {"survivors": survivors}


def _list_daemons() -> Iterator[int]:
    """Yield the daemons and guards of this run, which have the command line of the session that started them.

    Its last word names the run and the host, so that cleanups for two names of one machine spare each other; earlier
    versions named the run only.
    """
    token = sys.argv[-1].encode()
    tokens = {token, token.partition(b"@")[0]}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
                if tokens.intersection(file.read().split(b"\0")):
                    yield int(name)
