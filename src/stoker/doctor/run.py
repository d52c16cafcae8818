"""Run the doctor for a job on its target: check the target, then run a probe job through the job's launcher.

The probe is started exactly like the job, with a working directory and a run folder that are removed afterwards. They
are private to the user, since the settings of the probe may contain credentials.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from stoker.core.processes import wait_until
from stoker.core.units import Seconds, pluralize
from stoker.doctor import probe
from stoker.doctor.checks import Check
from stoker.doctor.rules import (
    ProbeReport,
    ProbeResult,
    RayFacts,
    check_hosts,
    check_port,
    check_probe,
    check_ray_cluster,
    check_routes,
    checks_from_faults,
    missing_resources,
)
from stoker.errors import SpecError, StokerError, UnavailableError
from stoker.jobs.launcher import Launcher, check_traits
from stoker.jobs.run_folder import RunFolder, create_run, stoker_home
from stoker.jobs.spec import (
    CheckpointSpec,
    DataSpec,
    JobSpec,
    ProfileSpec,
    ProgramSpec,
    RoleSpec,
    WorkerGroupSpec,
    parse_job,
)
from stoker.jobs.status import JobState
from stoker.jobs.topology import list_slots
from stoker.jobs.topology_traits import find_topology
from stoker.launchers.plan import is_free
from stoker.launchers.ssh.client import SshClient, expand_slots
from stoker.launchers.ssh.gpus import count_needed_gpus, share_gpus
from stoker.launchers.ssh.launcher import describe_unused_hosts
from stoker.launchers.ssh.preflight import (
    HostFacts,
    Routes,
    check_host,
    find_routes,
    make_client,
    open_sessions,
    probe_hosts,
    remote_workdir,
    run_parallel,
)
from stoker.launchers.supervise.supervisor import supervisor_pid
from stoker.telemetry.reader import read_events

PROBE_TIMEOUT_S = 120.0
"""For a whole probe job; its reads and its rendezvous have shorter timeouts of their own."""
MAX_SINGLE_HOST_PROBES = 16
"""The maximum number of hosts that are probed alone because they cannot take part in the all-reduce."""
REMOTE_DIR_PREFIX = "/tmp/stoker-doctor-"
"""Of the directories on hosts; each probe job appends a unique suffix."""
POLL_S = 0.1
RAY_CAPACITY_TIMEOUT_S = 6.0
"""How long a Ray cluster may take to report that resources have become free."""

_DEFAULT_JOB = "stoker doctor's default job"

Notify = Callable[[str], None]


class ProbeJob(NamedTuple):
    """One probe job, with the settings of the probe."""

    job: JobSpec
    settings: dict[str, Any]
    gpus: tuple[int, ...]
    """The number of GPUs that each of its workers needs."""
    hosts: tuple[str, ...] = ()
    """The hosts that it leaves a directory on, which must be removed."""


class ProbePlan(NamedTuple):
    """The checks made before the probe, and the probe jobs to run."""

    checks: list[Check]
    probe_jobs: list[ProbeJob]
    client: SshClient | None = None


def default_job(on: str, target: str, overrides: Sequence[str]) -> JobSpec:
    """Return the job to check if the user passes none: one worker per host or node, or two ranks on this machine."""
    base: dict[str, Any] = {"name": "doctor", "program": {"module": "this"}}
    if on == "local":
        base["processes_per_worker"] = 2
    elif on == "ssh":
        base["ssh"] = {"copy": False}
    elif on == "ray" and not any(override.startswith("ray.hosts=") for override in overrides):
        nodes = _count_ray_nodes(target)
        base |= {"workers": nodes, "ray": {"strategy": "spread"}} if nodes else {"processes_per_worker": 2}
    return parse_job(json.dumps(base), _DEFAULT_JOB, overrides)


def _count_ray_nodes(target: str) -> int:
    """Count the nodes of a Ray cluster; 0 if it does not respond, which a check reports later."""
    from stoker.launchers.ray import cluster as ray

    ray.require_ray()
    address = ray.resolve_address(target or None, os.environ)
    with contextlib.suppress(UnavailableError):
        return 0 if address is None else list(ray.RayCluster(address).nodes().values()).count("alive")
    return 0


def run_doctor(job: JobSpec, launcher: Launcher[Any], target: str, notify: Notify) -> list[Check]:
    """Check a job on a target and return all checks; `target` follows the launcher's name, `notify` prints progress."""
    name = launcher.traits.name
    if faults := [fault for fault in check_traits(job, launcher.traits) if fault.path == "topology"]:
        raise SpecError(faults)
    plan = PREPARERS.get(name, _prepare_by_rendering)(launcher.resolve_paths(job), launcher, target, notify)
    results = []
    if plan.probe_jobs:
        notify("Running a probe job")
        results = _run_probes(launcher, plan)
    return list(_deduplicate(plan.checks + check_probe(job, results, knows_hosts=name == "ssh")))


