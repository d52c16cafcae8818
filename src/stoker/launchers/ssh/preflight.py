"""Preflight checks of ssh hosts and the network between them: probe all hosts in parallel, report issues as values.

`render` rejects a job with these issues, and `stoker doctor` shows them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, TypeVar

from stoker.errors import InputError, StokerError, UnavailableError
from stoker.jobs.spec import DEFAULT_PORT, JobSpec
from stoker.jobs.topology import Slot
from stoker.launchers.paths import programs_by_key
from stoker.launchers.plan import listening_slots, requested_ports
from stoker.launchers.ssh.client import Session, SshClient

MAX_PARALLEL = 32
MIN_PYTHON = (3, 8)
PORT_TRIES = 20
"""How many ports are tried if the job sets none; the first free one is used."""
FULL_MESH_HOSTS = 32
"""Up to this many hosts, each dials all others; beyond, each dials the next one and the first."""

MPI_PROGRAMS = ("mpirun", "orted")
_PORT_FIX = "set another port with --set port=N"
_PYTHON_FIX = "set ssh.python to another interpreter"

T = TypeVar("T")


class Issue(NamedTuple):
    """One thing that prevents the job from running on a host: its subject, what is wrong, and how to fix it."""

    about: str
    what: str
    fix: str = ""

    @property
    def sentence(self) -> str:
        """The text after the host name."""
        return f"{self.what} ({self.fix})" if self.fix else self.what


class HostFacts(NamedTuple):
    """What the probe found on a host, or why the host cannot be used."""

    host: str
    facts: dict[str, Any]
    issue: Issue | None = None


class Route(NamedTuple):
    """The address by which other hosts reach a host, and the interface of that address."""

    address: str
    interface: str


class Routes(NamedTuple):
    """The rendezvous port, the route to each host, and the issues of each host."""

    port: int
    routes: dict[str, Route]
    issues: dict[str, list[Issue]]


# --- What the job requires of a host


def required_paths(job: JobSpec) -> dict[str, str]:
    """Return the paths that must exist on a host, by their keys in the job file."""
    candidates = {"data.train": job.data.train, "data.val": job.data.val}
    candidates |= {f"{key}.script": program.script for key, program in programs_by_key(job).items()}
    paths = {key: path for key, path in candidates.items() if path and "://" not in path and "{" not in path}
    return {**paths, **{f"secret_files.{path}": path for path in job.secret_files}}


def required_modules(job: JobSpec) -> tuple[str, ...]:
    """Return the modules that the job's Python must have."""
    needs_stoker = (job.program.module or "").startswith("stoker.")
    return (*job.traits.required_modules, *(("stoker",) if needs_stoker else ()))


def remote_workdir(job: JobSpec) -> str:
    """Return the working directory on a host; a relative one is relative to the home directory."""
    return job.ssh.workdir or f"stoker/{job.name}"


def python_path(job: JobSpec, facts: Mapping[str, Any]) -> str:
    """Return the absolute path of the Python on a host, if it exists already."""
    python = job.ssh.python
    return str(facts["python"] or (str(Path(facts["workdir"], python)) if "/" in python else python))


# --- Facts about hosts


def make_client(job: JobSpec) -> SshClient:
    """Return the ssh client with the settings of a job."""
    return SshClient(config=job.ssh.config, user=job.ssh.user, lost_after_s=float(job.ssh.lost_after))


@contextmanager
def open_sessions(job: JobSpec, hosts: Iterable[str]) -> Iterator[dict[str, Session]]:
    """Yield one session for each distinct host; close all of them at the end."""
    client, python = make_client(job), job.ssh.python
    with ExitStack() as stack:
        yield {host: stack.enter_context(Session(client, host, python, attempts=2)) for host in dict.fromkeys(hosts)}


def probe_hosts(sessions: Mapping[str, Session], job: JobSpec, modules: Iterable[str] = ()) -> dict[str, HostFacts]:
    """Probe all hosts in parallel; `modules` are those whose versions are asked for besides the usual ones."""
    request = facts_request(job, python=job.ssh.python)
    request["modules"] += modules
    return {facts.host: facts for facts in run_parallel(lambda session: _probe(session, request), sessions.values())}


def _probe(session: Session, request: Mapping[str, Any]) -> HostFacts:
    try:
        before = time.time()
        facts = session.request(request)
    except UnavailableError as error:
        return HostFacts(session.host, {}, Issue("host", error.what, error.hint or ""))
    # The clock was read on the host between `before` and now: within that interval there is no skew.
    skew_s = facts["clock"] - max(before, min(time.time(), facts["clock"]))
    return HostFacts(session.host, {**facts, "clock_skew_s": skew_s})


def facts_request(job: JobSpec, *, python: str) -> dict[str, Any]:
    """Return the request for the facts about a host."""
    return {
        "op": "facts",
        "workdir": remote_workdir(job),
        "python": python,
        "modules": list(dict.fromkeys(("torch", "stoker", *required_modules(job)))),
        "paths": list(required_paths(job).values()),
        "programs": [*([job.program.command[0]] if job.program.command else []), *MPI_PROGRAMS],
    }


