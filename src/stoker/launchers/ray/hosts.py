"""Ray on bare hosts: check the hosts over ssh, and plan the Ray processes that are started there for a run.

The first host gets the head of the cluster, the others are its workers. Each Ray node is a slot of the ssh launcher, in
a plan of its own: a lease stops it when nobody uses the cluster any more. The dashboard, which accepts jobs, listens on
the loopback interface of the head only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stoker.errors import Fault, SpecError
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.spec import JobSpec
from stoker.jobs.spec.checks import check_host_counts
from stoker.jobs.topology import Command, Slot, list_slots
from stoker.launchers.ray.cluster import local_version
from stoker.launchers.ray.plan import worker_bundle
from stoker.launchers.ssh.client import expand_hosts, expand_slots
from stoker.launchers.ssh.gpus import share_gpus
from stoker.launchers.ssh.plan import HostConfig, SshPlan
from stoker.launchers.ssh.preflight import (
    HostFacts,
    Issue,
    Route,
    check_host,
    check_python,
    find_routes,
    make_client,
    open_sessions,
    probe_hosts,
    python_path,
    raise_issues,
    required_modules,
)

GCS_PORT, DASHBOARD_PORT = "@ray:gcs-port@", "@ray:dashboard-port@"
CLIENT_PORT, AGENT_PORT = "@ray:client-port@", "@ray:agent-port@"
TEMP_DIR = "@ray:temp-dir@"
"""Placeholders for what each attempt chooses anew: ports that are free on the host, and a directory in /tmp."""
HEAD = Slot("node", 0)
NODE_GRACE_S = 10.0
"""Time for the processes of a Ray node to exit; they have no state to save."""
LEASE_MARGIN_S = 10.0
"""How much longer than the slots of the job a Ray node keeps running without us, so that it does not cut them off."""
JOIN_TRIES = "120"
"""How many seconds a worker waits for the head, which is started at the same time."""
# Ray's agents erase their environment, so that their tags are not found, and outlive a killed head by a minute. All
# processes of Ray have log files open in its directory.
_KILL_USERS = (
    "import contextlib, os, sys\n"
    "for name in os.listdir('/proc'):\n"
    "    with contextlib.suppress(OSError, ValueError):\n"
    "        fds = ['/proc/%d/fd/%s' % (int(name), fd) for fd in os.listdir('/proc/%d/fd' % int(name))]\n"
    "        if any(os.readlink(fd).startswith(sys.argv[1] + '/') for fd in fds):\n"
    "            os.kill(int(name), 9)"
)
# Ray needs up to 30 s to stop a node whose head is gone; whatever still uses its directory then is killed.
_RUN_NODE = (
    'dir=$1; kill_users=$2; shift 2; trap : TERM; "$@" & wait $!; code=$?; kill $! 2>/dev/null; '
    "for i in 1 2 3 4 5; do kill -0 $! 2>/dev/null || break; sleep 0.2; done; "
    '"$1" -IS -c "$kill_users" "$dir"; rm -rf "$dir"; exit $code'
)


class NodePlan(NamedTuple):
    """The Ray nodes of a run as slots of the ssh launcher."""

    job: JobSpec
    """The job, with the GPUs of each worker if it leaves them open."""
    ssh: SshPlan
    addresses: dict[str, str]
    """The address of the node on each host."""

    def pin(self, host: str) -> dict[str, float]:
        """Return the resource that only the node on a host has, by which a slot is placed there."""
        return {f"node:{self.addresses[host]}": 0.001}


def node_run(run: RunFolder) -> RunFolder:
    """Return the folder of a run's Ray nodes, which are run by ssh as if they were a run of their own."""
    return RunFolder(run.folder / f"ray-{run.id}")


# --- Checks


def assign_hosts(job: JobSpec) -> dict[Slot, str]:
    """Assign workers to hosts in the order of the list."""
    return dict(zip(list_slots(job), expand_slots(job.ray.hosts), strict=False))


