"""TensorFlow trainings in pods, with a checkpoint claim, an evaluator and TensorBoard."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.kube.client import KubeClient
from stoker.kube.objects import build_claim, build_object
from stoker.telemetry.events import parse
from tests.e2e.kubernetes.pods import build_job_keys
from tests.e2e.test_tensorflow_training import ENV, OLD_STYLE, OPTIONS, TRAINED_ENOUGH, digits
from tests.launchers.contract import LauncherTests
from tests.support.tf_gangs import read_tf_checkpoint

__all__ = ["digits"]  # a fixture
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MODES = {"rwo": "ReadWriteOnce", "rwx": "ReadWriteMany"}


@contextmanager
def make_claim(cluster: KubeClient, folder: Path, access: str) -> Iterator[None]:
    """Create a claim `ckpt` whose volume is a folder of this machine."""
    name = f"{cluster.namespace}-ckpt"
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": [MODES[access]],
        "hostPath": {"path": str(folder)},
        "storageClassName": "",
        "persistentVolumeReclaimPolicy": "Retain",
    }
    folder.mkdir()
    cluster.create(build_object("v1", "PersistentVolume", name, {}, spec=spec))
    cluster.create(build_claim("ckpt", 1 << 30, access, {}, storage_class="", volume=name))
    try:
        yield
    finally:
        cluster.delete("PersistentVolumeClaim", "ckpt")
        cluster.delete("PersistentVolume", name)


class TestTrainings(LauncherTests):
    ON = "k8s"

    @pytest.fixture(autouse=True)
    def _setup(self, cluster: KubeClient, digits: Path) -> None:
        self.cluster, self.digits = cluster, digits

    def train(self, launcher: Any, folder: Path, access: str, scored_by: Slot, module: str, **keys: Any) -> None:
        job_keys = build_job_keys(self.cluster.namespace, str(self.digits))
        job_keys["env"] |= ENV
        with make_claim(self.cluster, folder / "claim", access):
            job = self.job(
                program={"module": f"stoker.trainers.{module}", "args": [*OPTIONS.split(), "--tensorboard", "/ck/tb"]},
                data={"train": str(self.digits / "train"), "val": str(self.digits / "val")},
                checkpoint={"dir": "/ck", "claim": "ckpt", "access": access},
                **job_keys,
                **keys,
            )
            run, status = self.run_to_end(launcher, job, 400)
            assert status.state is JobState.SUCCEEDED, (status.message, self.text(launcher, run))
            lines = run.log_path(scored_by, 0).read_text().splitlines()
            events = [event for line in lines if (event := parse(line)) is not None]
            top1 = [event.fields["value"] for event in events if event.fields.get("name") == "val_top1"][-1]
            assert top1 > TRAINED_ENOUGH
            assert read_tf_checkpoint(folder / "claim")["meta"]["cursor"]["epoch"] == 4
            assert list((folder / "claim/tb").glob("events.out.tfevents.*"))

    def test_mirrored_where_only_the_chief_mounts_the_claim(self, launcher: Any, tmp_path: Path) -> None:
        chief = Slot("worker", 0)
        self.train(launcher, tmp_path, "rwo", chief, "tf_mirrored", topology="tf-mirrored", workers=2)

    def test_parameter_servers_with_evaluator_and_tensorboard(self, launcher: Any, tmp_path: Path) -> None:
        roles = {
            "ps": {"count": 2},
            "evaluator": {"count": 1, "program": {"module": "stoker.trainers.tf_evaluator"}},
            "tensorboard": {"count": 1, "logdir": "/ck/tb"},
        }
        evaluator = Slot("evaluator", 0)
        self.train(launcher, tmp_path, "rwx", evaluator, "tf_ps", topology="tf-ps", workers=2, roles=roles)

    def test_a_script_that_knows_only_cluster_config_and_pod_name(self, launcher: Any, tmp_path: Path) -> None:
        shutil.copy(OLD_STYLE, tmp_path / "train.py")  # copied with the job
        job_keys = build_job_keys(self.cluster.namespace)
        job_keys["env"] |= ENV
        roles = {"ps": {"count": 1}, "chief": {"count": 0}}
        job = self.job(program={"script": "train.py"}, topology="tf-ps", workers=2, roles=roles, **job_keys)
        run, status = self.run_to_end(launcher, job, 300)
        assert status.state is JobState.SUCCEEDED, (status.message, self.text(launcher, run))
        (line,) = [line for line in self.text(launcher, run, Slot("worker", 0)) if line.startswith("accuracy")]
        assert float(line.split()[1]) > TRAINED_ENOUGH
