"""The demo training in two pods with a checkpoint claim: bit-identical to a local run, whichever pod is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.jobs.run_folder import RunFolder, find_run
from stoker.jobs.status import JobState
from stoker.kube.client import KubeClient
from stoker.kube.objects import RUN_LABEL
from stoker.trainers.ledger import effective_samples
from tests.e2e.kubernetes.pods import build_job_keys, claim_of_folder
from tests.support.training_drill import (
    EPOCHS,
    SAMPLES,
    final_state,
    has_reached_step,
    train_reference,
    write_training_job,
)
from tests.support.trees import stoker
from tests.support.unequal_training import UNEQUAL, check_training, train_equal, training_keys
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_reference(tmp_path_factory.mktemp("reference"))


@pytest.fixture
def checkpoints(cluster: KubeClient, tmp_path: Path) -> Iterator[Path]:
    """A ReadWriteOnce claim `ckpt`; return its folder on this machine."""
    with claim_of_folder(cluster, "ckpt", tmp_path / "checkpoints") as folder:
        yield folder


@pytest.mark.parametrize("victim", [None, "worker-0", "worker-1"])
@pytest.mark.usefixtures("stoker_home")
def test_weights_are_bit_identical(
    cluster: KubeClient,
    reference: Path,
    checkpoints: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    victim: str | None,
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    keys = build_job_keys(cluster.namespace, str(reference / "shards"), str(folder))
    keys["env"]["OMP_NUM_THREADS"] = "1"
    job = write_training_job(
        folder, reference / "shards", {}, checkpoint={"dir": "/checkpoint", "claim": "ckpt", "access": "rwo"}, **keys
    )
    assert stoker("job", "run", job, "--on", "k8s", "--detach") == 0
    run = find_run(None)
    if victim is not None:
        wait_until(lambda: has_reached_step(run, 10), 120)
        kill_ranks(cluster, run, victim)
    wait_until(lambda: is_finished(run), 240)
    status = run.read_status()
    assert status.state is JobState.SUCCEEDED, status.message
    assert len(status.attempts) == (1 if victim is None else 2), status.attempts
    actual, expected = final_state(checkpoints.parent), final_state(reference)
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not expected[name].equal(actual[name])] == []
    for samples in effective_samples(folder / "ledger").values():
        assert len(samples) == len(set(samples)) == SAMPLES
    assert sorted(effective_samples(folder / "ledger")) == list(range(EPOCHS))


@pytest.mark.usefixtures("stoker_home")
def test_unequal_workers_train_as_equal_ones(
    cluster: KubeClient, checkpoints: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    equal = train_equal(tmp_path_factory.mktemp("equal"))
    folder = tmp_path / "job"
    folder.mkdir()
    keys = build_job_keys(cluster.namespace, str(equal / "shards"), str(folder))
    keys["env"]["OMP_NUM_THREADS"] = "1"
    claim = {"dir": "/checkpoint", "claim": "ckpt", "access": "rwo"}
    job = training_keys(folder, equal / "shards", **{**keys, "workers": UNEQUAL, "checkpoint": claim})
    (folder / "job.yaml").write_text(json.dumps(job))
    assert stoker("job", "run", folder / "job.yaml", "--on", "k8s", "--detach") == 0
    run = find_run(None)
    wait_until(lambda: is_finished(run), 240)
    status = run.read_status()
    assert status.state is JobState.SUCCEEDED, status.message
    check_training(folder, equal, checkpoints)


def kill_ranks(cluster: KubeClient, run: RunFolder, victim: str) -> None:
    """Kill the ranks of a pod with SIGKILL, as the OOM killer would."""
    kind = {"worker-0": "chief", "worker-1": "rest"}[victim]
    (pod,) = [pod for pod in cluster.list_objects("Pod", {RUN_LABEL: run.id}) if f"-{kind}-" in pod["metadata"]["name"]]
    script = (
        "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline | grep -q 'torch_image' && kill -9 ${p#/proc/}; done; true"
    )
    assert cluster.exec_in_pod(pod["metadata"]["name"], ["sh", "-c", script]).exit_code in (0, 137)


def is_finished(run: RunFolder) -> bool:
    assert stoker("job", "status", run.id) == 0
    return run.read_status().state.is_final
