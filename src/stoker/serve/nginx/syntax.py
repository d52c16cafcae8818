"""nginx's configuration syntax: quoted words, and hosts as nginx writes them."""

from __future__ import annotations

import ipaddress
import re

from stoker.errors import InputError

MAX_WORD_BYTES = 3000
"""nginx reads its configuration through a buffer of 4096 bytes, which no word may exceed."""

_HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252}[A-Za-z0-9_.])?")


def quote_word(value: object) -> str:
    """Return a value as a quoted word; raise InputError for what nginx cannot escape, such as `$`."""
    text = str(value)
    if re.search(r"[\x00-\x1f\x7f$]", text):
        raise InputError("nginx does not support control characters or $ in names", where=repr(text))
    word = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if len(word.encode(errors="surrogateescape")) > MAX_WORD_BYTES:
        raise InputError(f"longer than {MAX_WORD_BYTES} bytes, which nginx does not support", where=f"{text[:60]}…")
    return word


def format_host(host: str) -> str:
    """Return a host name or IPv4 address unchanged, and an IPv6 address in brackets."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if address is None or "%" in host:  # an IPv6 zone after % may contain anything
        if _HOST_NAME.fullmatch(host) and host.lower() != "unix":  # `unix:80` would be a socket
            return host
        raise InputError("invalid host name or address", where=repr(host))
    return f"[{address}]" if address.version == 6 else str(address)
