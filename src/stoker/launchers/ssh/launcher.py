"""Jobs on hosts that are reached by ssh, under the same supervisor as on this machine.

`render` looks at every host at once and changes nothing there. `start` copies the working folder, prepares the hosts,
and starts the supervisor here, in which a process stands for each slot: `slot` here, `agent` and `keeper` there.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any, ClassVar

import msgspec

from stoker.core.spec import to_json
from stoker.core.units import counted, format_bytes
from stoker.errors import Fault, InputError, SpecError, StokerError, UnavailableError
from stoker.jobs.launcher import LogLine, Traits, check
from stoker.jobs.run_folder import Run, home
from stoker.jobs.spec import Job
from stoker.jobs.status import JobState, JobStatus
from stoker.jobs.topology import AddressBook, Command, Slot, Standby, command_of, slots_of
from stoker.launchers.diagnosis import LOST
from stoker.launchers.local import LocalLauncher
from stoker.launchers.paths import inside, placed, programs, with_programs
from stoker.launchers.plan import LocalPlan, gpu_faults, named_ports, read_plan
from stoker.launchers.process_group import STANDS_IN
from stoker.launchers.ssh.client import ANSWER_S, Client, Session, expanded, places
from stoker.launchers.ssh.plan import Place, SshPlan, far_codes, read_ssh_plan
from stoker.launchers.ssh.preflight import (
    Look,
    Route,
    Trouble,
    at_once,
    client_of,
    find_ports,
    find_ways,
    look_at_all,
    modules,
    python_troubles,
    talking,
    troubles,
)
from stoker.launchers.ssh.upload import Extra, Parcel, attend
from stoker.launchers.supervisor import STOPPING, watching
from stoker.launchers.upload import listed, size_of
from stoker.telemetry.events import PREFIX

MUCH = 2**30
SKEW_S = 5.0
LAST_S = 5.0
"""For the end of a setup to be told, after its time to end."""
_PROFILER_FILE = ".stoker/profiler.py"
_MPI_FILE = ".stoker/mpi_rank.py"


class SshLauncher:
    """Runs slots on hosts that `ssh` reaches."""

    traits: ClassVar[Traits] = Traits(
        name="ssh", topologies=frozenset({"mpi", "single", "tf-mirrored", "tf-ps", "torchrun"}), elastic=True
    )

    def __init__(self) -> None:
        self._here = LocalLauncher()

    def anchored(self, job: Job) -> Job:
        """Put hosts in the place of their file; relative paths start at the working folder, here as there."""
        change = msgspec.structs.replace
        config = None if job.ssh.config is None else str(Path.cwd() / job.ssh.config)
        job = with_programs(job, lambda one: change(one, script=inside(one.script), cwd=inside(one.cwd)))
        board = str(Path.cwd() / job.tensorboard) if isinstance(job.tensorboard, str) else job.tensorboard
        ssh = change(job.ssh, hosts=expanded(job.ssh.hosts), config=config)
        workers = max(1, len(places(ssh.hosts))) if job.workers == "all" else job.workers
        return change(job, tensorboard=board, ssh=ssh, workers=workers)

    def render(self, job: Job) -> SshPlan:
        """Look at every host, and give the command of every slot; all that is in the way is told at once."""
        job = self.anchored(job)
        faults = [*check(job, self.traits), *missing(job)]
        if faults:
            raise SpecError(faults, where=f"job {job.name!r} on ssh")
        hosts = _seats(job)
        with talking(job, hosts.values()) as sessions:
            looks = look_at_all(sessions, job)
            crowds = Counter(host for slot, host in hosts.items() if slot.role == "worker")
            faulty = {host: list(troubles(job, look, crowds[host])) for host, look in looks.items()}
            up = {host: session for host, session in sessions.items() if looks[host].trouble is None}
            ways = find_ways(job, up, looks) if hosts[min(hosts)] in up else None  # its port is where they meet
            ports, taken = find_ports(job, up, hosts, ways) if ways else ({}, {})
        for host, found in (*(ways.troubles if ways else {}).items(), *taken.items()):
            faulty[host] += found
        _refuse(job, looks, faulty)
        assert ways is not None
        _check_even(job, looks)
        return plan_of(job, client_of(job), hosts, looks, ways.routes, ways.port, ports)

    def start(self, rendered: SshPlan, run: Run, *, detach: bool = False) -> str:  # noqa: ARG002
        """Copy, prepare, and start the supervisor here."""
        handle = f"ssh://{run.folder}"
        run.write("handle", f"{handle}\n".encode())
        self.restart(run, detach=detach)
        return handle

    def restart(self, run: Run, *, detach: bool = False) -> None:
        """Start a run again that is over, with what was copied before; where that was not done, it is now."""
        (run.folder / STOPPING).unlink(missing_ok=True)
        run.write("processes.json", to_json(_stand_ins(read_ssh_plan(run), run, detach=detach)))
        if not _is_prepared(run):
            _prepare_all(run)
        self._here.restart(run)

    def status(self, handle: str) -> JobStatus:
        """Tell what the supervisor wrote last; where there is none any more, watch over it again first."""
        self._go_on(handle)
        return self._here.status(handle)

    def logs(self, handle: str, slot: Slot | None, *, follow: bool) -> Iterator[LogLine]:
        """Give what the slots wrote, which comes here as it is written."""
        if follow:
            self._go_on(handle)
        return self._here.logs(handle, slot, follow=follow)

    def stop(self, handle: str) -> None:
        """Have the supervisor end the run; where none is left, or it could not reach a host, see to the hosts."""
        run = _run(handle)
        if run.read_status().state in (JobState.FAILED, JobState.STOPPED, JobState.SUCCEEDED):
            if _goes_on(run):
                _sweep(run)
            return
        if not _has_ended(run):  # else another attempt would start
            self._go_on(handle)
        if _is_prepared(run):
            run.write(STOPPING, b"")
        is_lost = self._here.status(handle).state is JobState.LOST
        self._here.stop(handle)
        if is_lost or not _is_prepared(run) or _is_unsure(run):
            _sweep(run)

    def _go_on(self, handle: str) -> None:
        """Watch again over a run that goes on without this machine."""
        run = _run(handle)
        if (
            not run.read_status().state.is_final
            and _is_prepared(run)
            and not (run.folder / STOPPING).exists()
            and read_plan(run).detached
            and self._here.status(handle).state is JobState.LOST
        ):
            self._here.go_on(run)


def _is_prepared(run: Run) -> bool:
    return (run.folder / "prepared").exists()


def _has_ended(run: Run) -> bool:
    """Whether the last attempt has, and was seen to."""
    status = run.read_status()
    return any(one.number == status.attempt for one in status.attempts)


def _is_unsure(run: Run) -> bool:
    """Whether the end of a slot of the last attempt was never told."""
    return any(code in (None, LOST) for code in far_codes(run, run.read_status().attempt))


def _goes_on(run: Run) -> bool:
    """Whether something of a run that is over may go on elsewhere, with nobody there to end it."""
    return (run.folder / "processes.json").exists() and read_plan(run).detached and _is_unsure(run)


# --- What is asked for


def _seats(job: Job) -> dict[Slot, str]:
    """Give each worker its host, in the order of the list; parameter servers go around, all others to the first."""
    workers = {Slot("worker", index): host for index, host in enumerate(places(job.ssh.hosts)[: job.max_workers])}
    every = list(dict.fromkeys(workers.values()))

    def seat(slot: Slot) -> str:
        return workers.get(slot) or every[slot.index % len(every) if slot.role == "ps" else 0]

    return {slot: seat(slot) for slot in slots_of(job)}


def missing(job: Job) -> Iterator[Fault]:
    """List what is wrong before any host is asked."""
    room = len(places(job.ssh.hosts))
    if not job.ssh.hosts:
        yield Fault("ssh.hosts", "names no host: write them there, or give --hosts a,b")
    elif room < job.max_workers:
        many = f"workers are {job.max_workers}, and there is room for {room}"
        yield Fault("ssh.hosts", f"{many}: name more hosts, or let one take more (node1:2)")
    for name in job.secret_env:
        if name not in os.environ:
            yield Fault(f"secret_env.{name}", "secrets come from the environment here, and this variable is not set")
    yield from gpu_faults(job)
    for where, program in programs(job).items() if job.ssh.copy else ():
        script, folder = program.script, program.cwd
        if script is not None and not Path(script).is_absolute() and not Path(script).is_file():
            yield Fault(f"{where}.script", f"there is no file {Path.cwd() / script}")
        if folder is not None and not Path(folder).is_absolute() and not Path(folder).is_dir():
            yield Fault(f"{where}.cwd", f"there is no folder {Path.cwd() / folder}")
    if job.ssh.config is not None and not Path(job.ssh.config).is_file():
        yield Fault("ssh.config", f"there is no file {job.ssh.config}")
    if job.ssh.copy and Path.cwd() in (Path.home(), Path("/")):
        yield Fault("ssh.copy", f"the working folder is {Path.cwd()}: give the command in the folder of your project")


def _check_even(job: Job, looks: Mapping[str, Look]) -> None:
    """Refuse hosts on which mpirun, which starts the same command on all, would not find it."""
    for what, key in (("the folder", "workdir"), ("Python", "python")):
        found = {host: look.found[key] for host, look in looks.items()}
        if job.topology == "mpi" and len(set(found.values())) > 1:
            told = ", ".join(f"{place} on {host}" for host, place in found.items())
            raise InputError(
                f"{what} must have the same path on all hosts for mpirun, and is {told}",
                where=f"job {job.name!r} on ssh",
                hint=f"give ssh.{key} as a whole path",
            )


def _refuse(job: Job, looks: Mapping[str, Look], faulty: Mapping[str, list[Trouble]]) -> None:
    """Tell all that is in the way on all hosts at once."""
    hosts: dict[str, list[str]] = {}
    for host, found in faulty.items():
        for trouble in found:
            hosts.setdefault(trouble.sentence, []).append(host)
    if not hosts:
        return
    sentences = [
        f"each of {', '.join(names)} {sentence}" if len(names) > 1 else f"{names[0]} {sentence}"
        for sentence, names in hosts.items()
    ]
    up = sum(look.trouble is None for look in looks.values())
    counted = f"{up} of {len(looks)} hosts are up; " if up < len(looks) else ""
    text = counted + "; ".join(sentences)
    where = f"job {job.name!r} on ssh"
    if up < len(looks):
        raise UnavailableError(text, where=where)
    raise InputError(text, where=where)


# --- What would be started


def plan_of(
    job: Job,
    client: Client,
    hosts: Mapping[Slot, str],
    looks: Mapping[str, Look],
    routes: Mapping[str, Route],
    port: int,
    ports: Mapping[Slot, int] | None = None,
) -> SshPlan:
    """Give what is started on hosts of which all is known: pure, but for a look at the working folder."""
    folder = Path.cwd()
    here = folder.stat()
    found = {host: look.found for host, look in looks.items()}
    spots = {
        host: Place(
            workdir=one["workdir"],
            python=_python(job, one),
            copies=job.ssh.copy,
            rsync=one["rsync"],
            profiler=job.profile.every > 0 and (one.get("modules") or {}).get("stoker") is None,
            mpi=job.topology == "mpi",
        )
        for host, one in found.items()
    }
    # For the notes alone: whether it is this very folder is found out for sure before it is copied.
    other = [host for host, one in found.items() if one["identity"] != [here.st_ino, here.st_mtime_ns]]
    copied = other if job.ssh.copy else []
    names = listed(folder, job.ssh.exclude, away=home()) if copied else []
    ports = ports or {}
    named = {slot for host in spots for slot in named_ports(job, [one for one in ports if hosts[one] == host])}
    given = _commands(job, hosts, found, spots, routes, port, ports)
    waiting = {str(slot): dict(command.env) for slot, command in given.items() if isinstance(command, Standby)}
    return SshPlan(
        slots={str(slot): command for slot, command in given.items() if isinstance(command, Command)},
        standby=tuple(waiting),
        standby_env=waiting,
        hosts={str(slot): host for slot, host in hosts.items()},
        places=spots,
        client=client,
        source=str(folder),
        exclude=job.ssh.exclude,
        setup=job.ssh.setup,
        modules=modules(job),
        secrets=tuple(job.secret_env),
        grace_s=float(job.grace),
        port=port,
        ports={str(slot): one for slot, one in ports.items() if slot not in named},
        keeps_port=bool(job.port),
        notes=tuple(_notes(job, hosts, found, spots, folder, copied, names)),
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
    ports: Mapping[Slot, int],
) -> dict[Slot, Command | Standby]:
    """Give each slot its command, with what is particular to its host."""
    addresses = {slot: routes[host].address for slot, host in hosts.items()}
    given: dict[Slot, Command | Standby] = {}
    crowds, seated = Counter(host for slot, host in hosts.items() if slot.role == "worker"), Counter[str]()
    for slot, host in hosts.items():
        spot, interface = spots[host], routes[host].interface
        book = AddressBook(
            hosts=addresses,
            port=port,
            ports=ports,
            python=spot.python,
            profiler=(spot.python, f"{spot.workdir}/{_PROFILER_FILE}") if spot.profiler else (),
            mpi_rank=(spot.python, "-I", "-S", f"{spot.workdir}/{_MPI_FILE}"),
            cores=max(1, found[host]["cores"] // max(1, crowds[host])),
            env=dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else (), interface),
            has_ask=True,
        )
        command = command_of(placed(job, spot.workdir), slot, book)
        if slot.role == "worker":
            if crowds[host] > 1:
                command = replace(command, env={**_own_gpus(job, seated[host]), **command.env})
            seated[host] += 1
        elif job.topology.startswith("tf-"):  # TensorFlow would take all memory of all that it sees
            command = replace(command, env={"CUDA_VISIBLE_DEVICES": "", **command.env})
        given[slot] = command
    return given


def _own_gpus(job: Job, seat: int) -> dict[str, str]:
    """Give each of several workers of a host GPUs of its own."""
    each = job.resources.gpu
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(seat * each, (seat + 1) * each)))} if each else {}


def _notes(
    job: Job,
    hosts: Mapping[Slot, str],
    found: Mapping[str, Mapping[str, Any]],
    spots: Mapping[str, Place],
    folder: Path,
    copied: list[str],
    names: list[str],
) -> Iterator[str]:
    """Tell what will be done, and what is odd."""
    if copied:
        size = size_of(folder, names)
        where = ", ".join(f"{host}:{spots[host].workdir}" for host in copied)
        yield f"{counted(len(names), 'file')} ({format_bytes(size)}) of {folder} to be copied to {where}"
        if size > MUCH:
            yield "that is much to copy: .stokerignore leaves out what is not needed there"
    spare = [host for host in dict.fromkeys(places(job.ssh.hosts)) if host not in spots]
    if spare:
        yield f"{', '.join(spare)}: not needed for {counted(job.max_workers, 'worker')}"
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


def _stand_ins(plan: SshPlan, run: Run, *, detach: bool) -> LocalPlan:
    """Give the processes here, one for each slot there."""
    argv = (sys.executable, "-m", "stoker.launchers.ssh.remote_slot", str(run.folder))
    slots = {}
    for name in (*plan.slots, *plan.standby):
        env = {"STOKER_SLOT": name, "STOKER_ROLE": Slot.parse(name).role, **STANDS_IN}
        slots[name] = Command((*argv, name), env, str(run.folder))
    return LocalPlan(slots=slots, hosts=plan.hosts, detached=detach)


def _run(handle: str) -> Run:
    return Run(Path(handle.partition("://")[2]))


def _sweep(run: Run) -> None:
    """End all that is left of a run on its hosts; with one that cannot be reached, a run is not stopped."""
    plan = read_ssh_plan(run)

    def end(host: str) -> str:
        place = plan.places[host]
        request = {
            "do": "sweep",
            "folder": f"{place.workdir}/.stoker/{run.id}",
            "slots": ["setup-*", *(Slot.parse(name).filename for name, one in plan.hosts.items() if one == host)],
            "marks": {"STOKER_RUN": run.id, "STOKER_HOST": host},
            "grace_s": plan.grace_s,
        }
        try:
            with Session(plan.client, host, place.python, run.id, attempts=1) as session:
                left = session.ask(request, plan.grace_s + ANSWER_S)["left"]
        except UnavailableError as error:
            return f"{host} {error.what}"
        return f"{host} cannot end process {', '.join(map(str, left))}" if left else ""

    if faults := [fault for fault in at_once(end, plan.places) if fault]:
        words = f"{'; '.join(faults)}; what runs there may go on: stoker job stop {run.id} tries again"
        if (status := run.read_status()).state is JobState.STOPPED:
            run.write_status(msgspec.structs.replace(status, state=JobState.LOST, message=words))
        raise UnavailableError(words, where=run.id)


def _prepare_all(run: Run) -> None:
    """Copy the working folder to every host and prepare it there; a failure is kept as the run's."""
    plan = read_ssh_plan(run)
    try:
        with watching(run), _multiplexed(plan.client) as client:
            _prepare(plan, run, client)
    except (StokerError, OSError, KeyboardInterrupt) as error:
        now = time.time()
        how, why = (JobState.FAILED, str(error)) if isinstance(error, Exception) else (JobState.STOPPED, "stopped")
        run.write_status(JobStatus(state=how, message=why, began=now, ended=now))
        if isinstance(error, OSError):
            raise InputError(f"the hosts were not prepared: {error}", where=run.id) from error
        raise
    run.write("prepared", b"")


