"""A command in a container, over a websocket whose messages begin with the number of a stream."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from stoker.errors import AccessError, NotFoundError, StokerError, UnavailableError
from stoker.kube.errors import to_error

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
    """What takes bytes."""

    def write(self, data: bytes, /) -> object:
        """Take some."""


class OutputError(Exception):
    """What takes a command's output does not; no fault of the cluster's."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause)
        self.cause = cause


def build_exec_params(argv: Sequence[str], container: str | None, *, stdin: bool) -> list[tuple[str, str]]:
    """Ask for a command; every word is a value of its own."""
    asked = [("stdout", "true"), ("stderr", "true"), *([("stdin", "true")] if stdin else [])]
    return [*asked, *([("container", container)] if container else []), *(("command", word) for word in argv)]


def run_command(
    http: Client,
    path: str,
    asked: Sequence[tuple[str, str]],
    sinks: Mapping[int, Writer],
    *,
    stdin: bytes | None,
    is_patient: bool,
) -> dict[str, Any]:
    """Run a command to its end and give its `Status`; `is_patient`: who takes the output may be slow, as a pager is."""
    with http.websocket(
        path,
        subprotocols=PROTOCOLS,
        params=list(asked),
        keepalive_ping_interval_seconds=PING_INTERVAL_S,
        keepalive_ping_timeout_seconds=None if is_patient else PING_INTERVAL_S,
    ) as session:
        try:
            if stdin is not None:
                _feed(session, stdin)
            return _read(session, sinks)
        finally:
            _hang_up(session)


def _feed(session: WebSocketSession, data: bytes) -> None:
    if session.subprotocol != PROTOCOLS[0]:
        raise UnavailableError("the cluster is too old to pass standard input to a command (Kubernetes 1.30 can)")
    for at in range(0, len(data), CHUNK_BYTES):
        session.send_bytes(bytes([STDIN]) + data[at : at + CHUNK_BYTES])
    session.send_bytes(CLOSE_STDIN)


def _read(session: WebSocketSession, sinks: Mapping[int, Writer]) -> dict[str, Any]:
    while True:
        message = session.receive_bytes()
        if message[:1] == bytes([STATUS]):
            status: dict[str, Any] = json.loads(message[1:])
            return status
        if len(message) > 1 and (sink := sinks.get(message[0])) is not None:
            try:
                sink.write(message[1:])
            except OSError as error:
                raise OutputError(error) from error


def _hang_up(session: WebSocketSession) -> None:
    """End the connection and its reader before the descriptor is given back.

    httpx2 closes it under a thread that still reads; the next connection gets the same number, and loses its first
    bytes to that thread.
    """
    from httpx2.websockets import HTTPXWSException

    with suppress(OSError):  # past TLS: the reader has its own hold on that
        socket.socket.shutdown(session.stream.get_extra_info("socket"), socket.SHUT_RDWR)
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            session.receive(timeout=0.1)
        except TimeoutError:
            continue
        except HTTPXWSException:  # the reader's last word
            return


def get_exit_code(status: Mapping[str, Any], where: str) -> int:
    """Read how a command ended; raises what kept it from running."""
    if status.get("status") != "Failure":
        return 0
    causes = (status.get("details") or {}).get("causes") or ()
    codes = [int(one["message"]) for one in causes if one.get("reason") == "ExitCode"]
    if status.get("reason") != "NonZeroExitCode" or not codes:
        raise to_error(status, where)
    return codes[0]


def to_upgrade_error(code: int, pod: str, where: str) -> StokerError:
    """Tell why no command could be started; what the server said with the code is lost on the way."""
    if code == 403:
        hint = "`stoker job plan FILE --on k8s --rbac WHO` shows what is needed"
        return AccessError(
            f"you may not run commands in pods (create pods/exec, for pod {pod})", where=where, hint=hint
        )
    if code == 404:
        return NotFoundError(f"there is no pod {pod}", where=where)
    return UnavailableError(f"no command can be run in pod {pod} (answer {code}): does it run?", where=where)
