"""What would fail of a job in a place: looks at it, then sends a probe through its launcher, as a job of its own.

The probe goes the very way that the job will go, in a working folder and a run folder that are removed after; here only
their user can read them, for what is asked of the probe may hold a login.
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

from stoker.core.processes import until
from stoker.core.units import Seconds
from stoker.doctor import probe
from stoker.doctor.checks import Check
from stoker.doctor.rules import (
    Cluster,
    Outcome,
    Told,
    of_cluster,
    of_faults,
    of_looks,
    of_port,
    of_probe,
    of_ways,
    short_of,
)
from stoker.errors import Fault, SpecError, StokerError, UnavailableError
from stoker.jobs.launcher import Launcher, check
from stoker.jobs.run_folder import Run, create, home
from stoker.jobs.spec import Checkpoint, Data, Job, Profile, Program, RoleSpec, parse_job
from stoker.jobs.status import JobState
from stoker.jobs.topology import slots_of
from stoker.launchers.plan import LocalPlan
from stoker.launchers.ssh.client import Client, expanded, places
from stoker.launchers.ssh.launcher import missing
from stoker.launchers.ssh.preflight import (
    Look,
    Ways,
    at_once,
    client_of,
    find_ways,
    look_at_all,
    talking,
    troubles,
    workdir,
)
from stoker.launchers.supervisor import watcher
from stoker.telemetry.reader import read_events

BOUND_S = 120.0
"""For a whole run of the probe, beside what reading and meeting may take by themselves."""
APART = 16
"""So many hosts that cannot take part in one run are probed in runs of their own."""
FOLDER = "/tmp/stoker-doctor-"
"""On hosts, with a name of its own for each run."""
POLL_S = 0.1
ROOM_S = 6.0
"""After which a Ray cluster has told that something is free again."""
TOGETHER = ("torchrun", "mpi")
"""Topologies whose ranks know of each other."""

_OWN = "the doctor's own job"

Tell = Callable[[str], None]


class Errand(NamedTuple):
    """One run of the probe: the job, what it is to look at, and whether its ranks reduce together."""

    job: Job
    settings: dict[str, Any]
    hosts: tuple[str, ...] = ()
    """Where something is left that must be removed."""


class Readiness(NamedTuple):
    """What is known before the probe is sent, and how it is to be sent."""

    checks: list[Check]
    errands: list[Errand]
    client: Client | None = None


def default_job(on: str, place: str, sets: Sequence[str]) -> Job:
    """Give the job that is taken where none is given: a worker on each host or node, or two ranks here."""
    base: dict[str, Any] = {"name": "doctor", "program": {"module": "this"}}
    if on == "local":
        base["processes_per_worker"] = 2
    elif on == "ssh":
        given = parse_job(json.dumps(base), _OWN, sets)
        base |= {"workers": max(1, len(places(expanded(given.ssh.hosts)))), "ssh": {"copy": False}}
    elif on == "ray":
        nodes = _nodes(place)
        base |= {"workers": nodes, "ray": {"strategy": "spread"}} if nodes else {"processes_per_worker": 2}
    return parse_job(json.dumps(base), _OWN, sets)


def _nodes(place: str) -> int:
    """Count the nodes of a Ray cluster; none where it does not answer, which is told later."""
    from stoker.launchers.ray import cluster as ray

    ray.need_ray()
    address = ray.address_of(place or None, os.environ)
    with contextlib.suppress(UnavailableError):
        return 0 if address is None else list(ray.Cluster(address).nodes().values()).count("alive")
    return 0


def examine(job: Job, launcher: Launcher[Any], place: str, tell: Tell) -> list[Check]:
    """Look, probe, and judge; `place` is what follows the launcher's name, `tell` says what is being done."""
    name = launcher.traits.name
    if faults := [fault for fault in check(job, launcher.traits) if fault.path == "topology"]:
        raise SpecError(faults, where=f"job {job.name!r} on {name}")
    ready = LOOKS.get(name, _look_by_rendering)(launcher.anchored(job), launcher, place, tell)
    outcomes = []
    if ready.errands:
        tell("Sending a probe there, as a job of its own")
        outcomes = _carry_out(launcher, ready)
    return list(_once(ready.checks + of_probe(job, outcomes, knows_hosts=name == "ssh")))


