"""TensorFlow topologies with real processes: tasks reach each other, and the job ends with its lead role."""

from __future__ import annotations

import json
import random
import shutil
import socket
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stoker.errors import SpecError
from stoker.jobs.retry_policy import INVALID_INPUT, attempts_exhausted, not_retried
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from tests.launchers.contract import LauncherTests, job_of
from tests.support.hosts import Network, network
from tests.support.paths import ROOT

TASK = ROOT / "tests/support/tf_task.py"
PS = {"topology": "tf-ps", "workers": 2, "roles": {"ps": {"count": 2}}}
NO_CHIEF = {"topology": "tf-ps", "workers": 2, "roles": {"ps": {"count": 1}, "chief": {"count": 0}}}
MIRRORED = {"topology": "tf-mirrored", "workers": 3}


def read_cluster(run: RunFolder, slot: str = "worker/0") -> dict[str, list[str]]:
    plan = json.loads((run.folder / "plan.json").read_text())
    cluster: dict[str, list[str]] = json.loads(plan["slots"][slot]["env"]["TF_CONFIG"])["cluster"]
    return cluster


class SlotRestartTests(LauncherTests):
    """What launchers do that restart single slots."""

    keys: ClassVar[dict[str, Any]] = {}

    def test_failed_worker_is_restarted_alone(self, launcher: Any, tmp_path: Path) -> None:
        fail_once = (
            f"test $POD_NAME != worker-1 || {{ test -e {tmp_path}/tried || {{ touch {tmp_path}/tried; exit 7; }}; }}"
        )
        wait = f"test $POD_NAME != worker-1 || touch {tmp_path}/go; while ! test -e {tmp_path}/go; do sleep 0.05; done"
        keep = "while test ${POD_NAME%-*} = ps; do sleep 0.1; done"
        job = job_of(f"echo started $$ $TF_CONFIG; {fail_once}; {wait}; {keep}", **NO_CHIEF, **self.keys, retries=1)
        run, status = self.run_to_end(launcher, job)
        assert status.state is JobState.SUCCEEDED, status.message
        assert [(attempt.number, attempt.code) for attempt in status.attempts] == [(0, 0)]
        starts = {slot.slot: self.text(launcher, run, Slot.parse(slot.slot)) for slot in status.slots}
        assert {slot: len(lines) for slot, lines in starts.items()} == {"worker/0": 1, "worker/1": 2, "ps/0": 1}
        first, again = (line.split(maxsplit=2) for line in starts["worker/1"])
        assert first[1] != again[1]
        assert first[2] == again[2]  # the others know its address


