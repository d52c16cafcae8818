"""nginx engines for tests, and paths that try to leave their root."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from stoker.serve.nginx.config import NginxCacheConfig, NginxConfig, NginxServeConfig
from stoker.serve.nginx.engine import NginxEngine
from tests.support.http_requests import send_request

SECRET = b"nobody may read this"
MIB = 1 << 20
TOKEN = "open-sesame-0123"


def read_stats(url: str, **headers: str) -> dict[str, Any]:
    """Return the statistics of a server."""
    stats: dict[str, Any] = json.loads(send_request(url, "/-/stats", **headers).body)
    return stats


@contextmanager
def run_nginx(settings: NginxConfig, prefix: Path | None = None) -> Iterator[str]:
    """Run nginx, and yield its URL."""
    engine = NginxEngine(settings, prefix)
    engine.start()
    try:
        yield engine.url
    finally:
        engine.stop()


@contextmanager
def run_server(root: Path, **more: Any) -> Iterator[str]:
    """Serve a folder with nginx, and yield its URL."""
    with run_nginx(NginxServeConfig(**{"root": root, "host": "127.0.0.1", "port": 0} | more)) as url:
        yield url


@contextmanager
def run_cache(folder: Path, *urls: str, **more: Any) -> Iterator[str]:
    """Cache one origin at the root, or several named a, b and c, and yield the URL."""
    names = [""] if len(urls) == 1 else "abc"
    settings = {"origins": tuple(zip(names, urls, strict=False)), "dir": folder, "size": 64 * MIB, "host": "127.0.0.1"}
    with run_nginx(NginxCacheConfig(**settings | {"port": 0, "slice_bytes": MIB} | more)) as url:
        yield url


def traversal_paths() -> list[bytes]:
    """Return encodings of paths outside the root."""
    dots = ["..", "%2e%2e", ".%2e", "%2E.", "%252e%252e", "%c0%ae%c0%ae", "..;", "..%00", "\u2025", "%uff0e%uff0e"]
    separators = ["/", "%2f", "\\", "%5c", "//", "%252f", "/./", "%c0%af"]
    paths = [
        f"{start}{(dot + separator) * depth}secret"
        for dot, separator, depth, start in product(dots, separators, (1, 2, 3), ("/", "/sub/"))
    ]
    paths += [f"/{name}" for name in ("out", "outside/secret", "sub/up", "sub/folder/secret", "outside/root/../secret")]
    paths += [
        "//secret",
        "/../secret",
        "/%00../secret",
        "/ten/../../secret",
        "../secret",
        "%2e%2e/secret",
        "\\..\\secret",
    ]
    paths += ["http://127.0.0.1/../secret", "http:///../secret", "file:///etc/passwd", "/..", "/sub/../.."]
    return [path.encode() for path in paths]
