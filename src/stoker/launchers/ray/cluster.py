"""A Ray cluster through its job API: the only home of the `ray` package on this side."""

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
from typing import TYPE_CHECKING, cast

from stoker.errors import AccessError, InputError, MissingExtraError, UnavailableError

if TYPE_CHECKING:
    import requests
    from ray.job_submission import JobSubmissionClient

PORT = 8265
ANSWER_S = 5.0
HERE_S = 1.0
LARGEST = 512 * 2**20
"""What Ray takes of a working folder, as an archive."""
GUARDED = "unknown"
"""The version of a cluster that tells nothing without a token."""
_OVER = ("STOPPED", "SUCCEEDED", "FAILED")
_USAGE = re.compile(r"^(\S+)/(\S+) (\S+)(?: \((\S+) used of (\S+) reserved)?", re.MULTILINE)
_SIZES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_HINT = "its dashboard is wanted, at port 8265 if you name none; ray start --head --dashboard-host=0.0.0.0 opens it"


def address_of(place: str | None, environ: Mapping[str, str]) -> str | None:
    """Give the dashboard's URL: of the place, of RAY_ADDRESS, or of a cluster here; None when there is none."""
    if place:
        return f"http://{_with_port(place.rstrip('/'))}"
    named = environ.get("RAY_API_SERVER_ADDRESS") or environ.get("RAY_ADDRESS")
    if named and named.startswith(("http://", "https://")):
        return named.rstrip("/")
    here = f"http://127.0.0.1:{PORT}"
    if named and named not in ("auto", "local"):
        # Of a Ray client (ray://host:10001) or of the store (host:6379): the dashboard is on the same host.
        host = named.removeprefix("ray://").rstrip("/")
        return f"http://{host.rpartition(':')[0] or host}:{PORT}"
    if named == "local":
        return None
    return here if named == "auto" or _version(here, HERE_S) else None


def _with_port(place: str) -> str:
    host, _, port = place.rpartition(":")
    if host and not port.isdigit():
        raise InputError(f"{place!r} is no address of a Ray cluster", hint="write ray://host or ray://host:8265")
    return place if host else f"{place}:{PORT}"


def need_ray() -> None:
    """Refuse to go on without the package."""
    for package in ("ray", "aiohttp"):  # a bare `ray` lacks what its job API needs
        if find_spec(package) is None:
            raise MissingExtraError("ray[default]", "ray", purpose="the launcher 'ray'")


def version_here() -> str:
    """Tell which Ray is installed on this side; it is not imported."""
    from importlib.metadata import version

    return version("ray")


def version_there(address: str) -> str:
    """Tell which Ray the cluster runs, and so whether there is one."""
    found = _version(address, ANSWER_S)
    if found is None:
        raise UnavailableError("no Ray cluster answers", where=address, hint=_HINT)
    if not found:
        raise UnavailableError("what answers is no Ray dashboard, or one of before Ray 1.9", where=address, hint=_HINT)
    if found == GUARDED:
        _client(address)  # which knows the token, or says what is wrong with it
    return found


def _version(address: str, timeout_s: float) -> str | None:
    """Give the version that a dashboard tells: none when it tells none, None when nobody answers."""
    try:
        with urllib.request.urlopen(f"{address}/api/version", timeout=timeout_s) as answer:
            told = json.loads(answer.read(1 << 16))
            return str(told["ray_version"])
    except urllib.error.HTTPError as error:
        return GUARDED if error.code in (401, 403) else ""
    except (ValueError, KeyError, TypeError, HTTPException):
        return ""
    except OSError:
        return None


