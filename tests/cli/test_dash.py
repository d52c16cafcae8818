"""`stoker dash`: how it starts and stops, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from stoker.jobs.status import JobState
from tests.support.runs import Runs
from tests.support.trees import stoker

RUN_ID = "digits-20260101-000000-abcd"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serves_until_a_signal(stoker_home: Path, number: int) -> None:
    Runs().write(stoker_home, RUN_ID, JobState.SUCCEEDED)
    command = [sys.executable, "-m", "stoker", "dash", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stderr is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/", process.stderr.readline())
        assert found
        with urllib.request.urlopen(f"{found[0]}api/runs") as response:
            assert [run["id"] for run in json.load(response)["runs"]] == [RUN_ID]
        stream = urllib.request.urlopen(f"{found[0]}api/runs/{RUN_ID}/stream")
        process.send_signal(number)
        assert process.wait() == 0
        stream.close()
        assert process.stderr.read() == ""


def test_runs_are_chosen_by_name_and_folder(
    stoker_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Runs().write(stoker_home, RUN_ID, JobState.SUCCEEDED)
    copy = tmp_path / "copied-20260101-000000-abcd"
    run.folder.rename(copy)
    assert stoker("dash", "digits", "--html", tmp_path / "page.html") == 2
    assert stoker("dash", copy, "--html", tmp_path / "page.html") == 0
    assert "copied-20260101-000000-abcd" in (tmp_path / "page.html").read_text()
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")


def test_page_is_of_one_run_which_is_named(
    stoker_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = "photos-20260102-000000-abcd"
    for run_id in (RUN_ID, newest):
        Runs().write(stoker_home, run_id, JobState.SUCCEEDED)
    page = tmp_path / "page.html"
    assert stoker("dash", RUN_ID, newest, "--html", page) == 2
    assert not page.exists()
    assert "--html" in capsys.readouterr().err
    assert stoker("dash", "--html", page) == 0
    assert newest in capsys.readouterr().err


def test_mistakes(stoker_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Runs().write(stoker_home, RUN_ID, JobState.SUCCEEDED)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert stoker("dash", "--port", port) == 5
    expected = f"cannot listen on 127.0.0.1:{port}: the port is already in use; choose another --port"
    assert capsys.readouterr().err.strip().endswith(expected)
    assert stoker("dash", "--notify", "ftp://example.org") == 2
    assert stoker("dash", "--html", tmp_path / "missing" / "page.html") == 5
    (tmp_path / "token").write_text("short")
    assert stoker("dash", "--token-file", tmp_path / "token") == 2
