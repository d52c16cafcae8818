"""What an API server answers when it says no, in a sentence of ours and the right class of error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stoker.errors import (
    AccessError,
    ConflictError,
    FullError,
    InputError,
    MissingError,
    NotFoundError,
    StokerError,
    UnavailableError,
)

_FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]+)" cannot (?P<verb>\S+) resource "(?P<what>[^"]+)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]+)")?'
)
_QUOTA = re.compile(
    r"exceeded quota: (?P<name>\S+), requested: (?P<asked>.+?), used: (?P<used>.+?), limited: (?P<limit>.+)"
)
_PROGRAM = re.compile(r'exec: "(?P<name>[^"]+)": (?:executable file not found|stat [^:]+: no such file)')
_NAMESPACE = re.compile(r'namespaces "([^"]+)" not found')


def describe_quota_error(message: str) -> str:
    """Tell which quota has no room; nothing if it is not that."""
    found = _QUOTA.search(message)
    if found is None:
        return ""
    used = f"{found['used']} used of {found['limit']}"
    return f"quota {found['name']} leaves no room: {found['asked']} asked for, {used}"


def to_error(status: Mapping[str, Any], where: str) -> StokerError:
    """Give the error for a `Status`, the API server's own form of telling one."""
    code, message = int(status.get("code") or 0), str(status.get("message") or "no reason was given").strip()
    details = status.get("details") or {}
    if what := describe_quota_error(message):
        return FullError(what, where=where, hint="ask for less, stop other jobs, or have the quota raised")
    if found := _NAMESPACE.search(message):
        hint = "name another, or set kubernetes.create_namespace: true"
        return NotFoundError(f"there is no namespace {found[1]!r}", where=where, hint=hint)
    if found := _PROGRAM.search(message):
        return NotFoundError(f"there is no program {found['name']!r} in the container", where=where)
    if code == 401:
        return AccessError("the cluster does not know you", where=where, hint="log in again, as for kubectl")
    if code == 403:
        return AccessError(
            _forbidden(message), where=where, hint="`stoker job plan FILE --on k8s --rbac WHO` shows what is needed"
        )
    if code == 404 and not details.get("name"):
        return MissingError(f"the cluster does not serve {details.get('kind') or 'this kind of object'}", where=where)
    if code == 404:
        return NotFoundError(f"there is no {details.get('kind', 'object')} {details['name']}", where=where)
    if code == 409:
        return ConflictError(message, where=where)
    if code in (400, 413, 422) or "not declared in schema" in message:  # which a server-side apply answers with 500
        return InputError(f"the cluster refuses it: {message}", where=where)
    if code == 410:
        return UnavailableError("the cluster has forgotten so old a version", where=where)
    return UnavailableError(f"the cluster answered {code or 'with an error'}: {message}", where=where)


def _forbidden(message: str) -> str:
    found = _FORBIDDEN.search(message)
    if found is None:
        return f"permission denied: {message}"
    group = f".{found['group']}" if found["group"] else ""
    inside = f" in namespace {found['namespace']}" if found["namespace"] else ""
    return f"user {found['user']} may not {found['verb']} {found['what']}{group}{inside}"