def check_host(job: JobSpec, host: HostFacts, gpus: int) -> Iterator[Issue]:
    """Yield what prevents a host from running its slots, which need this many GPUs."""
    facts = host.facts
    if host.issue is not None:
        yield host.issue
        return
    if not job.ssh.setup:
        yield from check_python(job.ssh.python, facts, required_modules(job))
    if facts["workdir_error"]:
        what = f"cannot use the directory {facts['workdir']}: {facts['workdir_error']}"
        yield Issue("folder", what, "set ssh.workdir to another directory")
    if gpus > facts["gpus"]:
        yield Issue(
            "gpus",
            f"job needs {gpus} GPUs, but the host has {facts['gpus']}",
            "to run on CPUs: --set resources.gpu=0",
        )
    if not job.ssh.setup:
        yield from _check_programs(job, facts["programs"])
    for key, path in required_paths(job).items():
        is_uploaded = job.ssh.copy and not Path(path).is_absolute() and Path(path).exists()
        if not is_uploaded and path not in facts["existing_paths"]:
            yield Issue(key, f"no such file or directory: {Path(facts['workdir'], path)} ({key})")


def _check_programs(job: JobSpec, programs: Iterable[str]) -> Iterator[Issue]:
    command = job.program.command
    if command and "/" not in command[0] and command[0] not in programs:
        yield Issue("program", f"program {command[0]!r} not found on the PATH")
    if job.traits.needs_open_mpi and set(MPI_PROGRAMS) - set(programs):
        what = "mpirun not found on the PATH; topology 'mpi' needs Open MPI 4"
        if "mpirun" in programs:
            what = "mpirun has no orted (Open MPI 5 or another MPI); topology 'mpi' needs Open MPI 4"
        yield Issue("program", what, "install the Debian package openmpi-bin")


def check_python(name: str, facts: Mapping[str, Any], modules: Iterable[str]) -> Iterator[Issue]:
    """Yield what is wrong with the Python on a host."""
    if facts["python"] is None:
        yield Issue("python", f"Python {name!r} does not work: {facts['python_error']}", _PYTHON_FIX)
        return
    if tuple(map(int, facts["version"].split(".")[:2])) < MIN_PYTHON:
        what = f"{name!r} is Python {facts['version']}, but the job needs 3.8 or later"
        yield Issue("python", what, _PYTHON_FIX)
    for module in modules:
        if facts["modules"][module] is None:
            fix = "install it, for example with ssh.setup, or set ssh.python to another interpreter"
            yield Issue(module, f"{module} is not installed for {facts['python']}", fix)


def raise_issues(where: str, hosts: Mapping[str, HostFacts], issues: Mapping[str, list[Issue]]) -> None:
    """Raise all issues of all hosts as one error."""
    by_sentence: dict[str, list[str]] = {}
    for host, host_issues in issues.items():
        for issue in host_issues:
            by_sentence.setdefault(issue.sentence, []).append(host)
    if not by_sentence:
        return
    sentences = [f"{', '.join(names)}: {sentence}" for sentence, names in by_sentence.items()]
    ready = sum(not issues[host] for host in hosts)
    summary = f"{ready} of {len(hosts)} hosts {'is' if ready == 1 else 'are'} ready; " if len(hosts) > 1 else ""
    error = InputError if all(facts.issue is None for facts in hosts.values()) else UnavailableError
    raise error(summary + "; ".join(sentences), where=where)


# --- The network between hosts