def _deduplicate(checks: list[Check]) -> Iterator[Check]:
    """Yield checks ordered by subject and host, without failures that the probe has repeated."""
    names = list(dict.fromkeys(check.what for check in checks))
    hosts = list(dict.fromkeys(check.host for check in checks))
    seen = set()
    for check in sorted(checks, key=lambda check: (names.index(check.what), hosts.index(check.host))):
        key = (check.what, check.host)
        if check.fine is not False or key not in seen or check.what in ("network", "probe"):
            yield check
        if check.fine is False:
            seen.add(key)


# --- Before the probe


def _prepare_by_rendering(job: JobSpec, launcher: Launcher[Any], target: str, notify: Notify) -> ProbePlan:  # noqa: ARG001
    """Render the job with its launcher, and report the faults."""
    try:
        launcher.render(job)
        checks = []
    except SpecError as error:
        checks = checks_from_faults(error.faults)
    except StokerError as error:
        checks = [Check("job", False, error.what, error.hint or "", error.where or "", error.exit_code)]
    gpus = not any(check.what in ("resources.gpu", "workers") for check in checks)
    return ProbePlan(checks, [_make_probe_job(job, topology=job.topology, port=job.port, gpus=gpus)])


def _prepare_local(job: JobSpec, launcher: Launcher[Any], target: str, notify: Notify) -> ProbePlan:
    """Check this machine; without a free port or torch, the probe runs without them."""
    is_port_free = not job.port or is_free(job.port)
    usable = job if is_port_free else msgspec.structs.replace(job, port=None)
    checks, (probe_job,), _ = _prepare_by_rendering(usable, launcher, target, notify)
    if job.port:
        checks.append(check_port(job.port, is_free=is_port_free))
    if job.traits.runs_ranks and find_spec("torch") is None:
        probe_job = _make_probe_job(job, topology="single", workers=[0], port=None)
    return ProbePlan(checks, [probe_job])


def _prepare_ray(job: JobSpec, launcher: Launcher[Any], target: str, notify: Notify) -> ProbePlan:
    """Check a Ray cluster, or the machines on which one is started for the run."""
    from stoker.launchers.ray import cluster as ray

    ray.require_ray()
    if job.ray.hosts and not target:
        return _prepare_by_rendering(job, launcher, target, notify)
    address = ray.resolve_address(target or None, os.environ)
    if address is None:
        plan = _prepare_local(job, launcher, target, notify)
        check = Check("cluster", True, "no cluster set or found: one is started on this machine for the run")
        return plan._replace(checks=[check, *plan.checks])
    try:
        version = ray.cluster_version(address)
        ray_cluster = ray.RayCluster(address)
        nodes, free = ray_cluster.nodes(), ray_cluster.free()
    except UnavailableError as error:
        check = Check("cluster", False, f"{error.where}: {error.what}", error.hint or "", code=error.exit_code)
        return ProbePlan([check], [])
    checks, needed = list[Check](), Counter[str]()
    try:
        rendered = launcher.render(job)
        for slot in rendered.slots:
            needed.update(rendered.bundle_of(slot))
    except SpecError as error:
        checks = checks_from_faults(error.faults)
    cluster = RayFacts(address, ray.local_version(), version, nodes, free, needed)
    deadline = time.monotonic() + RAY_CAPACITY_TIMEOUT_S
    while missing_resources(cluster) and time.monotonic() < deadline:
        time.sleep(0.5)
        cluster = cluster._replace(free=ray_cluster.free())
    checks = [*check_ray_cluster(cluster), *checks, *_check_uploaded_datasets(job)]
    if missing_resources(cluster):
        return ProbePlan([*checks, Check("probe", None, "skipped: the cluster has too few free resources")], [])
    return ProbePlan(checks, [_make_probe_job(job, topology=job.topology, port=job.port, is_remote=True)])