def check_hosts(job: JobSpec) -> Iterator[Fault]:
    """Yield what is wrong with the hosts of a job, without connecting to them."""
    try:
        capacity = len(expand_slots(expand_hosts(job.ray.hosts)))
    except SpecError as error:
        yield Fault("ray.hosts", f"{error.what} ({error.hint})")
        return
    if capacity < job.max_workers and not any(check_host_counts(job.ray)):  # reported with the job file
        what = f"job needs {job.max_workers} workers, the hosts have slots for {capacity}"
        yield Fault("ray.hosts", f"{what}: add hosts, or set more slots per host (node1:2)")
    if job.ssh.config is not None and not Path(job.ssh.config).is_file():
        yield Fault("ssh.config", f"no such file or directory: {job.ssh.config}")


def check_ray(host: str, facts: Mapping[str, Any], head: str, head_facts: Mapping[str, Any]) -> Iterator[Issue]:
    """Yield what prevents a host from joining a Ray cluster: Ray requires equal versions on all nodes."""
    if facts["python"] is None:
        return
    version, head_version = facts["modules"]["ray"], (head_facts.get("modules") or {}).get("ray")
    if version is None:
        return
    if host == head and facts["modules"]["aiohttp"] is None:
        yield Issue("ray", "ray is installed without its job API", f"pip install 'ray[default]=={version}'")
    if head_version is not None and version != head_version:
        yield Issue("ray", f"ray is {version}, but {head_version} on {head}", "install the same version on all hosts")
    elif _minor(version) != _minor(local_version()):
        fix = f"install ray=={local_version()} there, or ray=={version} here"
        yield Issue("ray", f"ray is {version}, but {local_version()} on this machine", fix)
    if head_facts.get("python") and _minor(facts["version"]) != _minor(head_facts["version"]):
        what = f"Python is {facts['version']}, but {head_facts['version']} on {head}; all nodes of Ray need the same"
        yield Issue("python", what, "set ssh.python to another interpreter")


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _check_host(job: JobSpec, host: HostFacts, head: HostFacts, workers: Sequence[int]) -> Iterator[Issue]:
    """Yield what prevents a host from running its Ray node and these workers."""
    resources = [job.resources_of(worker) for worker in workers]
    # Ray uploads the working directory, whatever `ssh.copy` says.
    copied = msgspec.structs.replace(job, ssh=msgspec.structs.replace(job.ssh, copy=True))
    yield from check_host(copied, host, sum(each.gpus for each in resources))
    if host.issue is not None:
        return
    facts = host.facts
    if not job.ssh.setup and facts["python"]:  # otherwise Ray may be installed by the setup
        yield from check_python(job.ssh.python, facts, ("ray",))
        yield from check_ray(host.host, facts, head.host, head.facts)
    if (needed := sum(each.cpu or 0 for each in resources)) > facts["cores"]:
        what = f"job needs {needed:g} CPUs, but the host has {facts['cores']}"
        yield Issue("cpus", what, "set resources.cpu to a lower value")


# --- The plan


def plan_nodes(job: JobSpec) -> NodePlan:
    """Probe the hosts and return the plan of the Ray nodes; raise all issues of all hosts at once."""
    worker_hosts = list(assign_hosts(job).values())
    with open_sessions(job, expand_slots(job.ray.hosts)) as sessions:
        hosts = probe_hosts(sessions, job, ("ray", "aiohttp"))
        job = share_gpus(job, worker_hosts, {host: facts.facts.get("gpus", 0) for host, facts in hosts.items()})
        workers = {host: [index for index, name in enumerate(worker_hosts) if name == host] for host in hosts}
        first = next(iter(hosts))
        issues = {host: list(_check_host(job, facts, hosts[first], workers[host])) for host, facts in hosts.items()}
        up = {host: session for host, session in sessions.items() if hosts[host].issue is None}
        routes = find_routes(job, up, hosts) if first in up else None
    for host, network_issues in (routes.issues if routes else {}).items():
        issues[host] += network_issues
    raise_issues(f"job {job.name!r} on ray", hosts, issues)
    assert routes is not None
    facts = {host: probed.facts for host, probed in hosts.items()}
    return build_nodes(job, facts, routes.routes)


