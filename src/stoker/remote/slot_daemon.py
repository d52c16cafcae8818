"""Slot daemon: owns all slots of a run on one host, and keeps them running while no client is connected.

Standard library only, Python 3.8 or later: the sources are sent to the host, which needs no stoker.

There are two processes. The daemon serves its client, which is the supervisor of the run, over a connection that may
break and be replaced, and the remote shell agents of its slots. The guard does nothing while the daemon lives. When
either of the two dies, the other terminates every process of the run on this host.

The lease: each frame `ALIVE` carries the time of the daemon's clock, and the client sends it back. The lease counts
from the latest time that has come back, so that it does not matter how long a request was on its way. When it expires,
the daemon stops all slots, and starts no more. A detached run has no lease.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.remote.frames import (
    ALIVE,
    ALIVE_INTERVAL_S,
    ATTACHED,
    EXEC,
    EXEC_EXIT,
    EXIT,
    GONE,
    OUTPUT,
    READY,
    STARTED,
    Connection,
    pack_frame,
    pack_json,
)
from stoker.remote.guard import Guard
from stoker.remote.slot_process import DaemonSlot, SlotProcess, remove_folder
from stoker.remote.tagged_processes import Termination, format_survivors, list_tagged, signal_tagged, terminate_tagged

POLL_S = 0.02
MAX_POLL_S = 0.25
"""Poll interval while the logs do not grow: they may be on a file system that many hosts share."""
LEASE_CHECK_S = 0.5
FIRST_CLIENT_S = 10.0
"""How long a new daemon waits for its first client."""
CANCEL_GRACE_S = 5.0
"""Grace period of a command whose caller has gone away."""
CHUNKS_PER_TURN = 16
"""How many chunks of output are sent before requests are read again."""
DAEMON_GONE = "the slot daemon was killed, or the host was rebooted"
LEASE_EXPIRED = "slot stopped: no client was connected"
NO_SLOT_CODE = 255
"""Exit code of a command for a slot that is not here."""
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Not set by anyone, and also counts while the machine sleeps."""


