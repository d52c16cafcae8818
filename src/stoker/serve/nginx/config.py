"""Settings of a file server or a cache as the text of an nginx configuration; nothing is read, started or written.

Whatever a user gives (paths, URLs, names) stands in double quotes or is refused; a token never stands there at all.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from urllib.parse import unquote, urlsplit

from stoker.errors import InputError

MIB = 1 << 20
LOGIN = "stoker"
"""The user of those who can only send a login; its password is the token."""
LONGEST_WORD = 3000
"""In bytes; nginx reads its configuration through a buffer of 4096, which no word may exceed."""

_HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252}[A-Za-z0-9_.])?")
_ORIGIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TOKEN = re.compile(r"[!-~]{1,1024}")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What a server and a cache have in common; `user` is for a master that runs as root, who else reads nothing."""

    host: str
    port: int
    token: str | None = None
    admin_socket: Path | None = None
    """Where whoever started nginx answers for `/-/`; without one there are no statistics."""
    client_timeout_s: int = 30
    user: str | None = None


@dataclass(frozen=True, kw_only=True)
class ServeSettings(_Settings):
    """One folder, to be read, or also written to."""

    root: Path
    writable: bool = False
    max_upload: int = 64 << 30


@dataclass(frozen=True, kw_only=True)
class Contained:
    """What is otherwise in a container: logs go to its streams, and some things are known only when it starts."""

    told: Path
    """The folder of `origins.json` and `stats.json`, for there is nobody beside nginx to answer for `/-/`."""
    found: Path
    """The folder of `resolver.conf`, `listen.conf` and `trusted.conf`, which whoever starts nginx writes before."""
    workers: int = 4
    """nginx itself would count the processors of the machine, not those that the container may use."""


@dataclass(frozen=True, kw_only=True)
class CacheSettings(_Settings):
    """Origins as pairs of a name and a URL, and where their slices are kept; the name "" is the only origin's."""

    origins: tuple[tuple[str, str], ...]
    dir: Path
    size: int
    slice_bytes: int = 8 * MIB
    valid_s: int = 86400
    origin_timeout_s: int = 60
    min_free: int = 64 * MIB
    """Of the disk: nginx evicts before it fills up."""
    resolver: str | None = None
    """A DNS server that is asked again and again; without one, names are resolved once at the start."""
    ca_file: Path | None = None
    """The certificates that https origins are checked with."""
    contained: Contained | None = None


Settings = ServeSettings | CacheSettings


def serve_config(settings: ServeSettings, prefix: Path) -> str:
    """Write the configuration of a file server that keeps all of its own files under `prefix`."""
    if settings.writable and settings.token is None and not is_loopback(settings.host):
        raise InputError("a writable server that others can reach needs a token", where=settings.host)
    if settings.writable and settings.admin_socket is None:
        raise InputError("a writable server needs someone who checks where writes lead", where=settings.root)
    location = _FILES
    if settings.writable:
        location += _WRITES
    return _config(
        settings,
        prefix,
        server=f"""\
root {quoted(settings.root)};
client_max_body_size {settings.max_upload if settings.writable else 1024};
location / {{
{indent(location, "    ")}}}
{_guard(settings) if settings.writable else ""}""",
        methods=("GET", "HEAD", "PUT", "DELETE") if settings.writable else ("GET", "HEAD"),
    )


