"""Translate error `Status` objects of the API server into stoker errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stoker.errors import (
    AccessDeniedError,
    ConflictError,
    InputError,
    MissingError,
    NotFoundError,
    StokerError,
    StorageFullError,
    UnavailableError,
)

NOT_ALLOWED = "is not allowed to"
RBAC_HINT = "`stoker job plan FILE --on k8s --rbac WHO` prints the required Role"

_FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]+)" cannot (?P<verb>\S+) resource "(?P<resource>[^"]+)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]+)")?'
)
_QUOTA = re.compile(
    r"exceeded quota: (?P<name>\S+), requested: (?P<requested>.+?), used: (?P<used>.+?), limited: (?P<limit>.+)"
)
_PROGRAM = re.compile(r'exec: "(?P<name>[^"]+)": (?:executable file not found|stat [^:]+: no such file)')
_NAMESPACE = re.compile(r'namespaces "([^"]+)" not found')


class RbacDeniedError(AccessDeniedError):
    """Request denied by RBAC, as opposed to an admission controller such as Pod Security."""


def describe_quota_error(message: str) -> str:
    """Return which ResourceQuota is exceeded and by what; "" if the message is about something else."""
    match = _QUOTA.search(message)
    if match is None:
        return ""
    return (
        f"quota {match['name']} exceeded: requested {match['requested']}, used {match['used']}, limit {match['limit']}"
    )


def to_error(status: Mapping[str, Any], where: str) -> StokerError:
    """Return the error for a `Status` object of the API server."""
    code, message = int(status.get("code") or 0), str(status.get("message") or "no message").strip()
    details = status.get("details") or {}
    if what := describe_quota_error(message):
        return StorageFullError(
            what, where=where, hint="request less, stop other jobs, or ask the cluster administrator to raise the quota"
        )
    if match := _NAMESPACE.search(message):
        hint = "choose another namespace, or set kubernetes.create_namespace: true"
        return NotFoundError(f"namespace {match[1]!r} not found", where=where, hint=hint)
    if match := _PROGRAM.search(message):
        return NotFoundError(f"program {match['name']!r} not found in the container", where=where)
    if code == 401:
        hint = "log in again, as for kubectl"
        return AccessDeniedError("authentication failed (401 Unauthorized)", where=where, hint=hint)
    if code == 403:
        return _to_forbidden_error(message, where)
    if code == 404 and not details.get("name"):
        return MissingError(f"the cluster has no API for {details.get('kind') or 'this kind of object'}", where=where)
    if code == 404:
        return NotFoundError(f"{details.get('kind', 'object')} {details['name']} not found", where=where)
    if code == 409:
        return ConflictError(message, where=where)
    if code in (400, 413, 422) or "not declared in schema" in message:  # server-side apply answers the latter with 500
        return InputError(f"the API server rejected the object: {message}", where=where)
    if code == 410:
        return UnavailableError("the resource version has expired (410 Gone)", where=where)
    return UnavailableError(f"the API server returned {code or 'an error'}: {message}", where=where)


def _to_forbidden_error(message: str, where: str) -> AccessDeniedError:
    match = _FORBIDDEN.search(message)
    if match is None:
        return AccessDeniedError(f"permission denied: {message}", where=where, hint=RBAC_HINT)
    group = f".{match['group']}" if match["group"] else ""
    namespace = f" in namespace {match['namespace']}" if match["namespace"] else ""
    what = f"user {match['user']} {NOT_ALLOWED} {match['verb']} {match['resource']}{group}{namespace}"
    return RbacDeniedError(what, where=where, hint=RBAC_HINT)
