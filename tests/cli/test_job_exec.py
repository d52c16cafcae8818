"""`stoker job exec`, `forward` and `shell` without a cluster: refusals, ports, and the pod of a shell."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.job_exec import shell_objects
from stoker.cli.job_forward import reserve_ports
from stoker.cli.main import run as stoker
from stoker.errors import ConflictError
from stoker.kube.kubectl import PortMapping

RUN = "digits-20300101-000000-abcd"
JOB = "name: digits\ntopology: torchrun\nworkers: 2\nimage: example/train\nprogram: {module: train}\n"


@pytest.fixture
def make_run(stoker_home: Path) -> Any:
    """Write the folder of a run with this handle and plan."""

    def make(handle: str, plan: dict[str, Any] | None = None) -> None:
        folder = stoker_home / "runs" / RUN
        folder.mkdir(parents=True)
        (folder / "handle").write_text(handle)
        (folder / "job.yaml").write_text(JOB)
        (folder / "plan.json").write_text(json.dumps(plan or {}))

    return make


def read_error(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip()


def test_exec_refuses_a_local_run(make_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    make_run("local:///runs/digits")
    assert stoker(["job", "exec", "digits", "--", "nvidia-smi"]) == 2
    sentence = read_error(capsys)
    assert re.match(rf"stoker: `job \w+` works only for Kubernetes runs; run {RUN} is local, ", sentence)
    assert "this machine" in sentence


def test_exec_and_forward_print_the_ssh_command_for_an_ssh_run(
    make_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("ssh:///runs/digits", {"hosts": {"worker/0": "gpu-a", "worker/1": "gpu-b"}})
    assert stoker(["job", "exec", "digits", "--slot", "worker/1", "--", "ls", "a b"]) == 2
    assert read_error(capsys).endswith("""use: ssh gpu-b -- 'ls '"'"'a b'"'"''""")
    assert stoker(["job", "forward", "digits", "6006", "80:8080"]) == 2
    assert read_error(capsys).endswith("use: ssh -N -L 6006:localhost:6006 -L 8080:localhost:80 gpu-a")


def test_damaged_plan_is_one_sentence(make_run: Any, stoker_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run("ssh:///runs/digits")
    path = stoker_home / "runs" / RUN / "plan.json"
    path.write_text("{")
    assert stoker(["job", "exec", "digits", "--", "ls"]) == 2
    assert str(path) in read_error(capsys)


def test_exec_refuses_a_ray_run(make_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    make_run("ray://head:8265/digits")
    assert stoker(["job", "exec", "digits", "--", "ls"]) == 2
    assert re.search(f"run {RUN} runs on ray, so log in ", read_error(capsys))


def test_every_invalid_port_is_reported(make_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    make_run("k8s://one/team/digits")
    assert stoker(["job", "forward", "digits", "http", "80", "0"]) == 2
    sentence = read_error(capsys)
    assert "'http'" in sentence
    assert "'0'" in sentence
    assert "'80'" not in sentence
    assert "PORT" in sentence


def test_shell_requires_kubernetes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    assert stoker(["job", "shell", str(tmp_path / "job.yaml"), "--on", "ray://head:1"]) == 2
    assert re.search(r"--on ray://head:1: .*Kubernetes.*; .*--on k8s", read_error(capsys))


def test_every_local_port_in_use_is_reported() -> None:
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
            each.listen()
        taken = [each.getsockname()[1] for each in (one, two)]
        with pytest.raises(ConflictError, match=rf"\b{taken[0]}\b.*in use.*\b{taken[1]}\b.*in use.*; .*\b80:0\b"):
            reserve_ports([PortMapping(80, number) for number in taken])


def test_free_port_for_0_and_no_port_twice() -> None:
    (port,) = reserve_ports([PortMapping(6006, 0)])
    assert port.pod_port == 6006
    assert port.local_port > 0
    with pytest.raises(ConflictError, match=rf"\b{port.local_port}\b.*twice"):
        reserve_ports([PortMapping(1, port.local_port), PortMapping(2, port.local_port)])


def test_shell_pod_copies_the_job_but_not_its_labels() -> None:
    config_maps = [
        {"kind": "ConfigMap", "metadata": {"name": "digits"}, "data": {"a": "b"}, "binaryData": {"c": "ZA=="}}
    ]
    spec = {
        "restartPolicy": "OnFailure",
        "subdomain": "digits",
        "hostname": "digits-0",
        "activeDeadlineSeconds": 5,
        "containers": [{"name": "main", "image": "example/train"}],
        "volumes": [
            {"name": "code", "configMap": {"name": "digits", "items": [{"key": "a", "path": "a"}]}},
            {"name": "own", "configMap": {"name": "theirs"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
        ],
    }
    pod, copies = shell_objects("digits", spec, config_maps, 3600, "abc")
    assert pod["metadata"] == {
        "name": "digits-shell-abc",
        "labels": {"stoker.dev/part": "shell", "app.kubernetes.io/managed-by": "stoker"},
    }
    assert pod["spec"] == {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": 3600,
        "containers": [{"name": "main", "image": "example/train"}],
        "volumes": [
            {"name": "code", "configMap": {"name": "digits-shell-abc-0", "items": [{"key": "a", "path": "a"}]}},
            {"name": "own", "configMap": {"name": "theirs"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
        ],
    }
    (copy,) = copies
    assert copy["metadata"]["name"] == "digits-shell-abc-0"
    assert (copy["data"], copy["binaryData"]) == ({"a": "b"}, {"c": "ZA=="})
    assert spec["subdomain"] == "digits"


def test_shell_pod_name_fits_63_characters() -> None:
    pod, copies = shell_objects("a" * 63, {"containers": []}, [{"metadata": {"name": "a" * 63}}], 1, "abcdef")
    assert max(len(one["metadata"]["name"]) for one in (pod, *copies)) <= 63
