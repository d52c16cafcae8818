"""From what was found in a Kubernetes cluster to checks: pure, each fault with its fix.

What could not be looked at is an error in the place of its value, and becomes a `–`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal

from stoker.core.units import counted, format_duration
from stoker.doctor.checks import Check
from stoker.doctor.kubernetes.capacity import (
    Amounts,
    Group,
    Node,
    amount,
    amounts,
    left,
    node_of,
    placed,
    short_of,
    total,
    used,
    why_not,
)
from stoker.doctor.kubernetes.findings import BAD, DOWN, Found, Look, Wants, missing, some, unknown
from stoker.doctor.kubernetes.storage import of_claims, of_storage
from stoker.errors import AccessError, ConflictError, FullError, MissingError, StokerError
from stoker.jobs.spec import Job
from stoker.kube.client import KINDS, Hello
from stoker.kube.conditions import condition, phase_of
from stoker.kube.objects import CACHE, GPU, Manifest
from stoker.kube.quantity import quantity
from stoker.kube.rbac import NEW_NAMESPACE, OPTIONAL, REQUIRED, Right

SKEW_S = 5.0
"""Tokens of clouds are refused when clocks differ by minutes; logs are hard to read before that."""
SLOW_S = 0.5
ROWS = ("namespace", "permissions", "MPI operator", "gpus", "room", "quota", "storage", "admission", "image", "DNS")
"""What is not tried where no API server answers."""
_RBAC = "an administrator gives them: stoker job plan FILE --on k8s --rbac WHO | kubectl apply -f -"
_PSA = "pod-security.kubernetes.io/enforce"


def of_look(job: Job, wanted: Wants, look: Look) -> list[Check]:
    """Judge all that was found, but for the probe."""
    return [
        *of_hello(look.server, look.hello),
        *of_namespace(job, look),
        *of_permissions(look.allowed),
        *of_operators(job, look),
        *of_nodes(job, wanted, look),
        *of_quotas(wanted, look),
        *of_storage(look),
        *of_claims(wanted, look),
        *of_named(job, wanted, look),
        *of_refusals(look),
    ]


def of_silence(error: StokerError) -> list[Check]:
    """Tell that no API server answers: one fault, and the rest is not tried."""
    first = Check("cluster", False, error.what, error.hint or "", code=error.exit_code)
    return [first, *(Check(row, None, "not tried: the cluster cannot be asked") for row in ROWS)]


# --- The API server, the namespace, rights


def of_hello(server: str, hello: Hello) -> Iterator[Check]:
    """Judge how the API server answers, and its clock."""
    told = f"{server} answers in {format_duration(hello.took_s)}: Kubernetes {hello.version}"
    slow = hello.took_s > SLOW_S
    yield Check("cluster", None if slow else True, told, "that is slow: is it far, or busy?" if slow else "")
    if hello.ahead_s is not None:
        off = abs(hello.ahead_s)
        if off <= SKEW_S:
            yield Check("clock", True, f"less than {SKEW_S:g} s off")
        else:
            side = "ahead of" if hello.ahead_s > 0 else "behind"
            fix = "keep time, here or there: logins are refused when clocks differ by minutes"
            yield Check("clock", None, f"the API server's is {format_duration(round(off))} {side} the one here", fix)


def of_namespace(job: Job, look: Look) -> Iterator[Check]:
    """Judge whether the namespace can be used, and what it lets pods be."""
    name, space = look.namespace, look.space
    if isinstance(space, StokerError):
        yield unknown("namespace", space)
        return
    if space is None and job.kubernetes.create_namespace:
        yield Check("namespace", True, f"{name} is not there, and is made with the job")
        return
    if space is None:
        fix = f"kubectl create namespace {name}, name another, or set kubernetes.create_namespace: true"
        yield missing("namespace", f"there is no namespace {name}", fix)
        return
    if phase_of(space) == "Terminating":
        yield missing("namespace", f"{name} is being deleted", "wait until it is gone, or name another")
        return
    level = (space["metadata"].get("labels") or {}).get(_PSA)
    also = f"; Pod Security enforces {level}" if level and level != "privileged" else ""
    if level == "restricted" and not job.kubernetes.user:
        fix = "it refuses pods that may run as root: set kubernetes.user, to 1000 for example"
        yield Check("namespace", None, f"{name} is there{also}", fix)
    else:
        yield Check("namespace", True, f"{name} is there{also}")


def of_permissions(allowed: Mapping[tuple[Right, str], Found[bool]]) -> Iterator[Check]:
    """Name every verb that is missing; only what a job cannot do without is a fault."""
    lacks: dict[Right, list[str]] = {}
    errors: dict[str, StokerError] = {}
    for (right, verb), answer in allowed.items():
        if isinstance(answer, StokerError):
            errors.setdefault(answer.what, answer)
        elif not answer:
            lacks.setdefault(right, []).append(verb)
    for error in errors.values():
        yield Check("permissions", False, f"cannot be asked for: {error.what}", error.hint or _RBAC, code=DOWN)
    needed = [right for right, _ in allowed if right.part not in OPTIONAL]
    if needed and not errors and not any(right in lacks for right in needed):
        yield Check("permissions", True, f"all {len(needed)} that jobs, volumes and caches need", code=DOWN)
    for right, verbs in lacks.items():
        told = f"may not {', '.join(verbs)} {right}"
        if right == NEW_NAMESPACE:
            yield Check("permissions", False, told, "have somebody make it: kubectl create namespace …", code=DOWN)
        elif right.part in REQUIRED:
            yield Check("permissions", False, told, _RBAC, code=DOWN)
        elif right.part not in OPTIONAL:
            yield Check("permissions", None, told, f"only {right.part} would fail; {_RBAC}", code=DOWN)
    if untold := [f"{', '.join(verbs)} {right}" for right, verbs in lacks.items() if right.part in OPTIONAL]:
        yield Check("permissions", None, f"may not {'; '.join(untold)}: no job needs it, but less can be told")


# --- Operators


def of_operators(job: Job, look: Look) -> Iterator[Check]:
    """Judge the kinds that are not Kubernetes' own."""
    yield _of_mpi(job, look.operator)
    if job.kubernetes.queue:
        yield _of_queue(job.kubernetes.queue, look)


