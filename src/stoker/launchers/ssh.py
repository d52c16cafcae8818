"""Jobs on hosts that are reached by ssh, under the same supervisor as on this machine.

`render` looks at every host at once and changes nothing there. `start` copies the working folder, prepares the hosts,
and starts the supervisor here, in which a process stands for each slot: `ssh_slot` here, `ssh_agent` there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import msgspec

from stoker.core.spec import to_json
from stoker.core.units import format_bytes
from stoker.errors import Fault, InputError, SpecError, StokerError, UnavailableError
from stoker.jobs.launcher import LogLine, Traits, check
from stoker.jobs.runs import Run, home
from stoker.jobs.spec import Job
from stoker.jobs.status import JobState, JobStatus
from stoker.jobs.topology import AddressBook, Command, Slot, commands, slots_of
from stoker.launchers.local import LocalLauncher
from stoker.launchers.plan import LocalPlan
from stoker.launchers.ssh_files import listed, send, size_of
from stoker.launchers.ssh_hosts import Client, Session, expanded, places
from stoker.launchers.ssh_look import (
    Look,
    Route,
    Trouble,
    at_once,
    client_of,
    find_ways,
    look_at_all,
    modules,
    python_troubles,
    talking,
    troubles,
)
from stoker.launchers.ssh_plan import Place, SshPlan, read_ssh_plan
from stoker.launchers.supervisor import watching

MUCH = 2**30
SKEW_S = 5.0
_PROFILER = "stoker.telemetry.profiler"
_PROFILER_FILE = ".stoker/profiler.py"


class SshLauncher:
    """Runs slots on hosts that `ssh` reaches."""

    traits: ClassVar[Traits] = Traits(name="ssh", topologies=frozenset({"single", "torchrun"}), elastic=True)

    def __init__(self) -> None:
        self._here = LocalLauncher()

    def anchored(self, job: Job) -> Job:
        """Put hosts in the place of their file; relative paths start at the working folder, here as there."""
        change = msgspec.structs.replace
        config = None if job.ssh.config is None else str(Path.cwd() / job.ssh.config)
        program = change(job.program, script=_inside(job.program.script), cwd=_inside(job.program.cwd))
        board = str(Path.cwd() / job.tensorboard) if isinstance(job.tensorboard, str) else job.tensorboard
        ssh = change(job.ssh, hosts=expanded(job.ssh.hosts), config=config)
        workers = max(1, len(places(ssh.hosts))) if job.workers == "all" else job.workers
        return change(job, program=program, tensorboard=board, ssh=ssh, workers=workers)

    def render(self, job: Job) -> SshPlan:
        """Look at every host, and give the command of every slot; all that is in the way is told at once."""
        job = self.anchored(job)
        faults = [*check(job, self.traits), *missing(job)]
        if faults:
            raise SpecError(faults, where=f"job {job.name!r} on ssh")
        hosts = dict(zip(slots_of(job), places(job.ssh.hosts), strict=False))
        with talking(job, hosts.values()) as sessions:
            looks = look_at_all(sessions, job)
            crowds = Counter(hosts.values())
            faulty = {host: list(troubles(job, look, crowds[host])) for host, look in looks.items()}
            ways = None if any(faulty.values()) else find_ways(job, sessions, looks)
        _refuse(job, looks, faulty if ways is None else ways.troubles)
        assert ways is not None
        return _plan(job, client_of(job), hosts, looks, ways.routes, ways.port)

    def start(self, rendered: SshPlan, run: Run) -> str:
        """Copy, prepare, and start the supervisor here."""
        handle = f"ssh://{run.folder}"
        run.write("handle", f"{handle}\n".encode())
        run.write("processes.json", to_json(_stand_ins(rendered, run)))
        self.restart(run)
        return handle

    def restart(self, run: Run) -> None:
        """Start a run again that is over, with what was copied before; where that was not done, it is now."""
        if not (run.folder / "prepared").exists():
            _prepare_all(run)
        self._here.restart(run)

    def status(self, handle: str) -> JobStatus:
        """Tell what the supervisor wrote last."""
        return self._here.status(handle)

    def logs(self, handle: str, slot: Slot | None, *, follow: bool) -> Iterator[LogLine]:
        """Give what the slots wrote, which comes here as it is written."""
        return self._here.logs(handle, slot, follow=follow)

    def stop(self, handle: str) -> None:
        """Have the supervisor end the run; without one, the hosts have ended it themselves."""
        self._here.stop(handle)


# --- What is asked for


def _inside(path: str | None) -> str | None:
    """Give a path in the working folder as one that starts there: so it means the same on every host."""
    if path is None or not Path(path).is_absolute() or not Path(path).is_relative_to(Path.cwd()):
        return path
    return str(Path(path).relative_to(Path.cwd()))


def missing(job: Job) -> Iterator[Fault]:
    """List what is wrong before any host is asked."""
    room = len(places(job.ssh.hosts))
    if not job.ssh.hosts:
        yield Fault("ssh.hosts", "names no host: write them there, or give --hosts a,b")
    elif room < len(slots_of(job)):
        many = f"{len(slots_of(job))} workers and room for {room}"
        yield Fault("ssh.hosts", f"there are {many}: name more hosts, or let one take more (node1:2)")
    for name in job.secret_env:
        if name not in os.environ:
            yield Fault(f"secret_env.{name}", "secrets come from the environment here, and this variable is not set")
    script = job.program.script
    if job.ssh.copy and script is not None and not Path(script).is_absolute() and not Path(script).is_file():
        yield Fault("program.script", f"there is no file {Path.cwd() / script}")
    if job.ssh.copy and Path.cwd() in (Path.home(), Path("/")):
        yield Fault("ssh.copy", f"the working folder is {Path.cwd()}: give the command in the folder of your project")


def _refuse(job: Job, looks: Mapping[str, Look], faulty: Mapping[str, list[Trouble]]) -> None:
    """Tell all that is in the way on all hosts at once."""
    sentences = [f"{host} {trouble.sentence}" for host, found in faulty.items() for trouble in found]
    if not sentences:
        return
    up = sum(look.trouble is None for look in looks.values())
    counted = f"{up} of {len(looks)} hosts are up; " if up < len(looks) else ""
    text = counted + "; ".join(sentences)
    where = f"job {job.name!r} on ssh"
    if up < len(looks):
        raise UnavailableError(text, where=where)
    raise InputError(text, where=where)


# --- What would be started


def _plan(
    job: Job,
    client: Client,
    hosts: Mapping[Slot, str],
    looks: Mapping[str, Look],
    routes: Mapping[str, Route],
    port: int,
) -> SshPlan:
    folder = Path.cwd()
    here = folder.stat()
    found = {host: look.found for host, look in looks.items()}
    spots = {
        host: Place(
            workdir=one["workdir"],
            python=_python(job, one),
            copies=job.ssh.copy and one["identity"] != [here.st_ino, here.st_mtime_ns],
            rsync=one["rsync"],
            profiler=job.profile.every > 0 and (one.get("modules") or {}).get("stoker") is None,
        )
        for host, one in found.items()
    }
    names = listed(folder, job.ssh.exclude, away=home()) if any(spot.copies for spot in spots.values()) else []
    return SshPlan(
        slots={str(slot): command for slot, command in _commands(job, hosts, found, spots, routes, port).items()},
        hosts={str(slot): host for slot, host in hosts.items()},
        places=spots,
        client=client,
        source=str(folder),
        exclude=job.ssh.exclude,
        setup=job.ssh.setup,
        modules=modules(job),
        secrets=tuple(job.secret_env),
        grace_s=float(job.grace),
        notes=tuple(_notes(job, hosts, found, spots, folder, names)),
    )


def _python(job: Job, found: Mapping[str, Any]) -> str:
    """Give the Python there by its whole path, where it is there already."""
    given = job.ssh.python
    return str(found["python"] or (str(Path(found["workdir"], given)) if "/" in given else given))


def _commands(
    job: Job,
    hosts: Mapping[Slot, str],
    found: Mapping[str, Mapping[str, Any]],
    spots: Mapping[str, Place],
    routes: Mapping[str, Route],
    port: int,
) -> dict[Slot, Command]:
    """Give each slot its command, with what is particular to its host."""
    addresses = {slot: routes[host].address for slot, host in hosts.items()}
    books: dict[tuple[object, ...], dict[Slot, Command]] = {}
    given = {}
    crowds, seated = Counter(hosts.values()), Counter[str]()
    for slot, host in hosts.items():
        spot, interface = spots[host], routes[host].interface
        cores = max(1, found[host]["cores"] // crowds[host])
        key = (spot, interface, cores)
        if key not in books:
            names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ()
            env = dict.fromkeys(names, interface)
            book = AddressBook(hosts=addresses, port=port, python=spot.python, cores=cores, env=env)
            every = commands(_placed(job, spot.workdir), book)
            books[key] = {one: command for one, command in every.items() if isinstance(command, Command)}
        command = _at(books[key][slot], spot)
        if crowds[host] > 1:
            command = replace(command, env={**_own_gpus(job, seated[host]), **command.env})
        seated[host] += 1
        given[slot] = command
    return given


def _own_gpus(job: Job, seat: int) -> dict[str, str]:
    """Give each of several workers of a host GPUs of its own."""
    each = job.resources.gpu
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(seat * each, (seat + 1) * each)))} if each else {}


def _placed(job: Job, workdir: str) -> Job:
    """Make relative paths absolute, as they are there."""

    def absolute(path: str | None) -> str | None:
        return path if path is None or "://" in path else str(Path(workdir, path))

    change, data = msgspec.structs.replace, job.data
    return change(
        job,
        program=change(job.program, script=absolute(job.program.script), cwd=absolute(job.program.cwd or ".")),
        data=change(
            data,
            train=absolute(data.train),
            val=absolute(data.val),
            cache=change(data.cache, dir=absolute(data.cache.dir)),
            via=None if data.via == "cluster" else data.via,
        ),
        checkpoint=change(job.checkpoint, dir=absolute(job.checkpoint.dir)),
    )


def _at(command: Command, spot: Place) -> Command:
    """Take the profiler that was sent along, where stoker is not installed."""
    python, *words = command.argv
    if spot.profiler and words[:2] == ["-m", _PROFILER]:
        return replace(command, argv=(python, f"{spot.workdir}/{_PROFILER_FILE}", *words[2:]))
    return command


def _notes(
    job: Job,
    hosts: Mapping[Slot, str],
    found: Mapping[str, Mapping[str, Any]],
    spots: Mapping[str, Place],
    folder: Path,
    names: list[str],
) -> Iterator[str]:
    """Tell what will be done, and what is odd."""
    copied = {host: spot for host, spot in spots.items() if spot.copies}
    if copied:
        size = size_of(folder, names)
        where = ", ".join(f"{host}:{spot.workdir}" for host, spot in copied.items())
        yield f"{len(names)} files ({format_bytes(size)}) of {folder} are copied to {where}"
        if size > MUCH:
            yield "that is much to copy: .stokerignore leaves out what is not needed there"
    spare = [host for host in dict.fromkeys(places(job.ssh.hosts)) if host not in spots]
    if spare:
        yield f"{', '.join(spare)}: not needed for {len(hosts)} workers"
    if job.checkpoint.dir is None:
        host = hosts[min(hosts)]
        place = f"{spots[host].workdir}/.stoker/<run>/checkpoints"
        yield f"checkpoints stay on {host}, in {place}; checkpoint.dir names another place"
    versions = {(one.get("modules") or {}).get("torch") for one in found.values()}
    if "torch" in modules(job) and len(versions) > 1:
        yield "torch is not the same everywhere: " + ", ".join(
            f"{(one.get('modules') or {}).get('torch') or 'none'} on {host}" for host, one in found.items()
        )
    for host, one in found.items():
        if abs(one["skew"]) > SKEW_S:
            yield f"the clock of {host} is {one['skew']:+.0f} s off from here"
    if job.image:
        yield "no containers on ssh: the image is left aside, and the Python there is used"
    if job.checkpoint.claim:
        yield "no claims on ssh: checkpoints go into the folder on the first host"
    if job.data.via == "cluster":
        yield "no cluster on ssh: data is read without its cache"


# --- Carrying it out


def _stand_ins(plan: SshPlan, run: Run) -> LocalPlan:
    """Give the processes here, one for each slot there."""
    argv = (sys.executable, "-m", "stoker.launchers.ssh_slot", str(run.folder))
    return LocalPlan(
        slots={
            name: Command((*argv, name), {"STOKER_SLOT": name, "STOKER_ROLE": Slot.parse(name).role}, str(run.folder))
            for name in plan.slots
        },
        hosts=plan.hosts,
    )


def _prepare_all(run: Run) -> None:
    """Copy the working folder to every host and prepare it there; a failure is kept as the run's."""
    plan = read_ssh_plan(run)
    try:
        with watching(run), _multiplexed(plan.client) as ssh:
            at_once(lambda item: _prepare(plan, run, ssh, *item), plan.places.items())
    except StokerError as error:
        now = time.time()
        run.write_status(JobStatus(state=JobState.FAILED, message=str(error), began=now, ended=now))
        raise
    run.write("prepared", b"")