def _prepare_ssh(job: JobSpec, launcher: Launcher[Any], target: str, notify: Notify) -> ProbePlan:  # noqa: ARG001
    """Check all SSH hosts and the routes between those of the job; probe those that are able to run it."""
    hosts = expand_slots(job.ssh.hosts)
    used = hosts[: job.max_workers]
    hosts = used + [host for host in dict.fromkeys(hosts) if host not in used]
    faults = list(launcher.check(job))
    if any(fault.path == "ssh.hosts" for fault in faults):
        raise SpecError(faults)
    notify(f"Checking {pluralize(len(set(hosts)), 'host')}")
    with open_sessions(job, hosts) as sessions:
        facts = probe_hosts(sessions, job)
        reachable = [host for host in dict.fromkeys(hosts) if facts[host].issue is None]
        connected = {host: sessions[host] for host in reachable if host in used}
        routes = find_routes(job, connected, facts) if connected else None
    job = share_gpus(job, used, {host: host_facts.facts.get("gpus", 0) for host, host_facts in facts.items()})
    checks = [
        *checks_from_faults(faults),
        *check_hosts(job, facts, count_needed_gpus(job, hosts)),
        *(check_routes(job, routes, list(connected)) if routes else []),
        *([Check("ssh.hosts", None, note)] if (note := describe_unused_hosts(job)) else []),
    ]
    checks += _check_uploaded_datasets(job, copies=job.ssh.copy)
    plan = _plan_ssh_probes(job, facts, hosts, routes)
    if plan.no_reduce_reason:
        checks.append(Check("all-reduce", None, f"skipped: {plan.no_reduce_reason}"))
    if plan.skipped_hosts:
        checks.append(
            Check("probe", None, f"skipped on {pluralize(plan.skipped_hosts, 'more host')}: fix the others first")
        )
    return ProbePlan(checks, plan.probe_jobs, make_client(job))


class _SshProbes(NamedTuple):
    probe_jobs: list[ProbeJob]
    no_reduce_reason: str = ""
    skipped_hosts: int = 0


