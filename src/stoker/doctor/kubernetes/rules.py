"""Turn the facts about a Kubernetes cluster into checks with fixes. Pure.

A fact that could not be read is an error in place of its value, and becomes a skipped check (`–`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal

from stoker.core.units import format_duration, pluralize
from stoker.doctor.checks import Check, format_names
from stoker.doctor.kubernetes.capacity import (
    NodeCapacity,
    PodGroup,
    ResourceAmounts,
    format_amount,
    format_amounts,
    insufficient_resources,
    parse_node,
    place_pods,
    rejection_reason,
    subtract_used,
    total_requests,
    used_by_node,
)
from stoker.doctor.kubernetes.findings import (
    INVALID,
    UNAVAILABLE,
    ClusterFacts,
    JobRequirements,
    OrError,
    failed_check,
    unknown_check,
)
from stoker.doctor.kubernetes.storage import check_claims, check_storage_classes
from stoker.errors import ConflictError, MissingError, StokerError, StorageFullError
from stoker.jobs.spec import JobSpec
from stoker.kube.client import API_RESOURCES, ServerInfo
from stoker.kube.conditions import get_condition, get_phase
from stoker.kube.errors import RbacDeniedError
from stoker.kube.objects import CACHE_SERVICE, GPU_RESOURCE, Manifest
from stoker.kube.quantity import parse_quantity
from stoker.kube.rbac import CREATE_NAMESPACE, OPTIONAL_FEATURES, REQUIRED_FEATURES, Permission

MAX_SKEW_S = 5.0
"""Cloud tokens are rejected if clocks differ by minutes; logs are hard to compare before that."""
SLOW_RESPONSE_S = 0.5
CHECK_NAMES = (
    "namespace",
    "permissions",
    "MPI operator",
    "gpus",
    "capacity",
    "quota",
    "storage",
    "admission",
    "image",
    "DNS",
)
"""The checks that are skipped if the API server does not respond."""
MISSING_PERMISSION = "missing: "
_RBAC_FIX = "an administrator can grant them: stoker job plan FILE --on k8s --rbac WHO | kubectl apply -f -"
_POD_SECURITY_LABEL = "pod-security.kubernetes.io/enforce"


def check_cluster(job: JobSpec, requirements: JobRequirements, facts: ClusterFacts) -> list[Check]:
    """Check all facts except for the image probes."""
    return [
        *check_server(facts.server, facts.server_info),
        *check_namespace(job, facts),
        *check_permissions(facts.allowed),
        *check_operators(job, facts),
        *check_nodes(job, requirements, facts),
        *check_quotas(requirements, facts),
        *check_storage_classes(facts),
        *check_claims(requirements, facts),
        *check_references(job, requirements, facts),
        *check_rejections(facts),
    ]


def check_unreachable(error: StokerError) -> list[Check]:
    """Return the checks for an API server that does not respond: one failed, the others skipped."""
    failed = Check("cluster", False, error.what, error.hint or "", code=error.exit_code)
    return [failed, *(Check(name, None, "skipped: the API server is not reachable") for name in CHECK_NAMES)]


# --- API server, namespace, permissions


def check_server(server: str, info: ServerInfo) -> Iterator[Check]:
    """Check the latency and the clock of the API server."""
    detail = f"{server} responds in {format_duration(info.latency_s)}: Kubernetes {info.version}"
    is_slow = info.latency_s > SLOW_RESPONSE_S
    yield Check(
        "cluster",
        None if is_slow else True,
        detail,
        "slow response: the API server is far away or overloaded" if is_slow else "",
    )
    if info.clock_ahead_s is not None:
        skew_s = abs(info.clock_ahead_s)
        if skew_s <= MAX_SKEW_S:
            yield Check("clock", True, f"off by less than {MAX_SKEW_S:g} s")
        else:
            direction = "ahead of" if info.clock_ahead_s > 0 else "behind"
            fix = "enable NTP on both machines: logins are rejected if clocks differ by minutes"
            yield Check(
                "clock", None, f"the API server is {format_duration(round(skew_s))} {direction} this machine", fix
            )


def check_namespace(job: JobSpec, facts: ClusterFacts) -> Iterator[Check]:
    """Check whether the namespace exists, and which Pod Security level it enforces."""
    name, namespace = facts.namespace, facts.namespace_object
    if isinstance(namespace, StokerError):
        yield unknown_check("namespace", namespace)
        return
    if namespace is None and job.kubernetes.create_namespace:
        yield Check("namespace", True, f"{name} does not exist; it is created with the job")
        return
    if namespace is None:
        fix = f"kubectl create namespace {name}, use another, or set kubernetes.create_namespace: true"
        yield failed_check("namespace", f"namespace {name} not found", fix)
        return
    if get_phase(namespace) == "Terminating":
        yield failed_check("namespace", f"{name} is being deleted", "wait until it is deleted, or use another")
        return
    level = (namespace["metadata"].get("labels") or {}).get(_POD_SECURITY_LABEL)
    note = f"; Pod Security enforces {level}" if level and level != "privileged" else ""
    if level == "restricted" and not job.kubernetes.user:
        fix = "it rejects pods that may run as root: set kubernetes.user, for example to 1000"
        yield Check("namespace", None, f"{name} exists{note}", fix)
    else:
        yield Check("namespace", True, f"{name} exists{note}")


def check_permissions(allowed: Mapping[tuple[Permission, str], OrError[bool]]) -> Iterator[Check]:
    """Check each permission; a missing one fails only if a job requires it."""
    missing_verbs: dict[Permission, list[str]] = {}
    errors: dict[str, StokerError] = {}
    for (permission, verb), outcome in allowed.items():
        if isinstance(outcome, StokerError):
            errors.setdefault(outcome.what, outcome)
        elif not outcome:
            missing_verbs.setdefault(permission, []).append(verb)
    for error in errors.values():
        yield Check("permissions", False, f"cannot be checked: {error.what}", error.hint or _RBAC_FIX, code=UNAVAILABLE)
    needed = [permission for permission, _ in allowed if permission.feature not in OPTIONAL_FEATURES]
    if needed and not errors and not any(permission in missing_verbs for permission in needed):
        yield Check(
            "permissions", True, f"all {len(needed)} permissions for jobs, volumes and caches", code=UNAVAILABLE
        )
    for permission, verbs in missing_verbs.items():
        detail = f"{MISSING_PERMISSION}{', '.join(verbs)} {permission}"
        if permission == CREATE_NAMESPACE:
            yield Check(
                "permissions",
                False,
                detail,
                "ask an administrator to run: kubectl create namespace …",
                code=UNAVAILABLE,
            )
        elif permission.feature in REQUIRED_FEATURES:
            yield Check("permissions", False, detail, _RBAC_FIX, code=UNAVAILABLE)
        elif permission.feature not in OPTIONAL_FEATURES:
            yield Check(
                "permissions", None, detail, f"needed only by {permission.feature}; {_RBAC_FIX}", code=UNAVAILABLE
            )
    if optional := [
        f"{', '.join(verbs)} {permission}"
        for permission, verbs in missing_verbs.items()
        if permission.feature in OPTIONAL_FEATURES
    ]:
        yield Check(
            "permissions",
            None,
            f"{MISSING_PERMISSION}{'; '.join(optional)} (not needed by jobs, but fewer checks are possible)",
        )


# --- Operators


def check_operators(job: JobSpec, facts: ClusterFacts) -> Iterator[Check]:
    """Check the MPI operator and Kueue."""
    yield _check_mpi_operator(job, facts.kubeflow_versions)
    if job.kubernetes.queue:
        yield _check_queue(job.kubernetes.queue, facts)


def _check_mpi_operator(job: JobSpec, served: OrError[Mapping[str, frozenset[str]]]) -> Check:
    kind, what = API_RESOURCES["MPIJob"], "MPI operator"
    if isinstance(served, StokerError):
        return unknown_check(what, served)
    is_served = kind.plural in served.get(kind.version, ())
    others = sorted(version for version, plurals in served.items() if kind.plural in plurals)
    if is_served:
        return Check(what, True, f"MPIJob is served as {kind.group}/{kind.version}")
    detail = f"MPIJob is served only as {', '.join(others)}" if others else "MPIJob is not installed"
    if not job.traits.has_standby_workers:
        return Check(what, None, f"{detail}; needed only by topology mpi")
    fix = f"install the MPI operator (github.com/kubeflow/mpi-operator), which serves {kind.group}/{kind.version}"
    return failed_check(what, f"{detail}, and topology {job.topology} needs {kind.group}/{kind.version}", fix)


def _check_queue(name: str, facts: ClusterFacts) -> Check:
    if isinstance(facts.kueue_versions, StokerError):
        return unknown_check("queue", facts.kueue_versions)
    if not facts.kueue_versions:
        fix = "install Kueue, or remove kubernetes.queue"
        return failed_check("queue", f"Kueue is not installed, and the job uses queue {name}", fix)
    if API_RESOURCES["LocalQueue"].version not in facts.kueue_versions:
        return Check("queue", None, f"skipped: Kueue is served only as {', '.join(facts.kueue_versions)}")
    if isinstance(facts.queue, StokerError):
        return unknown_check("queue", facts.queue)
    if facts.queue is None:
        fix = f"list the queues: kubectl get localqueues -n {facts.namespace}"
        return failed_check("queue", f"queue {name} not found in {facts.namespace}; the job would wait forever", fix)
    active = get_condition(facts.queue, "Active")
    if active.get("status") == "False":
        return failed_check(
            "queue",
            f"{name} admits no jobs: {active.get('message', '')}",
            "ask an administrator to fix its ClusterQueue",
        )
    waiting = int((facts.queue.get("status") or {}).get("pendingWorkloads") or 0)
    return Check("queue", True, f"{name}; {pluralize(waiting, 'job')} waiting")


# --- Nodes


def check_nodes(job: JobSpec, requirements: JobRequirements, facts: ClusterFacts) -> Iterator[Check]:
    """Count the GPUs by type, and check whether the pods of the job fit."""
    if isinstance(facts.nodes, StokerError):
        yield from (unknown_check(what, facts.nodes) for what in ("gpus", "capacity"))
        return
    nodes = [parse_node(node) for node in facts.nodes]
    free = None if isinstance(facts.pods, StokerError) else subtract_used(nodes, used_by_node(facts.pods))
    yield from _check_gpus(nodes, free)
    if requirements.groups:
        yield from check_capacity(job, requirements.groups, nodes, free)


def _check_gpus(nodes: Sequence[NodeCapacity], free: Sequence[NodeCapacity] | None) -> Iterator[Check]:
    gpu_types: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        if node.available.get(GPU_RESOURCE):
            gpu_types.setdefault(node.gpu_type, []).append(index)
    for gpu_type, indices in sorted(gpu_types.items()):
        total = sum(int(nodes[index].available[GPU_RESOURCE]) for index in indices)
        free_count = None if free is None else sum(int(free[index].available[GPU_RESOURCE]) for index in indices)
        availability = "number of free GPUs unknown" if free_count is None else f"{free_count} free"
        yield Check(
            "gpus",
            True,
            f"{total} × {gpu_type or 'GPU of unknown type'} on {pluralize(len(indices), 'node')}; {availability}",
        )
    if not gpu_types:
        yield Check("gpus", None, f"none on {pluralize(len(nodes), 'node')}")


def check_capacity(
    job: JobSpec, groups: Sequence[PodGroup], nodes: Sequence[NodeCapacity], free: Sequence[NodeCapacity] | None
) -> Iterator[Check]:
    """Check whether the pods fit: each on some node, all on empty nodes, and all on the nodes as they are now."""
    failed = list(dict.fromkeys(check for group in groups for check in _check_unschedulable(group, nodes)))
    yield from failed
    if failed:
        return
    counts = place_pods(groups, nodes)
    if unplaced := _describe_unplaced(groups, counts):
        is_enough = job.is_elastic and counts[0] >= job.min_workers
        fix = "use fewer workers (--set workers=…), or add nodes, unless an autoscaler does"
        detail = f"{unplaced}, even on empty nodes"
        yield Check("capacity", None if is_enough else False, detail, fix, code=INVALID)
        return
    what = "; ".join(f"{count} × {group}" for group, (_, count) in _counts_by_group(groups, counts).items())
    if free is None:
        yield Check("capacity", True, f"{what}: fits on empty nodes; free resources unknown")
    elif unplaced := _describe_unplaced(groups, place_pods(groups, free)):
        yield Check(
            "capacity",
            None,
            f"now {unplaced}",
            "the job would wait: stop other jobs, or use fewer workers (--set workers=…)",
        )
    else:
        yield Check("capacity", True, f"{what}: fits")


def _describe_group(group: PodGroup) -> str:
    return f"{group.role} ({format_amounts(group.requests)})" if group.requests else f"{group.role} (no requests)"


def _counts_by_group(groups: Sequence[PodGroup], counts: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Return the number of placed and of all pods, by role and requests."""
    sums: dict[str, tuple[int, int]] = {}
    for group, count in zip(groups, counts, strict=True):
        fitting, total = sums.get(_describe_group(group), (0, 0))
        sums[_describe_group(group)] = (fitting + count, total + group.count)
    return sums


