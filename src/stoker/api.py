"""The Python API of jobs, on which the command line is built: load a job file, plan and run it, follow its runs.

A `Job` is what a job file says, a `Plan` what it would start on one target, a `Run` one execution. A run continues when
the process that started it exits, and any process can find it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Number
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat, cast

from stoker.core.processes import wait_until
from stoker.errors import ConflictError, InputError, RunTimeoutError
from stoker.jobs import spec as job_spec
from stoker.jobs.launcher import Launcher, SlotLogLine
from stoker.jobs.overrides import OptionAssignment
from stoker.jobs.run_folder import RunFolder, create_run, list_runs
from stoker.jobs.run_lookup import launcher_of, open_launcher, resolve_run
from stoker.jobs.status import JobState, JobStatus
from stoker.jobs.targets import LOCAL
from stoker.jobs.topology import Slot, list_slots
from stoker.telemetry.events import Event
from stoker.telemetry.metrics import MetricsRow, build_table
from stoker.telemetry.reader import read_events

if TYPE_CHECKING:  # imports numpy, whose threads would keep a command from forking the supervisor
    from stoker.telemetry.analysis import RunAnalysis, TrainingProgress, Verdict

MAX_POLL_S = 0.5
HOSTS_NEED_TARGET = "hosts can be set only for the targets ssh and ray"
HOSTS_WITH_ADDRESS = "hosts cannot be combined with the address of a cluster"
EMPTY_HOST = "the list of hosts has an empty name"
NO_HOSTS = "the list of hosts is empty"

Overrides = Mapping[str, object] | Iterable[str]
"""Keys of a job file and their new values: `{"resources.gpu": 4}`, or `["resources.gpu=4"]` as for `--set`."""


@dataclass(frozen=True, slots=True, repr=False)
class Job:
    """A job: what a job file says, valid and independent of where it runs."""

    spec: job_spec.JobSpec
    """Every key of the job file as an attribute, for example `job.spec.resources.gpu`."""

    @classmethod
    def load(
        cls,
        path: str | Path,
        overrides: Overrides = (),
        *,
        on: str | None = None,
        hosts: str | Sequence[str] | None = None,
    ) -> Job:
        """Read a job file; raise SpecError with every fault if it is invalid or cannot run on the target `on`.

        `on` and `hosts` are those of `plan`. The job keeps the hosts, so that `plan` and `run` need only `on`.
        """
        check = None if on is None else open_launcher(on).check
        return cls(job_spec.load_job(path, [*to_assignments(overrides), *host_overrides(on, hosts)], check))

    @classmethod
    def from_dict(cls, keys: Mapping[str, Any], overrides: Overrides = ()) -> Job:
        """Return the job that a job file with these keys describes."""
        return cls(job_spec.parse_job(_to_json(dict(keys)), "job", to_assignments(overrides)))

    @property
    def name(self) -> str:
        """The name of the job."""
        return self.spec.name

    def replace(self, overrides: Overrides) -> Job:
        """Return the job with other values for some keys; None removes a key and so restores its default."""
        assignments = to_assignments(overrides)
        return Job(job_spec.parse_job(self.to_yaml(), f"job {self.name!r}", assignments)) if assignments else self

    def plan(self, on: str = LOCAL, *, hosts: str | Sequence[str] | None = None) -> Plan:
        """Return what the job would start on a target, after all checks; start nothing.

        `on` is a target as for `--on`: local, ssh, slurm, ray[://host:port] or k8s[://context/namespace]. `hosts` are
        the hosts for ssh, or those on which ray starts a cluster, for example `["node1", "node2:2"]`.
        """
        launcher = open_launcher(on)
        job = launcher.resolve_paths(self.replace(host_overrides(on, hosts)).spec)
        return Plan(job, launcher, launcher.render(job))

    def run(self, on: str = LOCAL, *, hosts: str | Sequence[str] | None = None) -> Run:
        """Start the job on a target and return its run, which continues when this process exits."""
        return self.plan(on, hosts=hosts).run()

    def to_yaml(self) -> str:
        """Return the job as the text of a job file, without keys that have their default value."""
        return job_spec.to_yaml(self.spec)

    def __repr__(self) -> str:
        return f"<stoker.Job {self.name!r}>"


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """What a job would start on one target: commands, or Kubernetes objects."""

    job: job_spec.JobSpec
    """The job with its paths and its number of workers resolved for the target."""
    launcher: Launcher[Any]
    rendered: Any

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know before the job starts: settings without effect, uploads, unused hosts."""
        notes: tuple[str, ...] = self.rendered.notes
        return notes

    def to_text(self) -> str:
        """Return the commands as shell text, or the Kubernetes objects as YAML."""
        return str(self.rendered.to_text())

    def run(self) -> Run:
        """Start the job; an interrupt while it starts stops what has been started."""
        run = self.create_run()
        try:
            self.start(run, detach=True)
        except KeyboardInterrupt as error:
            run.stop()
            error.add_note(f"run {run.id} was stopped while it was starting")
            raise
        return run

    def create_run(self) -> Run:
        """Create the run folder of a new run, without starting it."""
        return Run(create_run(self.job, self.rendered).folder)

    def start(self, run: Run, *, detach: bool) -> None:
        """Start a run; with `detach`, it also survives a failure of this machine if its target supports that."""
        self.launcher.start(self.rendered, run.files, detach=detach)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"<stoker.Plan of {self.job.name!r} on {self.launcher.traits.name}>"


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """One execution of a job, identified by its run folder; any process can follow and stop it."""

    folder: Path

    @classmethod
    def find(cls, name: str | None = None, *, on: str | None = None) -> Run:
        """Return a run by its ID, a unique prefix, its handle or the name of its job; by default the newest.

        `on` is the cluster that has the run, if it was started from another machine.
        """
        return cls(resolve_run(name, on).folder)

    @property
    def files(self) -> RunFolder:
        """The files in its run folder."""
        return RunFolder(self.folder)

    @property
    def id(self) -> str:
        """The unique ID of the run."""
        return self.files.id

    @property
    def name(self) -> str:
        """The name of its job."""
        return self.files.name

    @property
    def handle(self) -> str:
        """The URL that identifies the run to its launcher."""
        return self.files.handle

    @property
    def job(self) -> Job:
        """The job that was started, with its overrides."""
        return Job(self.files.job)

    @property
    def checkpoint_dir(self) -> str:
        """The directory or URL of its checkpoints."""
        return self.files.checkpoint_dir

    def status(self) -> JobStatus:
        """Return the current status: its state, slots, attempts, and why it failed."""
        return launcher_of(self.files).status(self.handle)

    def wait(self, timeout_s: float | None = None) -> JobStatus:
        """Wait until the run has finished and return its status.

        Raise JobFailedError with the diagnosis if it failed, InterruptError if it was stopped, and RunTimeoutError if
        it has not finished in time. Neither a timeout nor an interrupt stops the run.
        """
        launcher, handle = launcher_of(self.files), self.handle
        with self._survives_interrupt():
            is_finished = wait_until(
                lambda: launcher.status(handle).state.is_final, timeout_s, max_interval_s=MAX_POLL_S
            )
        if not is_finished:
            raise RunTimeoutError(f"run {self.id} has not finished after {timeout_s:g} s")
        status = launcher.status(handle)
        status.raise_for_state()
        return status

    def logs(
        self, slot: str | None = None, *, follow: bool = False, tail: int | None = None, partial: bool = False
    ) -> Iterator[SlotLogLine]:
        """Return an iterator over the log lines of a slot such as `worker/0`, or of all slots, or the last `tail`.

        With `follow`, it ends when the run has finished; with `partial`, it then includes the states of progress bars
        that are not finished. An interrupt does not stop the run.
        """
        if tail is not None and tail < 0:
            raise InputError(f"tail must be >= 0, got {tail}")
        slots = list_slots(self.job.spec)
        if slot is not None and slot not in map(str, slots):
            raise InputError(
                f"run {self.id} has no slot {slot!r}", hint=f"available slots: {', '.join(map(str, slots))}"
            )
        return self._iter_logs(None if slot is None else Slot.parse(slot), follow, tail, partial)

    def _iter_logs(self, slot: Slot | None, follow: bool, tail: int | None, partial: bool) -> Iterator[SlotLogLine]:
        with self._survives_interrupt():
            for line in launcher_of(self.files).logs(self.handle, slot, follow=follow, tail=tail):
                if partial or not line.is_partial:
                    yield line

    def events(self) -> list[Event]:
        """Return the events in its logs so far, in order of time."""
        return read_events(self.files.logs)

    def metrics(self) -> list[MetricsRow]:
        """Return the scalars reported so far, one row per step, for `pandas.DataFrame(run.metrics())`."""
        return build_table(self.events())

    def analysis(self) -> RunAnalysis:
        """Return the analysis of all events so far: progress, verdict, cost of restarts; it reads only new events."""
        from stoker.telemetry.run_index import open_index

        return open_index(self.files.logs).analysis

    def progress(self) -> TrainingProgress:
        """Return the step, epoch, loss and throughput that were reported last."""
        return self.analysis().progress()

    def verdict(self) -> Verdict:
        """Return where the time of the run goes."""
        return self.analysis().verdict()

    def stop(self) -> None:
        """Stop the run: SIGTERM, a grace period, then SIGKILL.

        An interrupt skips the grace period, except on a Ray cluster, which cannot shorten it once it has begun.
        Do nothing if it was never started; clean up what a finished run may have left on other machines.
        """
        if not (self.folder / "handle").exists():
            return
        with _restored_sigint():
            launcher_of(self.files).stop(self.handle)

    def resume(self, *, detach: bool = True) -> None:
        """Restart a run that failed, was stopped or was lost, in its own folder and from its newest checkpoint."""
        state = self.status().state
        if not state.is_final:
            raise ConflictError(f"run {self.id} is still running", hint=f"follow it with: stoker job logs -f {self.id}")
        if state is JobState.SUCCEEDED:
            raise ConflictError(f"run {self.id} already succeeded", hint="start a new run: stoker job run FILE")
        launcher_of(self.files).restart(self.files, detach=detach)

    @contextmanager
    def _survives_interrupt(self) -> Iterator[None]:
        """Add to a KeyboardInterrupt that the run continues, so that nobody believes it stopped."""
        try:
            yield
        except KeyboardInterrupt as error:
            error.add_note(f"run {self.id} continues; to stop it, call stop() or run: stoker job stop {self.id}")
            raise

    def __repr__(self) -> str:
        return f"<stoker.Run {self.id!r}>"


def runs() -> list[Run]:
    """Return the runs that this machine knows, newest first."""
    return [Run(run.folder) for run in list_runs()]


# --- Overrides


def to_assignments(overrides: Overrides) -> list[str]:
    """Return overrides in the form that `--set` takes."""
    if isinstance(overrides, str):
        return [overrides]
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [
        OptionAssignment(f"{key}={'' if value is None else _to_json(value)}", "overrides")
        for key, value in overrides.items()
    ]


def host_overrides(on: str | None, hosts: str | Sequence[str] | None) -> list[str]:
    """Return the overrides that select the hosts of a job; a string has commas between them."""
    if hosts is None:
        return []
    key = "" if on is None else open_launcher(on).traits.hosts_key
    if on is None or not key:
        raise InputError(HOSTS_NEED_TARGET, hint='choose a target with --on ssh or on="ssh", or omit the hosts')
    kind, _, address = on.partition("://")
    if address:
        hint = f"use --on {kind} to start a cluster on the hosts, or omit the hosts"
        raise InputError(HOSTS_WITH_ADDRESS, where=f"--on {on}", hint=hint)
    listed = hosts.split(",") if isinstance(hosts, str) else hosts
    names = [name.strip() for name in listed]
    if not any(names):
        raise InputError(NO_HOSTS, hint="for example: --hosts node1,node2 or --hosts @FILE")
    if not all(names):
        raise InputError(EMPTY_HOST, where=f"--hosts {','.join(names)}", hint="remove a comma, or add the missing name")
    return [OptionAssignment(f"{key}={_to_json(names)}", "--hosts")]


def _to_json(value: object) -> str:
    """Write a value as JSON, which is valid YAML; paths become strings, numbers of other libraries plain numbers."""
    return json.dumps(value, ensure_ascii=False, default=_to_plain)


def _to_plain(value: object) -> object:
    """Return what JSON can write for a path, a number or a scalar of numpy or torch; raise TypeError for the rest."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Number):
        return int(value) if isinstance(value, Integral) else float(cast("SupportsFloat", value))
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    raise TypeError(
        f"a key of a job cannot be set to {value!r}: use a string, number, boolean, path, list, dictionary or None"
    )


@contextmanager
def _restored_sigint() -> Iterator[None]:
    """Restore the SIGINT handler afterwards: launchers ignore the signal once it has interrupted a stop.

    Only the main thread can do so, and only for a handler that was installed by Python.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
