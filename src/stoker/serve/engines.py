"""The engines by name, and which one `auto` means."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from stoker.errors import InputError, MissingProgramError
from stoker.serve.nginx import config
from stoker.serve.settings import CacheSettings, ServeSettings
from stoker.serve.site import read_token

ENGINES = ("auto", "embedded", "nginx")


class Engine(Protocol):
    """Runs a data server or a cache."""

    name: str

    @property
    def url(self) -> str:
        """Where it answers."""
        ...

    def start(self) -> None:
        """Begin to answer."""
        ...

    def wait(self) -> None:
        """Run until a signal ends it."""
        ...

    def stop(self) -> None:
        """End everything."""
        ...


def serving(settings: ServeSettings, engine: str = "auto") -> Engine:
    """Make the engine for a data server: nginx where it is installed, unless one is named."""
    return _made(settings, engine, auto="nginx" if _has_nginx() else "embedded")


def caching(settings: CacheSettings, engine: str = "auto") -> Engine:
    """Make the engine for a cache: ours unless nginx is named, for it checks digests and speaks to buckets."""
    if engine == "nginx" and (odd := [url for _, url in settings.origins if not url.startswith("http")]):
        raise InputError(f"nginx cannot fetch from {odd[0]}", hint="use --engine embedded for buckets")
    return _made(settings, engine, auto="embedded")


def _made(settings: ServeSettings | CacheSettings, engine: str, auto: str) -> Engine:
    if engine not in ENGINES:
        raise InputError(f"--engine is {engine!r}, and must be one of {', '.join(ENGINES)}")
    if (auto if engine == "auto" else engine) == "embedded":
        from stoker.serve.embedded import EmbeddedEngine

        return EmbeddedEngine(settings)
    from stoker.serve.nginx.engine import NginxEngine

    return NginxEngine(_for_nginx(settings), reread=lambda: _for_nginx(_with_token_again(settings)))


def _for_nginx(settings: ServeSettings | CacheSettings) -> config.Settings:
    """Put settings as nginx's configuration wants them."""
    if isinstance(settings, ServeSettings):
        return config.ServeSettings(
            root=settings.root,
            host=settings.host,
            port=settings.port,
            token=settings.token,
            writable=settings.writable,
        )
    return config.CacheSettings(
        origins=settings.origins,
        dir=settings.dir,
        size=settings.size,
        host=settings.host,
        port=settings.port,
        token=settings.token,
        valid_s=max(1, round(settings.fresh_s)),
    )


def _with_token_again(settings: ServeSettings | CacheSettings) -> ServeSettings | CacheSettings:
    """Read the token's file again."""
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
