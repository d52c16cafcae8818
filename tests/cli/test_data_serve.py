"""`stoker data serve` and `cache` as processes and as calls: output, signals, refusals."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from stoker.remote.host_probe import list_addresses
from stoker.serve.cache.slices import SliceCache
from stoker.serve.embedded import EmbeddedEngine
from stoker.serve.http import STALL_TIMEOUT_S
from stoker.serve.nginx.engine import NginxEngine
from stoker.serve.settings import CacheSettings, ServeSettings
from tests.support import servers
from tests.support.engines import HAS_NGINX, TOKEN, run_embedded
from tests.support.http_origin import DATA, run_origin
from tests.support.http_requests import send_request
from tests.support.refusals import expect_refusal
from tests.support.trees import digests, stoker
from tests.support.waiting import wait_until

ENGINES = [
    "embedded",
    pytest.param("nginx", marks=pytest.mark.skipif(not HAS_NGINX, reason="nginx is not installed")),
]


# --- Start and stop


class ServerProcess(NamedTuple):
    """A running server command, and what it printed until it was ready."""

    process: subprocess.Popen[str]
    url: str
    output: str


@contextmanager
def run_server(tmp_path: Path, *words: object) -> Iterator[ServerProcess]:
    """Run a command as a process, with its own directory for temporary files."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "stoker", "data", *map(str, words)]
    environ = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stderr is not None
            output = ""
            while " at http" not in output:
                line = process.stderr.readline()
                assert line, output
                output += line
            yield ServerProcess(process, output.split(" at ")[-1].split()[0], output)
        finally:
            process.kill()


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    result, pending = [], [pid]
    while pending:
        pending += (more := children.get(pending.pop(), []))
        result += more
    return result


