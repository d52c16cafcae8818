"""One origin of an nginx cache: its upstream, and the locations that proxy and cache it in slices."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from stoker.errors import InputError
from stoker.serve.nginx.syntax import format_host, quote_word

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_REDIRECT_STATUSES = "300 301 302 303 305 306 307 308"


@dataclass(frozen=True)
class OriginLocations:
    """A parsed origin; `path` is decoded and has no trailing slash."""

    number: int
    name: str
    is_https: bool
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, number: int, name: str, url: str) -> OriginLocations:
        """Parse and check an origin's name and URL."""
        if name and not _NAME.fullmatch(name):
            raise InputError("invalid origin name", where=repr(name), hint="use letters, digits, dot, - and _")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InputError("invalid URL", where=url) from error
        if parts.scheme not in ("http", "https"):
            raise InputError("nginx only supports http and https origins", where=url, hint="use --engine embedded")
        if parts.username is not None or parts.query or parts.fragment or re.search(r"[\x00-\x20\x7f]", url):
            raise InputError(
                "nginx only supports origins without user, query and fragment",
                where=url,
                hint="use --engine embedded to send credentials",
            )
        is_https = parts.scheme == "https"
        path = unquote(parts.path, errors="surrogateescape").rstrip("/")
        if re.search(r"[\x00-\x1f\x7f$?\\]|/\.\.?(/|$)|//", path):
            raise InputError("nginx does not support this path", where=url)
        return cls(number, name, is_https, format_host(parts.hostname or ""), port or (443 if is_https else 80), path)

    def upstream(self) -> str:
        """Return the upstream block."""
        return f"""\
upstream stoker_{self.number} {{
    server {self.host}:{self.port} max_fails=0;
    keepalive 32;
}}
"""

    def locations(self, *, re_resolve: bool, in_cluster: bool = False) -> str:
        """Return the location that caches the origin in slices, and the uncached one for objects without slices.

        The proxy_pass target is a fixed upstream, or a variable of ours, because nginx only re-resolves variables.
        After the rewrite nginx re-encodes the path, so that the path it checked is the path it requests.
        """
        prefix = f"/{self.name}" if self.name else ""
        host_header = self.host if self.port == (443 if self.is_https else 80) else f"{self.host}:{self.port}"
        target = "$stoker_origin" if re_resolve else f"stoker_{self.number}"
        fqdn = f"{self.host}{self._search_domain()}" if in_cluster else self.host
        set_origin = f'    set $stoker_origin "{fqdn}:{self.port}";\n' if re_resolve else ""
        common = f"""\
{set_origin}    proxy_set_header Host "{host_header}";
    proxy_set_header Connection "";
    proxy_set_header Accept-Encoding identity;
    proxy_set_header User-Agent stoker;
    proxy_ssl_name "{self.host.strip("[]")}";
    proxy_pass {"https" if self.is_https else "http"}://{target};
"""
        # nginx's own redirect would go through error_page, that is, become a 502.
        bare = f'location = "{prefix}" {{\n    return 301 "{prefix}/";\n}}\n' if prefix else ""
        return f"""\
{bare}location "{prefix}/" {{
{common}\
    rewrite "^{prefix.replace(".", "[.]")}/(.*)$" {self._rewrite_target()} break;
    proxy_set_header Range $slice_range;
    # Unambiguous, because names and ranges contain no spaces.
    proxy_cache_key "{self.name} $slice_range $uri";
    error_page {_REDIRECT_STATUSES} = @elsewhere;
    error_page 416 = @whole_{self.number};
}}
# An empty object has no first slice; for an unsatisfiable range, only the origin knows the size to report.
location @whole_{self.number} {{
{common}\
    slice 0;
    proxy_cache off;
    proxy_set_header Range $http_range;
    error_page {_REDIRECT_STATUSES} = @elsewhere;
}}
"""

    def _search_domain(self) -> str:
        """Return the suffix that completes a Service name; nginx ignores the search domains of resolv.conf."""
        if self.host.endswith(".svc"):
            return ".$stoker_domain"
        return "" if "." in self.host or ":" in self.host else ".$stoker_near"

    def _rewrite_target(self) -> str:
        return quote_word(f"{self.path}/")[:-1] + '$1?"'  # drops the query, which is not part of the cache key
