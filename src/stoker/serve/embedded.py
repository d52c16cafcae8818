"""The engine that needs nothing but Python."""

from __future__ import annotations

import errno
import logging
import resource
import signal
import threading
from collections.abc import Callable
from types import FrameType

from stoker.errors import InputError, UnavailableError
from stoker.serve.cache.origins import Origins
from stoker.serve.cache.proxy import CacheSite
from stoker.serve.cache.slices import SliceCache
from stoker.serve.files import FileSite
from stoker.serve.http import Handler, Server
from stoker.serve.settings import CacheSettings, ServeSettings
from stoker.serve.site import Site, read_token
from stoker.serve.stats import Stats

log = logging.getLogger(__name__)


class EmbeddedEngine:
    """A server of ours in this process."""

    name = "embedded"

    def __init__(self, settings: ServeSettings | CacheSettings) -> None:
        self._settings = settings
        self._ended = threading.Event()
        self._close: Callable[[], None] = lambda: None
        if isinstance(settings, ServeSettings):
            self.stats = Stats(self.name, {"clients": lambda: self._server.clients})
            inner: Handler = FileSite(settings.root, writable=settings.writable)
            pages = {}
        else:
            origins = Origins(settings.origins)  # first: what is wrong with them leaves no folder
            cache = SliceCache(settings.dir, settings.size)
            gauges: dict[str, Callable[[], int | None]] = {
                "clients": lambda: self._server.clients,
                "evictions": lambda: cache.evictions,
                "held_bytes": lambda: cache.held,
                "budget": lambda: cache.budget,
            }
            self.stats = Stats(self.name, gauges)
            self.stats.add(hits=0, misses=0, origin_requests=0, origin_bytes=0, spoilt=0)
            inner = site = CacheSite(origins, cache, self.stats, fresh_s=settings.fresh_s)
            pages = {"origins": origins.told}
            self._close = site.close
        self._site = Site(inner, self.stats, token=settings.token, pages=pages)
        try:
            self._server = Server(self._site, settings.host, settings.port, answered=self._count)
        except OSError as error:
            self._close()
            raise cannot_listen(settings.host, settings.port, error) from error

    @property
    def url(self) -> str:
        """Where it answers."""
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        return f"http://{host}:{self._server.port}"

    def start(self) -> None:
        """Begin to answer, with as many open files as this process may have."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._server.start()

    def wait(self) -> None:
        """Run until a signal ends it; SIGHUP reads the token file again."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._ended.set())
        signal.signal(signal.SIGHUP, self._reload)
        while not self._ended.wait(0.5):
            pass

    def stop(self) -> None:
        """End every connection and thread."""
        self._ended.set()
        self._server.close()
        self._close()

    def _count(self, status: int, sent: int) -> None:
        self.stats.add(requests=1, bytes=sent, errors=int(status >= 500), broken=int(status == 0))

    def _reload(self, _number: int, _frame: FrameType | None) -> None:
        if self._settings.token_file is None:
            return
        try:
            self._site.token = read_token(self._settings.token_file)
        except InputError as error:
            log.warning("%s: the former token stays", error)


def cannot_listen(host: str, port: int, error: OSError) -> UnavailableError:
    """Say why nothing can be served here."""
    what = {
        errno.EADDRINUSE: f"port {port} is taken",
        errno.EACCES: f"port {port} is not for this user",
        errno.EADDRNOTAVAIL: "is no address of this machine",
    }.get(error.errno or 0, (error.strerror or "cannot listen").lower())
    return UnavailableError(what, where=f"{host}:{port}", hint="choose another --port or --host")
