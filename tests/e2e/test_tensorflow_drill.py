"""Kill drill for TensorFlow: tasks are killed and stopped at random moments, and the weights stay the same to the bit.

The faults come from seeds. Repeat the runs of one with `STOKER_DRILL_SEEDS=2`. Both topologies run side by side,
because a run mostly waits: for timeouts, and for the pauses before restarts.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stoker.core.processes import find_processes_by_env
from stoker.jobs.run_folder import RunFolder, find_run
from stoker.telemetry.reader import read_log, read_run
from stoker.testing import make_shards
from stoker.trainers.ledger import effective_samples
from tests.support.tf_gangs import assert_same_bits, read_tf_checkpoint
from tests.support.trees import stoker
from tests.support.waiting import wait_until

pytest.importorskip("keras")

SAMPLES = 240
EPOCHS = {"tf-mirrored": 100, "tf-ps": 20}
"""So many that a training lasts longer than its faults."""
FAULTS = 5
"""Faults per run: the pause before a restart grows with their number."""
SEEDS = 4
PEER_TIMEOUT_S, START_TIMEOUT_S, GRACE_S = 10, 60, 5
WATCHDOG_MARGIN_S = {"tf-mirrored": 30, "tf-ps": 0}
"""After the timeout, TensorFlow itself is given this long to report a lost worker."""
BUSY_S = 10
"""How much later than its deadline an event may be on a busy machine."""
MAX_RECOVERY_S = 240
"""From a fault to the next new step: also the pause before the restart, and the start of all tasks."""
MODULES = {"tf-mirrored": "tf_mirrored", "tf-ps": "tf_ps"}
TASKS = {
    "tf-mirrored": ["worker/0", "worker/1"],
    "tf-ps": ["chief/0", "worker/0", "worker/1", "ps/0", "ps/1"],
}
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]


def selected_seeds() -> list[int]:
    """Return the seeds that STOKER_DRILL_SEEDS names, or all."""
    chosen = os.environ.get("STOKER_DRILL_SEEDS", "").split()
    return [seed for seed in range(SEEDS) if not chosen or str(seed) in chosen]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(
        tmp_path_factory.mktemp("tf-drill") / "shards", samples=SAMPLES, val=20, classes=5, size=(24, 24)
    )


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Any]]:
    """The final checkpoints of undisturbed trainings, by topology."""
    return {}


def write_job(folder: Path, name: str, topology: str, shards: Path) -> Path:
    options = f"--model small --size 16 --global-batch-size 12 --epochs {EPOCHS[topology]} --deterministic --seed 3"
    options += f" --checkpoint-every-steps 3 --log-every 1s --validate-every 0 --ledger {folder / name / 'ledger'}"
    options += f" --threads 1 --peer-timeout {PEER_TIMEOUT_S} --start-timeout {START_TIMEOUT_S}"
    job = {
        "name": name,
        "topology": topology,
        "workers": 2,
        "program": {"module": f"stoker.trainers.{MODULES[topology]}", "args": options.split()},
        "roles": {"ps": {"count": 2}} if topology == "tf-ps" else {},
        "data": {"train": str(shards / "train")},
        "checkpoint": {"dir": str(folder / name / "checkpoints")},
        "env": {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        "profile": {"every": 0},
        "retries": 4 * FAULTS,
        "grace": GRACE_S,
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(job))
    return path


def newest_step(run: RunFolder, since: float) -> int:
    """The last step that the newest attempt has reported after a moment."""
    lead = TASKS[run.job.topology][0].replace("/", "-")
    path = max(run.logs.glob(f"{lead}.*.log"), key=lambda path: int(path.suffixes[0][1:]), default=None)
    events = read_log(path).events if path else []
    return max((e.fields["step"] for e in events if e.kind == "heartbeat" and e.t > since), default=0)


def has_reached(run: RunFolder, since: float, step: int) -> bool:
    """Whether the training has come further since a fault, or has ended."""
    return newest_step(run, since) >= step or run.read_status().state.is_final


class Fault(NamedTuple):
    """A signal for a task."""

    task: str
    number: signal.Signals

    def __str__(self) -> str:
        return f"{self.task} {self.number.name}"


def faults_of(topology: str, seed: int) -> list[Fault]:
    """The faults of one run; those of all seeds hit every task with every signal equally often."""
    pairs = [Fault(task, number) for task in TASKS[topology] for number in SIGNALS]
    faults = pairs * (FAULTS * SEEDS // len(pairs))
    assert len(faults) == FAULTS * SEEDS
    draw = random.Random(topology)
    while True:
        draw.shuffle(faults)
        runs = [faults[FAULTS * number : FAULTS * (number + 1)] for number in range(SEEDS)]
        # A killed worker of tf-ps restarts alone, after a pause in which the others may finish the training; if they
        # are gone, too, the chief gives up.
        pairs = [pair for own in runs for pair in pairwise(own) if is_restarted_alone(topology, pair[0])]
        if not any(a.task == b.task or is_restarted_alone(topology, b) for a, b in pairs):
            return runs[seed]


def is_restarted_alone(topology: str, fault: Fault) -> bool:
    return topology == "tf-ps" and fault.task.startswith("worker") and fault.number == signal.SIGKILL


def hit(run: RunFolder, fault: Fault) -> bool:
    """Signal all processes of a task; return whether there were any."""
    pids = find_processes_by_env({"STOKER_RUN": run.id, "STOKER_SLOT": fault.task})
    for pid in pids:
        os.kill(pid, fault.number)
    return bool(pids)


def stop_times(run: RunFolder, hits: list[tuple[Fault, float]]) -> list[str]:
    """Check that each fault ended an attempt in time, a killed worker of tf-ps none; return how long it took."""
    attempts, topology = run.read_status().attempts, run.job.topology
    steps = [(e.attempt, e.t, e.fields["step"]) for e in read_run(run.logs).events if e.kind == "heartbeat"]
    lines = []
    for (fault, at), until in zip(hits, [*(at for _, at in hits[1:]), float("inf")], strict=True):
        ended = [attempt for attempt in attempts if attempt.cause and at < attempt.ended < until]
        if is_restarted_alone(topology, fault):
            assert not ended, (fault, attempts)
            lines.append(f"{fault}: the others continued")
            continue
        assert ended, (fault, attempts)
        # The first step may take longer, because it builds the graph. Before it, a task reports the step it resumes at.
        has_stepped = len({step for attempt, t, step in steps if attempt == ended[0].number and t < at and step}) > 1
        limit_s = PEER_TIMEOUT_S + WATCHDOG_MARGIN_S[topology] + (0 if has_stepped else START_TIMEOUT_S)
        took_s = ended[0].ended - at
        assert took_s < limit_s + GRACE_S + BUSY_S, (fault, took_s, attempts)
        lines.append(f"{fault}: all stopped after {took_s:.1f} s (limit {limit_s} s + {GRACE_S} s)")
    return lines


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", selected_seeds())
def test_faults_do_not_change_the_weights(
    seed: int, shards: Path, references: dict[str, dict[str, Any]], workspace: Path
) -> None:
    if not references:
        undisturbed = {topology: start(workspace, f"{topology}-undisturbed", topology, shards) for topology in TASKS}
        for topology, run in undisturbed.items():
            wait_until(lambda run=run: run.read_status().state.is_final, 600)
            assert run.read_status().state == "succeeded", run.read_status().message
            references[topology] = read_tf_checkpoint(workspace / run.job.name / "checkpoints")
    runs = {topology: start(workspace, f"{topology}-hit", topology, shards) for topology in TASKS}
    with ThreadPoolExecutor() as pool:
        hits = dict(zip(runs, pool.map(partial(hit_all, seed), runs.values()), strict=True))
    for topology, run in runs.items():
        assert_same_bits(read_tf_checkpoint(workspace / run.job.name / "checkpoints"), references[topology])
        epochs = effective_samples(workspace / run.job.name / "ledger")
        assert sorted(epochs) == list(range(EPOCHS[topology]))
        assert all(len(samples) == len(set(samples)) == SAMPLES for samples in epochs.values())
        assert find_processes_by_env({"STOKER_RUN": run.id}) == []
        sys.stdout.write("\n  ".join([f"{topology}, seed {seed}", *stop_times(run, hits[topology])]) + "\n")


def start(folder: Path, name: str, topology: str, shards: Path) -> RunFolder:
    assert stoker("job", "run", write_job(folder, name, topology, shards), "--detach") == 0
    return find_run(name)


def hit_all(seed: int, run: RunFolder) -> list[tuple[Fault, float]]:
    """Hit the tasks of a run until its end; return the faults and when they happened."""
    topology = run.job.topology
    draw = random.Random(f"{topology} {seed}")
    hits, since, step = list[tuple[Fault, float]](), 0.0, 0
    for fault in faults_of(topology, seed):
        step += draw.randint(1, 12)
        wait_until(partial(has_reached, run, since, step), MAX_RECOVERY_S)
        time.sleep(draw.random() * 0.5)
        before = since
        since = time.time()
        wait_until(partial(hit, run, fault))
        step = newest_step(run, before)
        hits.append((fault, since))
        assert not run.read_status().state.is_final, (hits, run.read_status().message)
    wait_until(lambda: run.read_status().state.is_final, 300)
    assert run.read_status().state == "succeeded", (hits, run.read_status().message)
    return hits