def _once(checks: list[Check]) -> Iterator[Check]:
    """Leave out a fault that was seen before the probe met it too; give the rest by subject and host."""
    whats = list(dict.fromkeys(one.what for one in checks))
    hosts = list(dict.fromkeys(one.host for one in checks))
    seen = set()
    for one in sorted(checks, key=lambda one: (whats.index(one.what), hosts.index(one.host))):
        key = (one.what, one.host)
        if one.fine is not False or key not in seen or one.what in ("network", "probe"):
            yield one
        if one.fine is False:
            seen.add(key)


# --- Before the probe


def _look_by_rendering(job: Job, launcher: Launcher[Any], place: str, tell: Tell) -> Readiness:  # noqa: ARG001
    """Have the launcher render the job: what it refuses, it tells."""
    try:
        launcher.render(job)
        checks = []
    except SpecError as error:
        checks = of_faults(error.faults)
    except StokerError as error:
        checks = [Check("job", False, error.what, error.hint or "", error.where or "", error.exit_code)]
    gpus = not any(one.what == "resources.gpu" for one in checks)
    return Readiness(checks, [_errand(job, topology=job.topology, workers=job.max_workers, port=job.port, gpus=gpus)])


def _look_here(job: Job, launcher: Launcher[Any], place: str, tell: Tell) -> Readiness:
    """On this machine a port may be taken, or torch be missing; then the probe does without."""
    checks, (errand,), _ = _look_by_rendering(job, launcher, place, tell)
    if job.port:
        is_free = LocalPlan(slots={}, port=job.port).on_free_port().port == job.port
        checks.append(of_port(job.port, is_free=is_free))
        errand = errand if is_free else errand._replace(job=msgspec.structs.replace(errand.job, port=None))
    if job.topology in TOGETHER and find_spec("torch") is None:
        errand = _errand(job, topology="single", workers=1, port=None)
    return Readiness(checks, [errand])


def _look_at_cluster(job: Job, launcher: Launcher[Any], place: str, tell: Tell) -> Readiness:
    """Ask a Ray cluster how it is; one that is started for the run is on this machine."""
    from stoker.launchers.ray import cluster as ray

    ray.need_ray()
    address = ray.address_of(place or None, os.environ)
    if address is None:
        ready = _look_here(job, launcher, place, tell)
        found = Check("cluster", True, "none is named or found: one is started here for the run")
        return ready._replace(checks=[found, *ready.checks])
    try:
        there = ray.version_there(address)
        known = ray.Cluster(address)
        nodes, free = known.nodes(), known.free()
    except UnavailableError as error:
        down = Check("cluster", False, f"{error.where}: {error.what}", error.hint or "", code=error.exit_code)
        return Readiness([down], [])
    checks, bundle = list[Check](), dict[str, float]()
    try:
        bundle = launcher.render(job).bundle
    except SpecError as error:
        checks = of_faults(error.faults)
    cluster = Cluster(address, ray.version_here(), there, nodes, free, bundle, job.max_workers)
    deadline = time.monotonic() + ROOM_S
    while short_of(cluster) and time.monotonic() < deadline:
        time.sleep(0.5)
        cluster = cluster._replace(free=known.free())
    checks = [*of_cluster(cluster), *checks, *_coming_along(job)]
    if short_of(cluster):
        return Readiness([*checks, Check("probe", None, "not sent: there is no room for it")], [])
    errand = _errand(job, topology=job.topology, workers=job.max_workers, port=job.port, is_far=True)
    return Readiness(checks, [errand])