@contextmanager
def _multiplexed(client: Client) -> Iterator[Client]:
    """Have calls share one connection to each host."""
    with TemporaryDirectory(prefix="stoker-", dir="/tmp" if Path("/tmp").is_dir() else None) as folder:
        try:
            yield msgspec.structs.replace(client, control=f"{folder}/%C")
        finally:
            for socket in Path(folder).iterdir():
                argv = ["ssh", "-O", "exit", "-o", f"ControlPath={socket}", "--", "any"]
                subprocess.run(
                    argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
                )


def _prepare(plan: SshPlan, run: Run, client: Client) -> None:
    """Bring the hosts so far that slots can start; what several share is seen to once."""
    source, stop = Path(plan.source), Event()
    with ExitStack() as stack:
        sessions = {
            host: stack.enter_context(Session(client, host, place.python)) for host, place in plan.places.items()
        }
        shared, own = _shared(plan, sessions)
        wants = any(plan.places[host].copies for host in shared.keys() - own)
        names = listed(source, plan.exclude, away=home()) if wants else []
        parcel = stack.enter_context(Parcel(source, names, stop))

        def fill(host: str) -> None:
            """See to a folder, from the first of the hosts that have it."""
            place, extra = plan.places[host], _extra([plan.places[one] for one in shared[host]])
            parcel.send(extra, client=client, host=host, place=place, whole=place.copies and host not in own)
            if plan.setup:
                _set_up(run, host, stop, plan.grace_s)

        at_once(fill, shared, stop)
        if plan.setup:
            first = {one: host for host, others in shared.items() for one in others}
            at_once(lambda host: _check_python(plan, run, sessions[host], first[host]), sessions)


