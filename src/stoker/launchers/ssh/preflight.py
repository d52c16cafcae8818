"""What there is on ssh hosts and between them: all are asked at once, and what is in the way is told as values.

`render` refuses a job with it, and `stoker doctor` makes its table of it.
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

from stoker.errors import StokerError, UnavailableError
from stoker.jobs.spec import PORT, Job
from stoker.jobs.topology import Slot
from stoker.launchers.paths import programs
from stoker.launchers.plan import listeners, named_ports
from stoker.launchers.ssh.client import Client, Session

AT_ONCE = 32
OLDEST = (3, 8)
TRIED_PORTS = 20
"""Where the job names none: the first that is free of so many is taken."""
MESH = 32
"""Up to so many hosts each dials every other; beyond, the next and the first."""

MPI_PROGRAMS = ("mpirun", "orted")

T = TypeVar("T")


class Trouble(NamedTuple):
    """One thing that is in the way on a host: about what, what is wrong, and what mends it."""

    about: str
    what: str
    fix: str = ""

    @property
    def sentence(self) -> str:
        """What follows the name of the host."""
        if not self.fix:
            return self.what
        return f"{self.what}: {self.fix}" if self.about == "host" else f"{self.what} ({self.fix})"


class Look(NamedTuple):
    """What was found on one host, or why nothing was."""

    host: str
    found: dict[str, Any]
    trouble: Trouble | None = None


class Route(NamedTuple):
    """By which address and interface the others reach a host."""

    address: str
    interface: str


class Ways(NamedTuple):
    """Where slots meet, how each host is reached, and what is in the way, by the host that has the trouble."""

    port: int
    routes: dict[str, Route]
    troubles: dict[str, list[Trouble]]


# --- What the job needs of a host


def local_paths(job: Job) -> dict[str, str]:
    """Give the paths that must be there, by their keys."""
    found = {"data.train": job.data.train, "data.val": job.data.val}
    found |= {f"{key}.script": program.script for key, program in programs(job).items()}
    paths = {key: path for key, path in found.items() if path and "://" not in path and "{" not in path}
    return {**paths, **{f"secret_files.{path}": path for path in job.secret_files}}


def modules(job: Job) -> tuple[str, ...]:
    """Name the packages that the job's Python must have."""
    needs_torch = job.topology == "torchrun"
    needs_us = (job.program.module or "").startswith("stoker.")
    return (*(("torch",) if needs_torch else ()), *(("stoker",) if needs_us else ()))


def workdir(job: Job) -> str:
    """Give the working folder there; a relative one starts at the home."""
    return job.ssh.workdir or f"stoker/{job.name}"


# --- What there is


def client_of(job: Job) -> Client:
    """Say how `ssh` is called for a job."""
    return Client(config=job.ssh.config, user=job.ssh.user, lost_after_s=float(job.ssh.lost_after))


@contextmanager
def talking(job: Job, hosts: Iterable[str]) -> Iterator[dict[str, Session]]:
    """Give a talk with every host, each once."""
    client, python = client_of(job), job.ssh.python
    with ExitStack() as stack:
        yield {host: stack.enter_context(Session(client, host, python, attempts=2)) for host in dict.fromkeys(hosts)}


def look_at_all(sessions: Mapping[str, Session], job: Job) -> dict[str, Look]:
    """Look at every host at once."""
    return {look.host: look for look in at_once(lambda one: _look(one, job), sessions.values())}


def _look(session: Session, job: Job) -> Look:
    try:
        before = time.time()
        found = session.ask(question(job, python=job.ssh.python))
        return Look(session.host, {**found, "skew": found["clock"] - max(before, min(time.time(), found["clock"]))})
    except UnavailableError as error:
        return Look(session.host, {}, Trouble("host", error.what, error.hint or ""))


def question(job: Job, *, python: str) -> dict[str, Any]:
    """Write what the agent is asked about a host."""
    return {
        "do": "look",
        "workdir": workdir(job),
        "python": python,
        "modules": ["torch", "stoker"],
        "paths": list(local_paths(job).values()),
        "programs": [*([job.program.command[0]] if job.program.command else []), *MPI_PROGRAMS],
    }


