"""Slots as the slot daemon runs them: a command with all its descendants, its log, its exit record.

Each slot has a folder on the host:

    log        the output, written by the slot itself; its offsets are those of the log on the launching machine
    exit       the exit record; its disk space is allocated before the slot starts
    rsh-agent  runs commands on the hosts of other slots; `socket` beside it has the address of the daemon
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from stoker.remote.tagged_processes import KILL_TIMEOUT_S, Termination

LEFTOVER_GRACE_S = 0.5
"""Grace period of processes that are left when the command of a slot has exited."""
CHUNK_BYTES = 1 << 16
EXIT_RECORD_BYTES = 4096
_PR_SET_PDEATHSIG = 1


class SlotProcess:
    """A command and every process that descends from it, found by tags in their environment."""

    def __init__(self, request: dict[str, Any], env: dict[str, str], tags: dict[str, str], log: Path) -> None:
        """Start the command of a request; raise OSError if that fails."""
        self.tags = tags
        self._grace_s: float = request["grace_s"]
        self._oom_kills_before = oom_kills()
        self._child = _start(request["argv"], request["cwd"], {**env, **tags}, log)
        self.pid = self._child.pid
        self._requested, self._sent = 0, 0
        self._kill_at = float("inf")
        self._code: int | None = None
        self._termination: Termination | None = None

    def stop(self, level: int, max_grace_s: float = float("inf")) -> None:
        """Ask it to stop: 1 by SIGTERM, and SIGKILL after its grace period; 2 by SIGKILL."""
        if level > self._requested:
            self._requested = level
            grace_s = min(self._grace_s, max_grace_s) if level == 1 else 0.0
            self._kill_at = min(self._kill_at, time.monotonic() + grace_s)

    @property
    def is_ending(self) -> bool:
        """Whether only processes are left that must be killed."""
        return self._termination is not None

    def poll(self, tagged: list[int] | None) -> dict[str, Any] | None:
        """Signal what must be signalled now; return the exit record once no process is left.

        `tagged` are the tagged processes of the run, listed only if any slot `is_ending`.
        """
        if self._code is None:
            self._code = self._child.poll()
            if self._code is None:
                self._signal_leader()
                if time.monotonic() < self._kill_at + KILL_TIMEOUT_S:
                    return None
                self._code = -signal.SIGKILL  # it waits for a disk or a driver, and is one of the survivors
        if self._termination is None:
            self._termination = Termination(self.tags, 0 if self._requested > 1 else LEFTOVER_GRACE_S)
            tagged = None  # they were listed before it has exited, without processes that it started last
        if self._requested > 1:
            self._termination.expedite()
        if not self._termination.poll(tagged):
            return None
        survivors, oom = self._termination.survivors, oom_kills() > self._oom_kills_before
        return {"code": self._code, "oom": oom, "survivors": survivors}

    def _signal_leader(self) -> None:
        if time.monotonic() >= self._kill_at:
            self._requested = 2
        if self._requested > self._sent:
            self._sent = self._requested
            self._child.send_signal(signal.SIGTERM if self._sent == 1 else signal.SIGKILL)


def _start(argv: list[str], cwd: str, env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    libc, parent = ctypes.CDLL(None), os.getpid()

    def set_parent_death_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)

    with open(log, "ab", buffering=0) as output:
        return subprocess.Popen(
            argv,
            env={**os.environ, **env},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=set_parent_death_signal,
        )


class DaemonSlot:
    """One slot of the daemon: its command, the commands that other slots run in it, its log and its exit record."""

    def __init__(self, folder: Path, key: str = "") -> None:
        self.folder, self.key, self.name = folder, key, folder.name
        self.offset = 0
        """How much of the log the client has."""
        self.is_followed = False
        """Whether the client wants the output."""
        self.record: dict[str, Any] | None = None
        """The exit record."""
        self.is_reported = False
        """Whether the record was sent over the current connection."""
        self.execs: dict[str, SlotProcess] = {}
        self.exec_codes: dict[str, int] = {}
        """Exit codes of all commands that are over: a client may ask for one again."""
        self.command: SlotProcess | None = None
        """Its own command; None if that could not be started."""
        self._log: io.FileIO | None = None
        self._is_standby = self._is_lost = False
        self._stop_level = 0

    # --- Start and end

    def start(self, request: dict[str, Any], tags: dict[str, str], agent: tuple[str, str] | None) -> None:
        """Start the slot; `agent` is the source of the remote shell agent and the address of the daemon.

        Raise OSError if its folder cannot be made; a command that cannot be started is an exit record.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "exit").unlink()  # of an earlier start
        env = dict(request["env"])
        if agent is not None:
            env["STOKER_ASK"] = self._install_agent(*agent)
        with open(self.folder / ".exit", "wb") as file:
            file.write(b" " * EXIT_RECORD_BYTES)
        self.offset, self.is_followed = request["log_size"], True
        with open(self.folder / "log", "ab") as log:
            if log.tell() < self.offset:  # of an earlier start; what is missing here is in the client's log
                log.truncate(self.offset)
        self._is_standby = request["is_standby"]
        try:
            self.command = SlotProcess(request, env, tags, self.folder / "log")
        except OSError as error:
            self._publish({"start_error": str(error.strerror or error), "filename": str(error.filename or "")})

    def load(self, offset: int) -> bool:
        """Load the exit record that an earlier daemon left; return whether there is one."""
        try:
            self.record = json.loads((self.folder / "exit").read_bytes())
        except (OSError, ValueError):
            return False
        self.follow(offset)
        return True

    def _install_agent(self, source: str, address: str) -> str:
        (self.folder / "socket").write_text(address)
        path = self.folder / "rsh-agent"
        path.write_text(f"#!{sys.executable}\n{source}")
        path.chmod(0o700)
        return str(path)

    @property
    def is_running(self) -> bool:
        """Whether it has no exit record yet."""
        return self.record is None

    def list_ending(self) -> list[SlotProcess]:
        """List the commands of which only processes are left that must be killed."""
        commands = [*self.execs.values(), *([self.command] if self.command is not None and self.is_running else [])]
        return [command for command in commands if command.is_ending]

    def stop(self, level: int, *, is_lost: bool = False) -> None:
        """Stop the slot: 1 by SIGTERM, 2 by SIGKILL; a lost one that was asked before has had its grace period."""
        self._is_lost = self._is_lost or is_lost
        self._stop_level = max(self._stop_level, level, 2 if is_lost and self._stop_level else 0)
        for command in self.execs.values():
            command.stop(self._stop_level)

    def poll(self, tagged: list[int] | None) -> list[tuple[str, int]]:
        """Advance the ends of its commands; return ids and exit codes of commands of other slots that are over now."""
        over = []
        for exec_id, command in list(self.execs.items()):
            if (result := command.poll(tagged)) is not None:
                del self.execs[exec_id]
                self.exec_codes[exec_id] = result["code"]
                over.append((exec_id, result["code"]))
        if self.is_running and self.command is not None:
            # A standby slot stops after the commands in it: they have its tags and would be killed with it.
            if self._stop_level > 1 or (self._stop_level and not self.execs):
                self.command.stop(self._stop_level)
            if (record := self.command.poll(tagged)) is not None and not self.execs:
                if self._is_standby and self._stop_level:
                    record["code"] = 0
                self._publish(record)
        return over

    def _publish(self, record: dict[str, Any]) -> None:
        """Keep the exit record in memory and on disk; one of a lost slot is for nobody."""
        self.record = record
        with contextlib.suppress(OSError), open(self.folder / ".exit", "r+") as file:
            file.write(json.dumps(record)[:EXIT_RECORD_BYTES])
            file.flush()
            (self.folder / ".exit").rename(self.folder / "exit")

    @property
    def is_lost(self) -> bool:
        """Whether it was stopped because its lease had expired."""
        return self._is_lost

    def close(self) -> None:
        """Close its log."""
        if self._log is not None:
            self._log.close()

    def remove(self) -> None:
        """Remove its folder, and the folders above it if they are empty then; checkpoints stay."""
        self.close()
        remove_folder(self.folder)

    # --- Commands of other slots

    def exec(self, request: dict[str, Any], env: dict[str, str], tags: dict[str, str]) -> SlotProcess | None:
        """Run a command in the slot for another slot, with its output in this log, and return it.

        Return None for a repeated request, which is ignored, and for a command that cannot be started.
        """
        exec_id = request["id"]
        if exec_id in self.execs or exec_id in self.exec_codes:
            return None
        if self._stop_level or not self.is_running:
            self.exec_codes[exec_id] = -signal.SIGTERM
            return None
        try:
            self.execs[exec_id] = SlotProcess(request, env, tags, self.folder / "log")
        except OSError:  # its directory is missing
            self.exec_codes[exec_id] = 127
        return self.execs.get(exec_id)

    # --- Output

    def follow(self, offset: int) -> None:
        """Send the output from an offset on, and then the exit record."""
        self.offset, self.is_followed, self.is_reported = offset, True, False

    def read_output(self) -> bytes:
        """Return the next chunk of output."""
        if self._log is None:
            try:
                self._log = open(self.folder / "log", "rb", buffering=0)  # noqa: SIM115 (stays open for the whole slot)
            except OSError:
                return b""
        data = os.pread(self._log.fileno(), CHUNK_BYTES, self.offset)
        self.offset += len(data)
        return data


def oom_kills() -> int:
    """Return how many processes the OOM killer of this host has killed."""
    with contextlib.suppress(OSError), open("/proc/vmstat") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def remove_folder(folder: Path) -> None:
    """Remove the folder of a slot, and its parents if they are empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
        folder.parent.parent.rmdir()
