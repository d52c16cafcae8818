"""`stoker data loadtest`: measurements, errors by reason, refusals."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stoker.serve import loadtest
from stoker.serve.settings import ServeSettings
from tests.support import servers
from tests.support.engines import TOKEN, run_embedded
from tests.support.http_origin import DATA
from tests.support.refusals import expect_refusal
from tests.support.trees import stoker


def run_loadtest(capsys: pytest.CaptureFixture[str], url: str, *words: object) -> Any:
    capsys.readouterr()
    assert stoker("data", "loadtest", url, "--clients", 4, "--seconds", 0.5, *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_loadtest_measures_a_server(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_embedded(ServeSettings(root=root, port=0)) as url:
        report = run_loadtest(capsys, url)
        assert stoker("data", "loadtest", url, "--clients", 2, "--seconds", 0.2) == 0
        out = capsys.readouterr().out
    assert (report["clients"], report["errors"], report["reasons"]) == (4, 0, {})
    assert 0.4 < report["seconds"] < 2
    assert report["requests"] * len(DATA) <= report["bytes"] <= (report["requests"] + 4) * len(DATA)
    assert report["bytes_per_s"] == pytest.approx(report["bytes"] / report["seconds"])
    assert report["requests_per_s"] == pytest.approx(report["requests"] / report["seconds"])
    assert 0 < report["p50_s"] <= report["p99_s"] < report["seconds"] + 0.1
    for column in ("GB/s", "requests/s", "p50 ms", "p99 ms", "errors"):
        assert column in out


def test_loadtest_reads_ranges(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_embedded(ServeSettings(root=root, port=0)) as url:
        report = run_loadtest(capsys, url, "--range", "64KiB")
    assert report["errors"] == 0
    assert report["requests"] * 65536 <= report["bytes"] <= (report["requests"] + 4) * 65536


def test_loadtest_with_a_token(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_embedded(ServeSettings(root=root, port=0, token=TOKEN)) as url:
        assert run_loadtest(capsys, url.replace("://", f"://stoker:{TOKEN}@"))["errors"] == 0
        expect_refusal(capsys, 5, "denied", "loadtest", url)


LISTING = servers.json_reply(
    [{"name": "a.tar", "type": "file", "size": 5}, {"name": "b.tar", "type": "file", "size": 5}]
)


@pytest.mark.usefixtures("_quiet")
def test_loadtest_counts_errors_by_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def half(request: servers.RecordedRequest, _: int) -> servers.Reply:
        if request.path.endswith("/"):
            return LISTING
        return servers.Reply(body=b"right") if request.path == "/a.tar" else servers.Reply(500)

    def short(request: servers.RecordedRequest, _: int) -> servers.Reply:
        return LISTING if request.path.endswith("/") else servers.Reply(body=b"odd")

    with servers.scripted_server(half) as server:
        report = run_loadtest(capsys, server.url)
        assert report["errors"] == report["reasons"]["server responded with HTTP 500"] > 0
        assert report["requests"] > 0
        assert stoker("data", "loadtest", server.url, "--clients", 4, "--seconds", 0.3) == 0
        assert "HTTP 500" in capsys.readouterr().err
    with servers.scripted_server(short) as server:
        report = run_loadtest(capsys, server.url)
        assert report["requests"] == 0
        assert report["reasons"]["received 3 bytes, expected 5"] == report["errors"]


@pytest.mark.usefixtures("_quiet")
def test_loadtest_fails_when_nothing_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    def failing(request: servers.RecordedRequest, _: int) -> servers.Reply:
        return LISTING if request.path.endswith("/") else servers.Reply(500)

    with servers.scripted_server(failing) as server:
        words = ["loadtest", server.url, "--clients", 2, "--seconds", 0.3]
        expect_refusal(capsys, 5, "no client .*: .*HTTP 500", *words)
    with servers.scripted_server(lambda *_: servers.Reply(500)) as server:
        expect_refusal(capsys, 5, "500", "loadtest", server.url, "--seconds", 0.3)
    nowhere = f"http://127.0.0.1:{servers.free_port()}"
    expect_refusal(capsys, 5, r"connection refused \(5 attempts\)", "loadtest", nowhere, "--seconds", 0.3)


@pytest.mark.usefixtures("_quiet")
def test_loadtest_does_not_wait_for_a_silent_server(capsys: pytest.CaptureFixture[str]) -> None:
    over = threading.Event()

    def silent(request: servers.RecordedRequest, _: int) -> servers.Reply:
        if request.path.endswith("/"):
            return LISTING
        over.wait(60)
        return servers.Reply(500)

    with servers.scripted_server(silent) as server:
        began = time.monotonic()
        try:
            words = ["loadtest", server.url, "--clients", 4, "--seconds", 0.3]
            expect_refusal(capsys, 5, "no client .*: .*in time", *words)
            assert time.monotonic() - began < loadtest.TIMEOUT_S  # after which a client gives up by itself
        finally:
            over.set()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["s3://bucket/x"], "s3://bucket/x: .*http:// and https://"),
        (["{tmp}"], "http:// and https://"),
        (["http://127.0.0.1:9", "--clients", "0"], r"--clients\b.*\b4096\b.* 0\b"),
        (["http://127.0.0.1:9", "--seconds", "0"], r"--seconds\b.*\b3600\b.* 0\b"),
        (["http://127.0.0.1:9", "--seconds", "nan"], r"--seconds\b.*\b3600\b.* nan\b"),
        (["http://127.0.0.1:9", "--range", "much"], "must be a size"),
        (["http://127.0.0.1:9", "--range", "0"], r"--range\b.*\b1 byte\b.* 0\b"),
        (["http://127.0.0.1:99999"], "http://127.0.0.1:99999: .*URL"),
    ],
)
def test_loadtest_refuses_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], part: str
) -> None:
    expect_refusal(capsys, 2, part, "loadtest", *(word.format(tmp=tmp_path) for word in words))


def test_loadtest_refuses_an_empty_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    with run_embedded(ServeSettings(root=tmp_path / "empty", port=0)) as url:
        expect_refusal(capsys, 2, f"{url}/?: no files found", "loadtest", url)
