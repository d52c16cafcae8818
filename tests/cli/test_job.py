"""`stoker job plan` and `eval` where nothing is started: options that apply to one target, RBAC manifests, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.jobs.spec import to_yaml
from tests.launchers.contract import job_of
from tests.support.trees import stoker

JOB = "name: digits\ntopology: torchrun\nworkers: 2\nimage: example/train\nprogram: {module: train}\n"
KUBECONFIG: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "c",
    "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:9"}}],
    "users": [{"name": "u", "user": {"token": "none"}}],
    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
}


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file, beside a kubeconfig whose cluster does not answer."""
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(KUBECONFIG))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


def test_plan_prints_the_rbac_objects_of_a_subject(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("job", "plan", job_file, "--on", "k8s", "--rbac", "group:vision") == 0
    objects = {each["kind"]: each for each in yaml.safe_load_all(capsys.readouterr().out)}
    assert {"Role", "RoleBinding"} <= objects.keys()
    (subject,) = objects["RoleBinding"]["subjects"]
    assert (subject["kind"], subject["name"]) == ("Group", "vision")
    assert objects["Role"]["metadata"]["namespace"] == "team"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--rbac", "alice"], "--on k8s"),
        (["--hosts", "a,b"], "--on ssh"),
        (["--on", "ssh", "--hosts", " , "], "--hosts @FILE"),
        (["--on", "k8s:context/team"], "k8s://context/namespace"),
        (["--on", "ray:head:8265"], "ray://host:port"),
        (["--on", "local://here"], "'here'"),
        (["--on", "ray://"], "--on ray:// has no address; add it, or use --on ray"),
        (["--on", "shh"], "did you mean 'ssh'?"),
        (["--on", "ssh", "--hosts", "node1,,node2"], "--hosts node1,,node2: the list of hosts has an empty name"),
        (["--on", "ssh", "--hosts", "node1:0", "--set", "workers=1"], "node1:0"),
        (["--on", "ray", "--hosts", "node1:0", "--set", "workers=1"], "node1:0"),
    ],
)
def test_options_for_another_target_are_refused(
    job_file: Path, words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stoker("job", "plan", job_file, *words) == 2
    sentence = capsys.readouterr().err
    assert named in sentence
    assert sentence.count("\n") == 1


def test_dry_run_prints_the_plan_and_starts_nothing(
    stoker_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('started', 'w')")
    (tmp_path / "job.yaml").write_text("name: small\ntopology: single\nprogram: {module: train}\nprofile: {every: 0}\n")
    printed = []
    for command in (["plan"], ["run", "--dry-run"]):
        assert stoker("job", *command, "job.yaml") == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "train" in printed[0]
    assert stoker("job", "run", "job.yaml", "--dry-run", "--json", "--detach") == 0
    assert "worker/0" in json.loads(capsys.readouterr().out)["slots"]
    assert not stoker_home.exists()
    assert not (tmp_path / "started").exists()
    assert stoker("job", "run", "--resume", "small", "--dry-run") == 2
    assert "--dry-run" in capsys.readouterr().err


def test_list_of_runs_requires_a_target_that_lists_them(stoker_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("job", "list", "--on", "ssh") == 2
    assert "--on ssh " in capsys.readouterr().err


def test_home_that_cannot_be_written_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "file"))
    (tmp_path / "job.yaml").write_text(to_yaml(job_of("true")))
    assert stoker("job", "run", tmp_path / "job.yaml") == 2
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1
    assert "STOKER_HOME" in sentence