def dial_targets(hosts: list[str]) -> dict[str, list[str]]:
    """Return which hosts each host dials: all others, or the next one and the first if there are many."""
    if len(hosts) <= FULL_MESH_HOSTS:
        return {host: [other for other in hosts if other != host] for host in hosts}
    following = dict(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
    return {
        host: list(dict.fromkeys(other for other in (hosts[0], following[host]) if other != host)) for host in hosts
    }


class _Listening(NamedTuple):
    """The port on which a host listens for the others, and why it is not the one that was requested."""

    port: int
    error: str


def find_routes(job: JobSpec, sessions: Mapping[str, Session], hosts: Mapping[str, HostFacts]) -> Routes:
    """Test the connections between all hosts; return the rendezvous port and the addresses that are reachable."""
    first, *others = sessions
    ports = [job.port or 0] if job.port or not others else list(range(DEFAULT_PORT, DEFAULT_PORT + PORT_TRIES))
    tokens = {host: secrets.token_hex(8) for host in sessions}

    def listen(host: str) -> _Listening:
        # The first host listens on the rendezvous port, the others on any port, as ranks do.
        return _listen(sessions[host], ports if host == first else [], tokens[host])

    listening = dict(zip(sessions, run_parallel(listen, sessions), strict=True))
    issues: dict[str, list[Issue]] = {}
    port, error = listening[first]
    if error:
        issues[first] = [Issue("port", f"cannot listen on port {ports[-1]}: {error.lower()}", _PORT_FIX)]
    if not others:
        return Routes(port, {first: Route("127.0.0.1", "lo")}, issues)
    interfaces = {host: {address: name for name, address in hosts[host].facts["addresses"]} for host in sessions}
    targets = dial_targets(list(sessions))

    def dial(host: str) -> dict[str, dict[str, Any]]:
        """Dial the targets of a host from there; return how it reached each of them."""
        request = [
            {"addresses": list(interfaces[name]), "port": listening[name].port, "token": tokens[name]}
            for name in targets[host]
        ]
        routes = sessions[host].request({"op": "dial", "targets": request})["routes"]
        return dict(zip(targets[host], routes, strict=True))

    dialed = dict(zip(sessions, run_parallel(dial, sessions), strict=True))
    for host, reached in dialed.items():
        for other, route in reached.items():
            if route["address"] is None:
                tried = ", ".join(interfaces[other]) or "it has none"
                what = f"cannot reach {other} on port {listening[other].port} (addresses tried: {tried})"
                fix = f"open all ports of {other} for {host} in the firewall"
                issues.setdefault(host, []).append(Issue("network", what, fix))
    to_first = {host: dialed[host][first] for host in others}
    if any(route["address"] is None for route in to_first.values()):
        return Routes(port, {}, issues)
    # Hosts may reach the first one by different addresses; use the most frequent one for all.
    addresses = [route["address"] for route in to_first.values()]
    address = max(sorted(set(addresses)), key=addresses.count)
    routes = {host: Route(route["own_address"], route["interface"] or "") for host, route in to_first.items()}
    return Routes(port, {first: Route(address, interfaces[first][address]), **routes}, issues)


def _listen(session: Session, ports: Iterable[int], token: str) -> _Listening:
    """Start listening on a host, on the first of these ports that is free, or else on any port."""
    error = ""
    for port in (*ports, 0):
        response = session.request({"op": "listen", "port": port, "token": token})
        if "error" not in response:
            return _Listening(response["port"], error if port == 0 else "")
        error = str(response["error"])
    return _Listening(0, error)


def find_ports(
    job: JobSpec, sessions: Mapping[str, Session], hosts: Mapping[Slot, str], routes: Routes
) -> tuple[dict[Slot, int], dict[str, list[Issue]]]:
    """Find a port for every slot that listens on one of its own: the job's, or the first free ones on its host."""
    if not listening_slots(job):
        return {}, {}
    first = next(iter(sessions))

    def is_free(host: str, port: int) -> bool:
        # On the first host our own probe still listens on the rendezvous port.
        is_own = host == first and port == routes.port
        return is_own or "error" not in sessions[host].request({"op": "listen", "port": port, "token": ""})

    def find(host: str) -> tuple[dict[Slot, int], list[Issue]]:
        slots = [slot for slot in listening_slots(job) if hosts[slot] == host]
        requested = requested_ports(job, slots)
        last_port = DEFAULT_PORT + PORT_TRIES + len(slots) - 1
        candidates = iter(range(DEFAULT_PORT, last_port + 1))
        ports: dict[Slot, int] = {}
        issues: list[Issue] = []
        for slot in slots:
            for port in [requested[slot]] if slot in requested else candidates:
                if port in ports.values() or (slot not in requested and port in requested.values()):
                    continue
                if is_free(host, port):
                    ports[slot] = port
                    break
            else:
                port = requested.get(slot, 0)
                if not port:
                    what = f"no free port for {slot} from {DEFAULT_PORT} to {last_port}"
                    issues.append(Issue("port", what, _PORT_FIX))
                elif host != first or port != job.port:  # `find_routes` reports that one
                    issues.append(Issue("port", f"cannot listen on port {port} of {slot}: it is in use", _PORT_FIX))
        return ports, issues

    results = dict(zip(sessions, run_parallel(find, sessions), strict=True))
    ports = {slot: port for slot_ports, _ in results.values() for slot, port in slot_ports.items()}
    return ports, {host: issues for host, (_, issues) in results.items() if issues}


def run_parallel(function: Callable[[Any], T], items: Iterable[Any], stop: Event | None = None) -> list[T]:
    """Call a function for all items in parallel and return the results; raise all errors as one.

    On Ctrl-C no further call starts. With `stop`, running calls are asked to stop and waited for; without, they are
    left alone.
    """
    pool = ThreadPoolExecutor(MAX_PARALLEL)
    try:
        futures = [pool.submit(function, item) for item in items]
        wait(futures)
    except BaseException:
        if stop is not None:
            stop.set()
        pool.shutdown(wait=stop is not None, cancel_futures=True)
        raise
    pool.shutdown()
    errors = [error for future in futures if (error := future.exception()) is not None]
    user_errors = [error for error in errors if isinstance(error, StokerError)]
    if len(user_errors) > 1 and len(user_errors) == len(errors):
        raise type(user_errors[0])("; ".join(map(str, user_errors)))
    for error in errors:
        raise error
    return [future.result() for future in futures]