def _describe_unplaced(groups: Sequence[PodGroup], counts: Sequence[int]) -> str:
    sums = _counts_by_group(groups, counts)
    return "; ".join(
        f"{fitting} of {total} pods fit: {group}" for group, (fitting, total) in sums.items() if fitting < total
    )


def _check_unschedulable(group: PodGroup, nodes: Sequence[NodeCapacity]) -> Iterator[Check]:
    """Check for a group of which not even one pod fits on any node, and why."""
    if not nodes:
        yield failed_check("capacity", "the cluster has no nodes", "add nodes, unless an autoscaler does")
        return
    reasons: dict[str, list[str]] = {}
    candidates = []
    for node in nodes:
        if reason := rejection_reason(group.spec, node):
            reasons.setdefault(reason, []).append(node.name)
        else:
            candidates.append(node)
    tainted = {reason: names for reason, names in reasons.items() if reason.startswith("taint ")}
    if not candidates:
        detail = "; ".join(f"{reason} ({format_names(names)})" for reason, names in reasons.items())
        gpu_types = sorted({node.gpu_type for node in nodes if node.gpu_type})
        known = (
            f" (available types: {', '.join(gpu_types)})"
            if gpu_types and any("GPUs of type" in reason for reason in reasons)
            else ""
        )
        yield failed_check("capacity", f"no node accepts {group.role}: {detail}{known}", _scheduling_fix(reasons))
        return
    missing = {node.name: insufficient_resources(group.requests, node) for node in candidates}
    if all(missing.values()):
        best: ResourceAmounts = {}
        for shortage in missing.values():
            best |= {name: max(amount, best.get(name, Decimal(0))) for name, amount in shortage.items()}
        requested = format_amounts({name: group.requests[name] for name in best})
        detail = f"one {group.role} requests {requested}, the largest node it can use has {format_amounts(best)}"
        if tainted:
            detail += "; " + "; ".join(
                f"other nodes have {reason} ({format_names(names)})" for reason, names in tainted.items()
            )
        fix = (
            "set kubernetes.tolerations to use the other nodes"
            if tainted
            else "request less, unless an autoscaler adds larger nodes"
        )
        yield failed_check("capacity", detail, fix)