def _of_mpi(job: Job, served: Found[Mapping[str, frozenset[str]]]) -> Check:
    kind, what = KINDS["MPIJob"], "MPI operator"
    if isinstance(served, StokerError):
        return unknown(what, served)
    fine = kind.plural in served.get(kind.version, ())
    others = sorted(version for version, plurals in served.items() if kind.plural in plurals)
    if fine:
        return Check(what, True, f"MPIJob is served as {kind.group}/{kind.version}")
    told = f"MPIJob is served as {', '.join(others)} alone" if others else "there is no MPIJob here"
    if job.topology != "mpi":
        return Check(what, None, f"{told}; only topology mpi needs it")
    fix = f"install the MPI operator (github.com/kubeflow/mpi-operator), which serves {kind.group}/{kind.version}"
    return missing(what, f"{told}, and topology mpi needs {kind.group}/{kind.version}", fix)


def _of_queue(name: str, look: Look) -> Check:
    if isinstance(look.kueue, StokerError):
        return unknown("queue", look.kueue)
    if not look.kueue:
        fix = "install Kueue, or leave kubernetes.queue away"
        return missing("queue", f"there is no Kueue here, and the job is for its queue {name}", fix)
    if KINDS["LocalQueue"].version not in look.kueue:
        return Check("queue", None, f"not looked at: Kueue is served as {', '.join(look.kueue)} alone")
    if isinstance(look.queue, StokerError):
        return unknown("queue", look.queue)
    if look.queue is None:
        fix = f"name one of: kubectl get localqueues -n {look.namespace}"
        return missing("queue", f"there is no queue {name} in {look.namespace}, and the job would wait for ever", fix)
    active = condition(look.queue, "Active")
    if active.get("status") == "False":
        return missing("queue", f"{name} admits nothing: {active.get('message', '')}", "have its ClusterQueue mended")
    waiting = int((look.queue.get("status") or {}).get("pendingWorkloads") or 0)
    return Check("queue", True, f"{name}; {counted(waiting, 'job')} waiting")


