"""The Ray launcher on a real cluster of two nodes, and with a Ray of the run's own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stoker.core.spec import decode
from stoker.errors import InputError, SpecError
from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.run_folder import find_run
from stoker.jobs.spec import JobSpec
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.launchers.ray.launcher import RayLauncher
from stoker.launchers.ray.plan import read_ray_plan
from tests.launchers.contract import LauncherSuite, is_ready, job_of
from tests.launchers.test_local import HANGING
from tests.launchers.test_tensorflow import SlotRestartTests
from tests.support.ray import (
    CPUS,
    RayTestCluster,
    slot_processes,
    write_job,
)
from tests.support.trees import stoker
from tests.support.unequal_training import UNEQUAL, check_training, train_equal, training_keys
from tests.support.waiting import is_alive, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
names = os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"], os.path.basename(__file__)
print("sum", total.item(), "of", dist.get_world_size(), *names)
dist.destroy_process_group()
"""


class TestRay(LauncherSuite, SlotRestartTests):
    ON = "ray"

    @pytest.fixture
    def launcher(self, cluster: RayTestCluster) -> Any:
        self.cluster = cluster
        return RayLauncher(cluster.target)

    @pytest.mark.slow  # each takes seconds to reach the cluster
    def test_failure_names_slot_exit_code_error_and_log(self, launcher: Any) -> None:
        super().test_failure_names_slot_exit_code_error_and_log(launcher)

    @pytest.mark.slow
    def test_slot_environment(self, launcher: Any) -> None:
        super().test_slot_environment(launcher)

    @pytest.mark.slow
    def test_killed_gang_is_retried(self, launcher: Any, tmp_path: Path) -> None:
        super().test_killed_gang_is_retried(launcher, tmp_path)

    @pytest.mark.slow
    def test_bad_input_is_not_retried(self, launcher: Any) -> None:
        super().test_bad_input_is_not_retried(launcher)

    @pytest.mark.slow
    def test_logs_follow_to_the_end(self, launcher: Any) -> None:
        super().test_logs_follow_to_the_end(launcher)

    def test_all_reduce_over_two_nodes(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "reduce.py").write_text(ALL_REDUCE)
        keys = {"program": {"script": "reduce.py"}, "topology": "torchrun", "workers": 2}
        run, status = self.run_to_end(launcher, job_of(**keys, ray={"strategy": "strict_spread"}), 100)
        assert status.state is JobState.SUCCEEDED, status.message
        places = json.loads((run.folder / "places.json").read_text())
        assert sorted(places.values()) == sorted(node.address for node in self.cluster.nodes)
        interfaces = {node.address: node.host.interface for node in self.cluster.nodes}
        for name, address in places.items():
            expected = f"sum 3.0 of 2 {places['worker/0']} {interfaces[address]} reduce.py"
            assert expected in self.text(launcher, run, Slot.parse(name))
            assert slot_processes(run, name) == []

    @pytest.mark.slow
    def test_unequal_workers_train_as_equal_ones(
        self, launcher: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        equal = train_equal(tmp_path_factory.mktemp("equal"))
        keys = training_keys(tmp_path, equal / "shards", workers=UNEQUAL, ray={"strategy": "strict_spread"})
        run, status = self.run_to_end(launcher, decode(keys, JobSpec), 200)
        assert status.state is JobState.SUCCEEDED, status.message
        plan = read_ray_plan(run)
        assert [plan.bundle_of(f"worker/{index}") for index in range(2)] == [{"CPU": 2}, {"CPU": 1}]
        check_training(tmp_path, equal)

    def test_missing_capacity_is_reported_until_the_run_is_stopped(self, launcher: Any) -> None:
        run = self.start(launcher, job_of("true", resources={"cpu": CPUS + 1}))
        amounts = f"needs 3 CPU, {2 * CPUS} CPU of {2 * CPUS} CPU free"
        wait_until(lambda: amounts in launcher.status(run.handle).message)
        status = launcher.status(run.handle)
        assert "1 × (3 CPU)" in status.message
        assert [status.state, *(slot.state for slot in status.slots)] == [JobState.PENDING] * 2
        launcher.stop(run.handle)
        assert launcher.status(run.handle).state is JobState.STOPPED

    @pytest.mark.slow
    def test_hang_is_stopped_with_the_stacks_of_every_rank(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "hang.py").write_text(HANGING)
        run, status = self.run_to_end(launcher, job_of(program={"script": "hang.py"}, hang_after=5))
        assert re.search(r"\bhung at step 2 in train-00001\.tar: .*\b5s\b", status.message)
        assert "in stuck" in (run.folder / "stacks.0.txt").read_text()

    @pytest.mark.slow
    def test_missing_program_is_not_retried(self, launcher: Any) -> None:
        _, status = self.run_to_end(launcher, job_of(program={"command": ["./no-such-program"]}, retries=2))
        assert status.message.startswith("worker/0 ")
        assert "cannot start './no-such-program': No such file" in status.message
        assert len(status.attempts) == 1

    @pytest.mark.slow
    def test_files_and_secrets_reach_the_node(
        self, launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("keep.txt", "skip.bin", "deep/a.txt", ".git/config"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(name)
        (tmp_path / "run.sh").write_text("#!/bin/sh\necho ${#TOKEN}; printf '\\377\\r\\n'; find . -type f | sort\n")
        (tmp_path / "run.sh").chmod(0o755)
        (tmp_path / ".stokerignore").write_text("*.bin\n")
        monkeypatch.setenv("TOKEN", "hush-hush-hush")
        job = job_of(program={"command": ["./run.sh"]}, secret_env={"TOKEN": {"secret": "s", "key": "k"}})
        run, status = self.run_to_end(launcher, job)
        assert status.state is JobState.SUCCEEDED, status.message
        sent = ["./.stoker/driver.py", "./.stoker/profiler.py", "./.stokerignore"]
        expected = [*sent, "./deep/a.txt", "./keep.txt", "./run.sh"]
        output = run.log_path(Slot("worker", 0), 0).read_bytes()
        assert output.startswith(b"14\n\377\r\n")
        assert [line for line in output.decode(errors="replace").splitlines() if line.startswith("./")] == expected
        nodes = self.cluster.nodes[0].host.folder
        files = [path for folder in (run.folder, nodes) for path in folder.rglob("*") if path.is_file()]
        assert not any(b"hush-hush-hush" in path.read_bytes() for path in files)
        (submission,) = [name for name in self.cluster.jobs() if run.id in name]
        wait_until(lambda: not any(self.cluster.has_key(f"{submission}{suffix}") for suffix in ("", "-request")))

    @pytest.mark.slow
    def test_all_workers_use_the_free_resources(self, launcher: Any) -> None:
        def count(**resources: Any) -> Any:
            return launcher.resolve_paths(job_of("true", workers="all", resources=resources)).workers

        def is_free() -> bool:
            """The resources of earlier jobs become free a moment after their end."""
            try:
                return (count(cpu=2), count(gpu=1), count(gpu=2)) == (len(self.cluster.nodes), 2, 1)
            except InputError:
                return False

        wait_until(is_free)
        with pytest.raises(InputError, match=r"workers: all: .*\b1 CPU, 3 GPU\b.*; set a number of workers"):
            count(gpu=3)
        with pytest.raises(InputError, match=r"workers: all: .*\bmemory\b.*; set a number of workers"):
            count(cpu=1, memory="100Ti")

    @pytest.mark.slow
    def test_worker_sees_only_its_gpus(self, launcher: Any) -> None:
        resources = {"gpu": 1, "gpu_type": "TEST", "memory": "100Mi"}
        run, status = self.run_to_end(launcher, job_of("echo gpus $CUDA_VISIBLE_DEVICES", resources=resources))
        assert status.state is JobState.SUCCEEDED, status.message
        assert self.text(launcher, run)[0] in ("gpus 0", "gpus 1")
        assert json.loads((run.folder / "places.json").read_text()) == {"worker/0": self.cluster.nodes[1].address}

    def test_all_faults_of_a_job_are_reported_at_once(self, launcher: Any) -> None:
        keys = {"program": {"script": "no.py"}, "topology": "torchrun", "workers": {"min": 1, "max": 2}}
        with pytest.raises(SpecError) as caught:
            launcher.render(job_of(**keys, checkpoint={"dir": "relative"}, data={"train": "none"}))
        assert [fault.path for fault in caught.value.faults] == [
            "workers",
            "data.train",
            "program.script",
            "checkpoint.dir",
        ]
        with pytest.raises(SpecError, match=r"'mpi'.*ray"):
            launcher.render(job_of("true", topology="mpi"))


def test_own_ray_is_started_and_removed_with_the_run(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    find_session = "tr '\\0' '\\n' < /proc/$RAY_RAYLET_PID/cmdline | sed -n 's/--session_dir=//p' > ../session"
    job = write_job(workspace, f"echo $PWD; echo $RAY_RAYLET_PID > ../raylet; {find_session}; exit 7")
    assert stoker("job", "run", job, "--on", "ray") == 4
    out, err = capsys.readouterr()
    assert out == f"{workspace}/work\n"
    assert "Ray will run on this machine for the duration of the run" in err
    run = find_run(None)
    assert run.handle == f"ray://{run.folder}"
    assert re.search(rf"worker/0 .*\b7; log: {run.log_path(Slot('worker', 0), 0)}", err)
    assert not is_alive(int((workspace / "raylet").read_text()))
    session = Path((workspace / "session").read_text().strip())
    assert session.parent.name.startswith("stoker-ray-")
    assert not session.parent.exists()


@pytest.mark.slow
def test_two_workers_on_the_run_s_own_ray(workspace: Path) -> None:
    (workspace / "work" / "reduce.py").write_text(ALL_REDUCE)
    keys = {"program": {"script": "reduce.py"}, "topology": "torchrun", "workers": 2}
    assert stoker("job", "run", write_job(workspace, "", **keys), "--on", "ray") == 0
    for index in range(2):
        assert "sum 3.0 of 2" in find_run(None).log_path(Slot("worker", index), 0).read_text()


@pytest.mark.slow
def test_commands_work_for_a_detached_run(
    cluster: RayTestCluster, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "trap 'echo saved; exit 143' TERM; echo ready; while :; do sleep 0.05; done"
    assert stoker("job", "run", write_job(workspace, script), "--on", f"ray://{cluster.target}", "--detach") == 0
    run = find_run("small")
    wait_until(lambda: is_ready(run) and run.read_status().state is JobState.RUNNING)
    capsys.readouterr()
    assert stoker("job", "status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["state"] == "running"
    assert stoker("job", "stop") == 0
    capsys.readouterr()
    assert stoker("job", "logs") == 0
    assert capsys.readouterr().out == "ready\nsaved\n"
    assert slot_processes(run) == []
    assert stoker("job", "run", "--resume", run.id, "--detach") == 0
    wait_until(lambda: is_ready(run, 1))
    wait_until(lambda: LAUNCHERS.get("ray")().status(run.handle).state is JobState.RUNNING)
    assert stoker("job", "stop") == 0