def _look_by_ssh(job: Job, launcher: Launcher[Any], place: str, tell: Tell) -> Readiness:  # noqa: ARG001
    """Look at all hosts and between them; send the probe to those that can take it."""
    hosts = places(job.ssh.hosts)[: job.max_workers]
    faults = _faults_here(job, launcher)
    if any(fault.path == "ssh.hosts" for fault in faults):
        raise SpecError(faults, where=f"job {job.name!r} on ssh")
    crowds = Counter(hosts)
    tell(f"Looking at {len(crowds)} host{'s' * (len(crowds) > 1)}")
    with talking(job, hosts) as sessions:
        looks = look_at_all(sessions, job)
        up = [host for host in crowds if looks[host].trouble is None]
        ways = find_ways(job, {host: sessions[host] for host in up}, looks) if up else None
    checks = [*of_faults(faults), *of_looks(job, looks, crowds), *(of_ways(job, ways, up) if ways else [])]
    checks += _coming_along(job, copies=job.ssh.copy)
    plan = _errands(job, looks, hosts, ways)
    if plan.why_apart:
        checks.append(Check("all-reduce", None, f"not tried: {plan.why_apart}"))
    if plan.left_out:
        checks.append(Check("probe", None, f"not sent to {plan.left_out} more hosts: mend the others first"))
    return Readiness(checks, plan.errands, client_of(job))


class _Plan(NamedTuple):
    errands: list[Errand]
    why_apart: str = ""
    left_out: int = 0


def _faults_here(job: Job, launcher: Launcher[Any]) -> list[Fault]:
    """List what the launcher would refuse before it asks any host."""
    return [*check(job, launcher.traits), *missing(job)]


def _errands(job: Job, looks: Mapping[str, Look], hosts: list[str], ways: Ways | None) -> _Plan:
    """Send one run to the hosts that can reduce together, and one to each host that can only be looked at."""
    crowds = Counter(hosts)
    wrong = {host: {one.about for one in troubles(job, look, crowds[host])} for host, look in looks.items()}
    found = {one.about for every in (ways.troubles if ways else {}).values() for one in every}
    up = [host for host in crowds if "host" not in wrong[host]]
    able = [host for host in up if (looks[host].found.get("modules") or {}).get("torch") is not None]
    together, why = list[str](), ""
    if job.topology in TOGETHER:
        together = [] if "network" in found else able
        why = "" if together else "some hosts cannot reach each other" if able else "no host has torch"
    folder = f"{FOLDER}{secrets.token_hex(6)}"
    gpus = not any("gpus" in every for every in wrong.values())
    errands = []
    if together:
        seats = tuple(host for host in hosts if host in together)
        place = _Where(seats, folder, _python(job, looks, together), has_first=hosts[0] in together)
        port = ways.port if ways and "port" in found else job.port
        errands.append(_errand(job, topology=job.topology, workers=len(seats), port=port, gpus=gpus, where=place))
    apart = [host for host in up if host not in together]
    for number, host in enumerate(apart[:APART]):
        place = _Where((host,), f"{folder}-{number}", _python(job, looks, [host]), has_first=host == hosts[0])
        errands.append(_errand(job, topology="single", workers=1, port=None, gpus=gpus, where=place))
    return _Plan(errands, why, len(apart[APART:]))


def _python(job: Job, looks: Mapping[str, Look], hosts: list[str]) -> str:
    """Give the Python there by its whole path, for the probe runs in another folder; any where it is missing."""
    (python, *more) = {looks[host].found["python"] for host in hosts}
    if more:
        given = job.ssh.python
        return str(Path(workdir(job), given)) if "/" in given else given
    return "python3" if python is None else str(python)


class _Where(NamedTuple):
    """The hosts of one run, a folder and a Python there, and whether the job's first host is among them."""

    hosts: tuple[str, ...]
    folder: str
    python: str
    has_first: bool


def _coming_along(job: Job, *, copies: bool = True) -> list[Check]:
    coming = _coming(job) if copies else {}
    return [Check(key, None, f"{path} comes along with the working folder") for key, path in coming.items()]