def _scheduling_fix(reasons: Iterable[str]) -> str:
    fixes = {
        "taint ": "set kubernetes.tolerations for tainted nodes",
        "missing label": "change kubernetes.node_selector: no node has these labels",
        "no GPUs": "change resources.gpu_type: no node has this type",
        "cordoned": "kubectl uncordon makes a node schedulable again",
        "not ready": "kubectl describe node shows why a node is not ready",
    }
    matching = [fix for prefix, fix in fixes.items() if any(reason.startswith(prefix) for reason in reasons)]
    return "; ".join([*matching, "unless an autoscaler adds nodes"])


# --- Quota


def check_quotas(requirements: JobRequirements, facts: ClusterFacts) -> Iterator[Check]:
    """Compare the total requests of the job with the quotas of the namespace."""
    if isinstance(facts.quotas, StokerError):
        yield unknown_check("quota", facts.quotas)
        return
    if not facts.quotas:
        yield Check("quota", True, "no quota in this namespace")
    existing = {name for name, claim in facts.claims.items() if isinstance(claim, dict)}
    usage = _quota_usage(requirements, existing)
    yield from (_check_quota(quota, usage) for quota in facts.quotas)


def _check_quota(quota: Manifest, usage: ResourceAmounts) -> Check:
    name, status, spec = quota["metadata"]["name"], quota.get("status") or {}, quota.get("spec") or {}
    if spec.get("scopes") or spec.get("scopeSelector"):
        return Check("quota", None, f"skipped: {name} applies only to some pods")
    hard = {what: parse_quantity(text) for what, text in (status.get("hard") or {}).items()}
    used = {what: parse_quantity(text) for what, text in (status.get("used") or {}).items()}
    needed = {what: usage.get(what, Decimal(0)) for what in hard}
    free = {what: max(limit - used.get(what, Decimal(0)), Decimal(0)) for what, limit in hard.items()}
    if excess := _describe_excess(needed, hard, "allowed"):
        fix = "request less (--set workers=…, resources), or ask for a larger quota"
        return Check("quota", False, f"{name} is too small: {excess}", fix, code=UNAVAILABLE)
    if excess := _describe_excess(needed, free, "left"):
        fix = "the job would wait: stop other jobs, or request less"
        return Check("quota", None, f"{name} is used up: {excess}", fix)
    return Check("quota", True, f"{name} is sufficient")


