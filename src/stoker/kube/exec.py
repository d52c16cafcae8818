"""Exec: run a command in a container over a WebSocket whose messages start with a stream number."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from stoker.core import json_io
from stoker.errors import AccessDeniedError, NotFoundError, StokerError, UnavailableError
from stoker.kube.errors import RBAC_HINT, to_error

if TYPE_CHECKING:
    from httpx2 import Client
    from httpx2.websockets import WebSocketSession

PROTOCOLS = ["v5.channel.k8s.io", "v4.channel.k8s.io"]
STDIN, STDOUT, STDERR, STATUS = range(4)
CLOSE_STDIN = bytes([255, STDIN])
CHUNK_BYTES = 128 * 1024
PING_INTERVAL_S = 20.0
CLOSE_TIMEOUT_S = 2.0


class Writer(Protocol):
    """A destination for output."""

    def write(self, data: bytes, /) -> object:
        """Write bytes."""


class OutputError(Exception):
    """Writing a command's output failed on our side; not an error of the cluster."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause)
        self.cause = cause


def build_exec_params(argv: Sequence[str], container: str | None, *, stdin: bool) -> list[tuple[str, str]]:
    """Build the query parameters of an exec request; every argument is a parameter of its own."""
    streams = [("stdout", "true"), ("stderr", "true"), *([("stdin", "true")] if stdin else [])]
    return [*streams, *([("container", container)] if container else []), *(("command", argument) for argument in argv)]


def run_command(
    http: Client,
    path: str,
    params: Sequence[tuple[str, str]],
    sinks: Mapping[int, Writer],
    *,
    stdin: bytes | None,
    may_block: bool,
) -> dict[str, Any]:
    """Run a command and return its `Status`; `may_block`: a sink may block for long, as a pager does."""
    with http.websocket(
        path,
        subprotocols=PROTOCOLS,
        params=list(params),
        keepalive_ping_interval_seconds=PING_INTERVAL_S,
        keepalive_ping_timeout_seconds=None if may_block else PING_INTERVAL_S,
    ) as session:
        try:
            if stdin is not None:
                _send_stdin(session, stdin)
            return _read_output(session, sinks)
        finally:
            _close(session)


def _send_stdin(session: WebSocketSession, data: bytes) -> None:
    if session.subprotocol != PROTOCOLS[0]:
        raise UnavailableError("the cluster cannot pass stdin to a command; Kubernetes 1.30 or later is required")
    for offset in range(0, len(data), CHUNK_BYTES):
        session.send_bytes(bytes([STDIN]) + data[offset : offset + CHUNK_BYTES])
    session.send_bytes(CLOSE_STDIN)


def _read_output(session: WebSocketSession, sinks: Mapping[int, Writer]) -> dict[str, Any]:
    while True:
        message = session.receive_bytes()
        if message[:1] == bytes([STATUS]):
            status: dict[str, Any] = json_io.parse(message[1:], "exec status")
            return status
        if len(message) > 1 and (sink := sinks.get(message[0])) is not None:
            try:
                sink.write(message[1:])
            except OSError as error:
                raise OutputError(error) from error


def _close(session: WebSocketSession) -> None:
    """Shut down the socket and wait for httpx2's reader thread before the file descriptor is closed.

    httpx2 closes the descriptor while its thread still reads; the next connection reuses the number and loses its
    first bytes to that thread.
    """
    from httpx2.websockets import HTTPXWSException

    with suppress(OSError):  # the plain socket's shutdown: the reader thread holds the TLS layer
        socket.socket.shutdown(session.stream.get_extra_info("socket"), socket.SHUT_RDWR)
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            session.receive(timeout=0.1)
        except TimeoutError:
            continue
        except HTTPXWSException:  # the reader thread has stopped
            return


def get_exit_code(status: Mapping[str, Any], where: str) -> int:
    """Return the exit code in a `Status`; raise an error if the command could not be started."""
    if status.get("status") != "Failure":
        return 0
    causes = (status.get("details") or {}).get("causes") or ()
    codes = [int(cause["message"]) for cause in causes if cause.get("reason") == "ExitCode"]
    if status.get("reason") != "NonZeroExitCode" or not codes:
        raise to_error(status, where)
    return codes[0]


def to_upgrade_error(status_code: int, pod: str, where: str) -> StokerError:
    """Return the error for a failed WebSocket upgrade; the body of that response is not available."""
    if status_code == 403:
        what = f"you are not allowed to run commands in pods (create pods/exec, for pod {pod})"
        return AccessDeniedError(what, where=where, hint=RBAC_HINT)
    if status_code == 404:
        return NotFoundError(f"pod {pod} not found", where=where)
    what = f"cannot run a command in pod {pod} (HTTP {status_code})"
    return UnavailableError(what, where=where, hint="check that the pod is running")