class SlotDaemon:
    """Daemon of all slots of a run on one host."""

    def __init__(
        self,
        request: dict[str, Any],
        *,
        listener: socket.socket | None = None,
        client: Connection | None = None,
        previous_error: str = "",
    ) -> None:
        """Serve a request `attach`: for clients that connect to `listener`, or only for the client given.

        `previous_error` is why the previous daemon of the run failed, if it has left an error.
        """
        self._folder, self._tags = Path(request["folder"]), dict(request["tags"])
        self._grace_s: float = request["grace_s"]
        self._lost_after_s: float | None = request["lost_after_s"]
        self._gone_reason = f"the slot daemon failed: {previous_error}" if previous_error else DAEMON_GONE
        self._listener = listener
        self._client: Connection | None = None
        self._connections: set[Connection] = set()
        self._is_closing = self._is_ready_sent = False
        self._slots: dict[str, DaemonSlot] = {}
        self._callers: dict[str, tuple[Connection, dict[str, Any]]] = {}
        """Open exec requests of our own slots, by id, and the agents that wait for the exit code."""
        self._deferred: list[dict[str, Any]] = []
        """Requests that wait until nothing of an earlier daemon is left."""
        self._leftovers: Termination | None = Termination(self._tags, self._grace_s)
        self._unkillable: list[int] = []
        self._renewed_at, self._last_alive = _now(), float("-inf")
        self._is_expired = False
        self._turn, self._pause_s = 0, POLL_S
        self._selector = selectors.DefaultSelector()
        self._guard = Guard(self._tags, self._grace_s, closed_fds=[] if listener is None else [listener.fileno()])
        self._exit_at = _now() + FIRST_CLIENT_S
        if client is not None:
            self._serve(client)
            self._replace_client(client)
            self._handle_or_defer(request)

    def run(self) -> None:
        """Run until no slot is left that a client may ask for."""
        self._install_signal_handlers()
        if self._listener is not None:
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        while not self._is_over():
            for key, _ in self._selector.select(self._timeout_s()):
                key.data()
            if self._guard.has_exited():
                self._terminate_all()
            self._poll_slots()
            self._check_lease()
            self._serve_client()
        for slot in self._slots.values() if self._lost_after_s is not None else ():
            slot.remove()
        self._guard.dismiss()

    def _is_over(self) -> bool:
        if self._leftovers is not None or self._deferred:
            return False
        if any(slot.is_running for slot in self._slots.values()):
            return False
        if self._is_expired:  # whoever is connected does not respond
            return True
        if self._client is not None:
            return self._is_closing and not self._slots
        if not self._slots:
            return _now() > self._exit_at
        return self._lost_after_s is None  # the exit records stay on disk; otherwise a client must come for them

    def _timeout_s(self) -> float:
        if self._leftovers is not None or any(slot.list_ending() for slot in self._slots.values()):
            return POLL_S
        return self._pause_s if self._client is not None and self._slots else LEASE_CHECK_S

    def _install_signal_handlers(self) -> None:
        """Stop all slots on SIGTERM; any signal, SIGCHLD included, wakes up the selector."""
        wakeup_fd, write_fd = os.pipe()
        for fd in (wakeup_fd, write_fd):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        self._selector.register(wakeup_fd, selectors.EVENT_READ, lambda: os.read(wakeup_fd, 1 << 16))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_terminate)

    def _on_terminate(self, *_: Any) -> None:
        for slot in self._slots.values():
            slot.stop(1)

    def _terminate_all(self) -> None:
        """Stop all slots at once, because nobody would do it after us: the guard is gone."""
        if self._client is not None:
            self._drop(self._client)
        if self._listener is not None:
            self._listener.close()
        terminate_tagged(self._tags, self._grace_s)
        os._exit(1)

    # --- Slots

    def _poll_slots(self) -> None:
        """Advance the end of leftovers, slots and their commands, with one look at the processes of the host."""
        is_ending = any(slot.list_ending() for slot in self._slots.values())
        tagged = list_tagged(self._tags) if is_ending or self._leftovers is not None else None
        if self._leftovers is not None and self._leftovers.poll(tagged):
            self._unkillable, self._leftovers = self._leftovers.survivors, None
        for slot in list(self._slots.values()):
            was_running = slot.is_running
            for exec_id, code in slot.poll(tagged):
                self._send(pack_json(EXEC_EXIT, {"id": exec_id, "code": code}, slot.name))
            if was_running and slot.record is not None:  # what cannot be killed blocks the next start of the slot
                self._unkillable += slot.record.get("survivors", [])
            if slot.is_lost and not slot.is_running and not slot.is_followed and self._client is not None:
                self._forget(slot)
        if self._client is not None and not self._is_ready_sent and not self._is_blocked():
            self._is_ready_sent = True
            self._send(pack_frame(READY))
        while self._deferred and not self._is_blocked():
            self._handle(self._deferred.pop(0))

    def _is_blocked(self) -> bool:
        """Whether processes are left of an earlier daemon, or of slots that the client does not know."""
        return self._leftovers is not None or any(slot.is_lost and slot.is_running for slot in self._slots.values())

    def _forget(self, slot: DaemonSlot) -> None:
        del self._slots[slot.name]
        slot.remove()

    def _check_lease(self) -> None:
        """Stop all slots when the lease has expired; a client that comes later must first see them gone."""
        has_expired = self._has_expired()
        if has_expired and not self._is_expired:
            for slot in self._slots.values():
                slot.stop(1, is_lost=True)
        self._is_expired = has_expired or (self._is_expired and any(slot.is_running for slot in self._slots.values()))

    def _has_expired(self) -> bool:
        if self._lost_after_s is None:
            return False
        if self._listener is None:  # the client cannot come back
            return self._client is None
        return _now() - self._renewed_at > self._lost_after_s

    # --- Connections

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if peer_uid(sock) != os.getuid():
                sock.close()
                return
            fd = sock.detach()
            self._serve(Connection(fd, fd))

    def _serve(self, connection: Connection) -> None:
        def receive() -> None:
            if connection not in self._connections:  # dropped a moment ago
                return
            for request in connection.receive():
                if request["op"] == "attach":
                    self._replace_client(connection)
                if connection is self._client:
                    self._handle_or_defer(request)
                elif request["op"] == "exec":
                    self._add_caller(connection, request)
            if not connection.is_open:
                self._drop(connection)

        self._connections.add(connection)
        self._selector.register(connection.read_fd, selectors.EVENT_READ, receive)

    def _await_writable(self, connection: Connection) -> None:
        """Wake up as soon as more can be sent, if that is not possible now."""
        if connection.read_fd == connection.write_fd:
            key = self._selector.get_key(connection.read_fd)
            events = selectors.EVENT_READ | (0 if connection.is_idle else selectors.EVENT_WRITE)
            if key.events != events:
                self._selector.modify(connection.read_fd, events, key.data)
        elif not connection.is_idle:
            self._pause_s = POLL_S

    def _replace_client(self, connection: Connection) -> None:
        """Serve another client, which is the same after a reconnect: the old connection is surely broken."""
        if self._client is not None and self._client is not connection:
            self._drop(self._client)
        self._client, self._last_alive, self._exit_at = connection, float("-inf"), 0.0
        self._is_closing, self._is_ready_sent, self._deferred = False, False, []
        for slot in self._slots.values():
            slot.is_followed = slot.is_reported = False

    def _drop(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection.read_fd)
        for fd in {connection.read_fd, connection.write_fd}:
            os.close(fd)
        connection.is_open = False
        if connection is self._client:
            self._client = None
        for exec_id, (caller, _) in list(self._callers.items()):
            if caller is connection:
                del self._callers[exec_id]
                self._send(pack_json(EXEC, {"id": exec_id, "is_cancelled": True}))

    def _send(self, frame: bytes) -> None:
        if self._client is not None:
            self._client.send(frame)

    def _serve_client(self) -> None:
        """Send a sign of life when it is due, output of all slots in turn, and exit records after their output."""
        client, now = self._client, _now()
        if client is None:
            return
        client.flush()
        if now - self._last_alive >= ALIVE_INTERVAL_S:
            self._last_alive = now
            self._send(pack_json(ALIVE, now))
        slots = [slot for slot in self._slots.values() if slot.is_followed]
        self._pause_s = min(2 * self._pause_s, MAX_POLL_S)
        for _ in range(CHUNKS_PER_TURN if slots else 0):
            if not client.is_idle or not self._send_output(slots):
                break
        if not client.is_open:
            self._drop(client)
        else:
            self._await_writable(client)

    def _send_output(self, slots: list[DaemonSlot]) -> bool:
        """Send one chunk of the next slot that has any; return whether there was one."""
        for _ in slots:
            self._turn = (self._turn + 1) % len(slots)
            slot = slots[self._turn]
            is_over = not slot.is_running  # before the last of the log, so that nothing is missed
            if data := slot.read_output():
                self._pause_s = POLL_S
                self._send(pack_frame(OUTPUT, data, slot.name))
                return True
            if is_over and not slot.is_reported:
                slot.is_reported = True
                self._send(_exit_frame(slot))
        return False

    # --- Requests of the client

    def _handle_or_defer(self, request: dict[str, Any]) -> None:
        self._renewed_at = max(self._renewed_at, min(_now(), request.get("heard", 0.0)))
        if request["op"] == "attach":
            self._lost_after_s = request["lost_after_s"]
            self._send(pack_json(ATTACHED, _now()))
            self._abandon_others(request)
            if self._leftovers is None:
                self._handle(request)
                return
        if self._deferred or self._is_blocked():
            self._deferred.append(request)
        else:
            self._handle(request)

    def _abandon_others(self, request: dict[str, Any]) -> None:
        """Stop the slots that the client does not know: they are those of an earlier attempt."""
        known = {*request["slots"], *request["starting"]}
        for slot in self._slots.values():
            if slot.name not in known:
                slot.stop(1, is_lost=True)

    def _handle(self, request: dict[str, Any]) -> None:
        handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "attach": self._attach,
            "start": self._start,
            "exec": self._exec,
            "exec_pending": self._cancel_others,
            "exec_exit": self._answer_caller,
            "close": self._close,
        }
        if request["op"] in handlers:
            handlers[request["op"]](request)
        elif (slot := self._slots.get(request.get("slot", ""))) is not None:
            self._handle_for_slot(slot, request)

    def _handle_for_slot(self, slot: DaemonSlot, request: dict[str, Any]) -> None:
        if request["op"] == "stop":
            slot.stop(request["level"])
        elif request["op"] == "signal":
            signal_tagged(request["pid"], {**self._tags, "STOKER_SLOT": request["name"]}, request["number"])
        elif request["op"] == "acknowledge" and not slot.is_running:
            self._forget(slot)
        elif request["op"] == "exec_cancel" and request["id"] in slot.execs:
            slot.execs[request["id"]].stop(1, CANCEL_GRACE_S)

    def _attach(self, request: dict[str, Any]) -> None:
        """Resume the output of the slots that the client knows; report those that are gone."""
        for name, offset in request["slots"].items():
            slot = self._slots.get(name)
            if slot is not None:
                slot.follow(offset)
                self._send(pack_frame(STARTED, slot=name))
                for exec_id, code in slot.exec_codes.items():
                    self._send(pack_json(EXEC_EXIT, {"id": exec_id, "code": code}, name))
                continue
            slot = DaemonSlot(self._folder / name)
            if slot.load(offset):
                self._slots[name] = slot
                continue
            has_folder = slot.folder.exists()
            remove_folder(slot.folder)
            note = f"; {format_survivors(self._unkillable)} cannot be killed" if self._unkillable else ""
            self._send(pack_frame(GONE, f"{self._gone_reason if has_folder else LEASE_EXPIRED}{note}".encode(), name))
        self._send(pack_json(EXEC, {"pending": list(self._callers)}))
        for exec_id, (_, fields) in self._callers.items():
            self._send(pack_json(EXEC, {**fields, "id": exec_id}))

    def _start(self, request: dict[str, Any]) -> None:
        """Start a slot, unless this very start was requested over an earlier connection."""
        name, key = request["slot"], request["key"]
        slot = self._slots.get(name)
        if slot is not None and slot.key == key:
            slot.follow(request["log_size"])
            self._send(pack_frame(STARTED, slot=name))
            return
        if slot is not None and slot.is_running:
            self._send(pack_frame(GONE, b"an earlier start of the slot is still running", name))
            return
        if self._has_expired():
            self._send(pack_frame(GONE, LEASE_EXPIRED.encode(), name))
            return
        tags = {**self._tags, "STOKER_SLOT": request["name"]}
        if survivors := list_tagged(tags, self._unkillable):
            text = f"cannot kill {format_survivors(survivors)} of an earlier attempt"
            self._send(pack_frame(GONE, text.encode(), name))
            return
        if slot is not None:
            slot.close()
        slot = DaemonSlot(self._folder / name, key)
        agent = (request["rsh_agent"], address_of(self._tags)) if request.get("rsh_agent") else None
        try:
            slot.start(request, tags, agent)
        except OSError as error:
            remove_folder(slot.folder)
            self._send(pack_frame(GONE, f"could not run the slot: {error}".encode(), name))
            return
        self._slots[name] = slot
        self._add_leader(slot.command)
        self._send(pack_frame(STARTED, slot=name))

    def _add_leader(self, command: SlotProcess | None) -> None:
        """Let the guard know a process that gets SIGTERM when this one dies, so that it does not send it again."""
        if command is not None:
            self._guard.add_leader(command.pid)

    def _close(self, _: dict[str, Any]) -> None:
        """Exit as soon as no slot is left: the client waits for that."""
        self._is_closing = True

    # --- Commands that slots run on the hosts of others

    def _add_caller(self, caller: Connection, request: dict[str, Any]) -> None:
        exec_id = f"{time.time_ns():x}-{os.getpid()}"
        fields = {name: request[name] for name in ("slot", "command", "cwd")}
        self._callers[exec_id] = (caller, fields)
        self._send(pack_json(EXEC, {**fields, "id": exec_id}))

    def _answer_caller(self, request: dict[str, Any]) -> None:
        if request["id"] in self._callers:
            caller, _ = self._callers.pop(request["id"])
            caller.send(f"{request['code']}\n".encode())

    def _exec(self, request: dict[str, Any]) -> None:
        slot, code = self._slots.get(request["slot"]), NO_SLOT_CODE
        if slot is not None:
            tags = {**self._tags, "STOKER_SLOT": request["name"], "STOKER_ASKED": request["id"]}
            self._add_leader(slot.exec(request, request["env"], tags))
            if request["id"] not in slot.exec_codes:
                return
            code = slot.exec_codes[request["id"]]
        self._send(pack_json(EXEC_EXIT, {"id": request["id"], "code": code}, request["slot"]))

    def _cancel_others(self, request: dict[str, Any]) -> None:
        """Cancel the commands whose callers have gone away while no client was connected."""
        for slot in self._slots.values():
            for exec_id, command in slot.execs.items():
                if exec_id not in request["ids"]:
                    command.stop(1, CANCEL_GRACE_S)


def _exit_frame(slot: DaemonSlot) -> bytes:
    if slot.is_lost:
        return pack_frame(GONE, LEASE_EXPIRED.encode(), slot.name)
    return pack_json(EXIT, slot.record, slot.name)


# --- The address


def address_of(tags: dict[str, str]) -> str:
    """Return the address of a run's daemon on this host: an abstract socket, so that no file system matters."""
    names = "\0".join(f"{name}={value}" for name, value in sorted(tags.items()))
    return f"stoker-{os.getuid()}-{tags['STOKER_RUN'][-60:]}-{zlib.crc32(names.encode()):08x}"


def peer_uid(sock: socket.socket) -> int:
    """Return the user at the other end of a local connection: anyone may use the name of an abstract socket."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


def _now() -> float:
    return time.clock_gettime(_CLOCK)
