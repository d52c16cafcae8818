"""Where a job is to run, wrongly said: told before anything is asked of another machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.cli.main import run

JOB = "name: small\nprogram: {command: [sleep, '1']}\ntopology: single\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--on", "local", "--hosts", "a"), "--hosts is for --on ssh"),
        (("--on", "ssh", "--hosts", ""), "--hosts names no host"),
        (("--on", "ssh", "--hosts", "a:x"), "'a:x': behind the colon stands how many workers"),
        (("--on", "ssh", "--hosts", "a:0"), "'a:0': behind the colon stands how many workers"),
        (("--on", "ssh", "--hosts", "a:2222"), "a port of ssh goes into your ssh configuration"),
        (("--on", "ssh", "--hosts", "a", "--set", "ssh.config=missing"), "ssh.config: there is no file"),
        (("--on", "ssh", "--hosts", "a", "--set", "program.cwd=missing"), "program.cwd: there is no folder"),
        (("--on", "ray:10.0.0.1"), "an address is written ray://host:port"),
        (("--on", "ssh://a"), "`--on ssh` takes no address"),
    ],
)
def test_a_place_that_cannot_be(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    assert run(["job", "plan", "job.yaml", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--on", "ssh"), ("--hosts", "a"), ("--set", "retries=1")])
def test_a_run_goes_on_where_it_was(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["job", "run", "--resume", "any", *words]) == 2
    assert "--resume goes on with the job as it was, where it was" in capsys.readouterr().err
