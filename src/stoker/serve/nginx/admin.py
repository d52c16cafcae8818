"""Admin endpoints (`/-/`) of an nginx engine: a server on a Unix socket that nginx proxies to."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer

from stoker.errors import InputError
from stoker.serve.http import HttpStatusError
from stoker.serve.nginx.stats import NginxStats

log = logging.getLogger(__name__)


class _AdminServer(ThreadingUnixStreamServer):
    """Server for the `/-/` requests that nginx proxies; updates the statistics in between."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, path: Path, stats: NginxStats, check_write: Callable[[str], None]) -> None:
        self.stats = stats
        self.check_write = check_write
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
            self._check_write(self.headers.get("X-Stoker-Path", ""))
        elif path == "/-/stats":
            self._respond(200, json.dumps(self.server.stats.to_dict()), "application/json")
        elif path == "/-/origins":
            self._respond(200, json.dumps(self.server.stats.origins()), "application/json")
        elif path == "/-/metrics":
            self._respond(200, self.server.stats.to_prometheus(), "text/plain; version=0.0.4")
        else:
            self._respond(404, "no such page\n")

    def _check_write(self, target: str) -> None:
        """Respond with 403 if a path may not be written, with the status and reason for the client as headers."""
        try:
            self.server.check_write(target.encode("latin-1").decode(errors="surrogateescape"))
        except HttpStatusError as error:
            self._respond(403, "", headers={"X-Stoker-Status": str(error.status), "X-Stoker-Reason": str(error)})
        else:
            self._respond(200, "")

    def _respond(
        self, status: int, text: str, kind: str = "text/plain", headers: Mapping[str, str] | None = None
    ) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
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
def run_admin_server(path: Path, stats: NginxStats, check_write: Callable[[str], None]) -> Iterator[None]:
    """Serve the admin endpoints on a Unix socket while the context is open."""
    try:
        server = _AdminServer(path, stats, check_write)
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
