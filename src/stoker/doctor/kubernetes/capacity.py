"""What the pods of a job ask for, and whether the nodes of a cluster have it: pure, on objects as clusters tell them.

Pods are put onto nodes first come, first served; that is what a scheduler does at its worst.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, NamedTuple

from stoker.core.units import format_bytes
from stoker.kube.conditions import OVER, holds, phase_of
from stoker.kube.objects import GPU, GPU_LABELS, ROLE, Manifest
from stoker.kube.quantity import quantity

Amounts = dict[str, Decimal]

NOUNS = {"cpu": "CPU", GPU: "GPU", "pods": "pod"}
_REPELS = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, slots=True)
class Group:
    """Pods that are alike, by their role; `spec` is that of each."""

    role: str
    count: int
    spec: Manifest

    @property
    def each(self) -> Amounts:
        """What one of them asks for."""
        return asked(self.spec)

    @property
    def claims(self) -> dict[str, bool]:
        """The claims that each of them mounts, and whether only to read."""
        sources = {
            one["name"]: one["persistentVolumeClaim"]
            for one in self.spec.get("volumes") or ()
            if "persistentVolumeClaim" in one
        }
        mounts = [mount for one in self.spec.get("containers") or () for mount in one.get("volumeMounts") or ()]
        return {
            source["claimName"]: bool(source.get("readOnly"))
            or all(mount.get("readOnly") for mount in mounts if mount["name"] == name)
            for name, source in sources.items()
        }

    @property
    def images(self) -> list[str]:
        """The images of its containers."""
        return [one["image"] for one in self.spec.get("containers") or () if one.get("image")]


def groups(objects: Iterable[Manifest]) -> list[Group]:
    """Find the pods of objects, those of one role and the same kind together."""
    found: dict[tuple[str, str], Group] = {}
    for group in (group for one in objects for group in _groups(one)):
        key = (group.role, _shape(group.spec))
        known = found.get(key)
        found[key] = group if known is None else replace(known, count=known.count + group.count)
    return list(found.values())


def _shape(spec: Manifest) -> str:
    """Write down a pod without what tells it from its like: its variables."""
    containers = [{**one, "env": None} for one in spec.get("containers") or ()]
    return json.dumps({**spec, "containers": containers}, sort_keys=True, default=str)


def _groups(one: Manifest) -> Iterator[Group]:
    spec = one.get("spec") or {}
    if one["kind"] == "MPIJob":
        for role, replica in spec.get("mpiReplicaSpecs", {}).items():
            yield Group(str(role).lower(), int(replica.get("replicas") or 1), replica["template"]["spec"])
        return
    template = spec.get("template")
    if template is None:
        return
    labels = (template.get("metadata") or {}).get("labels") or {}
    wide = spec.get("parallelism", spec.get("replicas", 1))
    count = min(int(wide), int(spec.get("completions", wide)))
    yield Group(labels.get(ROLE) or one["metadata"]["name"], count, template["spec"])


def asked(spec: Manifest) -> Amounts:
    """Sum up what a pod asks for, as the scheduler does."""
    whole: Amounts = {}
    start: Amounts = {}
    for one in spec.get("containers") or ():
        _add(whole, _of(one))
    for one in spec.get("initContainers") or ():
        if one.get("restartPolicy") == "Always":
            _add(whole, _of(one))
        else:
            start |= {name: max(amount, start.get(name, Decimal(0))) for name, amount in _of(one).items()}
    whole |= {name: max(amount, whole.get(name, Decimal(0))) for name, amount in start.items()}
    _add(whole, {name: quantity(text) for name, text in (spec.get("overhead") or {}).items()})
    return whole


def _add(sums: Amounts, more: Amounts, times: int = 1) -> None:
    for name, amount in more.items():
        sums[name] = sums.get(name, Decimal(0)) + amount * times


def _of(container: Manifest) -> Amounts:
    given = container.get("resources") or {}
    return {name: quantity(text) for name, text in {**given.get("limits", {}), **given.get("requests", {})}.items()}


def total(every: Sequence[Group]) -> Amounts:
    """Sum up what all pods ask for, their number among it."""
    sums: Amounts = {"pods": Decimal(sum(group.count for group in every))}
    for group in every:
        _add(sums, group.each, group.count)
    return sums


# --- Nodes


class Node(NamedTuple):
    """A node, and what pods can have of it."""

    name: str
    has: Amounts
    labels: Mapping[str, str]
    taints: Sequence[Mapping[str, str]] = ()
    trouble: str = ""
    """Why it takes no pods at all."""

    @property
    def gpu_kind(self) -> str:
        """How its GPUs are called; empty: nothing tells."""
        return next((self.labels[key] for key in GPU_LABELS if self.labels.get(key)), "")


def node_of(one: Manifest) -> Node:
    """Read a node as the cluster tells it."""
    spec, status = one.get("spec") or {}, one.get("status") or {}
    return Node(
        name=one["metadata"]["name"],
        has={name: quantity(text) for name, text in (status.get("allocatable") or {}).items()},
        labels=one["metadata"].get("labels") or {},
        taints=[taint for taint in spec.get("taints") or () if taint.get("effect") in _REPELS],
        trouble="cordoned" if spec.get("unschedulable") else "" if holds(one, "Ready") else "not ready",
    )


def used(pods: Iterable[Manifest]) -> dict[str, Amounts]:
    """Sum up by node what its pods have of it."""
    found: dict[str, Amounts] = {}
    for pod in pods:
        node = pod["spec"].get("nodeName")
        if not node or phase_of(pod) in OVER:
            continue
        sums = found.setdefault(node, {"pods": Decimal(0)})
        _add(sums, {**asked(pod["spec"]), "pods": Decimal(1)})
    return found


def left(nodes: Iterable[Node], taken: Mapping[str, Amounts]) -> list[Node]:
    """Give the nodes with what is free on them."""
    return [
        node._replace(
            has={name: amount - taken.get(node.name, {}).get(name, Decimal(0)) for name, amount in node.has.items()}
        )
        for node in nodes
    ]


def why_not(spec: Manifest, node: Node) -> str:
    """Say why a node takes no pod of this kind, however empty it is; empty: it may."""
    if node.trouble:
        return node.trouble
    wants = spec.get("nodeSelector") or {}
    if odd := [f"{key}={value}" for key, value in wants.items() if node.labels.get(key) != value]:
        return f"no label {', '.join(odd)}"
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or ()
    if terms and not any(_matches(term, node) for term in terms):
        kinds = _wanted_kinds(terms)
        return f"no GPUs of type {', '.join(kinds)}" if kinds else "not of the wanted kind (affinity)"
    for taint in node.taints:
        if not any(_tolerates(one, taint) for one in spec.get("tolerations") or ()):
            value = f"={taint['value']}" if taint.get("value") else ""
            return f"taint {taint['key']}{value}:{taint['effect']}"
    return ""


def _wanted_kinds(terms: Iterable[Manifest]) -> list[str]:
    """Name the kinds of GPU that an affinity is about; none, if it is about something else."""
    rules = [rule for term in terms for rule in term.get("matchExpressions") or ()]
    if not rules or any(rule["key"] not in GPU_LABELS for rule in rules):
        return []
    return sorted({str(value) for rule in rules for value in rule.get("values") or ()})


def _matches(term: Manifest, node: Node) -> bool:
    fields = [{**one, "key": "name"} for one in term.get("matchFields") or ()]
    rules = [(one, node.labels) for one in term.get("matchExpressions") or ()]
    rules += [(one, {"name": node.name}) for one in fields]
    return bool(rules) and all(_holds(one, labels) for one, labels in rules)


def _holds(rule: Manifest, labels: Mapping[str, str]) -> bool:
    has, values = labels.get(rule["key"]), list(rule.get("values") or ())
    match rule["operator"]:
        case "In":
            return has in values
        case "NotIn":
            return has not in values
        case "Exists":
            return has is not None
        case "DoesNotExist":
            return has is None
        case "Gt" | "Lt" as operator:
            is_number = has is not None and has.lstrip("-").isdigit()
            return is_number and (
                int(has or 0) > int(values[0]) if operator == "Gt" else int(has or 0) < int(values[0])
            )
    return True


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, str]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", "")


# --- Pods onto nodes


def short_of(each: Amounts, node: Node) -> Amounts:
    """Tell of what a node has less than a pod asks for: how much it has."""
    has = {name: node.has.get(name, Decimal(0)) for name in each}
    return {name: has[name] for name, amount in each.items() if amount > has[name]}


def placed(every: Sequence[Group], nodes: Sequence[Node]) -> list[int]:
    """Tell how many pods of each group find a place, those that ask for most first."""
    free = {node.name: dict(node.has) for node in nodes}
    counts = [0] * len(every)
    order = sorted(range(len(every)), key=lambda at: _weight(every[at]), reverse=True)
    for at in order:
        group, each = every[at], {**every[at].each, "pods": Decimal(1)}
        for node in nodes:
            if counts[at] == group.count:
                break
            if why_not(group.spec, node):
                continue
            has = free[node.name]
            room = min((int(has.get(name, Decimal(0)) // amount) for name, amount in each.items() if amount), default=0)
            many = max(0, min(room, group.count - counts[at]))
            counts[at] += many
            _add(has, each, -many)
    return counts


def _weight(group: Group) -> tuple[Decimal, ...]:
    each = group.each
    return tuple(each.get(name, Decimal(0)) for name in (GPU, "memory", "cpu"))


# --- Words


def amount(name: str, many: Decimal) -> str:
    """Write an amount for people."""
    if name.removeprefix("requests.").removeprefix("limits.") in ("memory", "storage", "ephemeral-storage"):
        return f"{format_bytes(float(many))} of {name}"
    noun = NOUNS.get(name)
    return f"{float(many):g} {name if noun is None else noun if many == 1 else f'{noun}s'}"


def amounts(every: Mapping[str, Decimal]) -> str:
    """Write some amounts for people."""
    return ", ".join(amount(name, many) for name, many in every.items())
