"""`stoker data cache --on k8s` and `stoker data warm --on k8s` without a cluster."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from stoker.serve.cluster.manifests import (
    MAX_PARALLEL_READS,
    build_cache_objects,
)
from tests.support.cache_objects import SINGLE
from tests.support.servers import free_port
from tests.support.trees import stoker

ORIGIN = ["--origin", "http://origin:8000"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*ORIGIN, "--size", "much"], "--size must .*'much'"),
        ([*ORIGIN, "--size", "1MiB"], r"--size: .*\b32 MiB.*\b1 MiB"),
        (ORIGIN, "--size is required; .*--size 200Gi"),
        (["--size", "1Gi"], "--origin is required; .*--origin imagenet=s3://"),
        ([*ORIGIN, "--size", "1Gi", "--replicas", "0"], r"--replicas: .*\b0\b"),
        ([*ORIGIN, "--size", "1Gi", "--dir", "x", "--port", "1"], r"--dir, --port\b.*--on k8s"),
        (["--dry-run", "--stop"], "--dry-run.* --stop"),
        ([*ORIGIN, "--size", "1Gi", "--patch", "{tmp}/none"], "{tmp}/none: no such file or directory"),
        ([*ORIGIN, "--size", "1Gi", "--patch", "{tmp}/list"], "{tmp}/list.*kind"),
        ([*ORIGIN, "--size", "1Gi", "--timeout", "soon"], "duration .*'soon'"),
    ],
)
def test_invalid_options_exit_2(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list").write_text("- 1\n")
    words = [option.replace("{tmp}", str(tmp_path)) for option in options]
    dry_run = [] if "--dry-run" in words else ["--dry-run"]
    assert stoker("data", "cache", "--on", "k8s", *dry_run, *words) == 2
    assert re.search(message.replace("{tmp}", str(tmp_path)), capsys.readouterr().err)


def test_cluster_options_need_on_k8s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("data", "cache", *ORIGIN, "--dir", tmp_path, "--size", "1Gi", "--claim", "x", "--stop") == 2
    assert re.search(r"--claim, --stop\b.*--on k8s", capsys.readouterr().err)
    assert stoker("data", "warm", "http://x/train", "--read-from", "y") == 2
    assert re.search(r"--read-from\b.*--on k8s", capsys.readouterr().err)
    assert stoker("data", "warm", "http://x/train") == 2
    assert re.search("no cache specified; .*--via .*--on k8s", capsys.readouterr().err)
    assert stoker("data", "cache", *ORIGIN, "--size", "1Gi", "--on", "slurm") == 2
    assert re.search(r"--on slurm\b.*; .*--on k8s", capsys.readouterr().err)


def test_dry_run_needs_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    words = ["data", "cache", "--on", "k8s://here/team", *ORIGIN, "--size", "1Gi"]
    assert stoker(*words, "--dry-run") == 0
    text = capsys.readouterr().out
    assert list(yaml.safe_load_all(text)) == build_cache_objects(replace(SINGLE, namespace="team"))
    assert stoker(*words, "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out) == build_cache_objects(replace(SINGLE, namespace="team"))
    assert stoker(*words) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_unreachable_cluster_exits_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = {"server": f"http://127.0.0.1:{free_port()}"}
    config = {
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": server}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    assert stoker("data", "cache", "--on", "k8s", *ORIGIN, "--size", "1Gi") == 5
    assert server["server"] in capsys.readouterr().err
    assert stoker("data", "warm", "http://origin:8000/train", "--on", "k8s", "--jobs", MAX_PARALLEL_READS) == 5
    assert server["server"] in capsys.readouterr().err
