"""Preparation of ssh hosts before a run: upload the working directory, run `ssh.setup`, check the job's Python."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import msgspec

from stoker.errors import InputError, StokerError
from stoker.jobs.run_folder import RunFolder, stoker_home
from stoker.jobs.status import JobState, JobStatus
from stoker.launchers.ssh.client import Session, SshClient
from stoker.launchers.ssh.plan import HostConfig, SshPlan, read_ssh_plan
from stoker.launchers.ssh.preflight import check_python, run_parallel
from stoker.launchers.ssh.slots import run_setup
from stoker.launchers.ssh.upload import CodeUpload, ExtraFiles
from stoker.launchers.supervise.supervisor import supervisor_lock
from stoker.launchers.upload import list_files

PROFILER_FILE = ".stoker/profiler.py"
MPI_RANK_FILE = ".stoker/mpi_rank.py"
_PREPARED_FILE = "prepared"


def is_prepared(run: RunFolder) -> bool:
    """Whether the hosts of a run are prepared."""
    return (run.folder / _PREPARED_FILE).exists()


def prepare_hosts(run: RunFolder) -> None:
    """Upload the working directory to all hosts and set them up; a failure becomes the status of the run."""
    plan = read_ssh_plan(run)
    try:
        with supervisor_lock(run), _share_connections(plan.client) as client:
            _prepare(plan, run, client)
    except (StokerError, OSError, KeyboardInterrupt) as error:
        now = time.time()
        is_failure = isinstance(error, Exception)
        state, message = (JobState.FAILED, str(error)) if is_failure else (JobState.STOPPED, "stopped")
        run.write_status(JobStatus(state=state, message=message, began=now, ended=now))
        if isinstance(error, OSError):
            raise InputError(f"could not prepare the hosts: {error}", where=run.id) from error
        raise
    run.write(_PREPARED_FILE, b"")


@contextmanager
def _share_connections(client: SshClient) -> Iterator[SshClient]:
    """Yield a client whose calls share the connections of its sessions."""
    with TemporaryDirectory(prefix="stoker-", dir="/tmp" if Path("/tmp").is_dir() else None) as folder:
        yield msgspec.structs.replace(client, control=f"{folder}/%C")


def _prepare(plan: SshPlan, run: RunFolder, client: SshClient) -> None:
    """Prepare each working directory once, also if several hosts share it."""
    source, stop = Path(plan.source), Event()
    with ExitStack() as stack:
        sessions = {
            host: stack.enter_context(Session(client, host, config.python))
            for host, config in plan.host_configs.items()
        }
        sharing, unchanged = _find_shared_workdirs(plan, sessions)
        needs_upload = any(plan.host_configs[host].copies for host in sharing.keys() - unchanged)
        names = list_files(source, plan.exclude, skip=stoker_home()) if needs_upload else []
        upload = stack.enter_context(CodeUpload(source, names, stop))

        def prepare(host: str) -> None:
            """Prepare a working directory, from the first of the hosts that have it."""
            config, extra = plan.host_configs[host], _extra_files([plan.host_configs[name] for name in sharing[host]])
            include_workdir = config.copies and host not in unchanged
            upload.send(extra, client=client, host=host, config=config, include_workdir=include_workdir)
            if plan.setup:
                _run_setup(plan, run, host, client, stop)

        run_parallel(prepare, sharing, stop)
        if plan.setup:
            prepared_by = {name: host for host, names in sharing.items() for name in names}
            run_parallel(lambda host: _check_python_again(plan, run, sessions[host], prepared_by[host]), sessions)


def _find_shared_workdirs(plan: SshPlan, sessions: Mapping[str, Session]) -> tuple[dict[str, list[str]], set[str]]:
    """Return which hosts share a working directory, by the first of them, and which of these have the local one."""
    markers = {host: f"marker-{secrets.token_hex(8)}" for host in sessions}
    local_marker = f"marker-{secrets.token_hex(8)}"

    def exchange(host: str, **lists: list[str]) -> list[str]:
        workdir = plan.host_configs[host].workdir
        request = {"op": "markers", "workdir": workdir, "create": [], "find": [], "remove": [], **lists}
        response = sessions[host].request(request)
        if "error" in response:
            raise InputError(response["error"], where=host, hint="set ssh.workdir to another directory")
        existing: list[str] = response["found"]
        return existing

    with _local_marker(Path(plan.source), local_marker):
        run_parallel(lambda host: exchange(host, create=[markers[host]]), sessions)
        existing = run_parallel(lambda host: exchange(host, find=[local_marker, *markers.values()]), sessions)
        run_parallel(lambda host: exchange(host, remove=[markers[host]]), sessions)
    visible = dict(zip(sessions, existing, strict=True))
    sharing: dict[str, list[str]] = {}
    for host in sessions:
        first = next(other for other, marker in markers.items() if marker in visible[host])
        sharing.setdefault(first, []).append(host)
    return sharing, {host for host in sharing if local_marker in visible[host]}


@contextmanager
def _local_marker(folder: Path, name: str) -> Iterator[None]:
    """Keep a marker in the local working directory; one that is not writable is not the working directory of a host."""
    path = folder / ".stoker" / name
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
            path.parent.rmdir()  # fails if there are other files in it


def _extra_files(configs: Collection[HostConfig]) -> ExtraFiles:
    """Return the files of stoker that any of the hosts with one working directory needs."""
    is_needed = {
        PROFILER_FILE: any(config.profiler for config in configs),
        MPI_RANK_FILE: any(config.mpi for config in configs),
    }
    sources = files("stoker.remote")
    return tuple((name, sources.joinpath(Path(name).name).read_bytes()) for name, needed in is_needed.items() if needed)


def _setup_log(run: RunFolder, host: str) -> Path:
    return run.folder / f"setup.{host}.log"


def _run_setup(plan: SshPlan, run: RunFolder, host: str, client: SshClient, stop: Event) -> None:
    """Run `ssh.setup` on a host."""
    log = _setup_log(run, host)
    exited = run_setup(plan, run, host, client, log, stop)
    if exited.code:
        lines = log.read_text(errors="replace").strip().splitlines()
        last_line = exited.reason or (lines or ["no output"])[-1]
        what = f"ssh.setup failed with exit code {exited.code}: {last_line}"
        raise InputError(what, where=host, hint=f"see its log: {log}")


def _check_python_again(plan: SshPlan, run: RunFolder, session: Session, prepared_by: str) -> None:
    """Raise InputError if the Python of a host still has issues after setup."""
    config = plan.host_configs[session.host]
    request = {"op": "python", "workdir": config.workdir, "python": config.python, "modules": ["torch", "stoker"]}
    facts = session.request(request)
    if issues := list(check_python(config.python, facts, plan.modules)):
        raise InputError(
            "; ".join(issue.sentence for issue in issues),
            where=session.host,
            hint=f"ssh.setup did not fix it; see its log: {_setup_log(run, prepared_by)}",
        )
