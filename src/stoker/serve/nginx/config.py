"""nginx configuration of a data server or a cache, as text: pure functions, no I/O.

User input (paths, URLs, names) is quoted or rejected; a token never appears in the configuration.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from stoker.errors import InputError
from stoker.serve.loopback import is_loopback
from stoker.serve.nginx.auth import token_check, token_map
from stoker.serve.nginx.origin import OriginLocations
from stoker.serve.nginx.syntax import format_host, quote_word

MIB = 1 << 20

_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True)
class _CommonConfig:
    """The settings that a server and a cache share."""

    host: str
    port: int
    token: str | None = None
    admin_socket: Path | None = None
    """The Unix socket that answers `/-/` requests; without one there are no statistics."""
    client_timeout_s: int = 30
    user: str | None = None
    """The user of the workers; only set if the master runs as root."""


@dataclass(frozen=True, kw_only=True)
class NginxServeConfig(_CommonConfig):
    """A folder to serve, read-only or writable."""

    root: Path
    writable: bool = False
    max_upload_bytes: int = 64 << 30


@dataclass(frozen=True, kw_only=True)
class ContainerPaths:
    """Files of an nginx that runs alone in a container and logs to stdout and stderr."""

    admin_files: Path
    """Folder of `origins.json` and `stats.json`, which nginx serves as `/-/origins` and `/-/stats`."""
    runtime_files: Path
    """Folder of `resolver.conf`, `listen.conf` and `trusted.conf`, written by the start script."""
    workers: int = 4
    """Worker processes; nginx's `auto` would count the CPUs of the node, not those of the container."""


@dataclass(frozen=True, kw_only=True)
class NginxCacheConfig(_CommonConfig):
    """A cache of origins, given as (name, URL); the name "" stands for a single origin at the root."""

    origins: tuple[tuple[str, str], ...]
    dir: Path
    size: int
    slice_bytes: int = 8 * MIB
    revalidate_after_s: int = 86400
    origin_timeout_s: int = 60
    min_free_bytes: int = 64 * MIB
    """nginx evicts when the disk has less free space than this."""
    resolver: str | None = None
    """A DNS server to resolve origins at run time; without one, they are resolved once at startup."""
    ca_file: Path | None = None
    """The CA certificates that verify https origins."""
    container: ContainerPaths | None = None


NginxConfig = NginxServeConfig | NginxCacheConfig


def render_serve_config(config: NginxServeConfig, prefix: Path) -> str:
    """Return the configuration of a data server; nginx keeps its own files under `prefix`."""
    if config.writable and config.token is None and not is_loopback(config.host):
        raise InputError("a writable server on a non-loopback address needs a token", where=config.host)
    if config.writable and config.admin_socket is None:
        raise InputError("a writable server needs an admin socket to check the target of writes", where=config.root)
    location = _STATIC_FILES
    if config.writable:
        location += _DAV_WRITES
    return _render_config(
        config,
        prefix,
        server=f"""\
root {quote_word(config.root)};
client_max_body_size {config.max_upload_bytes if config.writable else 1024};
location / {{
{indent(location, "    ")}}}
{_write_guard_location(config) + _REFUSED_WRITES if config.writable else ""}""",
        methods=("GET", "HEAD", "PUT", "DELETE") if config.writable else ("GET", "HEAD"),
    )


def render_cache_config(config: NginxCacheConfig, prefix: Path) -> str:
    """Return the configuration of a caching reverse proxy in front of the given origins only."""
    origins = [OriginLocations.parse(number, name, url) for number, (name, url) in enumerate(config.origins)]
    _check_cache(config, origins)
    in_cluster = config.container is not None
    re_resolve = in_cluster or config.resolver is not None
    server = _PROXY.format(
        slice=config.slice_bytes,
        valid=config.revalidate_after_s,
        timeout=config.origin_timeout_s,
        lock=2 * config.origin_timeout_s,
    )
    server += _upstream_tls(config, origins)
    server += "".join(origin.locations(re_resolve=re_resolve, in_cluster=in_cluster) for origin in origins)
    if not any(origin.name == "" for origin in origins):
        server += "location / {\n    return 404;\n}\n"
    http = _cache_zone(config) + _resolver(config, origins)
    return _render_config(config, prefix, http=http, server=server, methods=("GET", "HEAD"))


def _check_cache(config: NginxCacheConfig, origins: list[OriginLocations]) -> None:
    names = [origin.name for origin in origins]
    if not names or len(set(names)) < len(names) or ("" in names and len(names) > 1):
        raise InputError("a cache needs one origin, or several with distinct names", hint="use NAME=URL")
    if config.slice_bytes <= 0 or config.size < 4 * config.slice_bytes:
        raise InputError("the cache is smaller than four slices", where=config.dir, hint="set a larger size")
    if config.ca_file is None and config.container is None and any(origin.is_https for origin in origins):
        raise InputError("no CA certificates found to verify https origins", hint="install ca-certificates")


