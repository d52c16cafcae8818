"""TensorFlow trainings as jobs, with real processes: digits on this machine, on SSH hosts and on Ray."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.demo.digits import write_digits
from stoker.jobs.run_folder import RunFolder, list_runs
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.launchers.ray.launcher import RayLauncher
from stoker.telemetry.events import parse
from tests.launchers.contract import LauncherTests, job_of
from tests.support.hosts import Network, network
from tests.support.paths import ROOT
from tests.support.ray import RayTestCluster, ray_cluster
from tests.support.ssh_runs import ssh_section
from tests.support.trees import stoker

pytest.importorskip("keras")

ENV = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
TIMEOUT_S = 400
TRAINED_ENOUGH = 0.95
OPTIONS = (
    "--size 32 --model small --transform digits-train --epochs 4 --global-batch-size 64 --lr 0.1 --schedule cosine"
)
OLD_STYLE = ROOT / "tests/support/cluster_config_training.py"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder / "images")
    assert stoker("data", "convert", folder / "images", folder / "shards", "--shard-samples", 100) == 0
    return folder / "shards"


class TrainingTests(LauncherTests):
    """The trainings that every launcher must run."""

    keys: dict[str, Any]

    @pytest.fixture(autouse=True)
    def _data(self, digits: Path, tmp_path: Path) -> None:
        self.shared = {
            "data": {"train": str(digits / "train"), "val": str(digits / "val")},
            "checkpoint": {"dir": str(tmp_path / "checkpoints")},
            "env": ENV,
            "profile": {"every": 0},
        }

    def final_top1(self, launcher: Any, run: RunFolder, slot: Slot) -> float:
        """The last validation accuracy that a slot has recorded."""
        lines = run.log_path(slot, 0).read_text().splitlines()
        events = [event for line in lines if (event := parse(line)) is not None]
        return float([event.fields["value"] for event in events if event.fields.get("name") == "val_top1"][-1])

    def train(self, launcher: Any, module: str, scored_by: Slot, **keys: Any) -> None:
        program = {"module": f"stoker.trainers.{module}", "args": OPTIONS.split()}
        if "resources" in self.keys:  # for every role the same
            keys["roles"] = {name: {**role, **self.keys} for name, role in keys.get("roles", {}).items()}
        job = job_of(program=program, **self.shared, **self.keys, **keys)
        run, status = self.run_to_end(launcher, job, TIMEOUT_S)
        assert status.state is JobState.SUCCEEDED, (status.message, self.text(launcher, run))
        assert self.final_top1(launcher, run, scored_by) > TRAINED_ENOUGH

    def test_mirrored(self, launcher: Any) -> None:
        self.train(launcher, "tf_mirrored", Slot("worker", 0), topology="tf-mirrored", workers=2)

    def test_parameter_servers_with_an_evaluator(self, launcher: Any) -> None:
        """The evaluator scores the last checkpoint, although the job does not wait for it."""
        evaluator = {"count": 1, "program": {"module": "stoker.trainers.tf_evaluator"}}
        roles = {"chief": {"count": 1}, "ps": {"count": 2}, "evaluator": evaluator}
        self.train(launcher, "tf_ps", Slot("evaluator", 0), topology="tf-ps", workers=2, roles=roles)

    def test_a_script_that_knows_only_cluster_config_and_pod_name(self, launcher: Any, tmp_path: Path) -> None:
        shutil.copy(OLD_STYLE, tmp_path / "train.py")
        roles = {"ps": {"count": 1}, "chief": {"count": 0}}
        job = job_of(program={"script": "train.py"}, topology="tf-ps", workers=2, roles=roles, env=ENV, **self.keys)
        run, status = self.run_to_end(launcher, job, TIMEOUT_S)
        assert status.state is JobState.SUCCEEDED, (status.message, self.text(launcher, run))
        for index in (0, 1):
            (line,) = [line for line in self.text(launcher, run, Slot("worker", index)) if line.startswith("accuracy")]
            assert float(line.split()[1]) > TRAINED_ENOUGH


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
class TestLocal(TrainingTests):
    ON = "local"

    @pytest.fixture(autouse=True)
    def _here(self) -> None:
        self.keys = {}

    def test_mirrored_under_mpirun(self, launcher: Any) -> None:
        """Ranks of Open MPI become the workers of a cluster."""
        if shutil.which("mpirun") is None:
            pytest.skip("no program 'mpirun'")
        self.train(launcher, "tf_mirrored", Slot("worker", 0), topology="mpi", workers=2)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(
    ("module", "keys"),
    [
        ("tf_mirrored", {"topology": "tf-mirrored", "workers": 2}),
        ("tf_ps", {"topology": "tf-ps", "workers": 1, "roles": {"ps": {"count": 1}}}),
    ],
)
def test_job_eval(
    module: str, keys: dict[str, Any], digits: Path, workspace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a validated checkpoint, the newest is evaluated."""
    options = "--size 32 --model small --num-batches 3 --validate-every 0 --global-batch-size 32"
    job = {
        "name": "digits",
        "program": {"module": f"stoker.trainers.{module}", "args": options.split()},
        "data": {"train": str(digits / "train"), "val": str(digits / "val")},
        "env": ENV,
        "profile": {"every": 0},
        **keys,
    }
    (workspace / "job.yaml").write_text(json.dumps(job))
    assert stoker("job", "run", workspace / "job.yaml") == 0
    (trained,) = list_runs()
    (path,) = Path(trained.checkpoint_dir).glob("*.npz")
    capfd.readouterr()
    assert stoker("job", "eval") == 0
    out, err = capfd.readouterr()
    assert f"{path.name}: validation loss" in out
    assert f"Evaluating {path} of run {trained.id}" in err
    assert "using the newest" in err


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(tmp_path_factory.mktemp("net")) as hosts:
        yield hosts


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
class TestSsh(TrainingTests):
    ON = "ssh"

    @pytest.fixture(autouse=True)
    def _hosts(self, net: Network, tmp_path: Path) -> None:
        self.keys = {"ssh": ssh_section(net, tmp_path / "there")}


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayTestCluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray")) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
class TestRay(TrainingTests):
    ON = "ray"

    @pytest.fixture
    def launcher(self, ray: RayTestCluster) -> Any:
        self.keys = {"resources": {"cpu": 0.5}}
        return RayLauncher(ray.target)
