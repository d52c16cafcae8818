"""Connection to one host of a run: one `ssh` process at a time, which multiplexes all slots there.

A thread runs `ssh`, passes on requests, and writes the output of each slot to its log on this machine. When the
connection breaks, it connects again: the size of a log is the offset at which its output continues.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.errors import MissingError
from stoker.launchers.ssh.client import (
    RESPONSE_TIMEOUT_S,
    SshClient,
    SshProcess,
    agent_argv,
    agent_code,
    format_failure,
    read_text,
    wait_exit_code,
)
from stoker.launchers.ssh.plan import HostConfig
from stoker.launchers.supervise.diagnosis import LOST_EXIT_CODE
from stoker.launchers.supervise.process_group import normalize_exit_code
from stoker.launchers.supervise.slot_handle import Exited, Running, SlotState, Unreachable
from stoker.launchers.supervise.status_writer import log_remark
from stoker.remote import frames
from stoker.remote.tagged_processes import format_survivors

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
"""The pauses before the first and before later tries to reconnect."""
FIRST_FRAME_S = 10.0
"""How long a new connection may take to its first frame."""
GONE_MARGIN_S = 5.0
"""How much later than at the end of its lease and grace period a slot is surely gone."""
CLOSE_TIMEOUT_S = 5.0
"""How long the slot daemon may take to exit."""
STDERR_TIMEOUT_S = 2.0
POLL_S = 0.5
DISCONNECTED_REMARK = "{host}: {reason}; reconnecting"
RECONNECTED_REMARK = "{host}: reconnected"


@dataclass(frozen=True, slots=True)
class HostTarget:
    """A host and how its slot daemon is reached."""

    host: str
    run_id: str
    config: HostConfig
    client: SshClient
    grace_s: float
    is_detached: bool

    @property
    def folder(self) -> str:
        """The folder of the run on the host."""
        return f"{self.config.workdir}/.stoker/{self.run_id}"

    @property
    def tags(self) -> dict[str, str]:
        """The variables by which processes of the run are found on the host; no process of this machine has them."""
        return {"STOKER_RUN": self.run_id, "STOKER_HOST": self.host}

    def attach_request(self, slots: dict[str, int], starting: list[str]) -> dict[str, Any]:
        """Return the request that starts or finds the daemon, with the slots that should be there."""
        return {
            "op": "attach",
            "folder": self.folder,
            "tags": self.tags,
            "grace_s": self.grace_s,
            "lost_after_s": None if self.is_detached else self.client.lost_after_s,
            "slots": slots,
            "starting": starting,
        }


@dataclass(slots=True, eq=False)
class SlotChannel:
    """One slot of a connection: how it is started, where its output goes, how it ended."""

    name: str
    """The slot, such as `worker/0`."""
    slot_id: str
    """Its name on the host, with the attempt."""
    request: dict[str, Any]
    log: Path
    has_started: bool = False
    is_sent: bool = False
    """Whether its start was requested, so that it may run, for all we know."""
    is_held: bool = False
    """Whether its start waits for other slots."""
    stop_level: int = 0
    """How it was asked to stop: 1 by SIGTERM, 2 by SIGKILL."""
    exit: Exited | None = None
    created_at: float = field(default_factory=time.monotonic)

    @property
    def log_size(self) -> int:
        """How much of its output is here."""
        return self.log.stat().st_size if self.log.exists() else 0


class HostConnection:
    """The connection to one host, over as many `ssh` processes as it takes."""

    def __init__(
        self,
        target: HostTarget,
        *,
        on_change: Callable[[], None] = lambda: None,
        on_exec: Callable[[HostConnection, bytes, dict[str, Any]], None] = lambda *_: None,
        on_attached: Callable[[HostConnection], None] = lambda _: None,
    ) -> None:
        """Connect as soon as there is a slot.

        `on_change` is called when the host is ready and when a slot has started or exited, `on_exec` with messages
        about commands that slots run on other hosts, `on_attached` when requests can be sent; all of them in the thread
        of the connection.
        """
        self.target, self.peers = target, list[HostConnection]()
        """`peers` are the connections of the same run."""
        self._on_change, self._on_exec, self._on_attached = on_change, on_exec, on_attached
        self._lock, self._wakeup = threading.RLock(), threading.Event()
        self._channels: list[SlotChannel] = []
        self._outgoing = bytearray()
        self._wakeup_fd, self._wake_fd = os.pipe()
        os.set_blocking(self._wakeup_fd, False)
        os.set_blocking(self._wake_fd, False)
        self._has_attached = self._is_attached = self._is_closing = self._is_disconnected = False
        self._is_stale = self._is_ready = False
        self._connected_at = self.last_heard = self._last_renewal = time.monotonic()
        self._reason, self._backoff_s = "connecting", MIN_BACKOFF_S
        self._thread: threading.Thread | None = None

    # --- For other threads

    def add(self, channel: SlotChannel) -> None:
        """Start a slot, or resume one that has started; it replaces an earlier start of the same slot."""
        with self._lock:
            replaced = [other for other in self._channels if other.slot_id == channel.slot_id]
            self._channels = [*(other for other in self._channels if other not in replaced), channel]
            # The exit of the earlier start that this connection may yet report must not be taken for that of this one.
            self._is_stale = self._is_stale or any(other.exit is None for other in replaced)
            if self._thread is None:
                self.last_heard = self._last_renewal = time.monotonic()
                self._thread = threading.Thread(target=self._run, name=f"ssh-{self.target.host}", daemon=True)
                self._thread.start()
            self._send_start(channel)
        self._wake()

    @property
    def is_clear(self) -> bool:
        """Whether nothing of an earlier attempt is running on the host: it has said so, or the lease has expired."""
        has_expired = not self.target.is_detached and time.monotonic() >= self._gone_by
        return has_expired or (self._is_attached and self._is_ready)

    @property
    def _gone_by(self) -> float:
        return self._last_renewal + self.target.client.lost_after_s + self.target.grace_s + GONE_MARGIN_S

    def release(self, channel: SlotChannel) -> None:
        """Start a slot that was held back."""
        with self._lock:
            if not channel.is_held:
                return
            channel.is_held = False
            self._send_start(channel)
        self._wake()

    def stop(self, channel: SlotChannel, level: int) -> None:
        """Stop a slot; the request is kept until the host can be reached."""
        with self._lock:
            if level <= channel.stop_level or channel.exit is not None:
                return
            channel.stop_level = level
            if not channel.is_sent and not channel.has_started:
                channel.exit = Exited(-signal.SIGTERM, "stopped before the slot started")
            self._send_stop(channel)
        self._wake()

    def send(self, request: dict[str, Any]) -> None:
        """Send a request if the host can be reached."""
        with self._lock:
            if self._is_attached and not self._is_closing:
                self._queue(request)
        self._wake()

    def poll(self, channel: SlotChannel) -> SlotState:
        """Return the state of a slot."""
        with self._lock:
            if channel.exit is None and not channel.is_sent and not channel.has_started:
                self._give_up_start(channel)
                return channel.exit or Running()
            if channel.exit is not None or self._is_attached:
                return channel.exit or Running()
            host, client = self.target.host, self.target.client
            is_lost = self._is_lost()
            reason = f"no response for {client.lost_after_s:g} s" if is_lost else self._reason
            gone_by = None if self.target.is_detached else self._gone_by
            return Unreachable(self.last_heard, f"{host}: {reason}", gone_by, is_lost=is_lost)

    @property
    def silence_s(self) -> float:
        """For how long the host has not responded."""
        return time.monotonic() - self.last_heard

    def _is_lost(self) -> bool:
        """Whether the host was silent for too long; if all hosts are, it may be this machine that is disconnected."""
        limit_s = self.target.client.lost_after_s
        if self.silence_s <= limit_s:
            return False
        return not self.target.is_detached or any(peer.silence_s <= limit_s for peer in self.peers if peer is not self)

    def _give_up_start(self, channel: SlotChannel) -> None:
        """Record that a slot was never started, if its host could not be reached for too long."""
        waited_s = time.monotonic() - max(channel.created_at, self.last_heard)
        if self._is_disconnected and waited_s > self.target.client.lost_after_s:
            channel.exit = Exited(LOST_EXIT_CODE, f"{self.target.host}: {self._reason}", is_lost=True)

    @property
    def is_idle(self) -> bool:
        """Whether all slots have exited."""
        with self._lock:
            return all(channel.exit is not None for channel in self._channels)

    def begin_close(self) -> None:
        """Begin to disconnect, without waiting."""
        with self._lock:
            if not self._is_closing and self._is_attached and self.is_idle:
                self._queue({"op": "close"})
            self._is_closing = True
        self._wake()

    def close(self) -> None:
        """Disconnect; wait a moment until the daemon has exited, if no slot of it is left."""
        self.begin_close()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            for fd in (self._wakeup_fd, self._wake_fd):
                os.close(fd)
            self._wakeup_fd = self._wake_fd = -1

    def _wake(self) -> None:
        """Wake up the thread; other connections may still send requests when this one is closed."""
        with self._lock:
            self._wakeup.set()
            if self._wake_fd >= 0:
                with suppress(BlockingIOError):  # it will wake up anyway
                    os.write(self._wake_fd, b"w")

    # --- Requests, with the lock held

    def _queue(self, request: dict[str, Any]) -> None:
        self._outgoing += json.dumps(request).encode() + b"\n"

    def _send_start(self, channel: SlotChannel) -> None:
        if self._is_attached and not channel.is_held and channel.exit is None and not channel.has_started:
            channel.is_sent = True
            self._queue({**channel.request, "op": "start", "slot": channel.slot_id, "log_size": channel.log_size})

    def _send_stop(self, channel: SlotChannel) -> None:
        if self._is_attached and channel.exit is None and channel.stop_level:
            self._queue({"op": "stop", "slot": channel.slot_id, "level": channel.stop_level})

    def _attach_request(self) -> dict[str, Any]:
        open_channels = [channel for channel in self._channels if channel.exit is None]
        return self.target.attach_request(
            {channel.slot_id: channel.log_size for channel in open_channels if channel.has_started},
            [channel.slot_id for channel in open_channels if channel.is_sent],
        )

    # --- The thread

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._serve_connection()
            except _Disconnected as error:
                self._handle_disconnect(str(error))
            except Exception as error:  # a bug of ours: the slots must not be left alone
                log_remark(traceback.format_exc())
                self._handle_disconnect(f"{type(error).__name__}: {error}")
            if not self._is_closing:
                self._back_off()

    def _handle_disconnect(self, reason: str) -> None:
        with self._lock:
            self._is_attached, self._reason = False, reason
            if not self._is_disconnected and not self._is_closing:
                log_remark(DISCONNECTED_REMARK.format(host=self.target.host, reason=reason))
            self._is_disconnected = True

    def _back_off(self) -> None:
        """Wait before reconnecting: ever longer, but briefly while the host may still be declared lost or must stop."""
        self._wakeup.wait(self._pause_s())
        self._wakeup.clear()
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    def _pause_s(self) -> float:
        limit_s = self.target.client.lost_after_s
        is_stopping = any(channel.stop_level for channel in self._channels if channel.exit is None)
        is_urgent = is_stopping or self.silence_s <= limit_s
        return min(self._backoff_s, limit_s / 10) if is_urgent else self._backoff_s

    def ssh_argv(self) -> list[str]:
        """Return the `ssh` command; to reconnect, never over a shared connection, which may be the broken one."""
        client = self.target.client
        return client.argv("-o", "ControlPath=none", attempts=1) if self._has_attached else client.argv()

    def _serve_connection(self) -> None:
        """Run one `ssh` until it exits, is silent for too long, or the connection is closed."""
        target = self.target
        argv = agent_argv(self.ssh_argv(), target.host, target.config.python, target.run_id)
        ssh = SshProcess(argv, terminate_with_parent=True)
        try:
            self._exchange(ssh)
            if self._is_closing:
                return
            code = wait_exit_code(ssh.process, STDERR_TIMEOUT_S)
            raise _Disconnected(_explain_exit(target.client, target.host, code, read_text(ssh.stderr)))
        finally:
            ssh.close()

    def _exchange(self, ssh: SshProcess) -> None:
        """Exchange requests and frames until `ssh` closes its output or the daemon has exited."""
        parser, close_by = frames.FrameParser(), float("inf")
        with self._lock:
            self._connected_at, self._is_stale, self._is_ready = time.monotonic(), False, False
            self._outgoing = bytearray(agent_code())
            self._queue(self._attach_request())
        while True:
            if self._is_stale:
                raise _Disconnected("a slot is started again")
            writable = [ssh.stdin_fd] if self._outgoing else []
            readable, writable, _ = select.select([ssh.stdout_fd, self._wakeup_fd], writable, [], POLL_S)
            if self._wakeup_fd in readable:
                os.read(self._wakeup_fd, 1 << 16)
            if writable:
                self._write(ssh.stdin_fd)
            if ssh.stdout_fd in readable:
                data = os.read(ssh.stdout_fd, 1 << 16)
                if not data:
                    return
                for kind, slot, payload in parser.feed(data):
                    self.last_heard = time.monotonic()
                    self._handle_frame(kind, slot, payload)
            if self._is_closing:
                close_by = min(close_by, time.monotonic() + CLOSE_TIMEOUT_S)
                if not self._is_attached or not self.is_idle or time.monotonic() > close_by:
                    return
            self._check_silence()

    def _write(self, fd: int) -> None:
        with self._lock:
            try:
                del self._outgoing[: os.write(fd, self._outgoing)]
            except BlockingIOError:
                return
            except OSError:  # the end of its output comes with a reason
                self._outgoing.clear()

    def _check_silence(self) -> None:
        """Raise if the host is silent for longer than a working connection would be."""
        if self.last_heard > self._connected_at:
            silence_s, limit_s = self.silence_s, self.silence_limit_s
        else:
            silence_s = time.monotonic() - self._connected_at
            limit_s = max(FIRST_FRAME_S, self.silence_limit_s) if self._has_attached else RESPONSE_TIMEOUT_S
        if silence_s > limit_s:
            raise _Disconnected("no response")

    @property
    def silence_limit_s(self) -> float:
        """After how much silence a connection is replaced: always before the host is declared lost."""
        limit_s = self.target.client.lost_after_s
        return min(max(3 * frames.ALIVE_INTERVAL_S, limit_s / 3), 0.8 * limit_s)

    # --- Frames

    def _handle_frame(self, kind: bytes, slot_id: str, payload: bytes) -> None:
        if kind in (frames.ALIVE, frames.ATTACHED) and payload:
            with self._lock:
                self._last_renewal = time.monotonic()
                self._queue({"op": "renew", "heard": json.loads(payload)})
                if kind == frames.ATTACHED:
                    self._handle_attached()
            if kind == frames.ATTACHED:
                self._on_attached(self)
        elif kind == frames.FAILED:
            raise _Disconnected(payload.decode(errors="replace"))
        elif kind == frames.READY:
            self._is_ready = True
            self._on_change()
        elif kind in (frames.EXEC, frames.EXEC_EXIT):
            self._on_exec(self, kind, json.loads(payload))
        else:
            with self._lock:
                known = (other for other in self._channels if other.slot_id == slot_id and other.exit is None)
                channel = None if self._is_stale else next(known, None)
            if channel is not None:
                self._handle_slot_frame(kind, channel, payload)

    def _handle_attached(self) -> None:
        if self._is_disconnected and self._has_attached:
            log_remark(RECONNECTED_REMARK.format(host=self.target.host))
        self._has_attached, self._is_attached, self._is_disconnected = True, True, False
        self._backoff_s = MIN_BACKOFF_S
        for channel in self._channels:
            self._send_start(channel)
            self._send_stop(channel)

    def _handle_slot_frame(self, kind: bytes, channel: SlotChannel, payload: bytes) -> None:
        if kind == frames.OUTPUT:
            try:
                with open(channel.log, "ab", buffering=0) as log:
                    frames.write_all(log.fileno(), payload)
            except OSError as error:  # the host has the output: it is sent again from the end of the log
                raise _Disconnected(f"cannot write {channel.log}: {error.strerror}") from error
            return
        if kind == frames.STARTED:
            channel.has_started = True
        else:
            with self._lock:
                channel.exit = _to_exit(kind, channel, self.target.host, payload.decode(errors="replace"))
                self._queue({"op": "acknowledge", "slot": channel.slot_id})
        self._on_change()


def _to_exit(kind: bytes, channel: SlotChannel, host: str, text: str) -> Exited:
    """Return the exit record of a slot from what its host reports."""
    if kind == frames.GONE:
        return Exited(LOST_EXIT_CODE, f"{host}: {text}", is_lost=True)
    record = json.loads(text)
    if "start_error" in record:
        cwd, program = channel.request["cwd"], channel.request["argv"][0]
        what = f"cannot use the directory {cwd}" if record["filename"] == cwd else f"cannot start {program!r}"
        return Exited(MissingError.exit_code, f"{host}: {what}: {record['start_error']}")
    if survivors := record["survivors"]:
        log_remark(f"{host}: cannot kill {format_survivors(survivors)} of {channel.name}")
    code = normalize_exit_code(record["code"])
    return Exited(code, out_of_memory=bool(code and record["oom"]))


class _Disconnected(Exception):  # noqa: N818
    """The connection broke, and why."""


def _explain_exit(client: SshClient, host: str, code: int, stderr: str) -> str:
    """Return why `ssh` exited while the connection was needed."""
    if code < 0:
        return f"the local ssh process was killed by {signal.Signals(-code).name}"
    if code in (0, LOST_EXIT_CODE) and not stderr.strip():
        return "the remote agent was killed"
    return format_failure(client, host, stderr, code)


def connect_peers(connections: Sequence[HostConnection]) -> None:
    """Let connections of one run know each other."""
    for connection in connections:
        connection.peers = list(connections)
