"""Embedded engine: a data server or cache in this Python process."""

from __future__ import annotations

import errno
import logging
import resource
import signal
import threading
from collections.abc import Callable
from types import FrameType

from stoker.errors import InputError, UnavailableError
from stoker.serve.admin import AdminHandler
from stoker.serve.auth import read_token
from stoker.serve.cache.origins import Origins
from stoker.serve.cache.proxy import CachingProxy
from stoker.serve.cache.slices import SliceCache
from stoker.serve.files import FileHandler
from stoker.serve.http import Handler, HttpServer
from stoker.serve.settings import CacheSettings, ServeSettings
from stoker.serve.stats import ServerStats

log = logging.getLogger(__name__)


class EmbeddedEngine:
    """The built-in HTTP server, run in threads of this process."""

    name = "embedded"

    def __init__(self, settings: ServeSettings | CacheSettings) -> None:
        self._settings = settings
        self._stop_event = threading.Event()
        self._close: Callable[[], None] = lambda: None
        if isinstance(settings, ServeSettings):
            self.stats = ServerStats(self.name, {"clients": lambda: self._server.clients})
            inner: Handler = FileHandler(settings.root, writable=settings.writable)
            pages = {}
        else:
            origins = Origins(settings.origins)  # first, so that an invalid origin leaves no folder
            cache = SliceCache(settings.dir, settings.size)
            gauges: dict[str, Callable[[], int | None]] = {
                "clients": lambda: self._server.clients,
                "evictions": lambda: cache.evictions,
                "held_bytes": lambda: cache.used_bytes,
                "budget": lambda: cache.budget,
            }
            self.stats = ServerStats(self.name, gauges)
            self.stats.add(hits=0, misses=0, origin_requests=0, origin_bytes=0, spoilt=0)
            inner = proxy = CachingProxy(origins, cache, self.stats, revalidate_after_s=settings.revalidate_after_s)
            pages = {"origins": origins.to_list}
            self._close = proxy.close
        self._handler = AdminHandler(inner, self.stats, token=settings.token, pages=pages)
        try:
            self._server = HttpServer(self._handler, settings.host, settings.port, on_response=self._count)
        except OSError as error:
            self._close()
            raise listen_error(settings.host, settings.port, error) from error

    @property
    def url(self) -> str:
        """The URL of the server."""
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        return f"http://{host}:{self._server.port}"

    def start(self) -> None:
        """Start to serve, with the limit of open files raised to its maximum."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        self._server.start()

    def wait(self) -> None:
        """Run until SIGTERM or SIGINT; SIGHUP reloads the token file."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop_event.set())
        signal.signal(signal.SIGHUP, self._reload)
        while not self._stop_event.wait(0.5):
            pass

    def stop(self) -> None:
        """Close all connections and stop all threads."""
        self._stop_event.set()
        self._server.close()
        self._close()

    def _count(self, status: int, sent: int) -> None:
        self.stats.add(requests=1, bytes=sent, errors=int(status >= 500), broken=int(status == 0))

    def _reload(self, _number: int, _frame: FrameType | None) -> None:
        if self._settings.token_file is None:
            return
        try:
            self._handler.token = read_token(self._settings.token_file)
        except InputError as error:
            log.warning("reload failed, keeping the current token: %s", error)


def listen_error(host: str, port: int, error: OSError) -> UnavailableError:
    """Return the error for an address that cannot be listened on."""
    reason, hint = {
        errno.EADDRINUSE: ("the port is already in use", "choose another --port"),
        errno.EACCES: ("permission denied", "choose a --port of 1024 or higher"),
        errno.EADDRNOTAVAIL: ("this machine has no such address", "choose another --host"),
    }.get(error.errno or 0, ((error.strerror or "unknown error").lower(), "choose another --port or --host"))
    return UnavailableError(f"cannot listen on {host}:{port}: {reason}", hint=hint)
