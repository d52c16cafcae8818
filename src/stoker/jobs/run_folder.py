"""Run folders: what was asked, what was rendered, and what became of it.

job.yaml  plan.json  handle      what was asked, what was rendered, the handle's URL
environment.json                 of whoever started it, secrets removed
logs/<role>-<index>.<attempt>.log  text and events, as they came
state.json                       the last known status
checkpoints/                     when the job names no other place
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.core.spec import load, to_json
from stoker.errors import ConflictError, InputError, NotFoundError, without_secrets
from stoker.jobs.spec import Job, load_job, to_yaml
from stoker.jobs.status import JobState, JobStatus
from stoker.jobs.topology import Slot

_SECRET = re.compile(
    r"key|token|secret|pass(w|$|_)|pwd|credential|auth|cookie|session|private|webhook|(^|[_-])pat($|_)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job, by its folder."""

    folder: Path

    @property
    def id(self) -> str:
        """Its name, which no other run has."""
        return self.folder.name

    @property
    def name(self) -> str:
        """The name of its job."""
        return self.id.rsplit("-", 3)[0]

    @property
    def logs(self) -> Path:
        """Where the logs lie."""
        return self.folder / "logs"

    @property
    def handle(self) -> str:
        """The URL by which its launcher finds it."""
        return self._text("handle").strip()

    @property
    def job(self) -> Job:
        """What was asked."""
        return load_job(self.folder / "job.yaml")

    @property
    def checkpoints(self) -> str:
        """Where its checkpoints go."""
        return self.job.checkpoint.dir or str(self.folder / "checkpoints")

    def log(self, slot: Slot, attempt: int) -> Path:
        """Name the log of a slot in an attempt."""
        return self.logs / f"{slot.filename}.{attempt}.log"

    def is_ending(self, attempt: int) -> bool:
        """Whether who watches over it is about to end an attempt."""
        return (self.folder / f"ending.{attempt}").exists()

    def read_status(self) -> JobStatus:
        """Read the last known status."""
        try:
            text = (self.folder / "state.json").read_bytes()
        except FileNotFoundError:
            return JobStatus(state=JobState.PENDING)
        return load(text, JobStatus, self.folder / "state.json")

    def write_status(self, status: JobStatus) -> None:
        """Keep the status; whoever reads meanwhile sees the old one or the new one."""
        self.write("state.json", to_json(status))

    def write(self, name: str, data: bytes) -> None:
        """Write a file of the run at once."""
        temporary = self.folder / f".{name}.{os.getpid()}"
        try:
            temporary.write_bytes(data)
            temporary.replace(self.folder / name)
        finally:
            temporary.unlink(missing_ok=True)

    def _text(self, name: str) -> str:
        try:
            return (self.folder / name).read_text()
        except FileNotFoundError as error:
            raise NotFoundError(f"this run has no {name}", where=self.folder, hint="it was never started") from error


def home(environ: Mapping[str, str] | None = None) -> Path:
    """Tell where runs are kept: $STOKER_HOME, or the user's data folder."""
    env = os.environ if environ is None else environ
    if given := env.get("STOKER_HOME"):
        return Path(given).absolute()
    return Path(env.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "stoker"


def create(job: Job, plan: object) -> Run:
    """Make the folder of a new run, with what was asked and what was rendered."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    run = Run(home() / "runs" / f"{job.name}-{stamp}-{secrets.token_hex(2)}")
    try:
        run.folder.mkdir(mode=0o700, parents=True)  # what was rendered holds the job's own variables
        run.logs.mkdir()
    except FileExistsError as error:
        raise ConflictError("two runs were started at once", where=run.folder, hint="try again") from error
    run.write("job.yaml", to_yaml(job).encode())
    run.write("plan.json", to_json(plan))
    run.write("environment.json", to_json(environment()))
    return run


def runs() -> list[Run]:
    """List every run, the newest first."""
    folder = home() / "runs"
    found = [Run(path) for path in folder.iterdir() if (path / "handle").is_file()] if folder.is_dir() else []
    return sorted(found, key=lambda run: (run.id.rsplit("-", 3)[1:], run.id), reverse=True)


def find(name: str | None) -> Run:
    """Find a run by its id, the beginning of it, or its job's name (then the newest); without a name, the newest."""
    every = runs()
    if not every:
        raise NotFoundError("there are no runs", where=home() / "runs", hint="start one with: stoker job run")
    if name is None:
        return every[0]
    for run in every:
        if name in (run.id, run.name):
            return run
    close = [run for run in every if run.id.startswith(name)]
    if len(close) == 1:
        return close[0]
    if close:
        names = ", ".join(run.id for run in close[:5])
        raise InputError(f"{len(close)} runs begin with {name!r}: {names}", hint="write more of the one you mean")
    raise NotFoundError(f"there is no run {name!r}", hint="stoker job list shows those there are")


def environment() -> dict[str, object]:
    """Describe this machine and process for a report, without secrets."""
    return {
        "python": sys.version,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "argv": [_shown(word) for word in sys.argv],
        "cwd": _shown(str(Path.cwd())),
        "variables": masked(os.environ),
    }


def masked(variables: Mapping[str, str]) -> dict[str, str]:
    """Give variables without the values that look like secrets."""
    return {name: "…" if looks_secret(name) else _shown(value) for name, value in sorted(variables.items())}


def _shown(text: str) -> str:
    """Take secrets out of URLs, and write bytes that are no text in another way."""
    return without_secrets(text.encode(errors="backslashreplace").decode())


def looks_secret(name: str) -> bool:
    """Whether a variable of this name is likely to hold a secret."""
    return _SECRET.search(name) is not None


def packages() -> dict[str, str]:
    """List the versions of all Python packages here; takes a moment."""
    from importlib.metadata import distributions

    return {found.name: found.version for found in distributions()}