class TestLocal(SlotRestartTests):
    ON = "local"

    @pytest.fixture(autouse=True)
    def _task(self, tmp_path: Path) -> None:
        shutil.copy(TASK, tmp_path / "task.py")

    @pytest.mark.parametrize("keys", [PS, NO_CHIEF, MIRRORED], ids=["ps", "no chief", "mirrored"])
    def test_tasks_reach_each_other_and_the_job_ends_with_the_lead_role(self, launcher: Any, keys: Any) -> None:
        run, status = self.run_to_end(launcher, job_of(program={"script": "task.py"}, **keys))
        assert status.state is JobState.SUCCEEDED, status.message
        cluster = read_cluster(run)
        lead = "chief" if "chief" in cluster else "worker"
        for index in range(len(cluster[lead])):
            lines = self.text(launcher, run, Slot(lead, index))
            others = {f"{role}-{number}": address for role in cluster for number, address in enumerate(cluster[role])}
            del others[f"{lead}-{index}"]
            assert {f"reached {name} at {address}" for name, address in others.items()} <= set(lines)
            assert "done" in lines
        states = {slot.slot: slot.state for slot in status.slots}
        assert states == {slot: JobState.SUCCEEDED if slot.startswith(lead) else JobState.STOPPED for slot in states}

    def test_observer_is_not_waited_for_and_may_fail(self, launcher: Any) -> None:
        roles = {"evaluator": {"count": 1, "program": {"command": ["sh", "-c", "exit 3"]}}}
        script = "while test $POD_NAME = ps-0; do sleep 0.1; done; sleep 1"
        _, status = self.run_to_end(launcher, job_of(script, **{**NO_CHIEF, "roles": {**NO_CHIEF["roles"], **roles}}))
        assert (status.state, status.message) == (JobState.SUCCEEDED, "")
        states = {slot.slot: (slot.state, slot.code) for slot in status.slots}
        assert states["evaluator/0"] == (JobState.FAILED, 3)
        assert states["ps/0"][0] is JobState.STOPPED

    def test_restarts_of_a_worker_count_as_retries(self, launcher: Any) -> None:
        script = "echo started; test $POD_NAME != worker-1 || exit 7; sleep 60"
        run, status = self.run_to_end(launcher, job_of(script, **NO_CHIEF, retries=1))
        assert (status.state, len(status.attempts)) == (JobState.FAILED, 1)
        assert not_retried(attempts_exhausted(1, 1)) in status.message
        assert self.text(launcher, run, Slot("worker", 1)) == ["started", "started"]
        _, status = self.run_to_end(launcher, job_of(script.replace("exit 7", "exit 2"), **NO_CHIEF, retries=1))
        assert not_retried(INVALID_INPUT) in status.message

    def test_failed_parameter_server_fails_the_job(self, launcher: Any) -> None:
        script = "test $POD_NAME != ps-1 || exit 7; sleep 60"
        _, status = self.run_to_end(launcher, job_of(script, **PS))
        assert status.state is JobState.FAILED
        assert status.message.startswith("ps/1")

    def test_all_ports_are_replaced_when_one_is_in_use(self, launcher: Any) -> None:
        roles = {"ps": {"count": 2, "port": 31999}, "tensorboard": {"count": 1, "logdir": "/logs"}}
        plan = launcher.render(job_of(program={"script": "task.py"}, **{**PS, "roles": roles}))
        assert set(plan.ports) == {"chief/0", "worker/0", "worker/1", "tensorboard/0"}
        assert plan.with_free_ports() == plan
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", plan.ports["worker/1"]))
            sock.listen()
            moved = plan.with_free_ports()
        assert not set(moved.ports.values()) & {plan.ports["worker/1"]}
        for name, command in moved.slots.items():
            if name == "tensorboard/0":
                assert command.argv[-1] == str(moved.ports[name])
                continue
            cluster = json.loads(command.env["TF_CONFIG"])["cluster"]
            assert cluster["worker"] == [f"127.0.0.1:{moved.ports[f'worker/{index}']}" for index in (0, 1)]
            assert cluster["chief"] == [f"127.0.0.1:{moved.ports['chief/0']}"]
            assert cluster["ps"] == ["127.0.0.1:31999", "127.0.0.1:32000"]  # as set in the job file

    def test_jobs_that_start_at_the_same_time_have_other_ports(self, launcher: Any) -> None:
        """Their slots listen only after a while, and until then the ports are free."""
        random.seed(1)
        first, second = (launcher.render(job_of("true", **PS)) for _ in range(2))
        assert not set(first.ports.values()) & set(second.ports.values())

    def test_retry_after_a_kill(self, launcher: Any, tmp_path: Path) -> None:
        """One task is killed after all ports are assigned; all tasks start again."""
        script = f"test -e {tmp_path}/again || {{ touch {tmp_path}/again; kill -9 $$; }}; exec {sys.executable} task.py"
        _, status = self.run_to_end(launcher, job_of(script, **{**MIRRORED, "retries": 1}))
        assert (status.state, status.attempt) == (JobState.SUCCEEDED, 1), status.message

    def test_ports_set_in_the_job_file_are_consecutive(self, launcher: Any) -> None:
        plan = launcher.render(job_of("true", **{**PS, "port": 21000}))
        cluster = json.loads(plan.slots["ps/1"].env["TF_CONFIG"])["cluster"]
        assert [address for addresses in cluster.values() for address in addresses] == [
            f"127.0.0.1:{port}" for port in range(21000, 21005)
        ]
        with pytest.raises(SpecError, match=r"65536.*65535"):
            launcher.render(job_of("true", **{**PS, "port": 65534}))

    def test_only_workers_have_gpus(self, launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
        plan = launcher.render(job_of("true", **{**PS, "resources": {"gpu": 2}}))
        visible = {name: command.env.get("CUDA_VISIBLE_DEVICES") for name, command in plan.slots.items()}
        assert visible == {"chief/0": "", "worker/0": "4,5", "worker/1": "6,7", "ps/0": "", "ps/1": ""}
        roles = {"evaluator": {"count": 1, "resources": {"gpu": 1}}}
        with pytest.raises(SpecError, match=r"roles\.evaluator\.resources\.gpu"):
            launcher.render(job_of("true", **{**MIRRORED, "roles": roles}))


# --- On ssh hosts


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(tmp_path_factory.mktemp("net")) as hosts:
        yield hosts


@pytest.mark.slow
@pytest.mark.timeout(180)
class TestSsh(SlotRestartTests):
    ON = "ssh"

    @pytest.fixture(autouse=True)
    def _task(self, net: Network, tmp_path: Path) -> None:
        self.net = net
        shutil.copy(TASK, tmp_path / "task.py")
        self.ssh = {"hosts": ["node1:2", "node2"], "config": str(net.config), "workdir": str(tmp_path / "remote")}
        self.ssh |= {"python": sys.executable}
        self.keys = {"ssh": self.ssh}  # type: ignore[misc]

    @pytest.mark.parametrize("keys", [PS, {**MIRRORED, "workers": 3}], ids=["ps", "mirrored"])
    def test_tasks_reach_each_other_between_hosts(self, launcher: Any, keys: Any) -> None:
        keys = {**keys, "workers": 3}
        run, status = self.run_to_end(launcher, job_of(program={"script": "task.py"}, ssh=self.ssh, **keys), 100)
        assert status.state is JobState.SUCCEEDED, status.message
        cluster = read_cluster(run)
        all_addresses = [address for addresses in cluster.values() for address in addresses]
        assert len(set(all_addresses)) == len(all_addresses)
        hosts = [address.partition(":")[0] for address in cluster["worker"]]
        assert hosts == [self.net["node1"].address] * 2 + [self.net["node2"].address]
        if "ps" in cluster:  # assigned round-robin
            assert [address.partition(":")[0] for address in cluster["ps"]] == [hosts[0], hosts[2]]
        lead = "chief" if "chief" in cluster else "worker"
        lines = self.text(launcher, run, Slot(lead, 0))
        others = [address for address in all_addresses if address != cluster[lead][0]]
        assert all(any(line.endswith(f"at {address}") for line in lines) for address in others)
        assert "done" in lines

    def test_retry_uses_other_ports(self, launcher: Any, tmp_path: Path) -> None:
        flag = tmp_path / "again"
        script = f"test -e {flag} || {{ sleep 1; touch {flag}; kill -9 $$; }}; exec {sys.executable} task.py"
        run, status = self.run_to_end(launcher, job_of(script, ssh=self.ssh, **{**MIRRORED, "retries": 1}), 100)
        assert (status.state, status.attempt) == (JobState.SUCCEEDED, 1), status.message
        first = set(read_cluster(run)["worker"])
        lines = self.text(launcher, run, Slot("worker", 0))
        again = {line.rpartition(" ")[2] for line in lines if line.startswith("reached")}
        assert len(again) == 2
        assert not again & first


# --- TensorFlow itself

PARAMETER_SERVERS = """
import json, os, sys
import tensorflow as tf

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
    )
    server.join()
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    total = tf.Variable(0.0)

@tf.function
def step():
    def replica():
        total.assign_add(1.0)
        return total.read_value()
    return strategy.run(replica)

for _ in range(8):
    coordinator.schedule(step)
coordinator.join()
print("total", total.numpy(), "on", total.device, flush=True)
"""
MIRRORED_LOOP = """
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    weight = tf.Variable(1.0)
index = strategy.cluster_resolver.task_id

@tf.function
def step(x):
    def replica(x):
        with tf.GradientTape() as tape:
            loss = weight * x / strategy.num_replicas_in_sync
        gradient = tape.gradient(loss, weight)
        gradient = tf.distribute.get_replica_context().all_reduce("sum", gradient)
        weight.assign_sub(0.25 * gradient)
        return gradient
    return strategy.run(replica, args=(x,))

for _ in range(2):
    step(tf.constant(float(index + 1)))
print("weight", weight.numpy(), "of", strategy.num_replicas_in_sync, flush=True)
"""
QUIET = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.timeout(240)
class TestTensorFlow(LauncherTests):
    ON = "local"

    def test_parameter_servers(self, launcher: Any, tmp_path: Path) -> None:
        pytest.importorskip("tensorflow")
        (tmp_path / "train.py").write_text(textwrap.dedent(PARAMETER_SERVERS))
        keys = {**PS, "roles": {"ps": {"count": 1}}, "env": QUIET}
        run, status = self.run_to_end(launcher, job_of(program={"script": "train.py"}, **keys), 200)
        assert status.state is JobState.SUCCEEDED, (status.message, self.text(launcher, run))
        (line,) = [line for line in self.text(launcher, run, Slot("chief", 0)) if line.startswith("total")]
        assert line.startswith("total 8.0 on /job:ps/")

    def test_mirrored_workers(self, launcher: Any, tmp_path: Path) -> None:
        pytest.importorskip("tensorflow")
        (tmp_path / "train.py").write_text(textwrap.dedent(MIRRORED_LOOP))
        run, status = self.run_to_end(
            launcher, job_of(program={"script": "train.py"}, **{**MIRRORED, "workers": 2, "env": QUIET}), 200
        )
        assert status.state is JobState.SUCCEEDED, (status.message, self.text(launcher, run))
        for index in (0, 1):
            assert "weight 0.25 of 2" in self.text(launcher, run, Slot("worker", index))
