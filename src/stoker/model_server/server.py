"""Run the model server: listen, serve until a stop signal, let requests finish; imports uvicorn."""

from __future__ import annotations

import logging
import signal
import socket
from contextlib import suppress
from types import FrameType

from stoker.errors import InputError, MissingExtraError
from stoker.model_server.http_api import create_app
from stoker.model_server.metrics import ServerMetrics
from stoker.model_server.settings import ModelServerSettings
from stoker.model_server.sources import ModelSource
from stoker.model_server.versions import LoadedVersion, ModelVersions
from stoker.serve.auth import read_token
from stoker.serve.embedded import listen_error

try:
    import uvicorn
except ImportError as error:
    raise MissingExtraError("uvicorn", "web", purpose="the model server") from error

log = logging.getLogger(__name__)

BACKLOG = 1024
MAX_CONNECTIONS = 4096
KEEP_ALIVE_S = 30


class ModelServer:
    """A model behind HTTP. The model is loaded and the port bound on creation, so that errors come first."""

    def __init__(
        self, settings: ModelServerSettings, source: ModelSource, *, keep: int = 1, max_batch: int = 32
    ) -> None:
        self._settings, self._token = settings, settings.token
        self.metrics = ServerMetrics()
        self._socket = _bind(settings.host, settings.port)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        try:
            self.versions = ModelVersions(source, keep=keep, max_batch=max_batch, on_batch=self.metrics.add_batch)
            self.first: LoadedVersion = self.versions.load_first()
            self._socket.listen(BACKLOG)  # requests wait until `run`
        except BaseException:
            self._socket.close()
            raise
        app = create_app(settings, self.versions, self.metrics, lambda: self._token)
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                limit_concurrency=MAX_CONNECTIONS,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(settings.shutdown_s)),
            )
        )

    @property
    def is_started(self) -> bool:
        """Whether requests are accepted."""
        return self._server.started

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`; in the main thread, SIGHUP reloads the token file."""
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGHUP, self._reload)
        with suppress(KeyboardInterrupt):  # uvicorn raises the signal again after it has shut down
            self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Stop accepting requests; `run` returns when the running ones have finished."""
        self._server.should_exit = True

    def _reload(self, _number: int, _frame: FrameType | None) -> None:
        if self._settings.token_file is None:
            return
        try:
            self._token = read_token(self._settings.token_file)
        except InputError as error:
            log.warning("reload failed, keeping the current token: %s", error)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise listen_error(host, port, error) from error
    return listening
