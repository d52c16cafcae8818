"""Invalid targets of a job are rejected before any connection to another machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.api import HOSTS_NEED_TARGET, HOSTS_WITH_ADDRESS, NO_HOSTS
from stoker.cli.main import run

JOB = "name: small\nprogram: {command: [sleep, '1']}\ntopology: single\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--on", "local", "--hosts", "a"), HOSTS_NEED_TARGET),
        (("--on", "k8s", "--hosts", "a"), HOSTS_NEED_TARGET),
        (("--on", "ray://10.0.0.1", "--hosts", "a"), HOSTS_WITH_ADDRESS),
        (("--on", "ray", "--hosts", "a:0"), "'a:0'"),
        (("--on", "ray", "--hosts", "a", "--set", "workers=2"), "ray.hosts: "),
        (("--on", "ray", "--hosts", "a", "--set", "ssh.config=missing"), "ssh.config: "),
        (("--on", "ray", "--set", "ray.keep=true"), "ray.keep: "),
        (("--on", "shh", "--hosts", "a"), "unknown target 'shh'"),
        (("--on", "ssh", "--hosts", ""), NO_HOSTS),
        (("--on", "ssh", "--hosts", "a:x"), "'a:x'"),
        (("--on", "ssh", "--hosts", "a:0"), "'a:0'"),
        (("--on", "ssh", "--hosts", "a:2222"), "2222"),
        (("--on", "ssh", "--hosts", "a", "--set", "ssh.config=missing"), "ssh.config: "),
        (("--on", "ssh", "--hosts", "a", "--set", "program.cwd=missing"), "program.cwd: "),
        (("--on", "ray:10.0.0.1"), "ray://host:port"),
        (("--on", "ssh://a"), "--on ssh"),
    ],
)
def test_invalid_target_exits_2(
    options: tuple[str, ...],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    assert run(["job", "plan", "job.yaml", *options]) == 2
    assert expected in capsys.readouterr().err


def test_all_faults_are_reported_with_their_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(f"{JOB}colour: red\n")
    options = ("--on", "ssh", "--set", "retries=many", "--set", "program.cwd=missing", "--hosts", "@no-file")
    assert run(["job", "plan", "job.yaml", *options]) == 2
    head, *lines = capsys.readouterr().err.splitlines()
    assert "4 errors" in head
    faults = {line.split(": ")[1]: line for line in lines}
    assert set(faults) == {"colour", "retries", "ssh.hosts", "program.cwd"}
    assert "no-file" in faults["ssh.hosts"]
    assert faults["ssh.hosts"].endswith("(from --hosts)")
    assert faults["retries"].endswith("(from --set retries)")


@pytest.mark.parametrize("options", [("--on", "ssh"), ("--hosts", "a"), ("--set", "retries=1")])
def test_resume_takes_no_other_target_or_settings(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["job", "run", "--resume", "any", *options]) == 2
    err = capsys.readouterr().err
    assert "--resume" in err
    assert options[0] in err
