"""Benchmark tf_ps with exact and asynchronous updates on 1, 2 and 4 workers, and the chief's share of the CPU time."""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import subprocess
import sys
from pathlib import Path

from bench_train import find_source
from measure import STOKER, BenchContext, BenchResult, Comparison, Implementation, Timing, run_rounds

BATCH, STEPS = 128, 60
WORKERS = (1, 2, 4)
_RATE = re.compile(r"done: .* ([\d,]+) images/s")


def run(context: BenchContext) -> BenchResult:
    shards = context.work / "tf-ps"
    source, what = find_source(context.work / "tf-ps-source")
    words = [STOKER, "data", "convert", source, shards, "--shard-samples", "500"]
    subprocess.run(words, check=True, capture_output=True)
    shares: dict[str, list[float]] = {}
    implementations = [
        Implementation(
            name=_name(updates, workers),
            run=lambda updates=updates, workers=workers: train(  # type: ignore[misc]
                shards, updates, workers, shares.setdefault(_name(updates, workers), [])
            ),
            ours=True,
            informational=updates == "async",
        )
        for updates in ("exact", "async")
        for workers in WORKERS
    ]
    speeds, _ = run_rounds(implementations, context.rounds, 1.0)
    chief = ", ".join(f"{name} {statistics.median(values):.0%}" for name, values in shares.items())
    return BenchResult(
        name="tf_ps",
        title="Train with TensorFlow and parameter servers",
        unit="images/s",
        implementations=implementations,
        speeds=speeds,
        comparisons=[Comparison(ours=_name("async", workers), peer=_name("exact", workers)) for workers in WORKERS],
        notes=[
            f"{what}; resnet8 at 32 px, global batch size {BATCH}, {STEPS} steps, one parameter server; all tasks "
            f"share the {os.cpu_count()} cores of this machine, so more workers than cores cannot be faster.",
            f"The chief's share of the CPU time of all tasks, after the first report of the chief: {chief}.",
        ],
    )


def train(shards: Path, updates: str, workers: int, shares: list[float]) -> Timing:
    """Run a cluster; return the seconds per image, and append the chief's share of the CPU time."""
    roles = {"chief": 1, "worker": workers, "ps": 1}
    cluster = {role: [f"127.0.0.1:{_free_port()}" for _ in range(count)] for role, count in roles.items()}
    words = f"--model resnet8 --size 32 --global-batch-size {BATCH} --num-batches {STEPS} --epochs 20 --threads 1"
    argv = [sys.executable, "-m", "stoker.trainers.tf_ps", "--train", str(shards / "train"), *words.split()]
    argv += ["--validate-every", "0", "--log-every", "1s", "--updates", updates]
    tasks = {}
    for role, count in roles.items():
        for index in range(count):
            config = {"cluster": cluster, "task": {"type": role, "index": index}}
            env = {**os.environ, "TF_CONFIG": json.dumps(config), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            out = subprocess.PIPE if role == "chief" else subprocess.DEVNULL
            tasks[role, index] = subprocess.Popen(argv, env=env, stdout=out, stderr=subprocess.DEVNULL, text=True)
    chief = tasks.pop(("chief", 0))
    try:
        assert chief.stdout is not None
        text, started = "", dict[int, float]()
        for line in chief.stdout:
            text += line
            if not started and " step " in line:
                started = {pid: _cpu_seconds(pid) for pid in (chief.pid, *(task.pid for task in tasks.values()))}
        _, status, usage = os.wait4(chief.pid, 0)
        assert status == 0, text
        own = usage.ru_utime + usage.ru_stime - started.pop(chief.pid)
        shares.append(own / (own + sum(_cpu_seconds(pid) - before for pid, before in started.items())))
    finally:
        for task in tasks.values():
            task.kill()
            task.wait()
    match = _RATE.search(text)
    assert match is not None, text
    return Timing(1.0 / float(match[1].replace(",", "")))


def _name(updates: str, workers: int) -> str:
    return f"{updates}, {workers} worker{'s' if workers > 1 else ''}"


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
