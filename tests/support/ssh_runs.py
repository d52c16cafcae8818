"""Jobs on ssh hosts: job files, the processes of a run on its hosts, and other machines to run commands on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stoker.core.processes import find_processes_by_env
from stoker.jobs.run_folder import RunFolder
from tests.support.hosts import Network
from tests.support.waiting import wait_until

COUNT_UNTIL = "echo ready; i=0; while ! test -e {go}; do echo $i; i=$((i+1)); sleep 0.05; done; printf over"
"""Prints consecutive numbers until the file `go` exists: a gap or a duplicate in the log shows."""


def ssh_section(net: Network, workdir: Path, *hosts: str, **more: Any) -> dict[str, Any]:
    """The ssh section of a job on these hosts."""
    return {
        "hosts": list(hosts or ("node1", "node2")),
        "config": str(net.config),
        "workdir": str(workdir),
        "python": sys.executable,
        **more,
    }


def write_ssh_job(net: Network, folder: Path, command: str, *hosts: str, lost_after: int = 5, **keys: Any) -> Path:
    """Write the file of a job that runs a shell command on node2, or on other hosts."""
    job = {
        "name": "small",
        "topology": "single",
        "profile": {"every": 0},
        "retries": 0,
        "grace": "2s",
        "program": {"command": ["bash", "-c", command]},
        "ssh": ssh_section(net, folder / "there", *(hosts or ("node2",)), lost_after=lost_after),
        **keys,
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def count_lines(lines: list[str]) -> list[str]:
    """What `COUNT_UNTIL` prints in as many lines."""
    return ["ready", *map(str, range(len(lines) - 2)), "over"]


# --- Processes


def slot_processes(run: RunFolder, *hosts: str) -> list[int]:
    """The processes of a run's slots on these hosts, or on all."""
    pids = (find_processes_by_env({"STOKER_RUN": run.id, "STOKER_HOST": host}) for host in hosts or ("node1", "node2"))
    return [pid for found in pids for pid in found]


def remote_processes(run: RunFolder) -> list[int]:
    """All processes of a run on its hosts: slots, slot daemons and attach sessions."""
    return [*slot_processes(run), *find_by_command(f"stoker-agent-{run.id}", "python")]


def find_by_command(word: str, program: str) -> list[int]:
    """The processes with this word in their command line, and this program."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                argv = (folder / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if program in Path(argv[0]).name and any(word in arg for arg in argv):
                pids.append(int(folder.name))
    return pids


def local_processes(run: RunFolder, module: str) -> list[int]:
    """The local processes that run a module for a run."""
    return sorted(set(find_by_command(module, "python")) & set(find_by_command(str(run.folder), "python")))


def supervisors(run: RunFolder) -> list[int]:
    """The supervisor of a run, which holds its lock: the process id in the lock is that of its own namespace."""
    with suppress(FileNotFoundError):
        inode = (run.folder / "lock").stat().st_ino
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return [int(lock[4]) for lock in locks if lock[3] == "WRITE" and lock[5].endswith(f":{inode}")]
    return []


def slot_daemons(run: RunFolder) -> list[int]:
    """The slot daemons of a run."""
    return _agents(run, "stoker-daemon")


def guards(run: RunFolder) -> list[int]:
    """The guards of the slot daemons of a run."""
    return _agents(run, "stoker-guard")


def attach_sessions(run: RunFolder) -> list[int]:
    """The attach sessions of a run: the far ends of its ssh connections."""
    return [pid for pid in _agents(run, "") if pid not in (*slot_daemons(run), *guards(run))]


def _agents(run: RunFolder, name: str) -> list[int]:
    """The processes of ours on the hosts of a run whose name begins like this."""
    found = []
    for pid in find_by_command(f"stoker-agent-{run.id}", "python"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just exited
            if Path(f"/proc/{pid}/comm").read_text().startswith(name):
                found.append(pid)
    return found


def kill_all(*pids: int) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


# --- Other machines


class Machine:
    """A machine with a process table of its own, on which stoker commands are run."""

    def __init__(self, init_pid: int) -> None:
        enter = ["nsenter", "--target", str(init_pid), "--pid", "--mount", f"--wd={Path.cwd()}"]
        self._argv = [*enter, sys.executable, "-m", "stoker"]

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run a command and wait for it."""
        return subprocess.run([*self._argv, *map(str, words)], capture_output=True, text=True, check=False)

    def start(self, *words: object) -> None:
        """Run a command in the background."""
        argv = ["sh", "-c", '"$@" > started 2>&1 &', "sh", *self._argv, *map(str, words)]
        subprocess.run(argv, check=True)


@contextmanager
def machine() -> Iterator[Machine]:
    """A machine that loses power at the end: all its processes are killed."""
    argv = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sleep", "1000"]
    with subprocess.Popen(argv) as process:
        try:
            wait_until(lambda: bool(_children(process.pid)))
            (init_pid,) = _children(process.pid)
            yield Machine(init_pid)
        finally:
            process.kill()


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
