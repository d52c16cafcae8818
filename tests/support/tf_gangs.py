"""Gangs of TensorFlow trainers: real processes, forked from one that has imported TensorFlow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.paths import ROOT
from tests.support.servers import free_port
from tests.support.trainings import TrainingResult

ENV = {
    "CUDA_VISIBLE_DEVICES": "",
    "KERAS_BACKEND": "tensorflow",
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}


class ForkServer:
    """The process that has imported TensorFlow."""

    def __init__(self) -> None:
        argv = [sys.executable, "-m", "tests.support.tf_fork_server"]
        env = {**os.environ, **ENV}
        self._process = subprocess.Popen(argv, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lock = threading.Lock()
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def request(self, **request: Any) -> Any:
        """Send a request and return the reply."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Stop it."""
        with self._process:  # closes the pipes, which ends it
            pass


@dataclass
class Task:
    """One forked process."""

    server: ForkServer
    name: str
    log: Path
    pid: int
    code: int | None = None

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        if self.code is None:
            self.code = self.server.request(poll=self.pid)
        return self.code

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, unless it has exited."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout: float = 120) -> TrainingResult:
        """Wait for its exit; return its exit code and output."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            assert time.monotonic() < deadline, f"{self.name} still runs: {self.text()}"
            time.sleep(0.02)
        assert self.code is not None
        return TrainingResult(self.code, self.text())

    def text(self) -> str:
        """Return its output so far."""
        return self.log.read_text() if self.log.exists() else ""

    def wait_for(self, *texts: str, timeout: float = 120) -> None:
        """Wait until it has written one of these texts."""
        deadline = time.monotonic() + timeout
        while not any(text in self.text() for text in texts):
            assert self.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)


@dataclass
class Gang:
    """The tasks of one cluster."""

    module: str
    args: list[str]
    cluster: Mapping[str, list[str]]
    folder: Path
    server: ForkServer
    env: Mapping[str, str] = field(default_factory=dict)
    tasks: dict[str, Task] = field(default_factory=dict)

    def start(self, name: str, **more: str) -> Task:
        """Start a task, `worker-0`, also again after it has exited; `more` is added to its environment."""
        role, _, index = name.rpartition("-")
        config = {"cluster": self.cluster, "task": {"type": role, "index": int(index)}}
        env = {"TF_CONFIG": json.dumps(config), "STOKER_SLOT": f"{role}/{index}", **self.env, **more}
        log = self.folder / f"{name}.{len(list(self.folder.glob(f'{name}.*')))}.log"
        pid = self.server.request(module=self.module, args=self.args, env=env, log=str(log))
        self.tasks[name] = Task(self.server, name, log, pid)
        return self.tasks[name]

    def __getitem__(self, name: str) -> Task:
        return self.tasks[name]

    def wait(self, *names: str, timeout: float = 120) -> dict[str, TrainingResult]:
        """Wait until these tasks, or all, have exited."""
        return {name: self.tasks[name].wait(timeout) for name in names or self.tasks}


@contextmanager
def start_gang(
    server: ForkServer,
    folder: Path,
    module: str,
    roles: Mapping[str, int],
    *args: object,
    absent: tuple[str, ...] = (),
    **env: str,
) -> Iterator[Gang]:
    """Start all tasks of a cluster but the absent ones; kill what still runs at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    cluster = {role: [f"127.0.0.1:{free_port()}" for _ in range(count)] for role, count in roles.items()}
    gang = Gang(module, [str(arg) for arg in args], cluster, folder, server, env)
    try:
        for role, count in roles.items():
            for name in (f"{role}-{index}" for index in range(count)):
                if name not in absent:
                    gang.start(name)
        yield gang
    finally:
        for task in gang.tasks.values():
            task.kill()
        for task in gang.tasks.values():
            task.wait(30)


def run_gang(
    server: ForkServer, folder: Path, module: str, roles: Mapping[str, int], *args: object, timeout: float = 120
) -> TrainingResult:
    """Train to the end; return the result of the first task, after checking that all workers of a mirror agree."""
    with start_gang(server, folder, module, roles, *args) as gang:
        lead = "chief-0" if "chief" in roles else "worker-0"
        names = [lead] if "chief" in roles else list(gang.tasks)
        results = gang.wait(*names, timeout=timeout)
        assert {result.code for result in results.values()} == {results[lead].code}, results
        return results[lead]


def read_tf_checkpoint(folder: Path) -> dict[str, Any]:
    """Return the content of the newest checkpoint."""
    from stoker.trainers.checkpoint_store import read_checkpoint
    from stoker.trainers.tf_checkpoints import TF_FORMAT

    path = max(folder.glob("step-*.npz"))
    return read_checkpoint(path.read_bytes(), TF_FORMAT, where=str(path))


def assert_same_bits(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Check that all arrays of two checkpoints are bit-identical, momentum and moving average included."""
    for group in ("weights", "momentum", "statistics", "ema"):
        assert (one.get(group) is None) == (other.get(group) is None)
        for name, array in (one.get(group) or {}).items():
            assert array.tobytes() == other[group][name].tobytes(), (group, name)
            assert np.isfinite(array).all()
