"""Admin endpoints (`/-/`) of an nginx engine: a server on a Unix socket that nginx proxies to."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer

from stoker.errors import InputError
from stoker.serve.nginx.stats import NginxStats

log = logging.getLogger(__name__)


class _AdminServer(ThreadingUnixStreamServer):
    """Server for the `/-/` requests that nginx proxies; updates the statistics in between."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, path: Path, stats: NginxStats, may_write: Callable[[str], bool]) -> None:
        self.stats = stats
        self.may_write = may_write
        super().__init__(str(path), _AdminRequestHandler)

    def service_actions(self) -> None:
        self.stats.update()

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """Log the error; the standard library would print a traceback."""
        log.debug("an admin request broke off", exc_info=True)


class _AdminRequestHandler(BaseHTTPRequestHandler):
    server: _AdminServer
    timeout = 10

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/-/guard":
            target = self.headers.get("X-Stoker-Path", "").encode("latin-1").decode(errors="surrogateescape")
            self._respond(200 if self.server.may_write(target) else 403, "")
        elif path == "/-/stats":
            self._respond(200, json.dumps(self.server.stats.to_dict()), "application/json")
        elif path == "/-/origins":
            self._respond(200, json.dumps(self.server.stats.origins()), "application/json")
        elif path == "/-/metrics":
            self._respond(200, self.server.stats.to_prometheus(), "text/plain; version=0.0.4")
        else:
            self._respond(404, "no such page\n")

    def _respond(self, status: int, text: str, kind: str = "text/plain") -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        with suppress(OSError):  # nginx or its client may have disconnected
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass

    def address_string(self) -> str:
        return "nginx"


@contextmanager
def run_admin_server(path: Path, stats: NginxStats, may_write: Callable[[str], bool]) -> Iterator[None]:
    """Serve the admin endpoints on a Unix socket while the context is open."""
    try:
        server = _AdminServer(path, stats, may_write)
    except OSError as error:
        raise InputError(
            f"cannot create a Unix socket: {error.strerror or error}", where=path, hint="set TMPDIR to a short path"
        ) from error
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="nginx-admin", daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