def build_nodes(job: JobSpec, facts: Mapping[str, Mapping[str, Any]], routes: Mapping[str, Route]) -> NodePlan:
    """Return the plan of the Ray nodes on probed hosts; pure."""
    needed = Counter[str]()
    for slot, host in assign_hosts(job).items():
        needed[host] += math.ceil(worker_bundle(job, slot.index)["CPU"])
    configs = {host: _host_config(job, values) for host, values in facts.items()}
    head = next(iter(configs))
    commands = {}
    for index, (host, config) in enumerate(configs.items()):
        cpus = max(facts[host]["cores"], needed[host])  # ranks may share CPUs, unless the job requests them
        address = "" if host == head else f"{routes[head].address}:{GCS_PORT}"
        argv = _start_ray(config.python, routes[host].address, cpus, head_address=address)
        # A token on the host would otherwise enable authentication, and we have no such token.
        env = {"RAY_AUTH_MODE": "disabled", "RAY_NUM_REDIS_GET_RETRIES": JOIN_TRIES}
        commands[f"{HEAD.role}/{index}"] = Command(argv, env, "/")
    lease_s = float(job.ray.lost_after) + float(job.grace) + LEASE_MARGIN_S
    plan = SshPlan(
        slots=commands,
        hosts=dict(zip(commands, configs, strict=True)),
        host_configs=configs,
        client=msgspec.structs.replace(make_client(job), lost_after_s=lease_s),
        source=str(Path.cwd()),
        exclude=job.ssh.exclude,
        setup=job.ssh.setup,
        modules=("ray", *required_modules(job)),
        grace_s=NODE_GRACE_S,
    )
    return NodePlan(job, plan, {host: routes[host].address for host in configs})


def _host_config(job: JobSpec, facts: Mapping[str, Any]) -> HostConfig:
    return HostConfig(
        workdir=facts["workdir"],
        python=python_path(job, facts),
        copies=job.ssh.copy and job.ssh.setup is not None,  # for the setup only: Ray uploads what the job needs
        rsync=facts["rsync"],
    )


def _start_ray(python: str, address: str, cpus: int, *, head_address: str) -> tuple[str, ...]:
    """Return the command of a Ray node: of the head if there is no `head_address`."""
    role = (
        (f"--address={head_address}",)
        if head_address
        else (
            "--head",
            f"--port={GCS_PORT}",
            "--include-dashboard=true",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={DASHBOARD_PORT}",
            f"--ray-client-server-port={CLIENT_PORT}",
        )
    )
    options = (
        f"--node-ip-address={address}",
        f"--num-cpus={cpus}",
        f"--dashboard-agent-listen-port={AGENT_PORT}",
        # Any free port: those of Ray's default range may be in use by another cluster on the host.
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--temp-dir={TEMP_DIR}",
        "--disable-usage-stats",
        "--block",
    )
    ray = (python, "-m", "ray.scripts.scripts", "start", *role, *options)
    return ("sh", "-c", _RUN_NODE, "sh", TEMP_DIR, _KILL_USERS, *ray)


def fill_in(plan: SshPlan, temp_dir: str, ports: Mapping[str, Mapping[str, int]]) -> SshPlan:
    """Return the plan of an attempt, with its directory and with the ports of each host instead of placeholders.

    `ports` has the values of the placeholders by host; the port of the head's store is that of the head on all hosts.
    """
    shared = {TEMP_DIR: temp_dir, GCS_PORT: str(ports[plan.hosts[str(HEAD)]][GCS_PORT])}

    def fill_in_command(name: str, command: Command) -> Command:
        values = {**{key: str(port) for key, port in ports[plan.hosts[name]].items()}, **shared}
        argv = list(command.argv)
        for placeholder, value in values.items():
            argv = [argument.replace(placeholder, value) for argument in argv]
        return Command(tuple(argv), command.env, command.cwd)

    slots = {name: fill_in_command(name, command) for name, command in plan.slots.items()}
    return msgspec.structs.replace(plan, slots=slots)