class Cluster:
    """Jobs of a cluster, and small values that its driver can read."""

    def __init__(self, address: str) -> None:
        self.address = address
        version_there(address)
        self._client = _client(address)

    def free(self) -> dict[str, float]:
        """Tell what of each resource nobody uses; nothing where the cluster does not tell."""
        total = Counter[str]()
        for node in self.free_by_node():
            total.update(node)
        return dict(total)

    def free_by_node(self) -> list[dict[str, float]]:
        """Tell what of each resource nobody uses or has reserved, node by node; nothing where it does not tell."""
        return [free_of(text) for text in self._usages()]

    def total_by_node(self) -> list[dict[str, float]]:
        """Tell what of each resource there is, node by node; nothing where it does not tell."""
        return [total_of(text) for text in self._usages()]

    def _usages(self) -> list[str]:
        """Give what is told of each node, for people to read; nothing else tells it without Ray's own protocol."""
        answer = self._say("GET", "/nodes?view=summary")
        told = (answer.json().get("data") or {}).get("nodeLogicalResources") if answer.ok else None
        return list((told or {}).values())

    def nodes(self) -> dict[str, str]:
        """Tell the state of every node by its address; nothing where the cluster does not tell."""
        answer = self._say("GET", "/api/v0/nodes")
        if not answer.ok:
            return {}
        every = ((answer.json().get("data") or {}).get("result") or {}).get("result") or []
        ordered = sorted(every, key=lambda one: one["state"] == "ALIVE")  # a node that came back is listed twice
        return {str(one["node_ip"]): str(one["state"]).lower() for one in ordered}

    def put(self, key: str, value: object) -> None:
        """Keep a value under a key, in place of an earlier one; it is on no command line, and in no list of jobs."""
        data = json.dumps(value).encode()
        # As packages are uploaded; the dashboard has no other road into the cluster's store.
        self._ask("PUT", f"/api/packages/gcs/{key}.zip", data)

    def _ask(self, method: str, path: str, data: bytes | None = None) -> requests.Response:
        return self._sound(self._say(method, path, data), path)

    def _sound(self, answer: requests.Response, path: str) -> requests.Response:
        if not answer.ok:
            raise UnavailableError(f"the Ray cluster says HTTP {answer.status_code} to {path}", where=self.address)
        return answer

    def _say(self, method: str, path: str, data: bytes | None = None) -> requests.Response:
        with _told(self.address, "the Ray cluster does not answer"):
            return self._client._do_request(method, path, data=data, timeout=ANSWER_S)

    def submit(self, name: str, entrypoint: str, archive: Path, variables: Mapping[str, str]) -> None:
        """Start a driver in the working folder of an archive."""
        environment = {"working_dir": str(archive), "env_vars": dict(variables)}
        with _told(self.address, "the Ray cluster did not take the job"):
            self._client.submit_job(entrypoint=entrypoint, submission_id=name, runtime_env=environment)

    def state(self, name: str) -> tuple[bool, str]:
        """Tell whether a job is over, and what Ray says of it."""
        path = f"/api/jobs/{name}"  # Ray's own client would wait for the answer without an end
        answer = self._say("GET", path)
        if answer.status_code == HTTPStatus.NOT_FOUND:
            return True, "the cluster no longer knows it: was its head started anew?"
        told = self._sound(answer, path).json()
        return told["status"] in _OVER, str(told.get("message") or "")

    def stop(self, name: str) -> None:
        """Have Ray send SIGTERM to a driver."""
        self._ask("POST", f"/api/jobs/{name}/stop")

    def tail(self, name: str) -> AsyncGenerator[str, None]:
        """Give a driver's log from its beginning, as it grows."""
        return cast("AsyncGenerator[str, None]", self._client.tail_job_logs(name))


@contextmanager
def _told(address: str, what: str) -> Iterator[None]:
    """Put what Ray's client raises into one sentence."""
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        hint = "set RAY_AUTH_MODE=token, and the token in RAY_AUTH_TOKEN or ~/.ray/auth_token"
        raise AccessError(
            "the Ray cluster wants a token, and yours is missing or wrong", where=address, hint=hint
        ) from error
    except (RuntimeError, OSError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise UnavailableError(f"{what}: {said}", where=address) from error


def free_of(usage: str) -> dict[str, float]:
    """Read what a node has free from lines such as `1.0/4.0 CPU (0.5 used of 2.0 reserved in placement groups)`."""
    found = {}
    for used, total, name, used_there, reserved in _USAGE.findall(usage):
        found[name] = _number(total) - _number(used) - _number(reserved or "0") + _number(used_there or "0")
    return found


def total_of(usage: str) -> dict[str, float]:
    """Read what a node has at all from the same lines."""
    return {name: _number(total) for _, total, name, _, _ in _USAGE.findall(usage)}


def _number(text: str) -> float:
    digits = text.rstrip("BKMGTi")
    return float(digits) * _SIZES.get(text[len(digits) :], 1)


def _client(address: str) -> JobSubmissionClient:
    need_ray()
    from ray.job_submission import JobSubmissionClient

    for name in ("dashboard_sdk", "job.sdk"):  # they tell every upload
        logging.getLogger(f"ray.dashboard.modules.{name}").setLevel(logging.WARNING)
    headers = json.loads(os.environ.get("RAY_JOB_HEADERS") or "{}")
    with _told(address, "the Ray cluster refused us"):
        return JobSubmissionClient(address, headers=headers or None)