def _plan_ssh_probes(
    job: JobSpec, facts: Mapping[str, HostFacts], hosts: list[str], routes: Routes | None
) -> _SshProbes:
    """Plan one probe job for the hosts that can all-reduce, and one for each other reachable host."""
    needed = count_needed_gpus(job, hosts)
    issues = {
        host: {issue.about for issue in check_host(job, host_facts, needed[host])} for host, host_facts in facts.items()
    }
    route_issues = {issue.about for host_issues in (routes.issues if routes else {}).values() for issue in host_issues}
    reachable = [host for host in dict.fromkeys(hosts) if "host" not in issues[host]]
    with_torch = [host for host in reachable if (facts[host].facts.get("modules") or {}).get("torch") is not None]
    collective, reason = list[str](), ""
    if job.traits.runs_ranks:
        used = hosts[: job.max_workers]
        with_torch = [host for host in with_torch if host in used]
        collective = [] if "network" in route_issues else with_torch
        if with_torch:
            reason = "" if collective else "some hosts cannot reach each other"
        else:
            reason = "torch is not installed on any reachable host" if reachable else "no reachable host"
    directory = f"{REMOTE_DIR_PREFIX}{secrets.token_hex(6)}"
    gpus = not any("gpus" in host_issues for host_issues in issues.values())
    probe_jobs = []
    if collective:
        workers = [index for index, host in enumerate(hosts) if host in collective]
        placement = _ProbeHosts(
            tuple(hosts[index] for index in workers),
            directory,
            _probe_python(job, facts, collective),
            has_first_host=hosts[0] in collective,
        )
        port = routes.port if routes and "port" in route_issues else job.port
        probe_jobs.append(
            _make_probe_job(job, topology=job.topology, workers=workers, port=port, gpus=gpus, hosts=placement)
        )
    alone = [host for host in reachable if host not in collective]
    for number, host in enumerate(alone[:MAX_SINGLE_HOST_PROBES]):
        placement = _ProbeHosts(
            (host,), f"{directory}-{number}", _probe_python(job, facts, [host]), has_first_host=host == hosts[0]
        )
        workers = [min(hosts.index(host), job.max_workers - 1)]
        probe_jobs.append(
            _make_probe_job(job, topology="single", workers=workers, port=None, gpus=gpus, hosts=placement)
        )
    return _SshProbes(probe_jobs, reason, len(alone[MAX_SINGLE_HOST_PROBES:]))


def _probe_python(job: JobSpec, facts: Mapping[str, HostFacts], hosts: list[str]) -> str:
    """Return the full path of Python on the hosts, since the probe runs in another directory."""
    (python, *others) = {facts[host].facts["python"] for host in hosts}
    if others:
        python = job.ssh.python
        return str(Path(remote_workdir(job), python)) if "/" in python else python
    return "python3" if python is None else str(python)


class _ProbeHosts(NamedTuple):
    """The hosts of one probe job, its directory and Python there, and whether the job's first host is one of them."""

    hosts: tuple[str, ...]
    directory: str
    python: str
    has_first_host: bool


def _check_uploaded_datasets(job: JobSpec, *, copies: bool = True) -> list[Check]:
    datasets = _uploaded_datasets(job) if copies else {}
    return [Check(key, None, f"{path} is uploaded with the working directory") for key, path in datasets.items()]


def _uploaded_datasets(job: JobSpec) -> dict[str, str]:
    """Return the datasets that are uploaded with the working directory, and so cannot be read there yet."""
    datasets = {"data.train": job.data.train, "data.val": job.data.val}
    relative = {key: url for key, url in datasets.items() if url and "://" not in url and not Path(url).is_absolute()}
    return {key: url for key, url in relative.items() if Path(url).exists()}


def _probe_roles(roles: Mapping[str, RoleSpec]) -> dict[str, RoleSpec]:
    """Return the roles of the probe job: without observers, and without programs of their own."""
    change = msgspec.structs.replace
    return {
        name: change(role, program=None, logdir=None, count=0 if name in ("evaluator", "tensorboard") else role.count)
        for name, role in roles.items()
    }


