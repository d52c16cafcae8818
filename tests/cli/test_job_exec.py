"""`stoker job exec`, `forward` and `shell` where no cluster is needed: refusals, ports, and the pod of a shell."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.job_exec import _free, shell_objects
from stoker.cli.main import run as stoker
from stoker.errors import ConflictError
from stoker.kube.kubectl import Port

JOB = "name: digits\ntopology: torchrun\nworkers: 2\nimage: example/train\nprogram: {module: train}\n"


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the folder of a run that has this handle and plan."""
    monkeypatch.setenv("STOKER_HOME", str(tmp_path))

    def make(handle: str, plan: dict[str, Any] | None = None) -> None:
        folder = tmp_path / "runs" / "digits-20300101-000000-abcd"
        folder.mkdir(parents=True)
        (folder / "handle").write_text(handle)
        (folder / "job.yaml").write_text(JOB)
        (folder / "plan.json").write_text(json.dumps(plan or {}))

    return make


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip()


def test_a_run_on_this_machine_needs_no_way_into_it(ran: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ran("local:///runs/digits")
    assert stoker(["job", "exec", "digits", "--", "nvidia-smi"]) == 2
    assert said(capsys).endswith("runs on local, and not in pods; it runs on this machine: no way into it is needed")


def test_a_run_on_hosts_is_reached_by_ssh(ran: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ran("ssh:///runs/digits", {"hosts": {"worker/0": "gpu-a", "worker/1": "gpu-b"}})
    assert stoker(["job", "exec", "digits", "--slot", "worker/1", "--", "ls", "a b"]) == 2
    assert said(capsys).endswith("""use: ssh gpu-b -- 'ls '"'"'a b'"'"''""")
    assert stoker(["job", "forward", "digits", "6006", "80:8080"]) == 2
    assert said(capsys).endswith("use: ssh -N -L 6006:localhost:6006 -L 8080:localhost:80 gpu-a")


def test_a_run_elsewhere_is_only_named(ran: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ran("ray://head:8265/digits")
    assert stoker(["job", "exec", "digits", "--", "ls"]) == 2
    assert "runs on ray, and not in pods; log in where it runs" in said(capsys)


def test_every_port_that_is_none_is_told(ran: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ran("k8s://one/team/digits")
    assert stoker(["job", "forward", "digits", "http", "80", "0"]) == 2
    assert "'http' is no port; '0' is no port; write PORT" in said(capsys)


def test_a_shell_is_for_kubernetes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    assert stoker(["job", "shell", str(tmp_path / "job.yaml"), "--on", "ray://head:1"]) == 2
    assert "`--on ray` has no pods" in said(capsys)


def test_ports_that_are_taken_are_told_at_once() -> None:
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
            each.listen()
        taken = [each.getsockname()[1] for each in (one, two)]
        with pytest.raises(ConflictError, match=f"port {taken[0]} is taken here; port {taken[1]} is taken here"):
            _free([Port(80, number) for number in taken])


def test_any_free_port_is_found_and_one_cannot_be_given_twice() -> None:
    (found,) = _free([Port(6006, 0)])
    assert found.there == 6006
    assert found.here > 0
    with pytest.raises(ConflictError, match=f"port {found.here} is given twice"):
        _free([Port(1, found.here), Port(2, found.here)])


def test_the_pod_of_a_shell_is_the_job_s_but_none_of_its_own() -> None:
    texts = [{"kind": "ConfigMap", "metadata": {"name": "digits"}, "data": {"a": "b"}, "binaryData": {"c": "ZA=="}}]
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
    pod, copies = shell_objects("digits", spec, texts, 3600, "abc")
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


def test_a_long_name_still_fits() -> None:
    pod, copies = shell_objects("a" * 63, {"containers": []}, [{"metadata": {"name": "a" * 63}}], 1, "abcdef")
    assert max(len(one["metadata"]["name"]) for one in (pod, *copies)) <= 63