def _describe_excess(needed: ResourceAmounts, limits: ResourceAmounts, label: str) -> str:
    """Describe the resources that exceed a limit; empty if none does."""
    excess = [what for what, amount in needed.items() if amount > limits[what]]
    return "; ".join(
        f"{format_amount(what, needed[what])} needed, {format_amount(what, limits[what])} {label}" for what in excess
    )


def _quota_usage(requirements: JobRequirements, existing: Collection[str]) -> ResourceAmounts:
    """Return the requests under every name that a quota may limit; existing claims are counted already."""
    sums = total_requests(requirements.groups)
    new_claims = [claim for name, claim in requirements.new_claims.items() if name not in existing]
    limits = {f"limits.{name}": amount for name, amount in sums.items() if name in ("cpu", "memory")}
    requests = {f"requests.{name}": amount for name, amount in sums.items() if name != "pods"}
    usage = {**sums, **requests, **limits, "count/pods": sums["pods"]}
    for kind, count in {**requirements.objects, "PersistentVolumeClaim": len(new_claims)}.items():
        if kind in API_RESOURCES:
            group = f".{API_RESOURCES[kind].group}" if API_RESOURCES[kind].group else ""
            usage |= {f"count/{API_RESOURCES[kind].plural}{group}": Decimal(count)}
            usage |= {} if group else {API_RESOURCES[kind].plural: Decimal(count)}
    sizes = [claim["spec"]["resources"]["requests"]["storage"] for claim in new_claims]
    return {**usage, "requests.storage": sum((parse_quantity(size) for size in sizes), Decimal(0))}


