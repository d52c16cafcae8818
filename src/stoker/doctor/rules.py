"""Turn facts about hosts, routes, Ray clusters and probe reports into checks with fixes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stoker.core.units import format_bytes, format_duration, pluralize
from stoker.doctor.checks import Check, format_names
from stoker.doctor.probe import NOT_SERVED
from stoker.errors import (
    AccessDeniedError,
    Fault,
    InputError,
    JobFailedError,
    NotFoundError,
    StokerError,
    UnavailableError,
    install_command,
    redact_urls,
)
from stoker.jobs.spec import JobSpec
from stoker.launchers.ssh.client import SshClient
from stoker.launchers.ssh.preflight import (
    FULL_MESH_HOSTS,
    HostFacts,
    Issue,
    Routes,
    check_host,
    make_client,
    required_modules,
)

MAX_SKEW_S = 1.0
MAX_S3_SKEW_S = 900.0
"""S3 rejects requests that are signed with a larger clock skew."""
LOW_DISK_BYTES = 5 << 30
MIN_DISK_BYTES = 100 << 20
SLOW_REDUCE_BYTES_PER_S = 50e6
SLOW_DATA_BYTES_PER_S = 5e6
MIN_MEASURED_BYTES = 1 << 20
"""The throughput of smaller reads is not meaningful."""
REMOTE_DATA_FIX = "copy it there, mount it on every host, or use a URL"
LOCAL_DATA_FIX = "use an existing directory, or a URL"
_INVALID, _UNAVAILABLE, _FAILED = InputError.exit_code, UnavailableError.exit_code, JobFailedError.exit_code


class ProbeReport(NamedTuple):
    """One report of the probe, and where it came from."""

    host: str
    slot: str
    rank: int
    subject: str
    fields: Mapping[str, Any]


class ProbeResult(NamedTuple):
    """The result of one probe job: the host of each slot, the reports, and the error if it failed."""

    hosts: Mapping[str, str]
    reports: Sequence[ProbeReport]
    fault: str = ""
    reduces: bool = False
    pending_reason: str = ""
    """Why it was still pending at the end."""
    stop_error: StokerError | None = None
    """Why it could not be stopped."""
    gpus: Mapping[str, int] = {}
    """The number of GPUs that each slot needs."""


# --- SSH hosts


def check_hosts(job: JobSpec, facts_by_host: Mapping[str, HostFacts], gpus: Mapping[str, int]) -> list[Check]:
    """Check the facts of each SSH host; `gpus` is the number of GPUs that the job needs on it."""
    reachable = {host: host_facts.facts for host, host_facts in facts_by_host.items() if host_facts.issue is None}
    checks = [_check_connection(host_facts, make_client(job)) for host_facts in facts_by_host.values()]
    for host, facts in reachable.items():
        checks += _check_host(job, host, facts, list(check_host(job, facts_by_host[host], gpus[host])))
    checks += check_versions("python", {host: facts.get("version") for host, facts in reachable.items()})
    torches = {host: (facts.get("modules") or {}).get("torch") for host, facts in reachable.items()}
    checks += check_versions("torch", torches) if "torch" in required_modules(job) else []
    checks += check_clocks({host: facts["clock_skew_s"] for host, facts in reachable.items()}, "this machine")
    return checks


def _check_connection(host_facts: HostFacts, client: SshClient) -> Check:
    if host_facts.issue is None:
        return Check("host", True, "reachable, public key accepted", host=host_facts.host, code=_UNAVAILABLE)
    fix = host_facts.issue.fix or f"try: {client.command_line(host_facts.host)}"
    return Check("host", False, host_facts.issue.what, fix, host_facts.host, _UNAVAILABLE)


def _check_host(job: JobSpec, host: str, facts: Mapping[str, Any], issues: Sequence[Issue]) -> Iterator[Check]:
    note = "ssh.setup may install it" if job.ssh.setup else "not required by the job"
    modules = facts.get("modules") or {}
    versions = {"python": facts.get("version"), "torch": modules.get("torch")}
    versions |= {"stoker": modules.get("stoker")} if "stoker" in required_modules(job) else {}
    issue_names = {issue.about for issue in issues}
    for what, version in versions.items():
        if what in issue_names:
            yield from (_check_from_issue(host, issue) for issue in issues if issue.about == what)
        elif version is None and "python" not in issue_names:
            yield Check(what, None, f"not found; {note}", host=host)
        elif version is not None:
            yield Check(what, True, str(version), host=host)
    yield from (_check_from_issue(host, issue) for issue in issues if issue.about not in versions)


def _check_from_issue(host: str, issue: Issue) -> Check:
    fixes = {"program": "install it there, or use its full path"}
    fix = issue.fix or fixes.get(issue.about, REMOTE_DATA_FIX)
    return Check(issue.about, False, issue.what, fix, host, _INVALID)


def check_routes(job: JobSpec, routes: Routes, hosts: Sequence[str]) -> list[Check]:
    """Check the ports of the hosts and the routes between them."""
    first = hosts[0]
    issues = [(host, issue) for host, host_issues in routes.issues.items() for issue in host_issues]
    checks = [_check_from_issue(host, issue) for host, issue in issues]
    if not any(issue.about == "port" for _, issue in issues):
        free = f"{routes.port} is free" if job.port or len(hosts) > 1 else "any free port"
        checks.insert(0, Check("port", True, free, host=first))
    if len(hosts) > 1 and not any(issue.about == "network" for _, issue in issues):
        note = (
            ""
            if len(hosts) <= FULL_MESH_HOSTS
            else f"; with more than {FULL_MESH_HOSTS} hosts not every pair is tested"
        )
        targets = "all other hosts" if len(hosts) <= FULL_MESH_HOSTS else "the first host and the next one"
        checks += [Check("network", True, f"reaches {targets}{note}", host=host) for host in hosts]
    return checks


def check_port(port: int, *, is_free: bool) -> Check:
    """Check a port of this machine."""
    if is_free:
        return Check("port", True, f"{port} is free")
    return Check("port", False, f"{port} is in use", "set another port with --set port=…", code=_INVALID)


# --- Versions and clocks


def check_versions(what: str, versions: Mapping[str, str | None]) -> list[Check]:
    """Compare the versions of Python or torch: different minor versions of torch fail, others are a warning."""
    known = {host: version for host, version in versions.items() if version}
    if len(set(known.values())) < 2:
        return []
    by_version: dict[str, list[str]] = {}
    for host, version in known.items():
        by_version.setdefault(version, []).append(host)
    detail = "; ".join(f"{version} on {format_names(hosts)}" for version, hosts in sorted(by_version.items()))
    minors = {tuple(version.split("+")[0].split(".")[:2]) for version in known.values()}
    is_fatal = what == "torch" and len(minors) > 1
    return [
        Check(
            f"same {what}", False if is_fatal else None, detail, f"install the same {what} on all hosts", code=_INVALID
        ),
    ]


def check_clocks(skews: Mapping[str, float], origin: str) -> list[Check]:
    """Check clock skew relative to `origin`."""
    checks = []
    for host, skew in skews.items():
        magnitude_s = abs(skew)
        fine = True if magnitude_s <= MAX_SKEW_S else None if magnitude_s <= MAX_S3_SKEW_S else False
        if fine:
            checks.append(Check("clock", True, f"off by less than {MAX_SKEW_S:g} s", host=host))
            continue
        direction = "ahead of" if skew > 0 else "behind"
        note = "" if fine is None else "; S3 rejects requests if the clock is off by 15 min"
        amount = f"{magnitude_s:.1f} s" if magnitude_s < 60 else format_duration(round(magnitude_s))
        detail = f"{amount} {direction} {origin}{note}"
        checks.append(Check("clock", fine, detail, "enable NTP there: timedatectl set-ntp true", host, _INVALID))
    return checks


# --- Ray


class RayFacts(NamedTuple):
    """The state of a Ray cluster, and the resources that the job needs."""

    address: str
    local_version: str
    cluster_version: str
    nodes: Mapping[str, str]
    free: Mapping[str, float]
    needed: Mapping[str, float]
    """The resources of all workers of the job."""


def check_ray_cluster(cluster: RayFacts) -> list[Check]:
    """Check a Ray cluster; too few free resources are a warning, since the job would wait."""
    checks = [Check("cluster", True, f"{cluster.address} is reachable", code=_UNAVAILABLE)]
    if cluster.cluster_version == cluster.local_version:
        checks.append(Check("ray", True, cluster.local_version))
    else:
        detail = f"{cluster.local_version} here, {cluster.cluster_version} there"
        checks.append(Check("ray", None, detail, f"pip install 'ray[default]=={cluster.cluster_version}' here"))
    alive = [node for node, state in cluster.nodes.items() if state == "alive"]
    if dead := sorted(set(cluster.nodes) - set(alive)):
        detail = f"{len(alive)} alive; dead: {format_names(dead)}"
        checks.append(Check("nodes", None, detail, "to use them, restart Ray there: ray start --address=…"))
    elif alive:
        checks.append(Check("nodes", True, f"{len(alive)} alive"))
    if cluster.free:
        checks.append(_check_capacity(cluster))
    return checks


def missing_resources(cluster: RayFacts) -> dict[str, float]:
    """Return the resources of which the job needs more than are free, with the amount it needs."""
    needed = {name: amount for name, amount in cluster.needed.items() if name in ("CPU", "GPU")}
    return {name: many for name, many in needed.items() if cluster.free and many > cluster.free.get(name, 0.0)}


def _check_capacity(cluster: RayFacts) -> Check:
    names = [name for name in ("CPU", "GPU") if name in cluster.free or name in cluster.needed]
    free = ", ".join(f"{cluster.free.get(name, 0.0):g} {name}s" for name in names)
    if missing := missing_resources(cluster):
        needed = ", ".join(f"{many:g} {name}s" for name, many in missing.items())
        fix = "the job would wait: use fewer workers (--set workers=…), stop other jobs, or add nodes"
        return Check("capacity", None, f"job needs {needed}; free: {free}", fix)
    return Check("capacity", True, f"{free} free")


# --- Faults that the launcher reports


def checks_from_faults(faults: Iterable[Fault]) -> list[Check]:
    """Turn the faults of a job into failed checks; text in parentheses at the end of a fault is its fix."""
    checks = []
    for fault in faults:
        what, _, fix = (
            fault.what.removesuffix(")").rpartition(" (") if fault.what.endswith(")") else (fault.what, "", "")
        )
        if fault.path.startswith("data."):
            fix = fix or LOCAL_DATA_FIX  # other hosts are checked separately
        default = f"change it in the job file, or with --set {fault.path}=…" if fault.path else "change the job file"
        checks.append(Check(fault.path or "job", False, what, fix or default, code=_INVALID))
    return checks


# --- Reports of the probe


def check_probe(job: JobSpec, results: Sequence[ProbeResult], *, knows_hosts: bool) -> list[Check]:
    """Check the results of all probe jobs; `knows_hosts`: the hosts themselves have been checked already."""
    reports = [report for result in results for report in result.reports]
    hosts = list(dict.fromkeys(report.host for report in reports))
    checks = [check for result in results for check in _check_missing_slots(result)]
    if not knows_hosts:
        checks += _check_machines(reports)
    for host in hosts:
        slots = {
            (number, report.slot): result.gpus.get(report.slot, 0)
            for number, result in enumerate(results)
            for report in result.reports
            if report.host == host
        }
        checks += _check_gpus(host, list(slots.values()), reports)
    disks = (_check_disk(job, report, by_ssh=knows_hosts) for report in reports if report.subject == "disk")
    checks += list(dict.fromkeys(disks))
    if "://" in (job.checkpoint.dir or ""):
        checks.append(Check("checkpoints", None, "skipped: a test would write to the bucket"))
    checks += _check_datasets(reports)
    for result in results:
        checks += _check_all_reduce(result)
    return checks


def _check_missing_slots(result: ProbeResult) -> Iterator[Check]:
    """Check for slots that never reported, and for probes that were pending or could not be stopped."""
    if result.stop_error is not None:
        fix = f"processes may be left there: {result.stop_error.hint or 'they exit by themselves'}"
        yield Check("probe", False, f"could not be stopped: {result.stop_error}", fix, "", result.stop_error.exit_code)
    if result.pending_reason:
        fix = "the job would wait too: use fewer workers (--set workers=…) or resources, or stop other jobs"
        yield Check("capacity", None, f"the probe was not scheduled: {result.pending_reason}", fix)
        return
    reported = {report.slot for report in result.reports}
    absent = {slot: host for slot, host in result.hosts.items() if slot not in reported}
    for slot, host in absent.items():
        reason = result.fault or "no report"
        yield Check("probe", False, f"{slot} did not report: {reason}", _PROBE_FIX, host, _FAILED)
    if not absent and result.fault and not any("fault" in report.fields for report in result.reports):
        yield Check("probe", False, result.fault, _PROBE_FIX, "", _FAILED)


def _check_machines(reports: Sequence[ProbeReport]) -> list[Check]:
    """Check hosts that have not been checked before the probe."""
    pythons = {report.host: report.fields["python"] for report in reports if report.subject == "machine"}
    torches = {report.host: report.fields.get("version") for report in reports if report.subject == "torch"}
    clocks = {report.host: float(report.fields["at"]) for report in reports if report.subject == "clock"}
    checks = [Check("python", True, version, host=host) for host, version in pythons.items()]
    for host, version in torches.items():
        fix = f"to train with it: {install_command('torch')}"
        missing = Check("torch", None, "not installed", fix, host)
        checks.append(Check("torch", True, version, host=host) if version else missing)
    checks += [*check_versions("python", pythons), *check_versions("torch", torches)]
    if len(clocks) > 1:  # reported right after a barrier
        first, *_ = clocks
        checks += check_clocks({host: at - clocks[first] for host, at in clocks.items()}, first)
    return checks


def _check_gpus(host: str, gpus: Sequence[int], reports: Sequence[ProbeReport]) -> Iterator[Check]:
    """Check the GPUs of a host; `gpus` is the number that each of its slots needs."""
    host_reports = [report for report in reports if report.host == host]
    gpus_by_slot = [dict(report.fields["names"]) for report in host_reports if report.subject == "gpus"]
    if not gpus_by_slot:
        return
    names = list({uuid: name for slot_gpus in gpus_by_slot for uuid, name in slot_gpus.items()}.values())
    fewest = min(map(len, gpus_by_slot))
    torch_counts = [
        int(report.fields["gpus"]) for report in host_reports if report.subject == "torch" and "gpus" in report.fields
    ]
    needed, smallest = sum(gpus), min(gpus)
    if len(names) < needed:
        fix = "check the driver with nvidia-smi, or: --set resources.gpu=0"
        yield Check(
            "gpus",
            False,
            f"the job needs {pluralize(needed, 'GPU')}, but this host has {len(names)}",
            fix,
            host,
            _INVALID,
        )
    elif needed and fewest < smallest:
        fix = "check what sets CUDA_VISIBLE_DEVICES there: env or a scheduler"
        yield Check("gpus", False, f"a worker can use only {fewest} of {len(names)} GPUs", fix, host, _INVALID)
    elif needed and torch_counts and min(torch_counts) < smallest:
        fix = "install a torch build for CUDA that matches the driver shown by nvidia-smi"
        yield Check("gpus", False, f"torch sees {min(torch_counts)} of {len(names)} GPUs", fix, host, _INVALID)
    else:
        gpu_types = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "none"
        yield Check("gpus", True, f"{gpu_types}; job needs {needed}", host=host)


def _check_disk(job: JobSpec, report: ProbeReport, *, by_ssh: bool) -> Check:
    path, free, what = str(report.fields["place"]), int(report.fields["free"]), str(report.fields["what"])
    name, other = f"disk: {what}", _other_directory_fix(what, report.host, by_ssh=by_ssh)
    if report.fields["fault"]:
        fix = f"make it writable, or {other}"
        return Check(name, False, f"cannot use {path}: {report.fields['fault']}", fix, report.host, _INVALID)
    detail = f"{format_bytes(free)} free in {path}"
    if free < MIN_DISK_BYTES:
        return Check(name, False, detail, f"free disk space there, or {other}", report.host, _INVALID)
    if what == "cache" and job.data.cache.size and free < job.data.cache.size:
        fix = f"the cache may take {format_bytes(job.data.cache.size)}: free disk space, or lower data.cache.size"
        return Check(name, None, detail, fix, report.host)
    if free < LOW_DISK_BYTES:
        return Check(name, None, detail, f"low disk space: free some, or {other}", report.host)
    return Check(name, True, detail, host=report.host)


def _other_directory_fix(what: str, host: str, *, by_ssh: bool) -> str:
    """Return how to use a directory on another disk; an empty host is this machine."""
    keys = {"checkpoints": "checkpoint.dir", "cache": "data.cache.dir"}
    if key := "ssh.workdir" if by_ssh and what == "workdir" else keys.get(what):
        return f"set another directory: {key}"
    return "run the job on another disk there" if host else "run the command in another directory"


def _check_datasets(reports: Sequence[ProbeReport]) -> list[Check]:
    """Check each dataset on each host, by the slot with the worst result."""
    order = (False, None, True)

    def severity(report: ProbeReport) -> tuple[int, float]:
        rate = report.fields.get("bytes", 0) / max(report.fields.get("seconds", 0.0), 1e-9)
        return order.index(_check_dataset(report).fine), rate

    by_host: dict[tuple[str, str], ProbeReport] = {}
    for report in sorted((report for report in reports if report.subject == "data"), key=severity):
        by_host.setdefault((str(report.fields["key"]), report.host), report)
    return [
        _check_dataset(report)
        for report in sorted(by_host.values(), key=lambda report: (str(report.fields["key"]), report.slot))
    ]


def _check_dataset(report: ProbeReport) -> Check:
    fields, key = report.fields, str(report.fields["key"])
    url = redact_urls(str(fields["url"]))
    if "untested" in fields:
        return Check(key, None, f"skipped: {url}: {fields['untested']}", host=report.host)
    if "fault" in fields:
        fault = redact_urls(str(fields["fault"]))
        fix = _data_fix(url, fault, str(fields.get("error", "")), report.host)
        return Check(key, False, f"cannot read {url}: {fault}", fix, report.host, _INVALID)
    size, seconds = int(fields["bytes"]), float(fields["seconds"])
    rate = size / max(seconds, 1e-9)
    detail = f"{format_bytes(size)} read at {format_bytes(rate)}/s"
    if not size:
        return Check(
            key, False, f"{url} is empty", "check whether it is complete: stoker data verify", report.host, _INVALID
        )
    if rate < SLOW_DATA_BYTES_PER_S and size >= MIN_MEASURED_BYTES:
        fix = "cache shards: data.cache.dir, or a shared caching proxy with data.via (stoker data cache)"
        return Check(key, None, detail, fix, report.host)
    return Check(key, True, detail, host=report.host)


# In errors of other classes, and of other versions of stoker on the hosts.
_ACCESS_SIGNS = ("HTTP 401", "HTTP 403", "denied", "credential", "Credential")


def _data_fix(url: str, fault: str, error: str, host: str) -> str:
    """Return how to fix a dataset that cannot be read; `error` is the exception class, an empty host this machine."""
    if "://" not in url:
        return REMOTE_DATA_FIX if host else LOCAL_DATA_FIX
    if error == NotFoundError.__name__ or "HTTP 404" in fault or "NotFound" in fault:
        return "not found: check the URL, and whether the dataset is complete"
    if error == AccessDeniedError.__name__ or any(sign in fault for sign in _ACCESS_SIGNS):
        return "set credentials: env, secret_env, or user:password in the URL"
    if NOT_SERVED in fault:
        return "add the origin to the caching proxy (stoker data cache), or remove data.via"
    return "check that this host can reach the server: firewall, DNS, proxy environment variables"


def _check_all_reduce(result: ProbeResult) -> Iterator[Check]:
    """Check the all-reduce, by its slowest rank."""
    if not result.reduces or not result.reports:
        return
    measurements = [report for report in result.reports if report.subject == "reduce"]
    if failed := [report for report in measurements if "fault" in report.fields]:
        met_hosts = {report.host for report in result.reports if report.subject == "met"}
        reported = {report.slot for report in measurements}
        absent = list(dict.fromkeys(host or slot for slot, host in result.hosts.items() if slot not in reported))
        if absent:
            yield Check("all-reduce", False, f"{format_names(absent)} did not take part", _REDUCE_FIX, code=_FAILED)
        for report in failed:
            stage = "failed" if report.host in met_hosts else "rendezvous failed"
            yield Check("all-reduce", False, f"{stage}: {report.fields['fault']}", _REDUCE_FIX, report.host, _FAILED)
        return
    if not measurements:
        yield Check("all-reduce", False, result.fault or "no rank reported a result", _REDUCE_FIX, code=_FAILED)
        return
    world, backend = int(measurements[0].fields["world"]), str(measurements[0].fields["backend"])
    sizes: dict[int, float] = {}
    for report in measurements:
        size = int(report.fields["size"])
        sizes[size] = max(sizes.get(size, 0.0), float(report.fields["seconds"]))
    if world == 1:
        yield Check("all-reduce", None, "skipped: there is only one rank")
        return
    timings = ", ".join(f"{format_bytes(size)} in {1000 * seconds:.3g} ms" for size, seconds in sorted(sizes.items()))
    best = max(bus_bandwidth(size, seconds, world) for size, seconds in sizes.items())
    detail = f"{world} ranks, {backend}: {timings}; {format_bytes(best)}/s"
    is_slow = best < SLOW_REDUCE_BYTES_PER_S
    yield Check("all-reduce", None if is_slow else True, detail, _SLOW_FIX if is_slow else "")


_PROBE_FIX = "a job would fail in the same way; fix this first"
_REDUCE_FIX = "open all ports between the hosts, or set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME in env"
_SLOW_FIX = "check the network interface: set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME in env"


def bus_bandwidth(size: int, seconds: float, world: int) -> float:
    """Return the bus bandwidth in bytes per second, as nccl-tests defines it: size / time × 2 (n − 1) / n."""
    return size / max(seconds, 1e-9) * 2 * (world - 1) / world