def cache_config(settings: CacheSettings, prefix: Path) -> str:
    """Write the configuration of a cache in front of its origins, and of nothing else."""
    origins = [_Origin.of(number, name, url) for number, (name, url) in enumerate(settings.origins)]
    names = [origin.name for origin in origins]
    if not names or len(set(names)) < len(names) or ("" in names and len(names) > 1):
        raise InputError("a cache wants one origin, or several with a name each", hint="write NAME=URL")
    if settings.slice_bytes <= 0 or settings.size < 4 * settings.slice_bytes:
        raise InputError("the cache is smaller than four slices", where=settings.dir, hint="give it a larger size")
    contained, secure = settings.contained, any(origin.secure for origin in origins)
    if settings.ca_file is None and contained is None and secure:
        raise InputError("an https origin needs certificates to check it with", hint="install ca-certificates")
    http = f"""\
proxy_cache_path {quoted(cache_folder(settings))} levels=1:2 use_temp_path=off keys_zone=stoker:{_zone(settings)}m
    max_size={max_size(settings)} min_free={settings.min_free} inactive=3650d;
# Folders change as objects come; they are asked for each time.
map $uri $stoker_folder {{
    default 0;
    "~/$" 1;
}}
# Without a length, an answer that broke off looks like one that ended; slices share their variables, hence volatile.
map $upstream_http_content_length $stoker_unmeasured {{
    volatile;
    default 0;
    "" 1;
}}
"""
    if contained is not None:
        http += f"include {quoted(contained.found / 'resolver.conf')};\n"
    elif settings.resolver is not None:
        http += f"resolver {_address(settings.resolver)};\n"
    else:
        http += "".join(origin.upstream() for origin in origins)
    server = _PROXY.format(
        slice=settings.slice_bytes,
        valid=settings.valid_s,
        timeout=settings.origin_timeout_s,
        lock=2 * settings.origin_timeout_s,
    )
    if settings.ca_file is not None:
        server += f"proxy_ssl_trusted_certificate {quoted(settings.ca_file)};\n{_VERIFIED}"
    elif contained is not None and secure:
        server += f"include {quoted(contained.found / 'trusted.conf')};\n{_VERIFIED}"
    resolved_again = contained is not None or settings.resolver is not None
    server += "".join(
        origin.locations(resolved_again=resolved_again, in_cluster=contained is not None) for origin in origins
    )
    if "" not in names:
        server += "location / {\n    return 404;\n}\n"
    return _config(settings, prefix, http=http, server=server, methods=("GET", "HEAD"))


def cache_folder(settings: CacheSettings) -> Path:
    """Give the folder that belongs to nginx alone; the other engine keeps its own beside it."""
    return settings.dir / "nginx"


def max_size(settings: CacheSettings) -> int:
    """Give the size at which nginx evicts: its manager looks only now and then, so it starts below the budget."""
    return settings.size - settings.size // 10


def quoted(value: object) -> str:
    """Write a word of nginx's language, or refuse one that cannot be said there: `$` has no escape."""
    text = str(value)
    if re.search(r"[\x00-\x1f\x7f$]", text):
        raise InputError("nginx cannot use a name with control characters or $", where=repr(text))
    word = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if len(word.encode(errors="surrogateescape")) > LONGEST_WORD:
        raise InputError("is too long for nginx", where=f"{text[:60]}…")
    return word


def _config(settings: Settings, prefix: Path, *, server: str, methods: tuple[str, ...], http: str = "") -> str:
    if not 0 < settings.port < 65536:
        raise InputError("is not a port", where=settings.port)
    contained = settings.contained if isinstance(settings, CacheSettings) else None
    # Nobody would read or shorten the log of an nginx without a supervisor.
    log = "off" if settings.admin_socket is None else f"{quoted(prefix / 'access.log')} stoker"
    complaints = quoted(prefix / "error.log")
    if contained is not None:
        log, complaints = "/dev/stdout stoker", "stderr"
    temporary = "\n    ".join(
        f"{kind}_temp_path {quoted(prefix / kind)};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""\
daemon off;
worker_processes {"auto" if contained is None else contained.workers};
{_user(settings.user)}pid {quoted(prefix / "nginx.pid")};
error_log {complaints} warn;
worker_shutdown_timeout 30s;
events {{
    worker_connections 4096;
}}
http {{
    {temporary}
    # A slice is a request within a request: its length is 0, and the bytes sent are those of the outer one so far.
    log_format stoker "$status $body_bytes_sent $request_length $upstream_cache_status $upstream_bytes_received";
    access_log {log};
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
    client_header_timeout {settings.client_timeout_s}s;
    client_body_timeout {settings.client_timeout_s}s;
    send_timeout {settings.client_timeout_s}s;
    reset_timedout_connection on;
    map $status $stoker_allow {{
        default "";
        405 "{", ".join(methods)}";
    }}
    map $status $stoker_challenge {{
        default "";
        401 Bearer;
    }}
{indent(_token_map(settings) + http, "    ")}\
    server {{
        listen {_listen(settings)};
{"" if contained is None else f"        include {quoted(contained.found / 'listen.conf')};{chr(10)}"}\
        add_header Allow $stoker_allow always;
        add_header WWW-Authenticate $stoker_challenge always;
        add_header X-Cache $upstream_cache_status always;
        if ($uri ~ "[\\x00-\\x1f\\x7f\\\\\\\\]") {{
            return 400;
        }}
{indent(_token_check(settings), "        ")}\
        if ($request_method !~ "^(?:{"|".join(methods)})$") {{
            return 405;
        }}
{indent(server + _admin(settings), "        ")}\
    }}
}}
"""


_FILES = """\
# A name that nothing has, since an index page would hide the listing.
index .stoker-has-no-index;
autoindex on;
autoindex_format json;
autoindex_exact_size on;
# Every link below the root is refused: nginx cannot tell those that stay inside from those that leave.
disable_symlinks on from=$document_root;
"""

_WRITES = """\
dav_methods PUT DELETE;
create_full_put_path on;
dav_access user:rw group:r all:r;
# The dav module follows links, and deletes whole folders; so somebody looks first.
auth_request /-/guard;
set $stoker_target $uri;
"""

_REDIRECTS = "300 301 302 303 305 306 307 308"

_PROXY = """\
client_max_body_size 1024;
# A client that takes us for a forward proxy means another host than we would ask.
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
# Nothing of the client's request but its path and query reaches the origin.
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
# X-Accel headers would let an origin steer us.
proxy_ignore_headers Cache-Control Expires Set-Cookie Vary
    X-Accel-Redirect X-Accel-Expires X-Accel-Limit-Rate X-Accel-Buffering X-Accel-Charset;
proxy_hide_header Set-Cookie;
proxy_hide_header X-Cache;
proxy_redirect off;
proxy_intercept_errors on;
# Followed, a redirect would lead to any host; handed on, it would lead clients past us.
location @elsewhere {{
    return 502;
}}
"""


_VERIFIED = """\
proxy_ssl_verify on;
proxy_ssl_verify_depth 8;
proxy_ssl_server_name on;
proxy_ssl_protocols TLSv1.2 TLSv1.3;
"""


def _guard(settings: ServeSettings) -> str:
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
    proxy_pass {_admin_url(settings)};
}}
"""


def _admin(settings: Settings) -> str:
    """Write the locations of `/-/`; a probe for health needs no token, and nobody but nginx to answer it."""
    healthy = 'location = /-/healthy {\n    access_log off;\n    default_type text/plain;\n    return 200 "ok\\n";\n}\n'
    if isinstance(settings, CacheSettings) and settings.contained is not None:
        healthy += _told(settings.contained)
    if settings.admin_socket is None:
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
    proxy_pass {_admin_url(settings)};
}}
"""


def _told(contained: Contained) -> str:
    return "".join(
        f"""\