@contextmanager
def _multiplexed(client: Client) -> Iterator[list[str]]:
    """Give a command of `ssh` whose calls share one connection to each host."""
    with TemporaryDirectory(prefix="stoker-", dir="/tmp" if Path("/tmp").is_dir() else None) as folder:
        shared = ["-o", "ControlMaster=auto", "-o", f"ControlPath={folder}/%C", "-o", "ControlPersist=60"]
        try:
            yield client.argv(*shared)
        finally:
            for socket in Path(folder).iterdir():
                argv = ["ssh", "-O", "exit", "-o", f"ControlPath={socket}", "--", "any"]
                subprocess.run(
                    argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
                )


def _prepare(plan: SshPlan, run: Run, ssh: list[str], host: str, place: Place) -> None:
    """Bring one host so far that a slot can start."""
    folder = Path(plan.source)
    names = listed(folder, plan.exclude, away=home()) if place.copies else []
    extra = [(_PROFILER_FILE, files("stoker.telemetry").joinpath("profiler.py").read_bytes())] if place.profiler else []
    python = "python3" if plan.setup else place.python
    send(folder, names, extra, ssh=ssh, host=host, to=place.workdir, python=python, rsync=place.rsync)
    if not plan.setup:
        return
    log = run.folder / f"setup.{host}.log"
    argv = [sys.executable, "-m", "stoker.launchers.ssh_slot", str(run.folder), f"setup@{host}"]
    with open(log, "wb") as output:
        code = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False).returncode
    if code:
        last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise InputError(f"ssh.setup failed with exit code {code}: {last}", where=host, hint=f"its log: {log}")
    with Session(ssh, host, python) as session:
        found = session.ask(
            {"do": "python", "workdir": place.workdir, "python": place.python, "modules": ["torch", "stoker"]}
        )
    faults = list(python_troubles(place.python, found, plan.modules))
    if faults:
        raise InputError(
            "; ".join(trouble.sentence for trouble in faults),
            where=host,
            hint=f"ssh.setup did not mend it; its log: {log}",
        )
