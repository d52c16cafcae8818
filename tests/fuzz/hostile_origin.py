"""An origin on a raw socket that answers each request with whatever bytes a test yields."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple


class OriginRequest(NamedTuple):
    """One request: its method, its path with the query, and its Range as (first byte, length) if it has one."""

    method: str
    path: str
    range: tuple[int, int] | None


Respond = Callable[[OriginRequest], Iterator[bytes]]


@contextmanager
def run_hostile_origin(respond: Respond) -> Iterator[str]:
    """Serve `respond` on loopback, and yield the URL. A response ends with its connection."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    stopped = threading.Event()

    def serve(client: socket.socket) -> None:
        with client, suppress(OSError):
            client.settimeout(30)
            request = _read_request(client)
            for chunk in respond(request) if request else ():
                if stopped.is_set():
                    return
                client.sendall(chunk)
            client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 16):
                pass

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stopped.set()
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def _read_request(client: socket.socket) -> OriginRequest | None:
    head = b""
    while b"\r\n\r\n" not in head:
        more = client.recv(1 << 16)
        if not more:
            return None
        head += more
    lines = head.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    method, path, _ = lines[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    text = headers.get("range", "").removeprefix("bytes=")
    if not text:
        return OriginRequest(method, path, None)
    first, _, last = text.partition("-")
    return OriginRequest(method, path, (int(first), int(last) - int(first) + 1))
