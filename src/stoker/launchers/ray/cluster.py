"""Ray cluster, through its dashboard's job API; the only local module that imports the `ray` package."""

from __future__ import annotations

import json
import logging
import os
import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from stoker.core import json_io
from stoker.errors import AccessDeniedError, InputError, MissingExtraError, SpecError, UnavailableError

if TYPE_CHECKING:
    import requests
    from ray.job_submission import JobSubmissionClient

PORT = 8265
RESPONSE_TIMEOUT_S = 5.0
LOCAL_TIMEOUT_S = 1.0
MAX_UPLOAD_BYTES = 512 * 2**20
"""Ray's limit for the archive of a working directory."""
UNKNOWN_VERSION = "unknown"
"""Version of a cluster that requires a token to report it."""
_FINAL_STATES = ("STOPPED", "SUCCEEDED", "FAILED")
_USAGE = re.compile(r"^(\S+)/(\S+) (\S+)(?: \((\S+) used of (\S+) reserved)?", re.MULTILINE)
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_HINT = (
    "pass the address of the Ray dashboard (default port 8265). To expose the dashboard, start Ray with "
    "`ray start --head --dashboard-host=0.0.0.0`"
)


def resolve_address(target: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the dashboard's URL: from `target`, RAY_ADDRESS, or of a cluster on this machine; None without any."""
    if target:
        return f"http://{_with_port(target.rstrip('/'))}"
    address = environ.get("RAY_API_SERVER_ADDRESS") or environ.get("RAY_ADDRESS")
    if address and address.startswith(("http://", "https://")):
        return address.rstrip("/")
    local = f"http://127.0.0.1:{PORT}"
    if address and address not in ("auto", "local"):
        # The address of a Ray client (ray://host:10001) or of the GCS (host:6379); the dashboard is on the same host.
        host = address.removeprefix("ray://").rstrip("/")
        return f"http://{host.rpartition(':')[0] or host}:{PORT}"
    if address == "local":
        return None
    return local if address == "auto" or _fetch_version(local, LOCAL_TIMEOUT_S) else None


def _with_port(target: str) -> str:
    host, _, port = target.rpartition(":")
    if host and not port.isdigit():
        raise InputError(f"{target!r} is not the address of a Ray cluster", hint="use ray://host or ray://host:8265")
    return target if host else f"{target}:{PORT}"


def require_ray() -> None:
    """Raise if the `ray` package or its job API is not installed."""
    for package in ("ray", "aiohttp"):  # `ray` without the extra `default` lacks the packages of its job API
        if find_spec(package) is None:
            raise MissingExtraError("ray[default]", "ray", purpose="the launcher 'ray'")


def local_version() -> str:
    """Return the version of Ray that is installed here, without importing it."""
    from importlib.metadata import version

    return version("ray")


def cluster_version(address: str) -> str:
    """Return the version of Ray on the cluster; raise if the cluster does not respond."""
    version = _fetch_version(address, RESPONSE_TIMEOUT_S)
    if version is None:
        raise UnavailableError("no response from the Ray cluster", where=address, hint=_HINT)
    if not version:
        raise UnavailableError("not a Ray dashboard, or one older than Ray 1.9", where=address, hint=_HINT)
    if version == UNKNOWN_VERSION:
        _make_client(address)  # raises if the token is missing or wrong
    return version


def _fetch_version(address: str, timeout_s: float) -> str | None:
    """Return the version that a dashboard reports; "" for another kind of server, None without a response."""
    try:
        with urllib.request.urlopen(f"{address}/api/version", timeout=timeout_s) as response:
            return str(json_io.parse(response.read(1 << 16), address)["ray_version"])
    except urllib.error.HTTPError as error:
        return UNKNOWN_VERSION if error.code in (401, 403) else ""
    except (SpecError, ValueError, KeyError, TypeError, HTTPException):
        return ""
    except OSError:
        return None


class SubmittedJob(NamedTuple):
    """A job that was submitted to a cluster, and its times in seconds."""

    name: str
    is_over: bool
    is_stopped: bool
    """Whether it was stopped through the job API."""
    message: str
    began: float
    ended: float | None


class RayCluster:
    """Client of one Ray cluster: its jobs, its resources, and small values for its driver."""

    def __init__(self, address: str) -> None:
        self.address = address
        cluster_version(address)
        self._client = _make_client(address)

    def free(self) -> dict[str, float]:
        """Return the free amount of each resource; empty if the cluster does not report it."""
        total = Counter[str]()
        for node in self.free_by_node():
            total.update(node)
        return dict(total)

    def free_by_node(self) -> list[dict[str, float]]:
        """Return the free and unreserved amount of each resource per node; empty if the cluster does not report it."""
        return [parse_free(text) for text in self._usage_by_node()]

    def total_by_node(self) -> list[dict[str, float]]:
        """Return the total amount of each resource per node; empty if the cluster does not report it."""
        return [parse_total(text) for text in self._usage_by_node()]

    def _usage_by_node(self) -> list[str]:
        """Return the human-readable usage text of each node, the only source without Ray's own protocol."""
        response = self._send("GET", "/nodes?view=summary")
        usage = (response.json().get("data") or {}).get("nodeLogicalResources") if response.ok else None
        return list((usage or {}).values())

    def nodes(self) -> dict[str, str]:
        """Return the state of every node by its address; empty if the cluster does not report it."""
        response = self._send("GET", "/api/v0/nodes")
        if not response.ok:
            return {}
        nodes = ((response.json().get("data") or {}).get("result") or {}).get("result") or []
        dead_first = sorted(nodes, key=lambda node: node["state"] == "ALIVE")  # a restarted node is listed twice
        return {str(node["node_ip"]): str(node["state"]).lower() for node in dead_first}

    def put(self, key: str, value: object) -> None:
        """Store a value under a key; it appears on no command line and in no job list."""
        data = json.dumps(value).encode()
        # The package upload is the only way through the dashboard into the cluster's key-value store.
        self._request("PUT", f"/api/packages/gcs/{key}.zip", data)

    def _request(self, method: str, path: str, data: bytes | None = None) -> requests.Response:
        return self._check(self._send(method, path, data), path)

    def _check(self, response: requests.Response, path: str) -> requests.Response:
        if not response.ok:
            raise UnavailableError(f"Ray cluster returned HTTP {response.status_code} for {path}", where=self.address)
        return response

    def _send(self, method: str, path: str, data: bytes | None = None) -> requests.Response:
        with _translate_errors(self.address, "no response from the Ray cluster"):
            return self._client._do_request(method, path, data=data, timeout=RESPONSE_TIMEOUT_S)

    def submit(self, name: str, entrypoint: str, archive: Path, variables: Mapping[str, str]) -> None:
        """Submit a driver as a job whose working directory is the content of an archive."""
        environment = {"working_dir": str(archive), "env_vars": dict(variables)}
        with _translate_errors(self.address, "Ray cluster rejected the job"):
            self._client.submit_job(entrypoint=entrypoint, submission_id=name, runtime_env=environment)

    def state(self, name: str) -> tuple[bool, str]:
        """Return whether a job is over, and Ray's message about it."""
        path = f"/api/jobs/{name}"  # not with Ray's client, which has no timeout for this
        response = self._send("GET", path)
        if response.status_code == HTTPStatus.NOT_FOUND:
            return True, "the job is unknown to the cluster: was its head node restarted?"
        info = self._check(response, path).json()
        return info["status"] in _FINAL_STATES, str(info.get("message") or "")

    def jobs(self) -> list[SubmittedJob]:
        """List the jobs that were submitted to the cluster."""
        path = "/api/jobs/"
        rows = self._check(self._send("GET", path), path).json()
        return [_to_job(row) for row in rows if isinstance(row, dict) and row.get("submission_id")]

    def stop(self, name: str) -> None:
        """Request that Ray sends SIGTERM to a driver."""
        self._request("POST", f"/api/jobs/{name}/stop")

    def tail(self, name: str) -> AsyncGenerator[str, None]:
        """Yield a driver's log from its beginning, as it grows."""
        return cast("AsyncGenerator[str, None]", self._client.tail_job_logs(name))


def _to_job(row: dict[str, Any]) -> SubmittedJob:
    status = str(row.get("status", ""))
    return SubmittedJob(
        name=str(row["submission_id"]),
        is_over=status in _FINAL_STATES,
        is_stopped=status == "STOPPED",
        message=str(row.get("message") or ""),
        began=float(row.get("start_time") or 0) / 1000,
        ended=float(row["end_time"]) / 1000 if row.get("end_time") else None,
    )


@contextmanager
def _translate_errors(address: str, what: str) -> Iterator[None]:
    """Raise the errors of Ray's client as ours, in one sentence."""
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        hint = "set RAY_AUTH_MODE=token, and the token in RAY_AUTH_TOKEN or ~/.ray/auth_token"
        raise AccessDeniedError(
            "Ray cluster requires a token; yours is missing or wrong", where=address, hint=hint
        ) from error
    except (RuntimeError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise UnavailableError(f"{what}: {reason}", where=address) from error


def parse_free(usage: str) -> dict[str, float]:
    """Parse free resources from lines such as `1.0/4.0 CPU (0.5 used of 2.0 reserved in placement groups)`."""
    free = {}
    for used, total, name, used_in_group, reserved in _USAGE.findall(usage):
        unused_reserved = _parse_amount(reserved or "0") - _parse_amount(used_in_group or "0")
        free[name] = _parse_amount(total) - _parse_amount(used) - unused_reserved
    return free


def parse_total(usage: str) -> dict[str, float]:
    """Parse total resources from the same lines."""
    return {name: _parse_amount(total) for _, total, name, _, _ in _USAGE.findall(usage)}


def _parse_amount(text: str) -> float:
    digits = text.rstrip("BKMGTi")
    return float(digits) * _UNITS.get(text[len(digits) :], 1)


def _make_client(address: str) -> JobSubmissionClient:
    require_ray()
    from ray.job_submission import JobSubmissionClient

    for name in ("dashboard_sdk", "job.sdk"):  # they log every upload
        logging.getLogger(f"ray.dashboard.modules.{name}").setLevel(logging.WARNING)
    headers = json_io.parse(os.environ.get("RAY_JOB_HEADERS") or "{}", "RAY_JOB_HEADERS")
    with _translate_errors(address, "Ray cluster refused the connection"):
        return JobSubmissionClient(address, headers=headers or None)