# --- References


def check_references(job: JobSpec, requirements: JobRequirements, facts: ClusterFacts) -> Iterator[Check]:
    """Check Secrets, service accounts, priority classes and the cache that the job refers to."""
    for name, keys in requirements.secrets.items():
        what, secret_keys = f"secret {name}", facts.secrets.get(name)
        if isinstance(secret_keys, StokerError):
            yield unknown_check(what, secret_keys)
        elif secret_keys is None:
            fix = f"kubectl create secret generic {name} -n {facts.namespace} --from-literal=…"
            yield failed_check(what, f"Secret {name} not found in {facts.namespace}", fix)
        elif missing_keys := sorted(keys - secret_keys):
            known = ", ".join(sorted(secret_keys)) or "none"
            yield failed_check(what, f"has no key {', '.join(missing_keys)}", f"use one of its keys: {known}")
        else:
            yield Check(what, True, f"exists, with {', '.join(sorted(keys))}" if keys else "exists")
    yield from _check_existence("service account", facts.accounts, "create it, or change kubernetes.service_account")
    yield from _check_existence("priority class", facts.priorities, "list them: kubectl get priorityclasses")
    if job.data.via == "cluster":
        if isinstance(facts.cache, StokerError):
            yield unknown_check("cache", facts.cache)
        elif facts.cache is None:
            detail = f"cache {CACHE_SERVICE} not found in {facts.namespace}; data.via: cluster requires it"
            yield failed_check("cache", detail, f"stoker data cache --on k8s:///{facts.namespace}")
        else:
            yield Check("cache", True, f"{CACHE_SERVICE} exists")


