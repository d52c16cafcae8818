"""Compute whether the nodes of a cluster can hold the pods of a job: requests, taints, affinity, free resources. Pure.

Pods are placed on nodes first come, first served, which is the worst case of the scheduler.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, NamedTuple

from stoker.core.units import format_bytes
from stoker.kube.conditions import FINISHED_PHASES, get_phase, has_condition
from stoker.kube.objects import GPU_RESOURCE, GPU_TYPE_LABELS, ROLE_LABEL, Manifest
from stoker.kube.quantity import parse_quantity

ResourceAmounts = dict[str, Decimal]

RESOURCE_NOUNS = {"cpu": "CPU", GPU_RESOURCE: "GPU", "pods": "pod"}
_SCHEDULING_EFFECTS = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, slots=True)
class PodGroup:
    """Identical pods of one role; `spec` is the spec of each."""

    role: str
    count: int
    spec: Manifest

    @property
    def requests(self) -> ResourceAmounts:
        """The resource requests of one pod."""
        return sum_requests(self.spec)

    @property
    def claims(self) -> dict[str, bool]:
        """The claims that each pod mounts, and whether read-only."""
        sources = {
            item["name"]: item["persistentVolumeClaim"]
            for item in self.spec.get("volumes") or ()
            if "persistentVolumeClaim" in item
        }
        mounts = [mount for item in self.spec.get("containers") or () for mount in item.get("volumeMounts") or ()]
        return {
            source["claimName"]: bool(source.get("readOnly"))
            or all(mount.get("readOnly") for mount in mounts if mount["name"] == name)
            for name, source in sources.items()
        }

    @property
    def images(self) -> list[str]:
        """The images of the containers."""
        return [container["image"] for container in self.spec.get("containers") or () if container.get("image")]


def group_pods(objects: Iterable[Manifest]) -> list[PodGroup]:
    """Collect the pods of objects, grouped by role and spec."""
    groups: dict[tuple[str, str], PodGroup] = {}
    for group in (group for manifest in objects for group in _pod_groups(manifest)):
        key = (group.role, _fingerprint(group.spec))
        existing = groups.get(key)
        groups[key] = group if existing is None else replace(existing, count=existing.count + group.count)
    return list(groups.values())


def _fingerprint(spec: Manifest) -> str:
    """Serialize a pod spec without its environment variables, in which the pods of one role differ."""
    containers = [{**container, "env": None} for container in spec.get("containers") or ()]
    return json.dumps({**spec, "containers": containers}, sort_keys=True, default=str)


def _pod_groups(manifest: Manifest) -> Iterator[PodGroup]:
    spec = manifest.get("spec") or {}
    if manifest["kind"] == "MPIJob":
        for role, replica in spec.get("mpiReplicaSpecs", {}).items():
            yield PodGroup(str(role).lower(), int(replica.get("replicas") or 1), replica["template"]["spec"])
        return
    template = spec.get("template")
    if template is None:
        return
    labels = (template.get("metadata") or {}).get("labels") or {}
    parallelism = spec.get("parallelism", spec.get("replicas", 1))
    count = min(int(parallelism), int(spec.get("completions", parallelism)))
    yield PodGroup(labels.get(ROLE_LABEL) or manifest["metadata"]["name"], count, template["spec"])


def sum_requests(spec: Manifest) -> ResourceAmounts:
    """Sum up the requests of a pod, as the scheduler does."""
    requests: ResourceAmounts = {}
    init_requests: ResourceAmounts = {}
    for container in spec.get("containers") or ():
        _add(requests, _container_requests(container))
    for container in spec.get("initContainers") or ():
        if container.get("restartPolicy") == "Always":
            _add(requests, _container_requests(container))
        else:
            init_requests |= {
                name: max(amount, init_requests.get(name, Decimal(0)))
                for name, amount in _container_requests(container).items()
            }
    requests |= {name: max(amount, requests.get(name, Decimal(0))) for name, amount in init_requests.items()}
    _add(requests, {name: parse_quantity(text) for name, text in (spec.get("overhead") or {}).items()})
    return requests


def _add(sums: ResourceAmounts, more: ResourceAmounts, times: int = 1) -> None:
    for name, amount in more.items():
        sums[name] = sums.get(name, Decimal(0)) + amount * times


def _container_requests(container: Manifest) -> ResourceAmounts:
    resources = container.get("resources") or {}
    return {
        name: parse_quantity(text)
        for name, text in {**resources.get("limits", {}), **resources.get("requests", {})}.items()
    }


def total_requests(groups: Sequence[PodGroup]) -> ResourceAmounts:
    """Sum up the requests of all pods, including their number as `pods`."""
    sums: ResourceAmounts = {"pods": Decimal(sum(group.count for group in groups))}
    for group in groups:
        _add(sums, group.requests, group.count)
    return sums


# --- Nodes


class NodeCapacity(NamedTuple):
    """A node, and the resources available to pods."""

    name: str
    available: ResourceAmounts
    labels: Mapping[str, str]
    taints: Sequence[Mapping[str, str]] = ()
    unschedulable_reason: str = ""
    """Why it accepts no pods at all; empty if it does."""

    @property
    def gpu_type(self) -> str:
        """The type of its GPUs; empty if no label states it."""
        return next((self.labels[key] for key in GPU_TYPE_LABELS if self.labels.get(key)), "")


def parse_node(manifest: Manifest) -> NodeCapacity:
    """Parse a Node object; all allocatable resources are available."""
    spec, status = manifest.get("spec") or {}, manifest.get("status") or {}
    return NodeCapacity(
        name=manifest["metadata"]["name"],
        available={name: parse_quantity(text) for name, text in (status.get("allocatable") or {}).items()},
        labels=manifest["metadata"].get("labels") or {},
        taints=[taint for taint in spec.get("taints") or () if taint.get("effect") in _SCHEDULING_EFFECTS],
        unschedulable_reason="cordoned"
        if spec.get("unschedulable")
        else ""
        if has_condition(manifest, "Ready")
        else "not ready",
    )


def used_by_node(pods: Iterable[Manifest]) -> dict[str, ResourceAmounts]:
    """Sum up the requests of the running pods by node."""
    used: dict[str, ResourceAmounts] = {}
    for pod in pods:
        node = pod["spec"].get("nodeName")
        if not node or get_phase(pod) in FINISHED_PHASES:
            continue
        sums = used.setdefault(node, {"pods": Decimal(0)})
        _add(sums, {**sum_requests(pod["spec"]), "pods": Decimal(1)})
    return used


def subtract_used(nodes: Iterable[NodeCapacity], used: Mapping[str, ResourceAmounts]) -> list[NodeCapacity]:
    """Return the nodes with the free resources only."""
    return [
        node._replace(
            available={
                name: amount - used.get(node.name, {}).get(name, Decimal(0)) for name, amount in node.available.items()
            }
        )
        for node in nodes
    ]


def rejection_reason(spec: Manifest, node: NodeCapacity) -> str:
    """Return why a node would reject a pod even if it were empty; an empty string if it would not."""
    if node.unschedulable_reason:
        return node.unschedulable_reason
    selector = spec.get("nodeSelector") or {}
    if missing := [f"{key}={value}" for key, value in selector.items() if node.labels.get(key) != value]:
        return f"missing label {', '.join(missing)}"
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or ()
    if terms and not any(_matches_term(term, node) for term in terms):
        gpu_types = _required_gpu_types(terms)
        return f"no GPUs of type {', '.join(gpu_types)}" if gpu_types else "node affinity does not match"
    for taint in node.taints:
        if not any(_tolerates(toleration, taint) for toleration in spec.get("tolerations") or ()):
            value = f"={taint['value']}" if taint.get("value") else ""
            return f"taint {taint['key']}{value}:{taint['effect']}"
    return ""


def _required_gpu_types(terms: Iterable[Manifest]) -> list[str]:
    """Return the GPU types that a node affinity requires; none if it is about something else."""
    rules = [rule for term in terms for rule in term.get("matchExpressions") or ()]
    if not rules or any(rule["key"] not in GPU_TYPE_LABELS for rule in rules):
        return []
    return sorted({str(value) for rule in rules for value in rule.get("values") or ()})


def _matches_term(term: Manifest, node: NodeCapacity) -> bool:
    fields = [{**expression, "key": "name"} for expression in term.get("matchFields") or ()]
    expressions = [(expression, node.labels) for expression in term.get("matchExpressions") or ()]
    expressions += [(expression, {"name": node.name}) for expression in fields]
    return bool(expressions) and all(_matches_expression(expression, labels) for expression, labels in expressions)


def _matches_expression(expression: Manifest, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(expression["key"]), list(expression.get("values") or ())
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            is_number = value is not None and value.lstrip("-").isdigit()
            return is_number and (
                int(value or 0) > int(values[0]) if operator == "Gt" else int(value or 0) < int(values[0])
            )
    return True


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, str]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", "")


# --- Placement


def insufficient_resources(requests: ResourceAmounts, node: NodeCapacity) -> ResourceAmounts:
    """Return the resources of which a node has less than requested, with the available amount."""
    available = {name: node.available.get(name, Decimal(0)) for name in requests}
    return {name: available[name] for name, amount in requests.items() if amount > available[name]}


def place_pods(groups: Sequence[PodGroup], nodes: Sequence[NodeCapacity]) -> list[int]:
    """Place pods on nodes, those with the largest requests first; return how many of each group fit."""
    free = {node.name: dict(node.available) for node in nodes}
    counts = [0] * len(groups)
    order = sorted(range(len(groups)), key=lambda index: _placement_priority(groups[index]), reverse=True)
    for index in order:
        group, requests = groups[index], {**groups[index].requests, "pods": Decimal(1)}
        for node in nodes:
            if counts[index] == group.count:
                break
            if rejection_reason(group.spec, node):
                continue
            available = free[node.name]
            fits = min(
                (int(available.get(name, Decimal(0)) // amount) for name, amount in requests.items() if amount),
                default=0,
            )
            added = max(0, min(fits, group.count - counts[index]))
            counts[index] += added
            _add(available, requests, -added)
    return counts


def _placement_priority(group: PodGroup) -> tuple[Decimal, ...]:
    requests = group.requests
    return tuple(requests.get(name, Decimal(0)) for name in (GPU_RESOURCE, "memory", "cpu"))


# --- Formatting


def format_amount(name: str, amount: Decimal) -> str:
    """Format an amount of a resource: `8 GPUs`, `64 GiB of memory`."""
    if name.removeprefix("requests.").removeprefix("limits.") in ("memory", "storage", "ephemeral-storage"):
        return f"{format_bytes(float(amount))} of {name}"
    noun = RESOURCE_NOUNS.get(name)
    return f"{float(amount):g} {name if noun is None else noun if amount == 1 else f'{noun}s'}"


def format_amounts(amounts: Mapping[str, Decimal]) -> str:
    """Format several amounts."""
    return ", ".join(format_amount(name, amount) for name, amount in amounts.items())