def _make_probe_job(
    job: JobSpec,
    *,
    topology: str,
    port: int | None,
    workers: Sequence[int] | None = None,
    gpus: bool = True,
    hosts: _ProbeHosts | None = None,
    is_remote: bool = False,
) -> ProbeJob:
    """Build a probe job: like the job, but with the probe as its program, and no retries.

    `workers` are the workers of the job that it has; default: all. Without `gpus`, it requests none.
    """
    change = msgspec.structs.replace
    runs_ranks = find_topology(topology).traits.runs_ranks
    resources = [job.resources_of(worker) for worker in (range(job.max_workers) if workers is None else workers)]
    is_remote = is_remote or hosts is not None
    uploaded = _uploaded_datasets(job) if is_remote and (hosts is None or job.ssh.copy) else {}
    data = {"data.train": job.data.train, "data.val": job.data.val}
    workdir = remote_workdir(job) if hosts else "" if is_remote else str(Path.cwd() / (job.program.cwd or ""))
    checkpoints = job.checkpoint.dir or ("" if is_remote else str(stoker_home()))
    folders = {"workdir": ".", "checkpoints": checkpoints, "cache": job.data.cache.dir}
    settings = {
        "workdir": workdir,
        "folders": {what: path for what, path in folders.items() if path and "://" not in path},
        "checkpoints_on": "worker/0" if hosts is None or hosts.has_first_host else "nowhere",
        "data": {key: url for key, url in data.items() if url and key not in uploaded},
        "via": None if job.data.via == "cluster" else job.data.via,
        "reduce": runs_ranks,
        "gpus": gpus and any(each.gpus for each in resources),
    }
    probe_job = change(
        job,
        name="doctor",
        program=ProgramSpec(script="probe.py"),
        topology=topology,
        workers=_select_workers(job, workers, gpus=gpus, runs_ranks=runs_ranks),
        processes_per_worker=job.processes_per_worker if runs_ranks else "auto",
        resources=job.resources if gpus else change(job.resources, gpu=0),
        port=port,
        env={**job.env, probe.SETTINGS_ENV: json.dumps(settings)},
        data=DataSpec(),
        checkpoint=CheckpointSpec(),
        profile=ProfileSpec(every=Seconds(0)),
        roles=_probe_roles(job.roles) if topology == job.topology else {},
        secret_env={name: secret for name, secret in job.secret_env.items() if name in os.environ},
        secret_files={},
        retries=0,
        grace=Seconds(2),
        hang_after=Seconds(0),
        tensorboard=False,
    )
    if hosts is None:
        return ProbeJob(probe_job, settings, tuple(each.gpus for each in resources))
    ssh = change(
        job.ssh, hosts=hosts.hosts, workdir=hosts.directory, copy=True, exclude=(), setup=None, python=hosts.python
    )
    return ProbeJob(change(probe_job, ssh=ssh), settings, tuple(each.gpus for each in resources), hosts.hosts)


def _select_workers(
    job: JobSpec, workers: Sequence[int] | None, *, gpus: bool, runs_ranks: bool
) -> int | tuple[WorkerGroupSpec, ...]:
    """Return some workers of a job, or all of them, as the probe job has them."""
    workers = range(job.max_workers) if workers is None else workers
    if not isinstance(job.workers, tuple):
        return len(workers)
    groups = []
    for worker in workers:
        resources = job.resources_of(worker)
        resources = resources if gpus else msgspec.structs.replace(resources, gpu=0)
        ranks = job.ranks_of(worker) if runs_ranks else None
        groups.append(WorkerGroupSpec(resources=resources, processes_per_worker=ranks))
    return tuple(groups)


PREPARERS: dict[str, Callable[[JobSpec, Launcher[Any], str, Notify], ProbePlan]] = {
    "local": _prepare_local,
    "ray": _prepare_ray,
    "ssh": _prepare_ssh,
}
"""The checks before the probe, by launcher; for any other launcher the job is only rendered."""


# --- The probe


def _run_probes(launcher: Launcher[Any], plan: ProbePlan) -> list[ProbeResult]:
    """Start all probe jobs, wait for them up to a timeout, and remove everything they leave."""
    parent = stoker_home() if launcher.traits.shares_files else None
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="stoker-doctor-", dir=parent, ignore_cleanup_errors=True) as directory:
        started: list[tuple[ProbeJob, RunFolder | None, Any, str]] = []
        try:
            for number, probe_job in enumerate(plan.probe_jobs):
                started.append((probe_job, *_start(launcher, probe_job, Path(directory, str(number)))))
            deadline = time.monotonic() + PROBE_TIMEOUT_S
            results = [_collect_result(launcher, *item, deadline) for item in started]
        finally:
            errors = [_stop(launcher, run) for _, run, _, _ in started]
            if plan.client is not None:
                _remove_directories(plan.client, plan.probe_jobs)
    return [result._replace(stop_error=error) for result, error in zip(results, errors, strict=True)]


