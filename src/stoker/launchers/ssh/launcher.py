"""ssh launcher: run a job on hosts reached by ssh, watched by the same supervisor as on this machine.

`render` probes all hosts in parallel and changes nothing on them. `start` uploads the working directory, prepares the
hosts, and starts the local supervisor, which has one connection to the slot daemon of each host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from stoker.core.spec import run_checks
from stoker.core.units import format_bytes, pluralize
from stoker.errors import Fault, InputError, SpecError, UnavailableError
from stoker.jobs.launcher import RUN_PLACEHOLDER, LauncherTraits, SlotLogLine, check_traits, raise_faults
from stoker.jobs.run_files import STOP_REQUEST_FILE
from stoker.jobs.run_folder import RunFolder, stoker_home
from stoker.jobs.spec import JobSpec, ProgramSpec
from stoker.jobs.spec.checks import check_host_counts
from stoker.jobs.status import JobState, JobStatus
from stoker.jobs.topology import AddressBook, Command, Slot, Standby, get_topology, list_slots, render_command
from stoker.launchers.checks import check_gpu_roles, check_secret_env, check_via
from stoker.launchers.local import LocalLauncher
from stoker.launchers.paths import map_programs, programs_by_key, relative_to_workdir, resolve_job_paths
from stoker.launchers.plan import requested_ports
from stoker.launchers.ssh.client import (
    REMOTE_MODULES,
    RESPONSE_TIMEOUT_S,
    Session,
    SshClient,
    expand_hosts,
    expand_slots,
)
from stoker.launchers.ssh.gpus import count_needed_gpus, describe_ranks, share_gpus
from stoker.launchers.ssh.plan import HostConfig, SshPlan, is_detached, is_first_version, read_ssh_plan, set_detached
from stoker.launchers.ssh.preflight import (
    HostFacts,
    Route,
    check_host,
    find_ports,
    find_routes,
    make_client,
    open_sessions,
    probe_hosts,
    python_path,
    raise_issues,
    required_modules,
    run_parallel,
)
from stoker.launchers.ssh.prepare import MPI_RANK_FILE, PROFILER_FILE, is_prepared, prepare_hosts
from stoker.launchers.supervise.diagnosis import LOST_EXIT_CODE
from stoker.launchers.upload import IGNORE_FILE, find_largest, list_files, total_size

LARGE_UPLOAD_BYTES = 2**26
CLOCK_SKEW_S = 5.0


class SshLauncher:
    """Launcher for hosts reached by ssh."""

    traits: ClassVar[LauncherTraits] = LauncherTraits(
        name="ssh",
        supports_standby_workers=True,
        supports_address_per_slot=True,
        supports_elastic=True,
        supports_unequal_workers=True,
        hosts_key="ssh.hosts",
        prints_stacks=True,
    )

    def __init__(self) -> None:
        self._local = LocalLauncher()

    def resolve_paths(self, job: JobSpec) -> JobSpec:
        """Expand host files, and make paths relative to the working directory, which is the same on the hosts."""
        change = msgspec.structs.replace

        def relative(program: ProgramSpec) -> ProgramSpec:
            return change(program, script=relative_to_workdir(program.script), cwd=relative_to_workdir(program.cwd))

        config = None if job.ssh.config is None else str(Path.cwd() / job.ssh.config)
        job = map_programs(job, relative)
        tensorboard = str(Path.cwd() / job.tensorboard) if isinstance(job.tensorboard, str) else job.tensorboard
        ssh = change(job.ssh, hosts=expand_hosts(job.ssh.hosts), config=config)
        job = change(job, tensorboard=tensorboard, ssh=ssh)
        return change(job, workers=_count_workers(job)) if isinstance(job.workers, str) else job

    def check(self, job: JobSpec) -> Iterator[Fault]:
        """Yield what is wrong with a job on this machine, without connecting to any host."""
        yield from check_traits(job, self.traits)
        yield from run_checks(
            job,
            _check_hosts,
            check_secret_env,
            check_gpu_roles,
            _check_programs,
            _check_config,
            _check_workdir,
            check_via,
        )

    def render(self, job: JobSpec) -> SshPlan:
        """Probe all hosts and return the command of every slot; raise all issues of all hosts at once."""
        job = self.resolve_paths(job)
        raise_faults(self.check(job))
        slot_hosts = _assign_hosts(job)
        with open_sessions(job, slot_hosts.values()) as sessions:
            hosts = probe_hosts(sessions, job)
            worker_hosts = [host for slot, host in slot_hosts.items() if slot.role == "worker"]
            job = share_gpus(job, worker_hosts, {host: facts.facts.get("gpus", 0) for host, facts in hosts.items()})
            gpus = count_needed_gpus(job, worker_hosts)
            issues = {host: list(check_host(job, facts, gpus[host])) for host, facts in hosts.items()}
            up = {host: session for host, session in sessions.items() if hosts[host].issue is None}
            # The rendezvous port is on the host of the first slot.
            routes = find_routes(job, up, hosts) if slot_hosts[min(slot_hosts)] in up else None
            ports, port_issues = find_ports(job, up, slot_hosts, routes) if routes else ({}, {})
        for host, network_issues in (*(routes.issues if routes else {}).items(), *port_issues.items()):
            issues[host] += network_issues
        raise_issues(f"job {job.name!r} on ssh", hosts, issues)
        assert routes is not None
        check_same_paths(job, hosts)
        return build_plan(job, make_client(job), slot_hosts, hosts, routes.routes, routes.port, ports)

    def start(self, rendered: SshPlan, run: RunFolder, *, detach: bool = False) -> str:  # noqa: ARG002
        """Upload, prepare the hosts, and start the local supervisor."""
        handle = f"ssh://{run.folder}"
        run.write_handle(handle)
        self.restart(run, detach=detach)
        return handle

    def restart(self, run: RunFolder, *, detach: bool = False) -> None:
        """Start a finished run again; upload and prepare only if that was not done before."""
        (run.folder / STOP_REQUEST_FILE).unlink(missing_ok=True)
        set_detached(run, is_detached=detach)
        if not is_prepared(run):
            prepare_hosts(run)
        self._local.restart(run)

    def status(self, handle: str) -> JobStatus:
        """Return the last status that the supervisor wrote; start a supervisor again if there is none."""
        self._reattach(handle)
        return self._local.status(handle)

    def logs(self, handle: str, slot: Slot | None, *, follow: bool, tail: int | None = None) -> Iterator[SlotLogLine]:
        """Yield the log lines of the slots, which are streamed to this machine."""
        if follow:
            self._reattach(handle)
        return self._local.logs(handle, slot, follow=follow, tail=tail)

    def stop(self, handle: str) -> None:
        """Stop the run through its supervisor; clean up the hosts if there is none, or if it could not reach a host."""
        run = _to_run(handle)
        if run.read_status().state in (JobState.FAILED, JobState.STOPPED, JobState.SUCCEEDED):
            if may_still_run(run):
                _clean_up_or_raise(run)
            return
        if not _is_attempt_over(run):  # a supervisor that reattaches would start another attempt
            self._reattach(handle)
        if is_prepared(run):
            run.write(STOP_REQUEST_FILE, b"")
        is_lost = self._local.status(handle).state is JobState.LOST
        self._local.stop(handle)
        if is_lost or not is_prepared(run) or _has_unknown_exits(run):
            _clean_up_or_raise(run)

    def _reattach(self, handle: str) -> None:
        """Start a supervisor again for a detached run that has none."""
        run = _to_run(handle)
        if (
            not run.read_status().state.is_final
            and is_prepared(run)
            and not (run.folder / STOP_REQUEST_FILE).exists()
            and is_detached(run)
            and not is_first_version(run)
            and self._local.status(handle).state is JobState.LOST
        ):
            self._local.reattach(run)


def _is_attempt_over(run: RunFolder) -> bool:
    """Whether the last attempt is over and recorded."""
    status = run.read_status()
    return any(attempt.number == status.attempt for attempt in status.attempts)


def _has_unknown_exits(run: RunFolder) -> bool:
    """Whether the exit of any slot of the last attempt is unknown."""
    return any(slot.code in (None, LOST_EXIT_CODE) for slot in run.read_status().slots)


def may_still_run(run: RunFolder) -> bool:
    """Whether slots of a finished detached run may still be running on their hosts."""
    return is_detached(run) and not _clean_marker(run).exists() and _has_unknown_exits(run)


def _clean_marker(run: RunFolder) -> Path:
    """Return the file that exists once nothing of the last attempt is left on any host."""
    return run.folder / f"clean.{run.read_status().attempt}"


# --- Checks


def _count_workers(job: JobSpec) -> int:
    """Return how many workers the hosts have room for, up to the maximum of the topology."""
    capacity = max(1, len(expand_slots(job.ssh.hosts)))
    return min(capacity, job.traits.max_workers or capacity)


def _assign_hosts(job: JobSpec) -> dict[Slot, str]:
    """Assign workers to hosts in the order of the list, roles that are spread round-robin, all others to the first."""
    names = expand_slots(job.ssh.hosts)[: job.max_workers]
    workers = {Slot("worker", index): host for index, host in enumerate(names)}
    hosts = list(dict.fromkeys(workers.values()))
    spread = {role.name for role in get_topology(job).roles(job) if role.is_spread}

    def choose_host(slot: Slot) -> str:
        return workers.get(slot) or hosts[slot.index % len(hosts) if slot.role in spread else 0]

    return {slot: choose_host(slot) for slot in list_slots(job)}


def describe_unused_hosts(job: JobSpec) -> str:
    """Return which hosts a job uses if it has fewer workers than the hosts have room for; empty if it uses all."""
    hosts = expand_slots(job.ssh.hosts)
    used = list(dict.fromkeys(hosts[: job.max_workers]))
    unused = [host for host in dict.fromkeys(hosts) if host not in used]
    is_limit = job.max_workers == job.traits.max_workers
    why = f"topology {job.topology}" if is_limit else f"workers: {job.max_workers}"
    return f"{why} uses only {', '.join(used)}, not {', '.join(unused)}" if unused else ""


def _check_hosts(job: JobSpec) -> Iterator[Fault]:
    try:
        capacity = len(expand_slots(expand_hosts(job.ssh.hosts)))
    except SpecError as error:  # of a host file; as a fault, it does not hide those of the other checks
        yield Fault("ssh.hosts", f"{error.what} ({error.hint})")
        return
    if not job.ssh.hosts:
        yield Fault("ssh.hosts", "no SSH hosts specified; set ssh.hosts in the job file or pass --hosts a,b")
    elif capacity < job.max_workers and not any(check_host_counts(job.ssh)):  # reported with the job file
        what = f"job needs {job.max_workers} workers, the hosts have slots for {capacity}"
        yield Fault("ssh.hosts", f"{what}: add hosts, or set more slots per host (node1:2)")


def _check_programs(job: JobSpec) -> Iterator[Fault]:
    for key, program in programs_by_key(job).items() if job.ssh.copy else ():
        script, folder = program.script, program.cwd
        if script is not None and not Path(script).is_absolute() and not Path(script).is_file():
            yield Fault(f"{key}.script", f"no such file or directory: {Path.cwd() / script}")
        if folder is not None and not Path(folder).is_absolute() and not Path(folder).is_dir():
            yield Fault(f"{key}.cwd", f"no such directory: {Path.cwd() / folder}")


def _check_config(job: JobSpec) -> Iterator[Fault]:
    if job.ssh.config is not None and not Path(job.ssh.config).is_file():
        yield Fault("ssh.config", f"no such file or directory: {job.ssh.config}")


def _check_workdir(job: JobSpec) -> Iterator[Fault]:
    if job.ssh.copy and Path.cwd() in (Path.home(), Path("/")):
        what = f"the working directory is {Path.cwd()}, which is not uploaded"
        yield Fault("ssh.copy", f"{what}: run the command in the directory of your project")


def check_same_paths(job: JobSpec, hosts: Mapping[str, HostFacts]) -> None:
    """Raise InputError if a path differs between hosts and the topology needs one command for all: mpirun does."""
    for what, key in (("the working directory", "workdir"), ("Python", "python")):
        paths = {host: facts.facts[key] for host, facts in hosts.items()}
        if job.traits.has_standby_workers and len(set(paths.values())) > 1:
            listing = ", ".join(f"{path} on {host}" for host, path in paths.items())
            raise InputError(
                f"mpirun needs {what} at the same path on all hosts, it is {listing}",
                where=f"job {job.name!r} on ssh",
                hint=f"set ssh.{key} to an absolute path",
            )


# --- The plan


def build_plan(
    job: JobSpec,
    client: SshClient,
    slot_hosts: Mapping[Slot, str],
    hosts: Mapping[str, HostFacts],
    routes: Mapping[str, Route],
    port: int,
    ports: Mapping[Slot, int] | None = None,
) -> SshPlan:
    """Return the plan for probed hosts; pure, except that it lists the working directory."""
    facts = {host: probed.facts for host, probed in hosts.items()}
    configs = {host: _host_config(job, values) for host, values in facts.items()}
    ports = ports or {}
    requested = {slot for host in configs for slot in requested_ports(job, [s for s in ports if slot_hosts[s] == host])}
    commands = _render_commands(job, slot_hosts, facts, configs, routes, port, ports)
    standby = {str(slot): dict(command.env) for slot, command in commands.items() if isinstance(command, Standby)}
    return SshPlan(
        slots={str(slot): command for slot, command in commands.items() if isinstance(command, Command)},
        standby=tuple(standby),
        standby_env=standby,
        hosts={str(slot): host for slot, host in slot_hosts.items()},
        host_configs=configs,
        client=client,
        source=str(Path.cwd()),
        exclude=job.ssh.exclude,
        setup=job.ssh.setup,
        modules=required_modules(job),
        secrets=tuple(job.secret_env),
        grace_s=float(job.grace),
        port=port,
        ports={str(slot): number for slot, number in ports.items() if slot not in requested},
        keeps_port=bool(job.port),
        notes=(*_upload_notes(job, facts, configs), *_host_notes(job, slot_hosts, facts, configs)),
    )


def _host_config(job: JobSpec, facts: Mapping[str, Any]) -> HostConfig:
    return HostConfig(
        workdir=facts["workdir"],
        python=python_path(job, facts),
        copies=job.ssh.copy,
        rsync=facts["rsync"],
        profiler=job.profile.every > 0 and (facts.get("modules") or {}).get("stoker") is None,
        mpi=job.traits.has_standby_workers,
    )


def _render_commands(
    job: JobSpec,
    slot_hosts: Mapping[Slot, str],
    facts: Mapping[str, Mapping[str, Any]],
    configs: Mapping[str, HostConfig],
    routes: Mapping[str, Route],
    port: int,
    ports: Mapping[Slot, int],
) -> dict[Slot, Command | Standby]:
    """Return the command of each slot, with the paths and interfaces of its host."""
    addresses = {slot: routes[host].address for slot, host in slot_hosts.items()}
    commands: dict[Slot, Command | Standby] = {}
    workers, ranks, gpus = Counter[str](), Counter[str](), Counter[str]()
    for slot, host in slot_hosts.items():
        if slot.role == "worker":
            workers[host] += 1
            ranks[host] += job.ranks_of(slot.index)
    for slot, host in slot_hosts.items():
        config, interface = configs[host], routes[host].interface
        book = AddressBook(
            hosts=addresses,
            port=port,
            ports=ports,
            python=config.python,
            profiler=(config.python, f"{config.workdir}/{PROFILER_FILE}") if config.profiler else (),
            mpi_rank=(config.python, "-I", "-S", f"{config.workdir}/{MPI_RANK_FILE}"),
            cores_per_rank=facts[host]["cores"] // max(1, ranks[host]),
            env=dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else (), interface),
            has_rsh_agent=True,
        )
        command = render_command(resolve_job_paths(job, config.workdir), slot, book)
        if slot.role == "worker":
            if workers[host] > 1:
                command = replace(command, env={**_gpu_env(job, slot.index, gpus[host]), **command.env})
            gpus[host] += job.resources_of(slot.index).gpus
        elif not job.traits.has_standby_workers:  # TensorFlow allocates the memory of all GPUs that it sees
            command = replace(command, env={"CUDA_VISIBLE_DEVICES": "", **command.env})
        commands[slot] = command
    return commands


def _gpu_env(job: JobSpec, worker: int, first: int) -> dict[str, str]:
    """Return the variable by which each worker of a host sees only its own GPUs, which start at the number `first`."""
    count = job.resources_of(worker).gpus
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + count)))} if count else {}


def _upload_notes(
    job: JobSpec, facts: Mapping[str, Mapping[str, Any]], configs: Mapping[str, HostConfig]
) -> Iterator[str]:
    """Yield what will be uploaded."""
    folder = Path.cwd()
    stat = folder.stat()
    # A guess, for the note only: markers show for sure whether a host has this very directory before it is uploaded.
    others = [host for host, values in facts.items() if values["identity"] != [stat.st_ino, stat.st_mtime_ns]]
    if not others or not job.ssh.copy:
        return
    names = list_files(folder, job.ssh.exclude, skip=stoker_home())
    size = total_size(folder, names)
    targets = ", ".join(f"{host}:{configs[host].workdir}" for host in others)
    yield f"uploads {pluralize(len(names), 'file')} ({format_bytes(size)}) of {folder} to {targets}"
    if size > LARGE_UPLOAD_BYTES:
        largest = ", ".join(f"{name} ({format_bytes(part)})" for name, part in find_largest(folder, names))
        yield f"the largest parts of the upload are {largest}: list what the hosts do not need in {IGNORE_FILE}"


def _host_notes(
    job: JobSpec,
    slot_hosts: Mapping[Slot, str],
    facts: Mapping[str, Mapping[str, Any]],
    configs: Mapping[str, HostConfig],
) -> Iterator[str]:
    """Yield what the user should know about the hosts, and which settings are ignored."""
    if note := describe_unused_hosts(job):
        yield note
    if ranks := describe_ranks(job, [host for slot, host in slot_hosts.items() if slot.role == "worker"]):
        yield f"the hosts run different numbers of ranks: {ranks}"
    if job.checkpoint.dir is None:
        host = slot_hosts[min(slot_hosts)]
        folder = f"{configs[host].workdir}/.stoker/{RUN_PLACEHOLDER}/checkpoints"
        yield f"checkpoints are written to {folder} on {host}; set checkpoint.dir to write them elsewhere"
    versions = {host: (values.get("modules") or {}).get("torch") for host, values in facts.items()}
    if "torch" in required_modules(job) and len(set(versions.values())) > 1:
        listing = ", ".join(f"{version or 'none'} on {host}" for host, version in versions.items())
        yield f"hosts have different versions of torch: {listing}"
    for host, values in facts.items():
        if abs(values["clock_skew_s"]) > CLOCK_SKEW_S:
            yield f"the clock of {host} differs from the local clock by {values['clock_skew_s']:+.0f} s"
    if job.image:
        yield "image is ignored: the SSH launcher uses the Python of the hosts, not containers"
    if job.checkpoint.claim:
        yield "checkpoint.claim is ignored: the SSH launcher writes checkpoints to the first host"
    if job.data.via == "cluster":
        yield "data.via: cluster is ignored: the SSH launcher reads data without the cluster's cache"


# --- Stopping


def _to_run(handle: str) -> RunFolder:
    return RunFolder(Path(handle.partition("://")[2]))


def clean_up_hosts(run: RunFolder) -> list[str]:
    """Kill what is left of a run on its hosts; return what went wrong on which host."""
    plan = read_ssh_plan(run)

    def clean_up(host: str) -> str:
        """Clean up one host, and return what went wrong."""
        config = plan.host_configs[host]
        request = {
            "op": "cleanup",
            "folder": f"{config.workdir}/.stoker/{run.id}",
            "slots": [
                "setup-*",
                *(Slot.parse(name).filename for name, slot_host in plan.hosts.items() if slot_host == host),
            ],
            "tags": {"STOKER_RUN": run.id, "STOKER_HOST": host},
            "grace_s": plan.grace_s,
        }
        try:
            with Session(plan.client, host, config.python, run.id, attempts=1, modules=REMOTE_MODULES) as session:
                survivors = session.request(request, plan.grace_s + RESPONSE_TIMEOUT_S)["survivors"]
        except UnavailableError as error:
            return f"{host}: {error.what}"
        return f"{host}: cannot kill process {', '.join(map(str, survivors))}" if survivors else ""

    return [failure for failure in run_parallel(clean_up, plan.host_configs) if failure]


def _clean_up_or_raise(run: RunFolder) -> None:
    """Kill what is left of a run on its hosts; raise UnavailableError if a host cannot be reached."""
    if failures := clean_up_hosts(run):
        message = f"{'; '.join(failures)}; slots may still be running there; try again: stoker job stop {run.id}"
        if (status := run.read_status()).state is JobState.STOPPED:
            run.write_status(msgspec.structs.replace(status, state=JobState.LOST, message=message))
        raise UnavailableError(message, where=run.id)
    _clean_marker(run).touch()