def _shared(plan: SshPlan, sessions: Mapping[str, Session]) -> tuple[dict[str, list[str]], set[str]]:
    """Find which hosts have a folder in common, by the first of them; and which of these have the one here."""
    marks = {host: f"sign-{secrets.token_hex(8)}" for host in sessions}
    here = f"sign-{secrets.token_hex(8)}"

    def ask(host: str, **what: list[str]) -> list[str]:
        request = {"do": "signs", "workdir": plan.places[host].workdir, "leave": [], "find": [], "take": []}
        answer = sessions[host].ask({**request, **what})
        if "fault" in answer:
            raise InputError(answer["fault"], where=host, hint="ssh.workdir names another")
        found: list[str] = answer["found"]
        return found

    with _signed(Path(plan.source), here):
        at_once(lambda host: ask(host, leave=[marks[host]]), sessions)
        seen = dict(zip(sessions, at_once(lambda host: ask(host, find=[here, *marks.values()]), sessions), strict=True))
        at_once(lambda host: ask(host, take=[marks[host]]), sessions)
    shared: dict[str, list[str]] = {}
    for host in sessions:
        shared.setdefault(next(one for one, mark in marks.items() if mark in seen[host]), []).append(host)
    return shared, {host for host in shared if here in seen[host]}


@contextmanager
def _signed(folder: Path, sign: str) -> Iterator[None]:
    """Leave a sign in the working folder here; one that cannot be written is nobody's working folder."""
    path = folder / ".stoker" / sign
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
            path.parent.rmdir()  # unless there is more in it


