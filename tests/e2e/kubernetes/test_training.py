"""The demo's trainer as two pods with a claim for checkpoints: the bits of a training here, whatever dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.jobs.run_folder import Run, find_run
from stoker.jobs.status import JobState
from stoker.kube.client import KubeClient
from stoker.kube.objects import RUN_LABEL, build_claim, build_object
from stoker.trainers.ledger import effective_samples
from tests.e2e.kubernetes.pods import keys
from tests.support.training_drill import (
    EPOCHS,
    SAMPLES,
    final_state,
    has_reached_step,
    train_reference,
    write_training_job,
)
from tests.support.trees import stoker
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_reference(tmp_path_factory.mktemp("calm"))


@pytest.fixture
def checkpoints(cluster: KubeClient, tmp_path: Path) -> Iterator[Path]:
    """A claim `ckpt` that one node can mount at a time, and the folder of this machine that is behind it."""
    folder, name = tmp_path / "checkpoints", f"{cluster.namespace}-ckpt"
    folder.mkdir()
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "hostPath": {"path": str(folder)},
        "storageClassName": "",
        "persistentVolumeReclaimPolicy": "Retain",
    }
    cluster.create(build_object("v1", "PersistentVolume", name, {}, spec=spec))
    cluster.create(build_claim("ckpt", 1 << 30, "rwo", {}, storage_class="", volume=name))
    yield folder
    cluster.delete("PersistentVolumeClaim", "ckpt")
    cluster.delete("PersistentVolume", name)


@pytest.mark.parametrize("victim", [None, "worker-0", "worker-1"])
@pytest.mark.usefixtures("stoker_home")
def test_the_same_bits(
    cluster: KubeClient,
    calm: Path,
    checkpoints: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    victim: str | None,
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    given = keys(cluster.namespace, str(calm / "shards"), str(folder))
    given["env"]["OMP_NUM_THREADS"] = "1"
    job = write_training_job(
        folder, calm / "shards", {}, checkpoint={"dir": "/checkpoint", "claim": "ckpt", "access": "rwo"}, **given
    )
    assert stoker("job", "run", job, "--on", "k8s", "--detach") == 0
    run = find_run(None)
    if victim is not None:
        wait_until(lambda: has_reached_step(run, 10), 120)
        kill(cluster, run, victim)
    wait_until(lambda: is_over(run), 240)
    status = run.read_status()
    assert status.state is JobState.SUCCEEDED, status.message
    assert len(status.attempts) == (1 if victim is None else 2), status.attempts
    theirs, ours = final_state(checkpoints.parent), final_state(calm)
    assert theirs.keys() == ours.keys()
    assert [name for name in ours if not ours[name].equal(theirs[name])] == []
    for samples in effective_samples(folder / "ledger").values():
        assert len(samples) == len(set(samples)) == SAMPLES
    assert sorted(effective_samples(folder / "ledger")) == list(range(EPOCHS))


def kill(cluster: KubeClient, run: Run, victim: str) -> None:
    """Kill the ranks of a pod with SIGKILL, as a kernel that is short of memory would."""
    kind = {"worker-0": "chief", "worker-1": "rest"}[victim]
    (pod,) = [one for one in cluster.list_objects("Pod", {RUN_LABEL: run.id}) if f"-{kind}-" in one["metadata"]["name"]]
    script = (
        "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline | grep -q 'torch_image' && kill -9 ${p#/proc/}; done; true"
    )
    assert cluster.exec_in_pod(pod["metadata"]["name"], ["sh", "-c", script]).exit_code in (0, 137)


def is_over(run: Run) -> bool:
    assert stoker("job", "status", run.id) == 0
    return run.read_status().state.is_final