def server_words(root: Path, folder: Path, what: str, far: str) -> list[object]:
    if what == "serve":
        return ["serve", root]
    return ["cache", "--origin", far, "--dir", folder, "--size", "64MiB"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("what", ["serve", "cache"])
def test_signal_stops_the_server_and_its_children(
    tmp_path: Path, root: Path, what: str, engine: str, number: signal.Signals
) -> None:
    with run_origin({"/a.tar": DATA}) as far:
        words = server_words(root, tmp_path / "cache", what, far.url)
        with run_server(tmp_path, *words, "--port", 0, "--engine", engine) as server:
            assert f"with the {engine} engine" in server.output
            assert send_request(server.url, "/a.tar").body == DATA
            below = descendants(server.process.pid)
            assert bool(below) == (engine == "nginx")
            server.process.send_signal(number)
            out, err = server.process.communicate(timeout=60)
            assert (server.process.returncode, out, err) == (0, "", "")
    assert [pid for pid in below if Path(f"/proc/{pid}").exists()] == []
    assert list((tmp_path / "tmp").iterdir()) == []
    assert list(digests(root)) == ["a.tar"]
    if what == "cache" and engine == "embedded":
        names = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
        assert names == {"lock", "about.json", "000000"}


@pytest.mark.parametrize("engine", ENGINES)
def test_signal_right_after_the_start_is_a_clean_exit(tmp_path: Path, root: Path, engine: str) -> None:
    for _ in range(3):
        with run_server(tmp_path, "serve", root, "--port", 0, "--engine", engine) as server:
            server.process.terminate()
            assert server.process.wait(60) == 0


@pytest.mark.parametrize("what", ["serve", "cache"])
def test_server_stops_despite_a_slow_client(tmp_path: Path, root: Path, what: str) -> None:
    large = bytes(40 << 20)
    (root / "large.tar").write_bytes(large)
    with run_origin({"/large.tar": large}) as far:
        words = server_words(root, tmp_path / "cache", what, far.url)
        with run_server(tmp_path, *words, "--port", 0, "--engine", "embedded") as server:
            parts = urlsplit(server.url)
            with socket.create_connection((parts.hostname, parts.port)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.sendall(b"GET /large.tar HTTP/1.1\r\nHost: x\r\n\r\n")
                assert client.recv(15) == b"HTTP/1.1 200 OK"
                server.process.terminate()
                # Before the server would disconnect the client as too slow.
                assert server.process.wait(0.8 * STALL_TIMEOUT_S) == 0


@pytest.mark.usefixtures("_quiet")
def test_cache_stops_despite_a_silent_origin(tmp_path: Path) -> None:
    size, over = 30 << 20, threading.Event()

    def only_the_first_slice(request: servers.RecordedRequest, _: int) -> servers.Reply:
        if request.path != "/a.tar":
            return servers.Reply(404)
        if request.method == "HEAD":
            return servers.Reply(length=size)
        first, last = map(int, request.headers["range"].removeprefix("bytes=").split("-"))
        if first:
            over.wait(120)
        return servers.Reply(206, bytes(last - first + 1), {"Content-Range": f"bytes {first}-{last}/{size}"})

    with servers.scripted_server(only_the_first_slice) as far:
        words = ["cache", "--origin", far.url, "--dir", tmp_path / "cache", "--size", "64MiB", "--port", 0]
        try:
            with run_server(tmp_path, *words) as server, socket.socket() as client:
                parts = urlsplit(server.url)
                client.connect((parts.hostname, parts.port))
                client.sendall(b"GET /a.tar HTTP/1.1\r\nHost: x\r\n\r\n")
                assert client.recv(15) == b"HTTP/1.1 200 OK"
                wait_until(lambda: len(far.requests) >= 5)  # version, manifest, and three slices
                server.process.terminate()
                # Before the cache's request to the origin would time out, after 30 s.
                assert server.process.wait(25) == 0
        finally:
            over.set()


def test_embedded_engine_leaves_no_thread(tmp_path: Path, root: Path) -> None:
    def ours() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("stoker-")]

    with run_origin({"/a.tar": DATA}) as far:
        for settings in (
            ServeSettings(root=root, port=0),
            CacheSettings(origins=(("", far.url),), dir=tmp_path / "cache", size=1 << 26, port=0),
        ):
            with run_embedded(settings) as url:
                assert send_request(url, "/a.tar").body == DATA
                assert ours() != []
    wait_until(lambda: ours() == [], 5)


@pytest.mark.parametrize(
    ("host", "token", "warned"),
    [("0.0.0.0", False, True), ("0.0.0.0", True, False), ("127.0.0.1", False, False), ("localhost", False, False)],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_public_address_without_a_token_causes_a_warning(
    tmp_path: Path, root: Path, engine: str, host: str, token: bool, warned: bool
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    words = ["--token-file", tmp_path / "token"] if token else []
    with run_server(tmp_path, "serve", root, "--host", host, "--port", 0, "--engine", engine, *words) as server:
        assert ("warning: 0.0.0.0" in server.output) == warned
        assert TOKEN not in server.output
        server.process.terminate()
        server.process.wait(60)


@pytest.mark.skipif(not list_addresses(), reason="this machine has only a loopback address")
@pytest.mark.parametrize("engine", ENGINES)
def test_url_of_all_interfaces_can_be_used_by_other_machines(tmp_path: Path, root: Path, engine: str) -> None:
    with run_server(tmp_path, "serve", root, "--host", "0.0.0.0", "--port", 0, "--engine", engine) as server:
        urls = [word for word in server.output.split() if word.startswith("http://")]
        assert server.url in urls
        assert not {urlsplit(url).hostname for url in urls} & {"127.0.0.1", "0.0.0.0"}
        assert send_request(server.url, "/a.tar").body == DATA
        server.process.terminate()
        server.process.wait(60)


# --- Refusals


@pytest.fixture
def _never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a server starts in this process."""

    def fail(self: object) -> None:
        pytest.fail("the server started")

    for engine in (EmbeddedEngine, NginxEngine):
        monkeypatch.setattr(engine, "wait", fail)


@pytest.mark.usefixtures("_never_runs")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["{tmp}/nothing"], 2, "{tmp}/nothing: no such directory"),
        (["{tmp}/root/a.tar"], 2, "{tmp}/root/a.tar: not a directory"),
        ([""], 2, "DIR is empty"),
        (["{tmp}/root", "--port", "65536"], 2, r"--port\b.*\b65535\b.*\b65536\b"),
        (["{tmp}/root", "--port", "-1"], 2, r"--port\b.*\b65535\b.* -1\b"),
        (["{tmp}/root", "--writable", "--host", "0.0.0.0", "--port", "0"], 2, "--token-file"),
        (["{tmp}/root", "--token-file", "{tmp}/nothing"], 2, "{tmp}/nothing: .*token: no such file"),
        (["{tmp}/root", "--token-file", "{tmp}/empty"], 2, r"{tmp}/empty: .*token.*\b16\b.*; .*openssl rand"),
        (["{tmp}/root", "--token-file", "{tmp}/short"], 2, r"{tmp}/short: .*token.*\b16\b.*; .*openssl rand"),
        (["{tmp}/root", "--token-file", "{tmp}/root"], 2, "{tmp}/root: .*token: is a directory"),
    ],
)
def test_serve_refuses_bad_input(
    tmp_path: Path,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    engine: str,
    words: list[str],
    code: int,
    part: str,
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("a-secret\n")
    expect_refusal(
        capsys,
        code,
        part.format(tmp=tmp_path),
        "serve",
        *(word.format(tmp=tmp_path) for word in words),
        "--engine",
        engine,
    )


CACHE = ["--dir", "{tmp}/cache", "--size", "64MiB"]
ONE = ["--origin", "http://127.0.0.1:9/x"]
INVALID_ORIGIN = r"--origin .*\[NAME=\]URL .*http, https, s3 or gs\b.*"


@pytest.mark.usefixtures("_never_runs")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([*CACHE, "--origin", "127.0.0.1:9/x"], f"{INVALID_ORIGIN} '127.0.0.1:9/x'"),
        ([*CACHE, "--origin", "ftp://127.0.0.1/x"], f"{INVALID_ORIGIN} 'ftp://127.0.0.1/x'"),
        ([*CACHE, "--origin", "http://"], f"{INVALID_ORIGIN} 'http://'"),
        ([*CACHE, "--origin", "s3://"], f"{INVALID_ORIGIN} 's3://'"),
        ([*CACHE, "--origin", "http://127.0.0.1:99999/x"], f"{INVALID_ORIGIN} 'http://127.0.0.1:99999/x'"),
        ([*CACHE, *ONE, "--origin", "http://127.0.0.1:9/y"], "--origin: duplicate .*; .*NAME=URL"),
        ([*CACHE, *ONE, "--origin", "y=http://127.0.0.1:9/y"], "--origin NAME=URL"),
        (
            [*CACHE, "--origin", "a=http://127.0.0.1:9/x", "--origin", "a=http://127.0.0.1:9/y"],
            "--origin: duplicate a; .*NAME=URL",
        ),
        ([*CACHE, "--origin", "A B=http://127.0.0.1:9/x"], "--origin: .*name 'A B'"),
        ([*ONE, "--dir", "{tmp}/cache", "--size", "much"], "must be a size"),
        ([*ONE, "--dir", "{tmp}/cache", "--size", "-5GiB"], "must be a size"),
        ([*ONE, "--dir", "{tmp}/cache", "--size", "4PiB"], r"--size is 4 PiB, .*\d [KMGT]iB free; .*--size"),
        ([*ONE, "--dir", "{tmp}/cache", "--size", "1MiB"], "must be >= 32 MiB"),
        ([*CACHE, *ONE, "--revalidate-after", "-1"], r"--revalidate-after\b.* -1\b"),
        ([*CACHE, *ONE, "--revalidate-after", "nan"], r"--revalidate-after\b.* nan\b"),
        ([*CACHE, *ONE, "--port", "65536"], r"--port\b.*\b65535\b.*\b65536\b"),
        ([*CACHE, *ONE, "--token-file", "{tmp}/nothing"], "{tmp}/nothing: .*token: no such file"),
    ],
)
def test_cache_refuses_bad_input_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str, words: list[str], part: str
) -> None:
    expect_refusal(
        capsys,
        2,
        part.format(tmp=tmp_path),
        "cache",
        *(word.format(tmp=tmp_path) for word in words),
        "--engine",
        engine,
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_never_runs")
def test_unknown_engine_is_refused(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expect_refusal(capsys, 2, "one of auto, embedded, nginx", "serve", root, "--engine", "apache")
    words = ["cache", "--dir", tmp_path / "cache", "--size", "64MiB", "--origin"]
    expect_refusal(capsys, 2, "one of auto, embedded, nginx", *words, ONE[1], "--engine", "apache")
    expect_refusal(capsys, 2, "use --engine embedded for buckets", *words, "s3://bucket/set", "--engine", "nginx")
    assert not (tmp_path / "cache").exists()


def test_embedded_engine_is_the_default_without_nginx(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(EmbeddedEngine, "wait", lambda _: None)
    expect_refusal(capsys, 3, "nginx is not installed; run: apt-get install", "serve", root, "--engine", "nginx")
    assert stoker("data", "serve", root, "--port", 0) == 0
    assert "with the embedded engine" in capsys.readouterr().err


@pytest.mark.usefixtures("_never_runs")
@pytest.mark.parametrize("engine", ENGINES)
def test_port_in_use_is_refused(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str], engine: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        expect_refusal(
            capsys, 5, f"127.0.0.1:{port}: .*in use; .*--port", "serve", root, "--port", port, "--engine", engine
        )
        words = ["cache", *ONE, "--dir", tmp_path / "cache", "--size", "64MiB", "--port", port, "--engine", engine]
        expect_refusal(capsys, 5, f"127.0.0.1:{port}: .*in use; .*--port", *words)
    SliceCache(tmp_path / "cache", 1 << 26).close()  # the lock was released


@pytest.mark.usefixtures("_never_runs")
@pytest.mark.parametrize("engine", ENGINES)
def test_unusable_cache_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "cache", Path("/proc/stoker")):
        capsys.readouterr()
        code = stoker("data", "cache", *ONE, "--dir", folder, "--size", "64MiB", "--port", 0, "--engine", engine)
        err = capsys.readouterr().err
        assert code in (2, 5), err
        assert err.startswith("stoker: /")
        assert err.count("\n") == 1


@pytest.mark.usefixtures("_never_runs")
@pytest.mark.parametrize("engine", ENGINES)
def test_cache_directory_without_permission_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    words = ["cache", *ONE, "--dir", tmp_path / "cache", "--size", "64MiB", "--port", 0, "--engine", engine]
    me = os.geteuid()
    os.seteuid(me or 65534)  # root may write everywhere
    try:
        code = stoker("data", *words)
    finally:
        os.seteuid(me)
    err = capsys.readouterr().err
    assert code in (2, 5), err
    assert "permission denied" in err.lower()
    assert err.count("\n") == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_cache_directory_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str) -> None:
    words = ["cache", *ONE, "--dir", tmp_path / "cache", "--size", "64MiB", "--port", 0, "--engine", engine]
    with run_server(tmp_path, *words):
        expect_refusal(capsys, 2, f"{tmp_path}/cache: .*in use .*; .*--dir", *words)
