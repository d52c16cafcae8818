"""Remote exec: commands that one slot runs on the host of another, passed as files in the run folder.

exec/<attempt>/<slot>.ready          the slot is ready for commands
exec/<attempt>/<slot>/<id>.json      a command for it
exec/<attempt>/<slot>/<id>.cancel    the command was cancelled
exec/<attempt>/<slot>/<id>.exit      its exit code
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from stoker.core.processes import Process, defer_signal, start, wait_until
from stoker.core.spec import load, to_json
from stoker.errors import InputError
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.topology import Slot

EXIT_REPORT_S = 5.0
"""How long a killed command may take to report its exit."""


class ExecRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A command for a shell on the host of a slot."""

    command: str
    cwd: str | None = None


class RequestFolder:
    """The exec requests of one attempt, as files in the run folder."""

    def __init__(self, run: RunFolder, attempt: int) -> None:
        self._folder = run.folder / "exec" / str(attempt)

    def mark_ready(self, slot: str) -> None:
        """Record that a slot is ready for commands."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._ready_file(slot).touch()

    def list_unready(self, slots: Iterable[str]) -> list[str]:
        """List the slots that are not ready yet."""
        return [slot for slot in slots if not self._ready_file(slot).exists()]

    def _ready_file(self, slot: str) -> Path:
        return self._folder / f"{Slot.parse(slot).filename}.ready"

    def slot_folder(self, slot: str) -> Path:
        """Return the folder with the requests for a slot."""
        return self._folder / Slot.parse(slot).filename

    def read_request(self, slot: str, exec_id: str) -> ExecRequest:
        """Read one request."""
        path = self.slot_folder(slot) / f"{exec_id}.json"
        return load(path.read_bytes(), ExecRequest, path)

    def cancel(self, slot: str, exec_id: str) -> None:
        """Record that a request is cancelled."""
        (self.slot_folder(slot) / f"{exec_id}.cancel").touch()

    def is_cancelled(self, slot: str, exec_id: str) -> bool:
        """Whether a request was cancelled."""
        return (self.slot_folder(slot) / f"{exec_id}.cancel").exists()

    def list_pending(self, slot: str) -> list[str]:
        """List the ids of requests for a slot that have no exit code yet."""
        # A name that starts with a dot is still being written.
        paths = (path for path in self.slot_folder(slot).glob("*.json") if not path.name.startswith("."))
        return [path.stem for path in paths if not path.with_suffix(".exit").exists()]

    def write(self, slot: str, file: str, data: bytes) -> None:
        """Write a file atomically."""
        folder = self.slot_folder(slot)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f".{file}").write_bytes(data)
        (folder / f".{file}").replace(folder / file)


class ExecForwarder:
    """Forwarder of the exec requests of the calling slot to standby slots; it collects their exit codes."""

    def __init__(self, requests: RequestFolder, standby: Collection[str]) -> None:
        self._requests, self._standby = requests, standby
        self._open: dict[str, str] = {}
        self._rejected: list[str] = []

    def handle(self, message: dict[str, Any]) -> None:
        """Forward or cancel a request; a list of `pending` ones cancels all others."""
        if "pending" in message:
            for slot in self._standby:
                for exec_id in set(self._requests.list_pending(slot)) - set(message["pending"]):
                    self._cancel(slot, exec_id)
            return
        exec_id = str(message["id"])
        if message.get("cancelled"):
            if exec_id in self._open:
                self._cancel(self._open[exec_id], exec_id)
            return
        slot = str(message["slot"])
        if slot not in self._standby:
            self._rejected.append(exec_id)
            return
        self._open[exec_id] = slot
        if not (self._requests.slot_folder(slot) / f"{exec_id}.json").exists():
            request = ExecRequest(command=message["command"], cwd=message.get("cwd"))
            self._requests.write(slot, f"{exec_id}.json", to_json(request))

    def _cancel(self, slot: str, exec_id: str) -> None:
        self._open.pop(exec_id, None)
        self._requests.cancel(slot, exec_id)

    def collect_exit_codes(self) -> Iterator[tuple[str, int]]:
        """Yield the ids and exit codes of finished commands; a request for no standby slot is bad input."""
        while self._rejected:
            yield self._rejected.pop(), InputError.exit_code
        for exec_id, slot in list(self._open.items()):
            path = self._requests.slot_folder(slot) / f"{exec_id}.exit"
            if path.exists():
                del self._open[exec_id]
                yield exec_id, int(path.read_text())


class ExecRunner:
    """Runner of the exec requests for one standby slot, each by a process on this machine."""

    def __init__(self, run: RunFolder, requests: RequestFolder, slot: str, has_started: Callable[[str], bool]) -> None:
        """Create the runner of a slot; `has_started` returns whether an earlier process has started a request.

        Those are picked up even while stopping: there may be output left to read.
        """
        self._run, self._requests, self._slot, self._has_started = run, requests, slot, has_started
        self._processes: dict[str, Process] = {}
        self._next_signal: dict[str, float] = {}
        self._is_stopping = False

    @property
    def is_idle(self) -> bool:
        """Whether no command is running."""
        return not self._processes

    def stop(self) -> None:
        """Stop all commands within their grace period, and start no more."""
        self._is_stopping = True
        self.poll()
        for process in self._processes.values():
            process.terminate()

    def poll(self) -> None:
        """Start new commands, stop cancelled ones, and write the exit codes of finished ones."""
        for exec_id in self._requests.list_pending(self._slot):
            is_open = not self._is_stopping and not self._requests.is_cancelled(self._slot, exec_id)
            if exec_id not in self._processes and (is_open or self._has_started(exec_id)):
                self._processes[exec_id] = self._start(exec_id)
        for exec_id, process in list(self._processes.items()):
            code = process.poll()
            if code is not None:
                del self._processes[exec_id]
                process.stop(0)
                self._requests.write(self._slot, f"{exec_id}.exit", str(code).encode())
            elif self._requests.is_cancelled(self._slot, exec_id):
                self._terminate(exec_id, process)

    def _start(self, exec_id: str) -> Process:
        module = "stoker.launchers.ssh.remote_slot"
        argv = [sys.executable, "-m", module, str(self._run.folder), self._slot, exec_id]
        with defer_signal(signal.SIGTERM):  # until its signal handlers are installed
            return start(argv, terminate_with_parent=True)

    def _terminate(self, exec_id: str, process: Process) -> None:
        """Send SIGTERM, and again after a while: the second one kills the command."""
        if time.monotonic() > self._next_signal.get(exec_id, 0.0):
            self._next_signal[exec_id] = time.monotonic() + EXIT_REPORT_S
            process.terminate()

    def close(self, grace_s: float) -> None:
        """Stop all commands and wait for them."""
        if not self._is_stopping:
            self.stop()
        wait_until(lambda: all(process.poll() is not None for process in self._processes.values()), grace_s)
        for process in self._processes.values():  # a second SIGTERM, which kills the command
            process.stop(EXIT_REPORT_S)