location = /-/{name} {{
    access_log off;
    default_type application/json;
    alias {quoted(contained.told / f"{name}.json")};
}}
"""
        for name in ("origins", "stats")
    )


def _admin_url(settings: Settings) -> str:
    if ":" in str(settings.admin_socket):
        raise InputError("a socket's path cannot hold a colon", where=settings.admin_socket)
    return quoted(f"http://unix:{settings.admin_socket}")


def _token_map(settings: Settings) -> str:
    """Compare the token as digests under a key that only who has the token knows.

    nginx compares byte by byte and stops at the first difference; with both sides hashed, the time that this takes
    tells nothing about the token. It also keeps the token itself out of the configuration.
    """
    if settings.token is None:
        return ""
    if not _TOKEN.fullmatch(settings.token):
        raise InputError("a token is 1 to 1024 visible ASCII characters, without spaces")
    login = base64.b64encode(f"{LOGIN}:{settings.token}".encode()).decode()
    return f"""\
map $http_authorization $stoker_digest {{
    default "{_digest(settings.token, f"Bearer {settings.token}")}";
    "~^Basic " "{_digest(settings.token, f"Basic {login}")}";
}}
map "$secure_link$uri" $stoker_refused {{
    default 1;
    "~^1/" 0;
    /-/healthy 0;
}}
"""


def _token_check(settings: Settings) -> str:
    if settings.token is None:
        return ""
    return f"""\
