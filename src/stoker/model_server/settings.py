"""Settings of the model server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_PORT = 8501
"""The REST port of TensorFlow Serving."""
MAX_BODY_BYTES = 32 << 20
HEALTH_PATH = "/healthz"


@dataclass(frozen=True, kw_only=True)
class ModelServerSettings:
    """Where to listen, who may send requests, and the limits of a request."""

    name: str
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    token: str | None = None
    token_file: Path | None = None
    check_host: bool = True
    """Whether requests must name this machine as their host, so that no web page can reach a server without a token."""
    max_body_bytes: int = MAX_BODY_BYTES
    access_log: bool = False
    poll_s: float = 2.0
    """Interval between looks for newer versions."""
    shutdown_s: float = 30.0
    """Time for requests to finish after a stop signal."""