def _stop(launcher: Launcher[Any], run: RunFolder | None) -> StokerError | None:
    """Stop one probe job; return the error instead of raising it, so that the others are stopped, too."""
    if run is None:
        return None
    try:
        launcher.stop(run.handle)
        wait_until(lambda: supervisor_pid(run) is None, 5)
    except (StokerError, OSError) as error:
        return error if isinstance(error, StokerError) else UnavailableError(str(error))
    return None


def _start(launcher: Launcher[Any], probe_job: ProbeJob, directory: Path) -> tuple[RunFolder | None, Any, str]:
    """Start one probe job in its own directory; return the run, the rendered plan and the error, if any."""
    workdir = directory / "work"
    workdir.mkdir(parents=True)
    (workdir / "probe.py").write_bytes(files("stoker.doctor").joinpath("probe.py").read_bytes())
    run, rendered = None, None
    with _isolated(workdir, directory / "home"):
        try:
            job = launcher.resolve_paths(probe_job.job)
            rendered = launcher.render(job)
            run = create_run(job, rendered)
            launcher.start(rendered, run)
        except StokerError as error:
            return None, rendered, str(error)
        except BaseException:  # Ctrl-C: it may have been started
            if run is not None and (run.folder / "handle").exists():
                launcher.stop(run.handle)
            raise
    return run, rendered, ""


def _collect_result(
    launcher: Launcher[Any], probe_job: ProbeJob, run: RunFolder | None, rendered: Any, fault: str, deadline: float
) -> ProbeResult:
    """Wait for a probe job to finish, and read its reports."""
    workers = [str(slot) for slot in list_slots(probe_job.job) if slot.role == "worker"]
    hosts = dict(zip(workers, probe_job.hosts or [""] * len(workers), strict=True))
    gpus = dict(zip(workers, probe_job.gpus, strict=True))
    if run is None:
        return ProbeResult(hosts, (), fault, probe_job.settings["reduce"], gpus=gpus)
    while not launcher.status(run.handle).state.is_final and time.monotonic() < deadline:
        time.sleep(POLL_S)
    status = launcher.status(run.handle)
    pending_reason = ""
    if not status.state.is_final:
        pending_reason = status.message if any(slot.state is JobState.PENDING for slot in status.slots) else ""
        fault = f"stopped after {PROBE_TIMEOUT_S:g} s without a result"
    elif status.state != "succeeded":
        fault = status.message
    reports = tuple(
        ProbeReport(
            hosts.get(event.slot) or _host_name(rendered, event.fields), event.slot, event.rank, subject, event.fields
        )
        for event in read_events(run.logs)
        if event.fields.get("name") == probe.MARK_NAME and (subject := str(event.fields.get("subject", "")))
    )
    return ProbeResult(hosts, reports, fault, probe_job.settings["reduce"], pending_reason, gpus=gpus)


def _host_name(rendered: Any, fields: Mapping[str, Any]) -> str:
    """Return the name that a host reports for itself; empty if it is this machine."""
    return str(fields.get("on", "")) if rendered.is_remote else ""


def _remove_directories(client: SshClient, probe_jobs: list[ProbeJob]) -> None:
    """Remove the directories of the probe on all hosts."""
    items = [(host, probe_job.job.ssh.workdir) for probe_job in probe_jobs for host in dict.fromkeys(probe_job.hosts)]

    def remove(item: tuple[str, str]) -> None:
        host, directory = item
        argv = [*client.argv(attempts=1), "--", host, f"rm -rf -- {shlex.quote(directory)}"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)

    run_parallel(remove, items)


@contextlib.contextmanager
def _isolated(workdir: Path, stoker_home: Path) -> Iterator[None]:
    """Change to another working directory and $STOKER_HOME for the duration of the block."""
    previous = os.environ.get("STOKER_HOME")
    os.environ["STOKER_HOME"] = str(stoker_home)
    try:
        with contextlib.chdir(workdir):
            yield
    finally:
        if previous is None:
            del os.environ["STOKER_HOME"]
        else:
            os.environ["STOKER_HOME"] = previous
