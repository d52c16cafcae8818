"""Read which task of a TensorFlow cluster this process is, from TF_CONFIG or from the variables of older charts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.errors import InputError

CHIEF_ROLES = ("chief", "master")
_TRAILING_COMMA = re.compile(r",(?=\s*[}\]])")
_ROLE = "chief|master|worker|ps|evaluator|tensorboard"
_POD_NAME = re.compile(rf"(?:.*-)?(?P<role>{_ROLE})-(?P<index>\d+)(?:-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class TaskEnvironment:
    """One task of a cluster: the addresses of all tasks by role, and the role and index of this one."""

    cluster: Mapping[str, tuple[str, ...]]
    role: str
    index: int

    @property
    def address(self) -> str:
        """The address of this task; empty if it is not part of the cluster, like an evaluator."""
        addresses = self.cluster.get(self.role, ())
        return addresses[self.index] if self.index < len(addresses) else ""

    @property
    def trainers(self) -> tuple[tuple[str, int], ...]:
        """The tasks that train with MultiWorkerMirroredStrategy, by rank: the chief, if there is one, and workers."""
        roles = (*CHIEF_ROLES, "worker")
        return tuple((role, index) for role in roles for index in range(len(self.cluster.get(role, ()))))

    def to_tf_config(self) -> str:
        """Return the value of TF_CONFIG for this task."""
        cluster = {role: list(addresses) for role, addresses in self.cluster.items() if addresses}
        return json.dumps({"cluster": cluster, "task": {"type": self.role, "index": self.index}})


def read_tf_environment(environ: Mapping[str, str] = os.environ) -> TaskEnvironment | None:
    """Return the task of this process; None if the environment describes no cluster.

    TF_CONFIG takes precedence. Otherwise CLUSTER_CONFIG holds the cluster, with or without the trailing commas that
    older charts write, and POD_NAME the task: `worker-0`, also with a prefix and with the hashes of a Deployment.
    """
    if config := environ.get("TF_CONFIG", "").strip():
        parsed = _parse(config, "TF_CONFIG")
        if not parsed:
            return None
        task = parsed.get("task")
        if not isinstance(task, dict) or not {"type", "index"} <= task.keys():
            raise InputError("has no task with type and index", where="TF_CONFIG")
        return TaskEnvironment(
            _read_cluster(parsed.get("cluster", {}), "TF_CONFIG"), str(task["type"]), _read_index(task["index"])
        )
    if config := environ.get("CLUSTER_CONFIG", "").strip():
        cluster = _read_cluster(_parse(_TRAILING_COMMA.sub("", config), "CLUSTER_CONFIG"), "CLUSTER_CONFIG")
        match = _POD_NAME.fullmatch(environ.get("POD_NAME", ""))
        if match is None:
            raise InputError(
                f"must be a role and an index, such as worker-0, got {environ.get('POD_NAME', '')!r}",
                where="POD_NAME",
                hint="CLUSTER_CONFIG is set, so it must name the task of this process",
            )
        return TaskEnvironment(cluster, match["role"], int(match["index"]))
    return None


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InputError(f"is not valid JSON: {error}", where=where) from error
    if not isinstance(value, dict):
        raise InputError(f"must be a JSON object, got {type(value).__name__}", where=where)
    return value


def _read_cluster(value: object, where: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict):
        raise InputError("cluster must map roles to lists of addresses", where=where)
    cluster = {}
    for role, addresses in value.items():
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            raise InputError(f"cluster.{role} must be a list of addresses", where=where)
        cluster[str(role)] = tuple(addresses)
    return cluster


def _read_index(value: object) -> int:
    try:
        return int(str(value))  # older templates write it as a string
    except ValueError:
        raise InputError(f"task.index must be a number, got {value!r}", where="TF_CONFIG") from None
