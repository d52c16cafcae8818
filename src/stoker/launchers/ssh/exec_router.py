"""Commands that slots run on the hosts of standby slots: pass them on, and their exit codes back."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.errors import InputError
from stoker.launchers.ssh.host_connection import HostConnection
from stoker.remote.frames import EXEC_EXIT


@dataclass(frozen=True, slots=True)
class StandbyTarget:
    """A standby slot, and the environment of commands in it."""

    connection: HostConnection
    slot_id: str
    env: Mapping[str, str]


class ExecRouter:
    """Router of the commands of one attempt.

    All state that matters is in the slot daemons: they send it again when a connection or the supervisor is new. A
    daemon ignores a command that it knows already.
    """

    def __init__(self, standby: Mapping[str, StandbyTarget], callers: set[str]) -> None:
        """Take the standby slots by name, and the hosts of the slots that run commands in them."""
        self._standby, self._callers = standby, callers
        self._lock = threading.RLock()
        self._open: dict[str, tuple[HostConnection, StandbyTarget, dict[str, Any]]] = {}
        """Commands without an exit code, by id: the connection of the caller, the slot, the request."""
        self._codes: dict[str, int] = {}
        self._pending: dict[str, list[str]] = {}
        """The ids of commands that callers wait for, by host."""

    def handle(self, connection: HostConnection, kind: bytes, message: dict[str, Any]) -> None:
        """Handle a message from the daemon of a caller or of a standby slot."""
        with self._lock:
            if kind == EXEC_EXIT:
                self._finish(message["id"], message["code"])
            elif "pending" in message:
                self._set_pending(connection, message["pending"])
            elif "is_cancelled" in message:
                self._cancel(message["id"])
            else:
                self._forward(connection, message)

    def resend(self, connection: HostConnection) -> None:
        """Send what a host that was just connected may not know."""
        with self._lock:
            self._send_pending(connection)
            for _, target, request in self._open.values():
                if target.connection is connection:
                    connection.send(request)

    def _forward(self, caller: HostConnection, message: dict[str, Any]) -> None:
        exec_id, target = message["id"], self._standby.get(message["slot"])
        if target is None:
            self._codes[exec_id] = InputError.exit_code
        if (code := self._codes.get(exec_id)) is not None or target is None:
            caller.send({"op": "exec_exit", "id": exec_id, "code": code})
            return
        request = {
            "op": "exec",
            "id": exec_id,
            "slot": target.slot_id,
            "name": message["slot"],
            "argv": ["sh", "-c", message["command"]],
            "cwd": message["cwd"],
            "env": dict(target.env),
            "grace_s": target.connection.target.grace_s,
        }
        self._open[exec_id] = (caller, target, request)
        target.connection.send(request)

    def _finish(self, exec_id: str, code: int) -> None:
        self._codes[exec_id] = code
        self._forget_pending(exec_id)
        if exec_id in self._open:
            caller, _, _ = self._open.pop(exec_id)
            caller.send({"op": "exec_exit", "id": exec_id, "code": code})

    def _cancel(self, exec_id: str) -> None:
        self._forget_pending(exec_id)
        if exec_id in self._open:
            _, target, _ = self._open.pop(exec_id)
            target.connection.send({"op": "exec_cancel", "slot": target.slot_id, "id": exec_id})

    def _forget_pending(self, exec_id: str) -> None:
        """Forget that a caller waits for a command; otherwise a host that reconnects would keep it running."""
        self._pending = {host: [known for known in ids if known != exec_id] for host, ids in self._pending.items()}

    def _set_pending(self, caller: HostConnection, ids: list[str]) -> None:
        """Cancel the commands whose callers have gone away while their host was not connected."""
        if caller.target.host not in self._callers:
            return
        self._pending[caller.target.host] = ids
        for exec_id, (connection, _, _) in list(self._open.items()):
            if connection is caller and exec_id not in ids:
                self._cancel(exec_id)
        for connection in {id(target.connection): target.connection for target in self._standby.values()}.values():
            self._send_pending(connection)

    def _send_pending(self, connection: HostConnection) -> None:
        """Send a host the list of commands that still have callers, once all callers are known."""
        is_standby = any(target.connection is connection for target in self._standby.values())
        if is_standby and self._pending.keys() >= self._callers:
            ids = [exec_id for known in self._pending.values() for exec_id in known]
            connection.send({"op": "exec_pending", "ids": [*ids, *self._open]})