def _cache_zone(config: NginxCacheConfig) -> str:
    path, zone = quote_word(cache_path(config)), f"stoker:{_keys_zone_mib(config)}m"
    return f"""\
proxy_cache_path {path} levels=1:2 use_temp_path=off keys_zone={zone}
    max_size={eviction_bytes(config)} min_free={config.min_free_bytes} inactive=3650d;
# Folder listings change as objects are added; they are not cached.
map $uri $stoker_folder {{
    default 0;
    "~/$" 1;
}}
# Without Content-Length, a truncated response looks complete. Slices share variables, hence volatile.
map $upstream_http_content_length $stoker_unmeasured {{
    volatile;
    default 0;
    "" 1;
}}
"""


def _resolver(config: NginxCacheConfig, origins: list[OriginLocations]) -> str:
    if config.container is not None:
        return f"include {quote_word(config.container.runtime_files / 'resolver.conf')};\n"
    if config.resolver is not None:
        return f"resolver {format_host(config.resolver)};\n"
    return "".join(origin.upstream() for origin in origins)


def _upstream_tls(config: NginxCacheConfig, origins: list[OriginLocations]) -> str:
    if config.ca_file is not None:
        return f"proxy_ssl_trusted_certificate {quote_word(config.ca_file)};\n{_PROXY_SSL}"
    if config.container is not None and any(origin.is_https for origin in origins):
        return f"include {quote_word(config.container.runtime_files / 'trusted.conf')};\n{_PROXY_SSL}"
    return ""


def cache_path(config: NginxCacheConfig) -> Path:
    """Return nginx's own cache folder; the embedded engine uses another one beside it."""
    return config.dir / "nginx"


def eviction_bytes(config: NginxCacheConfig) -> int:
    """Return nginx's max_size: below the budget, because its cache manager only runs periodically."""
    return config.size - config.size // 10


def _render_config(config: NginxConfig, prefix: Path, *, server: str, methods: tuple[str, ...], http: str = "") -> str:
    if not 0 < config.port < 65536:
        raise InputError("invalid port", where=config.port)
    container = config.container if isinstance(config, NginxCacheConfig) else None
    return f"""\
daemon off;
worker_processes {"auto" if container is None else container.workers};
{_user_directive(config.user)}pid {quote_word(prefix / "nginx.pid")};
error_log {"stderr" if container is not None else quote_word(prefix / "error.log")} warn;
worker_shutdown_timeout 30s;
events {{
    worker_connections 4096;
}}
http {{
{indent(_http_directives(config, prefix, methods), "    ")}\
{indent(token_map(config.token) + http, "    ")}\
    server {{
        listen {_listen_address(config)};
{"" if container is None else f"        include {quote_word(container.runtime_files / 'listen.conf')};{chr(10)}"}\
        add_header Allow $stoker_allow always;
        add_header WWW-Authenticate $stoker_challenge always;
        add_header X-Cache $upstream_cache_status always;
        if ($uri ~ "[\\x00-\\x1f\\x7f\\\\\\\\]") {{
            return 400;
        }}
{indent(token_check(config.token), "        ")}\
        if ($request_method !~ "^(?:{"|".join(methods)})$") {{
            return 405;
        }}
{indent(server + _admin_locations(config), "        ")}\
    }}
}}
"""


