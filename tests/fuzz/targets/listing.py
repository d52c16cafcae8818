"""Index pages of web servers, HTML and JSON: `list` follows their links."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice

from stoker.storage.http import HttpStore
from tests.fuzz.limits import Target


class _Pages(BaseHTTPRequestHandler):
    """Answers every request with one page; the first byte of the input selects HTML or JSON."""

    page = b""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        kind, body = ("application/json", self.page[1:]) if self.page[:1] == b"j" else ("text/html", self.page[1:])
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


_server = ThreadingHTTPServer(("127.0.0.1", 0), _Pages)
threading.Thread(target=_server.serve_forever, daemon=True).start()
_store = HttpStore(f"http://127.0.0.1:{_server.server_port}/data/")


def run(data: bytes) -> None:
    """List the server's root directory, then the first files below it."""
    _Pages.page = data
    _store.list_folder("")
    for _ in islice(_store.list(), 100):
        pass


def _html(*links: str) -> bytes:
    return ("h<html>" + "".join(f'<a href="{link}">x</a>' for link in links)).encode("utf-8", "surrogateescape")


def _json(data: object) -> bytes:
    return b"j" + json.dumps(data).encode()


TARGET = Target(
    run,
    valid=[_html("a.tar", "b.tar"), _json([{"name": "a.tar", "type": "file", "size": 3}])],
    hostile=[
        b"",
        b"h",
        b"j",
        b"j" + b"[" * 100_000,
        b"h" + b"<a " * 100_000,
        b"h" + b"<" * 500_000,
        b"h<a href='" + b"x" * 500_000,
        b"h<!--" * 50_000,
        b"h<![CDATA[" * 20_000,
        _html("http://[::bad", "//[", "http://[", "?x", "#", "", "..", "../", "./", "/", "a//b", "%00", "%", "%zz"),
        _html("a/"),
        _html("a/", "b/"),
        _html(*(f"d{i}/" for i in range(1000))),
        _html("javascript:alert(1)", "file:///etc/passwd", "a\0b", "\udcff"),
        _html(*(f"{i}.tar" for i in range(50_000))),
        _json(None),
        _json([None, 1, "x", [], {}]),
        _json([{"name": 1, "type": 2, "size": "x"}]),
        _json([{"name": "../x", "type": "file", "size": -1}, {"name": "a", "type": "file", "size": 2**70}]),
        _json([{"name": "a", "type": "directory"}, {"name": "b", "type": "directory"}]),
    ],
    tokens=[
        b'<a href="',
        b'">',
        b"</a>",
        b"&#x0;",
        b"&amp;",
        b"<!--",
        b'{"name":"',
        b'"type":"directory"',
        b"../",
        b"%2e",
    ],
)