def _extra(places: Collection[Place]) -> Extra:
    """Give the files of ours that any of some hosts with one folder needs."""
    sent = {_PROFILER_FILE: any(one.profiler for one in places), _MPI_FILE: any(one.mpi for one in places)}
    ours = files("stoker.telemetry")
    return tuple((name, ours.joinpath(Path(name).name).read_bytes()) for name, wanted in sent.items() if wanted)


def _setup_log(run: Run, host: str) -> Path:
    return run.folder / f"setup.{host}.log"


def _set_up(run: Run, host: str, stop: Event, grace_s: float) -> None:
    """Run the job's own preparation on a host."""
    log = _setup_log(run, host)
    argv = [sys.executable, "-m", "stoker.launchers.ssh.remote_slot", str(run.folder), f"setup@{host}"]
    with open(log, "wb") as output:
        code = attend(argv, stop, stdout=output, stderr=output, grace_s=grace_s + LAST_S)
    if code:
        said = [line for line in log.read_text(errors="replace").splitlines() if not line.startswith(PREFIX)]
        last = ("\n".join(said).strip().splitlines() or ["it said nothing"])[-1]
        raise InputError(f"ssh.setup failed with exit code {code}: {last}", where=host, hint=f"its log: {log}")


def _check_python(plan: SshPlan, run: Run, session: Session, prepared_by: str) -> None:
    """Look again at the Python of a host, now that it is prepared."""
    place = plan.places[session.host]
    found = session.ask(
        {"do": "python", "workdir": place.workdir, "python": place.python, "modules": ["torch", "stoker"]}
    )
    if faults := list(python_troubles(place.python, found, plan.modules)):
        raise InputError(
            "; ".join(trouble.sentence for trouble in faults),
            where=session.host,
            hint=f"ssh.setup did not mend it; its log: {_setup_log(run, prepared_by)}",
        )