def _http_directives(config: NginxConfig, prefix: Path, methods: tuple[str, ...]) -> str:
    temporary = "\n".join(
        f"{kind}_temp_path {quote_word(prefix / kind)};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""\
{temporary}
# A slice is a subrequest: its $request_length is 0, and $body_bytes_sent is that of the main request so far.
log_format stoker "$status $body_bytes_sent $request_length $upstream_cache_status $upstream_bytes_received";
access_log {_access_log(config, prefix)};
log_not_found off;
log_subrequest on;
server_tokens off;
default_type application/octet-stream;
types {{
    application/json json;
    application/x-tar tar;
}}
gzip off;
sendfile on;
aio off;
max_ranges 64;
absolute_redirect off;
keepalive_requests 100000;
client_header_buffer_size 1k;
large_client_header_buffers 4 8k;
client_header_timeout {config.client_timeout_s}s;
client_body_timeout {config.client_timeout_s}s;
send_timeout {config.client_timeout_s}s;
reset_timedout_connection on;
map $status $stoker_allow {{
    default "";
    405 "{", ".join(methods)}";
}}
map $status $stoker_challenge {{
    default "";
    401 Bearer;
}}
"""


def _access_log(config: NginxConfig, prefix: Path) -> str:
    if isinstance(config, NginxCacheConfig) and config.container is not None:
        return "/dev/stdout stoker"
    # Without the engine's process, nothing would read or rotate the log.
    return "off" if config.admin_socket is None else f"{quote_word(prefix / 'access.log')} stoker"


_STATIC_FILES = """\
# A file name that does not exist: an index page would hide the listing.
index .stoker-has-no-index;
autoindex on;
autoindex_format json;
autoindex_exact_size on;
# All symlinks below the root are rejected: nginx cannot tell which of them leave it.
disable_symlinks on from=$document_root;
"""

_DAV_WRITES = """\
dav_methods PUT DELETE;
create_full_put_path on;
dav_access user:rw group:r all:r;
# The dav module follows symlinks and deletes whole folders, so every write is checked first.
auth_request /-/guard;
auth_request_set $stoker_refusal $upstream_http_x_stoker_status;
auth_request_set $stoker_reason $upstream_http_x_stoker_reason;
error_page 403 = @refused;
set $stoker_target $uri;
"""

# auth_request only knows 401 and 403.
_REFUSED_WRITES = """\
location @refused {
    default_type text/plain;
    if ($stoker_refusal = 400) {
        return 400 "$stoker_reason\\n";
    }
    if ($stoker_refusal = 409) {
        return 409 "$stoker_reason\\n";
    }
    return 403;
}
"""

_PROXY = """\
client_max_body_size 1024;
# Reject requests to a forward proxy: they mean another host.
if ($request ~ "^[^ ]+ +[^/ ]") {{
    return 400;
}}
slice {slice};
proxy_http_version 1.1;
proxy_connect_timeout 10s;
proxy_send_timeout {timeout}s;
proxy_read_timeout {timeout}s;
proxy_buffer_size 16k;
proxy_buffers 16 64k;
proxy_busy_buffers_size 128k;
proxy_next_upstream off;
# Only the path of the client's request reaches the origin.
proxy_pass_request_headers off;
proxy_pass_request_body off;
proxy_cache stoker;
proxy_cache_lock on;
proxy_cache_lock_age {lock}s;
proxy_cache_lock_timeout {lock}s;
proxy_cache_valid 200 206 {valid}s;
proxy_cache_revalidate on;
proxy_cache_use_stale error timeout invalid_header updating http_500 http_502 http_503 http_504;
proxy_cache_bypass $http_x_stoker_bypass $stoker_folder;
proxy_no_cache $stoker_folder $stoker_unmeasured;
# X-Accel headers would let an origin control this server.
proxy_ignore_headers Cache-Control Expires Set-Cookie Vary
    X-Accel-Redirect X-Accel-Expires X-Accel-Limit-Rate X-Accel-Buffering X-Accel-Charset;
proxy_hide_header Set-Cookie;
proxy_hide_header X-Cache;
proxy_redirect off;
proxy_intercept_errors on;
# Following a redirect could reach any host; passing it on would send clients past the cache.
location @elsewhere {{
    return 502;
}}
"""


_PROXY_SSL = """\
proxy_ssl_verify on;
proxy_ssl_verify_depth 8;
proxy_ssl_server_name on;
proxy_ssl_protocols TLSv1.2 TLSv1.3;
"""


def _write_guard_location(config: NginxServeConfig) -> str:
    return f"""\
location = /-/guard {{
    internal;
    access_log off;
    if ($request_method ~ "^(?:GET|HEAD)$") {{
        return 204;
    }}
    proxy_pass_request_headers off;
    proxy_pass_request_body off;
    proxy_set_header X-Stoker-Method $request_method;
    proxy_set_header X-Stoker-Path $stoker_target;
    proxy_pass {_admin_url(config)};
}}
"""


def _admin_locations(config: NginxConfig) -> str:
    """Return the locations of `/-/`; nginx itself answers the health check, without a token."""
    healthy = 'location = /-/healthy {\n    access_log off;\n    default_type text/plain;\n    return 200 "ok\\n";\n}\n'
    if isinstance(config, NginxCacheConfig) and config.container is not None:
        healthy += _container_admin_locations(config.container)
    if config.admin_socket is None:
        return healthy + "location /-/ {\n    return 404;\n}\n"
    return f"""\
{healthy}location /-/ {{
    access_log off;
    if ($request_method !~ "^(?:GET|HEAD)$") {{
        return 405;
    }}
    proxy_cache off;
    proxy_method GET;
    proxy_pass_request_headers off;
    proxy_pass_request_body off;
    proxy_pass {_admin_url(config)};
}}
"""


def _container_admin_locations(container: ContainerPaths) -> str:
    return "".join(
        f"""\
location = /-/{name} {{
    access_log off;
    default_type application/json;
    alias {quote_word(container.admin_files / f"{name}.json")};
}}
"""
        for name in ("origins", "stats")
    )


def _admin_url(config: NginxConfig) -> str:
    if ":" in str(config.admin_socket):
        raise InputError("nginx does not support a colon in the path of a Unix socket", where=config.admin_socket)
    return quote_word(f"http://unix:{config.admin_socket}")


def keys_zone_bytes(config: NginxCacheConfig) -> int:
    """Return the shared memory that the cache keys take."""
    return _keys_zone_mib(config) * MIB


def _keys_zone_mib(config: NginxCacheConfig) -> int:
    """Size keys_zone in MiB: 8000 keys per MiB, for four times the number of full slices."""
    return min(1024, 10 + 4 * config.size // config.slice_bytes // 8000)


def _user_directive(user: str | None) -> str:
    if user is None:
        return ""
    if not _USER.fullmatch(user):
        raise InputError("invalid user name", where=repr(user))
    return f'user "{user}";\n'


def _listen_address(config: NginxConfig) -> str:
    return f"{format_host(config.host)}:{config.port} backlog=1024"
