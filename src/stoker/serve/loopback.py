"""Which addresses only this machine can reach."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether an address is only reachable from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_loopback_header(header: str) -> bool:
    """Return whether a Host header names this machine: a page of another site may point its own name here."""
    name = header.rpartition(":")[0] if header.rpartition(":")[2].isdecimal() else header
    return is_loopback(name.strip("[]"))