def troubles(job: Job, look: Look, slots: int) -> Iterator[Trouble]:
    """Say what a host lacks for so many slots."""
    found = look.found
    if look.trouble is not None:
        yield look.trouble
        return
    if not job.ssh.setup:
        yield from python_troubles(job.ssh.python, found, modules(job))
    if found["workdir_fault"]:
        what = f"cannot use the folder {found['workdir']}: {found['workdir_fault']}"
        yield Trouble("folder", what, "ssh.workdir names another")
    if (wanted := job.resources.gpu * slots) > found["gpus"]:
        what = f"has {found['gpus']} GPUs, and {wanted} are wanted"
        yield Trouble("gpus", what, "--set resources.gpu=0 does without")
    command = job.program.command
    if command and "/" not in command[0] and command[0] not in found["programs"] and not job.ssh.setup:
        yield Trouble("program", f"has no program {command[0]!r} on its PATH")
    if job.topology == "mpi" and not job.ssh.setup and set(MPI_PROGRAMS) - set(found["programs"]):
        what = "has no mpirun on its PATH, which the topology 'mpi' needs"
        if "mpirun" in found["programs"]:
            what = "has an mpirun without orted (Open MPI 5, or another MPI), and the topology 'mpi' needs Open MPI 4"
        yield Trouble("program", what, "Debian's package is openmpi-bin")
    for key, path in local_paths(job).items():
        comes = job.ssh.copy and not Path(path).is_absolute() and Path(path).exists()
        if not comes and path not in found["there"]:
            yield Trouble(key, f"has nothing at {Path(found['workdir'], path)} ({key})")


def python_troubles(name: str, found: Mapping[str, Any], wanted: Iterable[str]) -> Iterator[Trouble]:
    """Say what is wrong with the Python there."""
    if found["python"] is None:
        yield Trouble(
            "python", f"has no Python {name!r} that works: {found['python_fault']}", "ssh.python names another"
        )
        return
    if tuple(map(int, found["version"].split(".")[:2])) < OLDEST:
        yield Trouble(
            "python", f"has Python {found['version']} as {name!r}, and 3.8 is needed", "ssh.python names another"
        )
    for module in wanted:
        if found["modules"][module] is None:
            fix = "install it there, in ssh.setup, or name another ssh.python"
            yield Trouble(module, f"has no {module} in {found['python']}", fix)


# --- What is between them