# --- Nodes


def of_nodes(job: Job, wanted: Wants, look: Look) -> Iterator[Check]:
    """Count the GPUs of each kind, and judge whether the job has room."""
    if isinstance(look.nodes, StokerError):
        yield from (unknown(what, look.nodes) for what in ("gpus", "room"))
        return
    nodes = [node_of(one) for one in look.nodes]
    free = None if isinstance(look.pods, StokerError) else left(nodes, used(look.pods))
    yield from _gpus(nodes, free)
    if wanted.groups:
        yield from of_room(job, wanted.groups, nodes, free)


def _gpus(nodes: Sequence[Node], free: Sequence[Node] | None) -> Iterator[Check]:
    kinds: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        if node.has.get(GPU):
            kinds.setdefault(node.gpu_kind, []).append(index)
    for kind, indices in sorted(kinds.items()):
        many = sum(int(nodes[index].has[GPU]) for index in indices)
        left_over = None if free is None else sum(int(free[index].has[GPU]) for index in indices)
        now = "how many are free is not known" if left_over is None else f"{left_over} free"
        yield Check("gpus", True, f"{many} × {kind or 'of no named type'} on {counted(len(indices), 'node')}; {now}")
    if not kinds:
        yield Check("gpus", None, f"none on {counted(len(nodes), 'node')}")


def of_room(job: Job, every: Sequence[Group], nodes: Sequence[Node], free: Sequence[Node] | None) -> Iterator[Check]:
    """Judge whether the pods fit: onto any node, onto all nodes if they were empty, and now."""
    wrong = list(dict.fromkeys(check for group in every for check in _unfit(group, nodes)))
    yield from wrong
    if wrong:
        return
    counts = placed(every, nodes)
    if short := _short(every, counts):
        elastic = job.is_elastic and counts[0] >= job.min_workers
        fix = "--set workers=… for fewer; or add nodes; or an autoscaler does"
        told = f"{short}, even if all nodes were empty"
        yield Check("room", None if elastic else False, told, fix, code=BAD)
        return
    what = "; ".join(f"{wants} × {each}" for each, (_, wants) in _by_kind(every, counts).items())
    if free is None:
        yield Check("room", True, f"{what}: there is room on empty nodes; what is free is not known")
    elif short := _short(every, placed(every, free)):
        yield Check("room", None, f"{short} now", "the job would wait: let others end, or --set workers=… for fewer")
    else:
        yield Check("room", True, f"{what}: there is room")


def _each(group: Group) -> str:
    return f"{group.role} ({amounts(group.each)})" if group.each else f"{group.role} (asks for nothing)"


