"""Trainings as real processes: started by torchrun or alone, killed, and read back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.telemetry.events import Event, parse
from tests.support.servers import free_port


@dataclass(frozen=True)
class Done:
    """What a training left behind: its exit code, and all that it wrote."""

    code: int
    text: str

    @property
    def events(self) -> list[Event]:
        return [event for line in self.text.splitlines() if (event := parse(line)) is not None]

    def marks(self, name: str) -> list[Event]:
        return [event for event in self.events if event.kind == "mark" and event.fields["name"] == name]

    def scalars(self, name: str) -> list[float]:
        return [event.fields["value"] for event in self.events if event.fields.get("name") == name]


@dataclass(frozen=True)
class Gang:
    """The ranks of a training, started by torchrun or, which is quicker, each by itself."""

    log: Path
    processes: list[subprocess.Popen[bytes]]
    torchrun: bool

    @property
    def running(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def ranks(self) -> list[int]:
        """The processes of the ranks, which torchrun has put in sessions of their own."""
        if not self.torchrun:
            return [process.pid for process in self.processes]
        pid = self.processes[0].pid
        try:
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except FileNotFoundError:
            return []

    def wait(self, timeout: float = 120) -> Done:
        codes = [process.wait(timeout) for process in self.processes]
        return Done(next((code for code in codes if code), 0), self.log.read_text())

    def wait_for(self, words: str, timeout: float = 60) -> None:
        """Wait until the training has written something."""
        until = time.monotonic() + timeout
        while words not in self.log.read_text():
            assert self.running, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill a training as a machine dies: all of its processes at once."""
        for one in [*self.ranks(), *(process.pid for process in self.processes)]:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        for process in self.processes:
            process.wait()


@contextmanager
def started(log: Path, world: int, *words: object, torchrun: bool = False, **env: str) -> Iterator[Gang]:
    """Start a training; whatever of it still runs at the end is killed."""
    trainer = ["-m", "stoker.trainers.torch_image", *(str(word) for word in words)]
    port = str(free_port())
    base = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env}
    if torchrun:
        starter = ["-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port", port]
        starts = [([sys.executable, *starter, *trainer], base)]
    elif world == 1:
        starts = [([sys.executable, *trainer], base)]
    else:
        common = {**base, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
        starts = [([sys.executable, *trainer], rank) for rank in ranks]
    with log.open("wb") as out:
        appended = {"stdout": out, "stderr": subprocess.STDOUT}
        processes = [subprocess.Popen(argv, env=one, **appended) for argv, one in starts]  # type: ignore[call-overload]
    gang = Gang(log, processes, torchrun)
    try:
        yield gang
    finally:
        gang.kill()


def run(log: Path, world: int, *words: object, torchrun: bool = False, timeout: float = 120, **env: str) -> Done:
    """Train to the end."""
    with started(log, world, *words, torchrun=torchrun, **env) as gang:
        return gang.wait(timeout)


def weights(folder: Path, name: str = "") -> dict[str, Any]:
    """The weights of the newest checkpoint, or of a named one."""
    return state(folder, name)["model"]  # type: ignore[no-any-return]


def state(folder: Path, name: str = "") -> dict[str, Any]:
    from stoker.trainers.checkpoints import unpack

    path = folder / name if name else max(folder.glob("step-*.pt"))
    return unpack(path.read_bytes(), where=str(path))


def same_bits(one: dict[str, Any], other: dict[str, Any]) -> bool:
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
