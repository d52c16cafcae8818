"""Trainings as real processes: started by torchrun or alone, killed, and read back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers import free_port
from stoker.telemetry.events import Event, parse

MODULE = "stoker.trainers.torch_image"


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


def command(world: int, *words: object) -> list[str]:
    flags = [str(word) for word in words]
    if world == 1:
        return [sys.executable, "-m", MODULE, *flags]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port", str(free_port())]
    return [sys.executable, *torchrun, "-m", MODULE, *flags]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


@contextmanager
def started(log: Path, world: int, *words: object, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a training in a session of its own; whatever of it still runs at the end is killed."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            command(world, *words), stdout=out, stderr=subprocess.STDOUT, env=environment(**env), start_new_session=True
        )
    try:
        yield process
    finally:
        kill_all(process)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a training as a machine dies: all of its processes at once."""
    for one in [process.pid, *ranks_of(process)]:
        try:
            os.kill(one, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()


def ranks_of(process: subprocess.Popen[bytes]) -> list[int]:
    """The processes of the ranks, which torchrun has put in sessions of their own."""
    try:
        text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(pid) for pid in text.split()]


def run(world: int, *words: object, timeout: float = 120, **env: str) -> Done:
    """Train to the end."""
    done = subprocess.run(
        command(world, *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(**env),
        timeout=timeout,
        check=False,
    )
    return Done(done.returncode, done.stdout.decode())


def wait_for(log: Path, process: subprocess.Popen[bytes], words: str, timeout: float = 60) -> None:
    """Wait until a training has written something."""
    until = time.monotonic() + timeout
    while words not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.02)


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