secure_link $stoker_digest;
secure_link_md5 "{_key(settings.token)}$http_authorization";
if ($stoker_refused) {{
    return 401;
}}
"""


def _key(token: str) -> str:
    return hashlib.sha256(b"stoker nginx " + token.encode()).hexdigest()


def _digest(token: str, header: str) -> str:
    digest = hashlib.md5((_key(token) + header).encode(), usedforsecurity=False).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


@dataclass(frozen=True)
class _Origin:
    """An origin's URL in pieces; `path` is decoded and ends without a slash."""

    number: int
    name: str
    secure: bool
    host: str
    port: int
    path: str

    @classmethod
    def of(cls, number: int, name: str, url: str) -> _Origin:
        if name and not _ORIGIN_NAME.fullmatch(name):
            raise InputError("is not an origin's name", where=repr(name), hint="letters, digits, dot, - and _")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InputError("is not a URL", where=url) from error
        if parts.scheme not in ("http", "https"):
            raise InputError("nginx caches only http and https origins", where=url, hint="use --engine embedded")
        if parts.username is not None or parts.query or parts.fragment or re.search(r"[\x00-\x20\x7f]", url):
            raise InputError(
                "an origin is a plain URL, without login, query or fragment",
                where=url,
                hint="--engine embedded sends a login",
            )
        secure = parts.scheme == "https"
        path = unquote(parts.path, errors="surrogateescape").rstrip("/")
        if re.search(r"[\x00-\x1f\x7f$?\\]|/\.\.?(/|$)|//", path):
            raise InputError("nginx cannot ask for such a path", where=url)
        return cls(number, name, secure, _address(parts.hostname or ""), port or (443 if secure else 80), path)

    def upstream(self) -> str:
        return f"""\
upstream stoker_{self.number} {{
    server {self.host}:{self.port} max_fails=0;
    keepalive 32;
}}
"""

    def locations(self, *, resolved_again: bool, in_cluster: bool = False) -> str:
        """Write where the origin appears, in slices, and again as a whole, for objects that have none.

        The target is fixed, or a variable of our own, since only those are resolved again. After the rewrite nginx
        encodes the path anew, so that what was checked is what is asked for.
        """
        prefix = f"/{self.name}" if self.name else ""
        shown = self.host if self.port == (443 if self.secure else 80) else f"{self.host}:{self.port}"
        target = "$stoker_origin" if resolved_again else f"stoker_{self.number}"
        full = f"{self.host}{self._domain()}" if in_cluster else self.host
        chosen = f'    set $stoker_origin "{full}:{self.port}";\n' if resolved_again else ""
        common = f"""\
{chosen}    proxy_set_header Host "{shown}";
    proxy_set_header Connection "";
    proxy_set_header Accept-Encoding identity;
    proxy_set_header User-Agent stoker;
    proxy_ssl_name "{self.host.strip("[]")}";
    proxy_pass {"https" if self.secure else "http"}://{target};
"""
        # nginx would redirect by itself, by the location's rules, that is, to 502.
        bare = f'location = "{prefix}" {{\n    return 301 "{prefix}/";\n}}\n' if prefix else ""
        return f"""\
{bare}location "{prefix}/" {{
{common}\
    rewrite "^{prefix.replace(".", "[.]")}/(.*)$" {self._replacement()} break;
    proxy_set_header Range $slice_range;
    # Each piece ends where the next begins, whatever it holds: names have no spaces.
    proxy_cache_key "{self.name} $slice_range $uri";
    error_page {_REDIRECTS} = @elsewhere;
    error_page 416 = @whole_{self.number};
}}
# An empty object has not even a first slice; and a range that cannot be had is best refused by who knows the size.
location @whole_{self.number} {{
{common}\
    slice 0;
    proxy_cache off;
    proxy_set_header Range $http_range;
    error_page {_REDIRECTS} = @elsewhere;
}}
"""

    def _domain(self) -> str:
        """Complete the name of a Service as `search` in resolv.conf would, which nginx does not read."""
        if self.host.endswith(".svc"):
            return ".$stoker_domain"
        return "" if "." in self.host or ":" in self.host else ".$stoker_near"

    def _replacement(self) -> str:
        return quoted(f"{self.path}/")[:-1] + '$1?"'  # without the query: it would be cached under any other


def zone_bytes(settings: CacheSettings) -> int:
    """Give the memory that the keys take."""
    return _zone(settings) * MIB


def _zone(settings: CacheSettings) -> int:
    """Size the memory for keys in MiB: 8000 keys a MiB, and four times as many as there are whole slices."""
    return min(1024, 10 + 4 * settings.size // settings.slice_bytes // 8000)


def _user(user: str | None) -> str:
    if user is None:
        return ""
    if not _USER.fullmatch(user):
        raise InputError("is not a user's name", where=repr(user))
    return f'user "{user}";\n'


def _listen(settings: Settings) -> str:
    return f"{_address(settings.host)}:{settings.port} backlog=1024"


def _address(host: str) -> str:
    """Write a host as nginx wants it: a name or an IPv4 address as it is, an IPv6 address in brackets."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if address is None or "%" in host:  # what follows a % in an address may be anything
        if _HOST_NAME.fullmatch(host) and host.lower() != "unix":  # `unix:80` is a socket
            return host
        raise InputError("is not the name or address of a host", where=repr(host))
    return f"[{address}]" if address.version == 6 else str(address)


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