def _check_existence(kind: str, objects: Mapping[str, OrError[Manifest | None]], fix: str) -> Iterator[Check]:
    for name, manifest in objects.items():
        if isinstance(manifest, StokerError):
            yield unknown_check(f"{kind} {name}", manifest)
        elif manifest is None:
            yield failed_check(f"{kind} {name}", f"{kind} {name} not found", fix)
        else:
            yield Check(f"{kind} {name}", True, "exists")


# --- Objects that the API server rejects


def check_rejections(facts: ClusterFacts) -> Iterator[Check]:
    """Check the result of the dry run, without errors that other checks report."""
    failed = []
    for name, error in facts.rejections.items():
        if isinstance(error, MissingError | RbacDeniedError):
            continue  # reported by the checks of operators and permissions
        failed.append(_check_rejection(name, error))
    yield from dict.fromkeys(failed)
    if facts.dry_runs and not facts.rejections:
        yield Check("admission", True, f"{pluralize(facts.dry_runs, 'object')} of the job accepted in a dry run")


_POD_SECURITY_VIOLATION = re.compile(r'violates PodSecurity "(?P<level>[^"]+)": (?P<why>.+)')
_MISSING_REFERENCE = re.compile(r"no PriorityClass with name|serviceaccount \S+ not found", re.IGNORECASE)


def _check_rejection(name: str, error: StokerError) -> Check:
    if isinstance(error, StorageFullError):
        return Check("quota", False, error.what, error.hint or "", code=UNAVAILABLE)
    if isinstance(error, ConflictError):
        fix = "a finished job is replaced; otherwise stop it (stoker job stop), or rename this job"
        return Check("admission", None, f"{name} already exists", fix)
    if violation := _POD_SECURITY_VIOLATION.search(error.what):
        fix = f"set kubernetes.user, for example to 1000, or change the namespace label {_POD_SECURITY_LABEL}"
        return failed_check("admission", f"Pod Security {violation['level']} rejects {name}: {violation['why']}", fix)
    fix = "create what it refers to" if _MISSING_REFERENCE.search(error.what) else "change the job, or kubernetes.patch"
    return Check("admission", False, f"{name} would be rejected: {error.what}", fix, code=INVALID)
