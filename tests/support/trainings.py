"""Run the trainer as real processes, with or without torchrun; kill them; read their output and checkpoints."""

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
class TrainingResult:
    """The exit code and the output of a training."""

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
class RunningTraining:
    """The ranks of a training, started by torchrun or, which is faster, one by one."""

    log: Path
    processes: list[subprocess.Popen[bytes]]
    torchrun: bool

    @property
    def running(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks, which torchrun starts in separate sessions."""
        if not self.torchrun:
            return [process.pid for process in self.processes]
        pid = self.processes[0].pid
        try:
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except FileNotFoundError:
            return []

    def wait(self, timeout: float = 280) -> TrainingResult:
        codes = [process.wait(timeout) for process in self.processes]
        return TrainingResult(next((code for code in codes if code), 0), self.log.read_text())

    def wait_for(self, *texts: str, timeout: float = 60) -> None:
        """Wait until the training has written one of these texts."""
        deadline = time.monotonic() + timeout
        while not any(text in self.log.read_text() for text in texts):
            assert self.running, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill all processes at once, as when a machine dies."""
        for pid in [*self.ranks(), *(process.pid for process in self.processes)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


@contextmanager
def start_training(
    log: Path, world: int, *args: object, torchrun: bool = False, **env: str
) -> Iterator[RunningTraining]:
    """Start a training; kill what still runs at the end."""
    trainer = ["-m", "stoker.trainers.torch_image", *(str(arg) for arg in args)]
    port = str(free_port())
    base = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env}
    if torchrun:
        torchrun_argv = ["-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port", port]
        starts = [([sys.executable, *torchrun_argv, *trainer], base)]
    elif world == 1:
        starts = [([sys.executable, *trainer], base)]
    else:
        common = {**base, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
        starts = [([sys.executable, *trainer], rank) for rank in ranks]
    with log.open("wb") as out:
        redirects = {"stdout": out, "stderr": subprocess.STDOUT}
        processes = [subprocess.Popen(argv, env=rank_env, **redirects) for argv, rank_env in starts]  # type: ignore[call-overload]
    training = RunningTraining(log, processes, torchrun)
    try:
        yield training
    finally:
        training.kill()


def run(
    log: Path, world: int, *args: object, torchrun: bool = False, timeout: float = 280, **env: str
) -> TrainingResult:
    """Train to the end and return the result."""
    with start_training(log, world, *args, torchrun=torchrun, **env) as training:
        return training.wait(timeout)


def weights(folder: Path, name: str = "") -> dict[str, Any]:
    """Return the weights of the newest checkpoint, or of a named one."""
    return read_checkpoint(folder, name)["model"]  # type: ignore[no-any-return]


def read_checkpoint(folder: Path, name: str = "") -> dict[str, Any]:
    """Return the content of the newest checkpoint, or of a named one."""
    from stoker.trainers.checkpoints import decode_checkpoint

    path = folder / name if name else max(folder.glob("step-*.pt"))
    return decode_checkpoint(path.read_bytes(), where=str(path))


def same_bits(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two state dicts are bit-identical."""
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
