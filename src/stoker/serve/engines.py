"""Choose and create the engine (embedded or nginx) of a data server or cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from stoker.errors import InputError, MissingProgramError
from stoker.serve.auth import read_token
from stoker.serve.nginx import config
from stoker.serve.settings import CacheSettings, ServeSettings

ENGINES = ("auto", "embedded", "nginx")


class Engine(Protocol):
    """A running data server or cache."""

    name: str

    @property
    def url(self) -> str:
        """The URL of the server."""
        ...

    def start(self) -> None:
        """Start to serve."""
        ...

    def wait(self) -> None:
        """Run until SIGTERM or SIGINT."""
        ...

    def stop(self) -> None:
        """Stop the server and release its resources."""
        ...


def create_server(settings: ServeSettings, engine: str = "auto") -> Engine:
    """Create the engine of a data server; `auto` means nginx if it is installed."""
    return _create_engine(settings, engine, auto="nginx" if _has_nginx() else "embedded")


def create_cache(settings: CacheSettings, engine: str = "auto") -> Engine:
    """Create the engine of a cache; `auto` means embedded, which verifies digests and supports buckets."""
    if engine == "nginx" and (buckets := [url for _, url in settings.origins if not url.startswith("http")]):
        raise InputError(f"nginx cannot fetch from {buckets[0]}", hint="use --engine embedded for buckets")
    return _create_engine(settings, engine, auto="embedded")


def _create_engine(settings: ServeSettings | CacheSettings, engine: str, auto: str) -> Engine:
    if engine not in ENGINES:
        raise InputError(f"--engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    if (auto if engine == "auto" else engine) == "embedded":
        from stoker.serve.embedded import EmbeddedEngine

        return EmbeddedEngine(settings)
    from stoker.serve.nginx.engine import NginxEngine

    return NginxEngine(_to_nginx_config(settings), load_config=lambda: _to_nginx_config(_reload_token(settings)))


def _to_nginx_config(settings: ServeSettings | CacheSettings) -> config.NginxConfig:
    """Convert settings to those of nginx."""
    if isinstance(settings, ServeSettings):
        return config.NginxServeConfig(
            root=settings.root,
            host=settings.host,
            port=settings.port,
            token=settings.token,
            writable=settings.writable,
        )
    return config.NginxCacheConfig(
        origins=settings.origins,
        dir=settings.dir,
        size=settings.size,
        host=settings.host,
        port=settings.port,
        token=settings.token,
        revalidate_after_s=max(1, round(settings.revalidate_after_s)),
    )


def _reload_token(settings: ServeSettings | CacheSettings) -> ServeSettings | CacheSettings:
    """Return the settings with the token read again from its file."""
    if settings.token_file is None:
        return settings
    return replace(settings, token=read_token(settings.token_file))


def _has_nginx() -> bool:
    from stoker.serve.nginx.engine import find_nginx

    try:
        find_nginx()
    except MissingProgramError:
        return False
    return True