def _by_kind(every: Sequence[Group], counts: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Sum up how many find a place and how many want one, for pods that ask for the same."""
    sums: dict[str, tuple[int, int]] = {}
    for group, count in zip(every, counts, strict=True):
        has, wants = sums.get(_each(group), (0, 0))
        sums[_each(group)] = (has + count, wants + group.count)
    return sums


def _short(every: Sequence[Group], counts: Sequence[int]) -> str:
    sums = _by_kind(every, counts)
    return "; ".join(
        f"there is room for {has} of {wants} × {each}" for each, (has, wants) in sums.items() if has < wants
    )


def _unfit(group: Group, nodes: Sequence[Node]) -> Iterator[Check]:
    """Say why no node takes even one pod of a group."""
    if not nodes:
        yield missing("room", "the cluster has no nodes", "add some; or an autoscaler does")
        return
    reasons: dict[str, list[str]] = {}
    able = []
    for node in nodes:
        if why := why_not(group.spec, node):
            reasons.setdefault(why, []).append(node.name)
        else:
            able.append(node)
    tainted = {why: names for why, names in reasons.items() if why.startswith("taint ")}
    if not able:
        told = "; ".join(f"{why} ({some(names)})" for why, names in reasons.items())
        kinds = sorted({node.gpu_kind for node in nodes if node.gpu_kind})
        known = f" (there are: {', '.join(kinds)})" if kinds and any("GPUs of type" in why for why in reasons) else ""
        yield missing("room", f"no node takes {group.role}: {told}{known}", _room_fix(reasons))
        return
    lacks = {node.name: short_of(group.each, node) for node in able}
    if all(lacks.values()):
        best: Amounts = {}
        for short in lacks.values():
            best |= {name: max(many, best.get(name, Decimal(0))) for name, many in short.items()}
        asks = amounts({name: group.each[name] for name in best})
        told = f"one {group.role} asks for {asks}, and the largest node that it may use has {amounts(best)}"
        if tainted:
            told += "; " + "; ".join(f"others have {why} ({some(names)})" for why, names in tainted.items())
        fix = (
            "kubernetes.tolerations lets it onto the others" if tainted else "ask for less; or an autoscaler adds such"
        )
        yield missing("room", told, fix)


def _room_fix(reasons: Iterable[str]) -> str:
    fixes = {
        "taint ": "kubernetes.tolerations lets pods onto tainted nodes",
        "no label": "kubernetes.node_selector names labels that no node has",
        "no GPUs": "resources.gpu_type names a type that no node has",
        "cordoned": "kubectl uncordon lets a node take pods again",
        "not ready": "kubectl describe node says why one is not ready",
    }
    fitting = [fix for sign, fix in fixes.items() if any(why.startswith(sign) for why in reasons)]
    return "; ".join([*fitting, "or an autoscaler adds nodes"])


# --- Quota


def of_quotas(wanted: Wants, look: Look) -> Iterator[Check]:
    """Compare what the job asks for in sum with what quotas leave."""
    if isinstance(look.quotas, StokerError):
        yield unknown("quota", look.quotas)
        return
    if not look.quotas:
        yield Check("quota", True, "the namespace has none")
    there = {name for name, found in look.claims.items() if isinstance(found, dict)}
    asks = _counted(wanted, there)
    yield from (_of_quota(one, asks) for one in look.quotas)


def _of_quota(one: Manifest, asks: Amounts) -> Check:
    name, status, spec = one["metadata"]["name"], one.get("status") or {}, one.get("spec") or {}
    if spec.get("scopes") or spec.get("scopeSelector"):
        return Check("quota", None, f"{name} counts only some pods: not judged")
    hard = {what: quantity(text) for what, text in (status.get("hard") or {}).items()}
    taken = {what: quantity(text) for what, text in (status.get("used") or {}).items()}
    wants = {what: asks.get(what, Decimal(0)) for what in hard}
    free = {what: max(limit - taken.get(what, Decimal(0)), Decimal(0)) for what, limit in hard.items()}
    if over := _beyond(wants, hard, "allowed"):
        fix = "ask for less (--set workers=…, resources), or have the quota raised"
        return Check("quota", False, f"{name} is too small: {over}", fix, code=DOWN)
    if full := _beyond(wants, free, "left"):
        fix = "the job would wait: stop other jobs, or ask for less"
        return Check("quota", None, f"{name} is taken: {full}", fix)
    return Check("quota", True, f"{name} leaves room")


def _beyond(wants: Amounts, most: Amounts, how: str) -> str:
    """Say of what more is wanted than there is; empty: of nothing."""
    over = [what for what, many in wants.items() if many > most[what]]
    return "; ".join(f"{amount(what, wants[what])} wanted, {amount(what, most[what])} {how}" for what in over)


def _counted(wanted: Wants, there: Collection[str]) -> Amounts:
    """Give what is asked for under all names by which a quota may count it; claims that are there count already."""
    sums, new = total(wanted.groups), [one for name, one in wanted.made.items() if name not in there]
    limits = {f"limits.{name}": amount for name, amount in sums.items() if name in ("cpu", "memory")}
    requests = {f"requests.{name}": amount for name, amount in sums.items() if name != "pods"}
    asked = {**sums, **requests, **limits, "count/pods": sums["pods"]}
    for kind, many in {**wanted.objects, "PersistentVolumeClaim": len(new)}.items():
        if kind in KINDS:
            group = f".{KINDS[kind].group}" if KINDS[kind].group else ""
            asked |= {f"count/{KINDS[kind].plural}{group}": Decimal(many)}
            asked |= {} if group else {KINDS[kind].plural: Decimal(many)}
    sizes = [one["spec"]["resources"]["requests"]["storage"] for one in new]
    return {**asked, "requests.storage": sum((quantity(size) for size in sizes), Decimal(0))}


# --- What is named


def of_named(job: Job, wanted: Wants, look: Look) -> Iterator[Check]:
    """Judge secrets, accounts, priorities and the cache, which a job only names."""
    for name, keys in wanted.secrets.items():
        what, found = f"secret {name}", look.secrets.get(name)
        if isinstance(found, StokerError):
            yield unknown(what, found)
        elif found is None:
            fix = f"kubectl create secret generic {name} -n {look.namespace} --from-literal=…"
            yield missing(what, f"there is no secret {name} in {look.namespace}", fix)
        elif lacks := sorted(keys - found):
            known = ", ".join(sorted(found)) or "none"
            yield missing(what, f"has no key {', '.join(lacks)}", f"its keys: {known}; name one of them")
        else:
            yield Check(what, True, f"is there, with {', '.join(sorted(keys))}" if keys else "is there")
    yield from _of_names("service account", look.accounts, "kubernetes.service_account names it: make it, or another")
    yield from _of_names("priority class", look.priorities, "kubectl get priorityclasses lists those that are there")
    if job.data.via == "cluster":
        if isinstance(look.cache, StokerError):
            yield unknown("cache", look.cache)
        elif look.cache is None:
            told = f"there is no cache ({CACHE}) in {look.namespace}, and data.via: cluster means it"
            yield missing("cache", told, f"stoker data cache --on k8s:///{look.namespace}")
        else:
            yield Check("cache", True, f"{CACHE} is there")


def _of_names(kind: str, found: Mapping[str, Found[Manifest | None]], fix: str) -> Iterator[Check]:
    for name, one in found.items():
        if isinstance(one, StokerError):
            yield unknown(f"{kind} {name}", one)
        elif one is None:
            yield missing(f"{kind} {name}", f"there is no {kind} {name}", fix)
        else:
            yield Check(f"{kind} {name}", True, "is there")


# --- What the API server would say to the objects


def of_refusals(look: Look) -> Iterator[Check]:
    """Tell what the API server would refuse, but for what other checks have told."""
    wrong = []
    for name, error in look.refusals.items():
        if isinstance(error, MissingError) or (isinstance(error, AccessError) and " may not " in f" {error.what}"):
            continue  # the operator's row, and the permissions'
        wrong.append(_of_refusal(name, error))
    yield from dict.fromkeys(wrong)
    if look.tried and not look.refusals:
        yield Check(
            "admission", True, f"{counted(look.tried, 'object')} of the job would be taken (asked with dry-run)"
        )


_VIOLATES = re.compile(r'violates PodSecurity "(?P<level>[^"]+)": (?P<why>.+)')
_ABSENT = re.compile(r"no PriorityClass with name|serviceaccount \S+ not found", re.IGNORECASE)


def _of_refusal(name: str, error: StokerError) -> Check:
    if isinstance(error, FullError):
        return Check("quota", False, error.what, error.hint or "", code=DOWN)
    if isinstance(error, ConflictError):
        fix = "a job that is over makes room; else stop it (stoker job stop), or name this job otherwise"
        return Check("admission", None, f"{name} is there already", fix)
    if found := _VIOLATES.search(error.what):
        fix = f"set kubernetes.user, to 1000 for example; or have the namespace allow more (its label {_PSA})"
        return missing("admission", f"Pod Security {found['level']} refuses {name}: {found['why']}", fix)
    fix = "what it names must be there" if _ABSENT.search(error.what) else "change the job, or kubernetes.patch"
    return Check("admission", False, f"{name} would be refused: {error.what}", fix, code=BAD)
