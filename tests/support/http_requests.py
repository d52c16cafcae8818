"""HTTP requests exactly as a test writes them."""

from __future__ import annotations

import http.client
import socket
from typing import NamedTuple
from urllib.parse import urlsplit


class Response(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def send_request(url: str, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Response:
    """Send one request with the path unchanged; underscores in header names stand for dashes."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        return Response(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def send_raw(url: str, request: bytes, *, wait_s: float = 5.0, until_closed: bool = False) -> bytes:
    """Send bytes unchanged, and read until the server closes the connection or, by default, is silent for a while."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=wait_s) as client:
        client.sendall(request)
        response = b""
        try:
            while more := client.recv(1 << 16):
                response += more
        except ConnectionResetError:
            pass
        except TimeoutError:
            if until_closed:
                raise
        return response