def _coming(job: Job) -> dict[str, str]:
    """Name the sets that are copied there with the working folder, and so cannot be read there yet."""
    sets = {"data.train": job.data.train, "data.val": job.data.val}
    relative = {key: url for key, url in sets.items() if url and "://" not in url and not Path(url).is_absolute()}
    return {key: url for key, url in relative.items() if Path(url).exists()}


def _trying(roles: Mapping[str, RoleSpec]) -> dict[str, RoleSpec]:
    """Give the roles that the probe takes: all but those that look on, and none with a program of its own."""
    change = msgspec.structs.replace
    return {
        name: change(role, program=None, logdir=None, count=0 if name in ("evaluator", "tensorboard") else role.count)
        for name, role in roles.items()
    }


def _errand(
    job: Job,
    *,
    topology: str,
    workers: int,
    port: int | None,
    gpus: bool = True,
    where: _Where | None = None,
    is_far: bool = False,
) -> Errand:
    """Make the job of a run of the probe: as the given one, but with another program, and no second attempt."""
    change = msgspec.structs.replace
    job = job if gpus else change(job, resources=change(job.resources, gpu=0))
    is_far = is_far or where is not None
    coming = _coming(job) if is_far and (where is None or job.ssh.copy) else {}
    data = {"data.train": job.data.train, "data.val": job.data.val}
    folder = workdir(job) if where else "" if is_far else str(Path.cwd() / (job.program.cwd or ""))
    checkpoints = job.checkpoint.dir or ("" if is_far else str(home()))
    folders = {"workdir": ".", "checkpoints": checkpoints, "cache": job.data.cache.dir}
    settings = {
        "workdir": folder,
        "folders": {what: path for what, path in folders.items() if path and "://" not in path},
        "checkpoints_on": "worker/0" if where is None or where.has_first else "nowhere",
        "data": {key: url for key, url in data.items() if url and key not in coming},
        "via": None if job.data.via == "cluster" else job.data.via,
        "reduce": topology in TOGETHER,
        "gpus": job.resources.gpu > 0,
    }
    made = change(
        job,
        name="doctor",
        program=Program(script="probe.py"),
        topology=topology,
        workers=workers,
        processes_per_worker=job.ranks_per_worker if topology in TOGETHER else "auto",
        port=port,
        env={**job.env, probe.SETTINGS: json.dumps(settings)},
        data=Data(),
        checkpoint=Checkpoint(),
        profile=Profile(every=Seconds(0)),
        roles=_trying(job.roles) if topology == job.topology else {},
        secret_env={name: one for name, one in job.secret_env.items() if name in os.environ},
        secret_files={},
        retries=0,
        grace=Seconds(2),
        hang_after=Seconds(0),
        tensorboard=False,
    )
    if where is None:
        return Errand(made, settings)
    ssh = change(
        job.ssh, hosts=where.hosts, workdir=where.folder, copy=True, exclude=(), setup=None, python=where.python
    )
    return Errand(change(made, ssh=ssh), settings, where.hosts)


LOOKS: dict[str, Callable[[Job, Launcher[Any], str, Tell], Readiness]] = {
    "local": _look_here,
    "ray": _look_at_cluster,
    "ssh": _look_by_ssh,
}
"""How a place is looked at before the probe is sent, by launcher; for any other, the job is rendered."""


# --- The probe


def _carry_out(launcher: Launcher[Any], ready: Readiness) -> list[Outcome]:
    """Start all runs of the probe, wait for them within bounds, and remove all that they left."""
    with TemporaryDirectory(prefix="stoker-doctor-", ignore_cleanup_errors=True) as folder:
        started: list[tuple[Errand, Run | None, Any, str]] = []
        try:
            for number, errand in enumerate(ready.errands):
                started.append((errand, *_start(launcher, errand, Path(folder, str(number)))))
            deadline = time.monotonic() + BOUND_S
            outcomes = [_outcome(launcher, *one, deadline) for one in started]
        finally:
            left = [_end(launcher, run) for _, run, _, _ in started]
            if ready.client is not None:
                _remove(ready.client, ready.errands)
    return [outcome._replace(left=error) for outcome, error in zip(outcomes, left, strict=True)]


