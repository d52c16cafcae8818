"""Run folders: how to create, find, list, read and write them; `run_files` lists their files."""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.core.spec import load, to_json
from stoker.errors import ConflictError, InputError, NotFoundError, redact_urls
from stoker.jobs.run_files import VERSION
from stoker.jobs.spec import JobSpec, load_job, to_yaml
from stoker.jobs.status import JobState, JobStatus
from stoker.jobs.topology import Slot

KEPT_FILE = "kept"
STATUS_FILE = "state.json"
_SECRET_NAME = re.compile(
    r"key|token|secret|pass(w|$|_)|pwd|credential|auth|cookie|session|private|webhook|(^|[_-])pat($|_)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run of a job, identified by its run folder."""

    folder: Path

    @property
    def id(self) -> str:
        """The unique ID of the run: the name of its folder."""
        return self.folder.name

    @property
    def name(self) -> str:
        """The name of the job."""
        return self.id.rsplit("-", 3)[0]

    @property
    def version(self) -> int:
        """The version of the run folder; the first one had no number."""
        path = self.folder / "version"
        return int(path.read_text()) if path.exists() else 1

    @property
    def logs(self) -> Path:
        """The directory of the logs."""
        return self.folder / "logs"

    @property
    def handle(self) -> str:
        """The URL that identifies the run to its launcher."""
        return self._read_text("handle").strip()

    @property
    def job(self) -> JobSpec:
        """The job that was started."""
        return load_job(self.folder / "job.yaml")

    @property
    def checkpoint_dir(self) -> str:
        """Where its checkpoints are stored."""
        return self.job.checkpoint.dir or str(self.folder / "checkpoints")

    @property
    def kept(self) -> str:
        """What the finished run has left running, and how to use and stop it; empty if nothing."""
        path = self.folder / KEPT_FILE
        return path.read_text() if path.exists() else ""

    def log_path(self, slot: Slot, attempt: int) -> Path:
        """Return the path of the log of a slot in an attempt."""
        return self.logs / log_name(slot, attempt)

    def read_status(self) -> JobStatus:
        """Read the last known status."""
        try:
            text = (self.folder / STATUS_FILE).read_bytes()
        except FileNotFoundError:
            return JobStatus(state=JobState.PENDING)
        return load(text, JobStatus, self.folder / STATUS_FILE)

    def write_status(self, status: JobStatus) -> None:
        """Write the status; concurrent readers see either the old or the new one."""
        self.write(STATUS_FILE, to_json(status))

    def write(self, name: str, data: bytes) -> None:
        """Write a file of the run atomically."""
        temporary = self.folder / f".{name}.{os.getpid()}"
        try:
            temporary.write_bytes(data)
            temporary.replace(self.folder / name)
        except OSError as error:
            error.filename = str(self.folder / name)  # that of a full disk has none
            raise
        finally:
            temporary.unlink(missing_ok=True)

    def write_handle(self, handle: str) -> None:
        """Write the handle of a run of which nothing has started; without one nobody could find it, so remove it."""
        try:
            self.write("handle", f"{handle}\n".encode())
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _read_text(self, name: str) -> str:
        try:
            return (self.folder / name).read_text()
        except FileNotFoundError as error:
            raise NotFoundError(f"{name} not found", where=self.folder, hint="the run was never started") from error


def log_name(slot: Slot, attempt: int) -> str:
    """Return the name of the log of a slot in an attempt."""
    return f"{slot.filename}.{attempt}.log"


def stoker_home(environ: Mapping[str, str] | None = None) -> Path:
    """Return the directory of all runs: $STOKER_HOME, or the user's data directory."""
    env = os.environ if environ is None else environ
    if path := env.get("STOKER_HOME"):
        return Path(path).absolute()
    return Path(env.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "stoker"


def create_run(job: JobSpec, plan: object, *, home: Path | None = None) -> RunFolder:
    """Create the folder of a new run in `home` (default: `stoker_home()`), with its job and its rendered plan."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    run = RunFolder((home or stoker_home()) / "runs" / f"{job.name}-{stamp}-{secrets.token_hex(2)}")
    try:
        run.folder.mkdir(mode=0o700, parents=True)  # private: the plan contains the environment variables of the job
    except FileExistsError as error:
        raise ConflictError(
            "run folder already exists: another run was started at the same time", where=run.folder, hint="try again"
        ) from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        hint = "set STOKER_HOME to a directory that you can write to"
        raise InputError(f"cannot create the run folder: {reason}", where=run.folder, hint=hint) from error
    try:
        run.logs.mkdir()
        run.write("version", f"{VERSION}\n".encode())
        run.write("job.yaml", to_yaml(job).encode())
        run.write("plan.json", to_json(plan))
        run.write("environment.json", to_json(describe_environment()))
    except BaseException:
        shutil.rmtree(run.folder, ignore_errors=True)
        raise
    return run


def list_runs() -> list[RunFolder]:
    """List all runs, newest first."""
    folder = stoker_home() / "runs"
    paths = [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []
    ids = [path.name for path in paths if (path / "handle").is_file()]
    return [RunFolder(folder / run_id) for run_id in sorted(ids, key=sort_key, reverse=True)]


def sort_key(run_id: str) -> tuple[list[str], str]:
    """Return the key that sorts run IDs by the start time in them."""
    return run_id.rsplit("-", 3)[1:], run_id


def find_run(name: str | None) -> RunFolder:
    """Return the newest run that a name matches, whether it is running or not; see `run_lookup` for commands."""
    return match_runs(name)[0]


def match_runs(name: str | None, *, full_job_name: bool = False) -> list[RunFolder]:
    """Return the run with this ID or unique prefix, or all runs of the job with this name, newest first.

    Without a name, return all runs. Raise NotFoundError rather than return an empty list. With `full_job_name`, a
    prefix must include the whole name of the job: `cat` does not mean a run of the job `cat-big`.
    """
    runs = list_runs()
    if not runs:
        what = f"no runs found in {stoker_home() / 'runs'}"
        if name is not None:
            what = f"no run matches {name!r}: {what}"
        raise NotFoundError(what, hint="start one with: stoker job run")
    matches = [run for run in runs if run.id == name] or [run for run in runs if name in (None, run.name)]
    if matches:
        return matches
    matches = [run for run in runs if run.id.startswith(name or "")]
    if len(matches) > 1:
        ids = ", ".join(run.id for run in matches[:5])
        raise InputError(f"{name!r} matches {len(matches)} runs: {ids}", hint="use a longer prefix")
    if not matches:
        raise NotFoundError(f"no run matches {name!r}", hint="list runs with: stoker job list")
    if full_job_name and not (name or "").startswith(f"{matches[0].name}-"):
        what = f"there is no job {name!r}; the run that starts with it is {matches[0].id}"
        raise InputError(what, hint=f"use its ID or the name of its job, {matches[0].name}")
    return matches


def describe_environment() -> dict[str, object]:
    """Describe this machine and process for a report, with secrets redacted."""
    system = os.uname()  # `platform.platform` would start a process
    return {
        "python": sys.version,
        "platform": f"{system.sysname}-{system.release}-{system.machine}-with-{''.join(platform.libc_ver())}",
        "machine": system.machine,
        "cores": os.cpu_count(),
        "argv": [_redact_text(argument) for argument in sys.argv],
        "cwd": _redact_text(str(Path.cwd())),
        "variables": redact_env(os.environ),
    }


def redact_env(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with the values of likely secrets replaced."""
    return {name: "…" if is_secret_name(name) else _redact_text(value) for name, value in sorted(variables.items())}


def _redact_text(text: str) -> str:
    """Remove credentials from URLs, and escape bytes that are not valid text."""
    return redact_urls(text.encode(errors="backslashreplace").decode())


def is_secret_name(name: str) -> bool:
    """Return whether a variable of this name probably contains a secret."""
    return _SECRET_NAME.search(name) is not None


def list_packages() -> dict[str, str]:
    """Return the versions of all installed Python packages, from the names of their metadata folders, which is fast."""
    folders = (name for path in sys.path if Path(path).is_dir() for name in os.listdir(path))
    found = (re.fullmatch(r"(?P<name>.+?)-(?P<version>\d[^-]*)(?:-.*)?\.(?:dist|egg)-info", name) for name in folders)
    return dict(sorted((match["name"].replace("_", "-"), match["version"]) for match in found if match))