def partners(hosts: list[str]) -> dict[str, list[str]]:
    """Say whom each host dials: every other, or, where they are many, the next one and the first."""
    if len(hosts) <= MESH:
        return {host: [other for other in hosts if other != host] for host in hosts}
    after = dict(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
    return {host: list(dict.fromkeys(one for one in (hosts[0], after[host]) if one != host)) for host in hosts}


def find_ways(job: Job, sessions: Mapping[str, Session], looks: Mapping[str, Look]) -> Ways:
    """Have hosts dial each other: find the port, and the addresses by which they really get through."""
    first, *others = sessions
    ports = [job.port or 0] if job.port or not others else list(range(PORT, PORT + TRIED_PORTS))
    tokens = {host: secrets.token_hex(8) for host in sessions}

    def listen(host: str) -> tuple[int, str]:
        """Have a host listen: the first where slots meet, the others anywhere, as ranks do."""
        fault = ""
        for number in (*(ports if host == first else ()), 0):
            heard = sessions[host].ask({"do": "listen", "port": number, "token": tokens[host]})
            if "fault" not in heard:
                return heard["port"], fault if number == 0 else ""
            fault = str(heard["fault"])
        return 0, fault

    heard = dict(zip(sessions, at_once(listen, sessions), strict=True))
    found: dict[str, list[Trouble]] = {}
    port, fault = heard[first]
    if fault:
        found[first] = [Trouble("port", f"has port {ports[-1]} taken: {fault.lower()}", "--set port=… names another")]
    if not others:
        return Ways(port, {first: Route("127.0.0.1", "lo")}, found)
    interfaces = {host: {address: name for name, address in looks[host].found["addresses"]} for host in sessions}
    dials = partners(list(sessions))

    def dial(host: str) -> dict[str, dict[str, Any]]:
        """Have a host dial its partners, all at once."""
        targets = [
            {"addresses": list(interfaces[one]), "port": heard[one][0], "token": tokens[one]} for one in dials[host]
        ]
        answers = sessions[host].ask({"do": "dial", "targets": targets})["answers"]
        return dict(zip(dials[host], answers, strict=True))

    answers = dict(zip(sessions, at_once(dial, sessions), strict=True))
    for host, reached in answers.items():
        for other, answer in reached.items():
            if answer["address"] is None:
                tried = ", ".join(interfaces[other]) or "it has none"
                what = f"cannot reach {other} at port {heard[other][0]} (tried {tried})"
                fix = f"a firewall, or another network? Let {host} through to every port of {other}"
                found.setdefault(host, []).append(Trouble("network", what, fix))
    if any(answers[host][first]["address"] is None for host in others):
        return Ways(port, {}, found)
    # They may come by different ways; the one by which most do is taken for all.
    ways = [answers[host][first]["address"] for host in others]
    main = max(sorted(set(ways)), key=ways.count)
    routes = {host: Route(answers[host][first]["mine"], answers[host][first]["interface"] or "") for host in others}
    return Ways(port, {first: Route(main, interfaces[first][main]), **routes}, found)


def find_ports(
    job: Job, sessions: Mapping[str, Session], seats: Mapping[Slot, str], ways: Ways
) -> tuple[dict[Slot, int], dict[str, list[Trouble]]]:
    """Find a port for every slot that listens at one of its own: the job's, or the first that are free there."""
    first = next(iter(sessions))

    def find(host: str) -> tuple[dict[Slot, int], list[Trouble]]:
        slots = [slot for slot in listeners(job) if seats[slot] == host]
        named = named_ports(job, slots)
        tries = iter(range(PORT, PORT + TRIED_PORTS + len(slots)))
        found: dict[Slot, int] = {}
        wrong: list[Trouble] = []
        for slot in slots:
            for number in [named[slot]] if slot in named else tries:
                if number in found.values() or (slot not in named and number in named.values()):
                    continue
                # Where the first host was heard before, it is still listening.
                is_heard = host == first and number == ways.port
                heard = {} if is_heard else sessions[host].ask({"do": "listen", "port": number, "token": ""})
                if "fault" not in heard:
                    found[slot] = number
                    break
            else:
                number = named.get(slot, PORT)
                if host != first or number != job.port:  # that one is told already
                    what = f"has no free port for {slot} at {number}"
                    wrong.append(Trouble("port", what, "--set port=… names another"))
        return found, wrong

    answers = dict(zip(sessions, at_once(find, sessions), strict=True)) if listeners(job) else {}
    ports = {slot: port for found, _ in answers.values() for slot, port in found.items()}
    return ports, {host: wrong for host, (_, wrong) in answers.items() if wrong}


def at_once(do: Callable[[Any], T], items: Iterable[Any], stop: Event | None = None) -> list[T]:
    """Do something for all hosts at the same time; every failure is told, not only the first.

    On Ctrl-C nothing more is begun. What is under way is told by `stop`, and waited for; without, it is left alone.
    """
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        futures = [pool.submit(do, item) for item in items]
        wait(futures)
    except BaseException:
        if stop is not None:
            stop.set()
        pool.shutdown(wait=stop is not None, cancel_futures=True)
        raise
    pool.shutdown()
    errors = [error for future in futures if (error := future.exception()) is not None]
    told = [error for error in errors if isinstance(error, StokerError)]
    if len(told) > 1 and len(told) == len(errors):
        raise type(told[0])("; ".join(map(str, told)))
    for error in errors:
        raise error
    return [future.result() for future in futures]
