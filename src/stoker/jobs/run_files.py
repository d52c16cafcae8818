"""The files of a run folder: every name that stoker writes there, in one table; docs/jobs.md shows it.

Version 1 had more files: one local process and one record for each slot on an ssh host or on Ray. Its runs can be
listed, read and stopped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

VERSION = 2
"""The version of run folders that this version of stoker writes, in the file `version`."""
STOP_REQUEST_FILE = "stopping"
"""File that requests a stop of a run which outlives its supervisor, as opposed to a shutdown of this machine."""

STACKS_REQUEST_FILE = "stacks.request"
"""File that asks the supervisor for the stacks of all ranks; the supervisor deletes it when it has written them."""


def stacks_file(attempt: int) -> str:
    """Return the name of the file with the stacks of an attempt."""
    return f"stacks.{attempt}.txt"


@dataclass(frozen=True, slots=True)
class RunFile:
    """A file or directory of a run folder; `<…>` in its name stands for a number or a name."""

    name: str
    content: str
    launchers: str = "all"
    """The launchers that write it."""

    def matches(self, path: str) -> bool:
        """Whether a path, relative to the run folder, is this file or in this directory."""
        parts = re.split("(<[^>]+>)", self.name)
        pattern = "".join("[^/]+" if part.startswith("<") else re.escape(part) for part in parts)
        return re.fullmatch(pattern + (".*" if self.name.endswith("/") else ""), path) is not None


RUN_FILES = (
    RunFile("version", "the version of the run folder"),
    RunFile("job.yaml", "the job with absolute paths"),
    RunFile("plan.json", "the commands that were started"),
    RunFile("handle", "the URL that commands use to find the run"),
    RunFile("environment.json", "the machine and its environment variables, without secrets"),
    RunFile("packages.json", "the installed Python packages"),
    RunFile("state.json", "the last known status: state, slots with their exit codes, attempts"),
    RunFile("state.reserve", "disk space for the final status, while a supervisor is running", "local, ssh, ray"),
    RunFile("logs/<slot>.<attempt>.log", "the output of one slot in one attempt, including its [events](watch.md)"),
    RunFile("logs/<slot>.<attempt>.times", "when the lines of that log were written"),
    RunFile("index/", "the events of the logs as columns of numbers; may be deleted, and is built again when needed"),
    RunFile("checkpoints/", "checkpoints, if `checkpoint.dir` is not set"),
    RunFile("tensorboard/", "TensorBoard event files, if enabled"),
    RunFile("stacks.<attempt>.txt", "stack traces of all threads, if an attempt hung or they were requested"),
    RunFile(STACKS_REQUEST_FILE, "exists while stack traces are requested", "local, ssh, ray"),
    RunFile("supervisor.log", "messages from the supervisor: retries, broken connections, errors"),
    RunFile("lock", "locked while a supervisor or a follower is running; contains its process ID"),
    RunFile(STOP_REQUEST_FILE, "exists once a stop was requested", "ssh, slurm, kubernetes"),
    RunFile("prepared", "exists once the hosts are prepared", "ssh"),
    RunFile("setup.<host>.log", "the output of `ssh.setup` on a host", "ssh"),
    RunFile("detached", "exists if the slots keep running without a supervisor", "ssh"),
    RunFile("clean.<attempt>", "exists once no process of a detached attempt is running on any host", "ssh"),
    RunFile("working.zip", "the uploaded working directory", "ray"),
    RunFile("logs/ray.<attempt>.log", "Ray's own output", "ray"),
    RunFile("places.json", "the address of the node of each slot", "ray"),
    RunFile("submissions", "the Ray jobs that may still be running", "ray"),
    RunFile("ray-folder", "the temporary directory of the run's own Ray, while it is running", "ray"),
    RunFile("ray-<run>/", "the run folder of the Ray nodes that a run with `ray.hosts` started", "ray"),
    RunFile("kept", "what a finished run has left running, and how to use and stop it", "ray"),
    RunFile("streams.json", "how much of each log in the cluster has been copied", "kubernetes, ray"),
    RunFile("slurm.sh", "the batch script", "slurm"),
    RunFile("slurm.job", "the ID of the Slurm job", "slurm"),
    RunFile("slurm.log", "the output of the batch script and of `srun`", "slurm"),
    RunFile("slurm.records", "when attempts began and how they ended", "slurm"),
    RunFile("exit.<attempt>.<slot>", "the exit code of a slot", "slurm"),
    RunFile("profiler.py", "the profiler, for nodes without stoker", "slurm"),
    RunFile("mpi_rank.py", "wrapper that mpirun starts for each rank, which then starts the program", "slurm"),
)


def find_run_file(path: str) -> RunFile | None:
    """Return the entry of a path, relative to the run folder; None for a file that is not of stoker."""
    return next((file for file in RUN_FILES if file.matches(path)), None)


def format_table() -> str:
    """Return the table of files for the documentation."""
    rows = [f"| `{file.name}` | {file.content} | {file.launchers} |" for file in RUN_FILES]
    return "\n".join(["| file | content | launcher |", "|---|---|---|", *rows]) + "\n"
