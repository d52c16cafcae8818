"""Start many slots that sleep, and measure how long that takes and how much memory our own processes need meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from measure import STOKER
from stoker.core.processes import parent_pid

if TYPE_CHECKING:
    from tests.support.hosts import Network

START_TIMEOUT_S = 300.0
PROGRAM = "exec sleep 600"


@dataclass(frozen=True, kw_only=True)
class StartedSlots:
    """How long the start of all slots took, and the processes of ours while they run: supervisor, ssh, profilers, …"""

    seconds: float
    processes: int
    pss_bytes: int
    """Memory of these processes; what several of them share counts once."""

    def __str__(self) -> str:
        return f"{self.pss_bytes / 1e6:,.0f} MB in {self.processes} processes"


def start_slots(folder: Path, slots: int, net: Network | None = None) -> StartedSlots:
    """Start a job with this many slots on this machine or on the hosts of a network, measure it and stop it."""
    name = f"slots-{slots}-{'ssh' if net else 'local'}"
    project, running, home = folder / name, folder / name / "running", folder / name / "home"
    running.mkdir(parents=True)
    job: dict[str, object] = {"name": name, "topology": "tf-mirrored", "workers": slots}
    job["program"] = {"command": ["sh", "-c", f"touch {running}/$POD_NAME; {PROGRAM}"]}
    roots = []
    if net is not None:
        hosts = [f"{host.name}:{-(-slots // len(net.hosts))}" for host in net.hosts]
        job["ssh"] = {"hosts": hosts, "config": str(net.config), "workdir": str(project), "python": sys.executable}
        roots = [host.process.pid for host in net.hosts if host.process is not None]
    (project / "job.yaml").write_text(json.dumps(job))
    started = time.perf_counter()
    _run_stoker(home, project, "run", "job.yaml", "--detach", *(("--on", "ssh") if net else ()))
    try:
        while len(os.listdir(running)) < slots:
            if time.perf_counter() - started > START_TIMEOUT_S:
                raise RuntimeError(f"only {len(os.listdir(running))} of {slots} slots have started")
            time.sleep(0.02)
        seconds = time.perf_counter() - started
        roots += [int(lock.read_text()) for lock in home.glob("runs/*/lock")]
        ours = [pid for pid in _list_descendants(roots) if b"stoker" in _read(pid, "cmdline")]
        return StartedSlots(seconds=seconds, processes=len(ours), pss_bytes=sum(map(_pss_bytes, ours)))
    finally:
        _run_stoker(home, project, "stop", name)


def _run_stoker(home: Path, project: Path, *words: str) -> None:
    env = {**os.environ, "STOKER_HOME": str(home)}
    subprocess.run([STOKER, "job", *words], cwd=project, env=env, check=True, capture_output=True)


def _list_descendants(roots: Iterable[int]) -> list[int]:
    """List these processes and their descendants."""
    children: dict[int | None, list[int]] = {}
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        children.setdefault(parent_pid(pid), []).append(pid)
    found = list(roots)
    for pid in found:
        found += children.get(pid, [])
    return found


def _pss_bytes(pid: int) -> int:
    lines = _read(pid, "smaps_rollup").splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(b"Pss:"))


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