def _end(launcher: Launcher[Any], run: Run | None) -> StokerError | None:
    """End one run; give what kept it from that, for others are to be ended too."""
    if run is None:
        return None
    try:
        launcher.stop(run.handle)
        until(lambda: watcher(run) is None, 5)
    except (StokerError, OSError) as error:
        return error if isinstance(error, StokerError) else UnavailableError(str(error))
    return None


def _start(launcher: Launcher[Any], errand: Errand, folder: Path) -> tuple[Run | None, Any, str]:
    """Start one run in a folder of its own; or say why that cannot be."""
    work = folder / "work"
    work.mkdir(parents=True)
    (work / "probe.py").write_bytes(files("stoker.doctor").joinpath("probe.py").read_bytes())
    run, rendered = None, None
    with _elsewhere(work, folder / "home"):
        try:
            job = launcher.anchored(errand.job)
            rendered = launcher.render(job)
            run = create(job, rendered)
            launcher.start(rendered, run)
        except StokerError as error:
            return None, rendered, str(error)
        except BaseException:  # a Ctrl-C, when it may have begun
            if run is not None and (run.folder / "handle").exists():
                launcher.stop(run.handle)
            raise
    return run, rendered, ""


def _outcome(
    launcher: Launcher[Any], errand: Errand, run: Run | None, rendered: Any, fault: str, deadline: float
) -> Outcome:
    """Wait for the end of a run, and read what it told."""
    workers = [str(slot) for slot in slots_of(errand.job) if slot.role == "worker"]
    hosts = dict(zip(workers, errand.hosts or [""] * len(workers), strict=True))
    if run is None:
        return Outcome(hosts, (), fault, errand.settings["reduce"])
    while not launcher.status(run.handle).state.is_final and time.monotonic() < deadline:
        time.sleep(POLL_S)
    status = launcher.status(run.handle)
    waits = ""
    if not status.state.is_final:
        waits = status.message if any(slot.state is JobState.PENDING for slot in status.slots) else ""
        fault = f"it was ended after {BOUND_S:g} s without a result"
    elif status.state != "succeeded":
        fault = status.message
    told = tuple(
        Told(hosts.get(event.slot) or _named(rendered, event.fields), event.slot, event.rank, subject, event.fields)
        for event in read_events(run.logs)
        if event.fields.get("name") == probe.NAME and (subject := str(event.fields.get("subject", "")))
    )
    return Outcome(hosts, told, fault, errand.settings["reduce"], waits)


def _named(rendered: Any, fields: Mapping[str, Any]) -> str:
    """Name a host that nobody chose: as it names itself, or not at all where it is this machine."""
    return str(fields.get("on", "")) if rendered.is_far else ""


def _remove(client: Client, errands: list[Errand]) -> None:
    """Remove the folders of the probe on all hosts."""
    left = [(host, errand.job.ssh.workdir) for errand in errands for host in dict.fromkeys(errand.hosts)]

    def remove(item: tuple[str, str]) -> None:
        host, folder = item
        argv = [*client.argv(attempts=1), "--", host, f"rm -rf -- {shlex.quote(folder)}"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)

    at_once(remove, left)


@contextlib.contextmanager
def _elsewhere(work: Path, stoker_home: Path) -> Iterator[None]:
    """Be in another working folder, with run folders that are removed later."""
    before = os.environ.get("STOKER_HOME")
    os.environ["STOKER_HOME"] = str(stoker_home)
    try:
        with contextlib.chdir(work):
            yield
    finally:
        if before is None:
            del os.environ["STOKER_HOME"]
        else:
            os.environ["STOKER_HOME"] = before
