"""Slot daemons on this machine, without ssh: a client with an attach session, and the processes of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stoker.remote.frames import ALIVE, ATTACHED, EXEC, OUTPUT, FrameParser
from stoker.remote.tagged_processes import list_tagged
from tests.support.ssh_runs import find_by_command
from tests.support.waiting import wait_until

HOST = "here"
_SESSION = """
import json, os, sys
from stoker.remote.attach_session import attach
from stoker.remote.frames import MAGIC, FrameWriter
os.write(1, MAGIC)
attach(json.loads(sys.stdin.buffer.readline()), sys.stdin.buffer, FrameWriter(1))
os._exit(0)
"""


class DaemonClient:
    """The client's end of one attach session; it renews the lease while `renews` is set."""

    def __init__(self, folder: Path, *, lost_after_s: float | None = 60.0, grace_s: float = 5.0) -> None:
        self.run, self.folder, self._grace_s = f"run-{folder.name}", folder / "run", grace_s
        self._lost_after_s = lost_after_s
        self.tags = {"STOKER_RUN": self.run, "STOKER_HOST": HOST}
        self.frames: list[tuple[bytes, str, bytes]] = []
        self.output: dict[str, bytearray] = defaultdict(bytearray)
        self.renews = True
        self._lock = threading.Lock()
        argv = [sys.executable, "-c", _SESSION, f"stoker-agent-{self.run}"]
        self.session = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def close(self) -> None:
        """Kill the session, as a broken connection does."""
        self.session.kill()
        self.session.wait()
        self._reader.join()
        for pipe in (self.session.stdin, self.session.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def attach(self, *, starting: Sequence[str] = (), **offsets: int) -> None:
        """Attach, with slots whose output is known up to an offset; an underscore in a name stands for a hyphen.

        Slots that are `starting` may have started, for all that the client knows.
        """
        slots = {f"{name.replace('_', '-')}.0": offset for name, offset in offsets.items()}
        self.send(
            op="attach",
            folder=str(self.folder),
            tags=self.tags,
            grace_s=self._grace_s,
            lost_after_s=self._lost_after_s,
            slots=slots,
            starting=list(starting),
        )
        self.wait_for(ATTACHED)

    def send(self, **request: Any) -> None:
        """Send a request."""
        assert self.session.stdin is not None
        with self._lock, suppress(OSError):
            self.session.stdin.write(json.dumps(request).encode() + b"\n")
            self.session.stdin.flush()

    def start(self, name: str, script: str, **more: Any) -> None:
        """Start a slot such as `worker/0`."""
        slot = f"{name.replace('/', '-')}.0"
        argv = ["bash", "-c", script]
        fields = {"slot": slot, "name": name, "key": "k", "argv": argv, "env": {}, "cwd": "/", "log_size": 0}
        self.send(op="start", **{**fields, "is_standby": False, "grace_s": self._grace_s, **more})

    def wait_for(self, kind: bytes, slot: str = "", timeout_s: float = 60.0) -> bytes:
        """Wait for a frame of a kind about a slot; return the payload of the last one."""
        wait_until(lambda: self._find(kind, slot), timeout_s)
        return self._find(kind, slot)[-1]

    def _find(self, kind: bytes, slot: str) -> list[bytes]:
        return [data for found, name, data in list(self.frames) if (found, name) == (kind, slot)]

    def exec_requests(self) -> list[dict[str, Any]]:
        """The exec requests of slots that have arrived."""
        return [json.loads(data) for data in self._find(EXEC, "")]

    def _read(self) -> None:
        assert self.session.stdout is not None
        parser = FrameParser()
        while data := os.read(self.session.stdout.fileno(), 1 << 16):
            for kind, slot, payload in parser.feed(data):
                if kind == OUTPUT:
                    self.output[slot] += payload
                    continue
                self.frames.append((kind, slot, payload))
                if kind in (ALIVE, ATTACHED) and payload and self.renews:
                    self.send(op="renew", heard=json.loads(payload))

    # --- Processes

    def slot_pids(self) -> list[int]:
        """All processes of all slots."""
        return list_tagged(self.tags)

    def daemon_and_guard(self) -> tuple[int, int]:
        """The daemon and its guard, which is its child."""
        first, second = sorted(self.daemons(), key=lambda pid: _parent(pid) in self.daemons())
        return first, second

    def daemons(self) -> list[int]:
        """The daemons and guards of the run."""
        return [pid for pid in find_by_command(f"stoker-agent-{self.run}", "python") if pid != self.session.pid]

    def is_everything_gone(self) -> bool:
        """Whether no process of any slot, no daemon and no guard is left."""
        return not self.slot_pids() and not self.daemons()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextmanager
def daemon_client(folder: Path, **options: Any) -> Iterator[DaemonClient]:
    """A client; at the end everything that it has started is killed."""
    client = DaemonClient(folder, **options)
    try:
        yield client
    finally:
        client.close()
        for _ in range(3):
            for pid in (*client.daemons(), *client.slot_pids()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
