"""`stoker data serve`, `cache`, `warm` and `loadtest` as processes and as calls: output, signals, refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from socketserver import BaseServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import pytest

from stoker.load.planning import find_shard_set, plan_sampling
from stoker.sampling.plan import SamplingPlan
from stoker.sampling.rank import Rank
from stoker.serve.cache.slices import SliceCache
from stoker.serve.cache.warm import order_shards, select_fitting
from stoker.serve.embedded import EmbeddedEngine
from stoker.serve.nginx.engine import NginxEngine
from stoker.serve.settings import CacheSettings, ServeSettings
from stoker.storage import Entry
from tests.support.engines import HAS_NGINX, TOKEN, run_engine
from tests.support.http_origin import DATA, OriginServer, run_origin
from tests.support.http_requests import send_request
from tests.support import servers
from tests.support.trees import digests, make_tree, stoker
from tests.support.waiting import wait_until

ENGINES = [
    "embedded",
    pytest.param("nginx", marks=pytest.mark.skipif(not HAS_NGINX, reason="nginx is not installed")),
]


def running(settings: ServeSettings | CacheSettings) -> AbstractContextManager[str]:
    return run_engine(EmbeddedEngine(settings))


@pytest.fixture
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence the test server about clients that disconnect during a response."""
    monkeypatch.setattr(BaseServer, "handle_error", lambda *_: None)


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


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a.tar").write_bytes(DATA)
    return tmp_path / "root"


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
                assert server.process.wait(60) == 0


@pytest.mark.usefixtures("_quiet")
def test_cache_stops_despite_a_silent_origin(tmp_path: Path) -> None:
    size, over = 30 << 20, threading.Event()

    def only_the_first_slice(asked: servers.RecordedRequest, _: int) -> servers.Reply:
        if asked.path != "/a.tar":
            return servers.Reply(404)
        if asked.method == "HEAD":
            return servers.Reply(length=size)
        first, last = map(int, asked.headers["range"].removeprefix("bytes=").split("-"))
        if first:
            over.wait(60)
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
                assert server.process.wait(60) == 0
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
            with running(settings) as url:
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


# --- Refusals


@pytest.fixture
def _never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a server starts in this process."""

    def fail(self: object) -> None:
        pytest.fail("the server started")

    for engine in (EmbeddedEngine, NginxEngine):
        monkeypatch.setattr(engine, "wait", fail)


def expect_refusal(capsys: pytest.CaptureFixture[str], code: int, part: str, *words: object) -> None:
    """Expect an exit code and one sentence that contains `part`."""
    capsys.readouterr()
    assert stoker("data", *words) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("stoker: "), err
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert part in err


@pytest.mark.usefixtures("_never_runs")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["{tmp}/nothing"], 2, "{tmp}/nothing"),
        (["{tmp}/root/a.tar"], 2, "{tmp}/root/a.tar"),
        ([""], 2, "DIR"),
        (["{tmp}/root", "--port", "65536"], 2, "65536"),
        (["{tmp}/root", "--port", "-1"], 2, "-1"),
        (["{tmp}/root", "--writable", "--host", "0.0.0.0", "--port", "0"], 2, "--token-file"),
        (["{tmp}/root", "--token-file", "{tmp}/nothing"], 2, "{tmp}/nothing"),
        (["{tmp}/root", "--token-file", "{tmp}/empty"], 2, "16"),
        (["{tmp}/root", "--token-file", "{tmp}/short"], 2, "16"),
        (["{tmp}/root", "--token-file", "{tmp}/root"], 2, "{tmp}/root"),
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


@pytest.mark.usefixtures("_never_runs")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([*CACHE, "--origin", "127.0.0.1:9/x"], "127.0.0.1:9/x"),
        ([*CACHE, "--origin", "ftp://127.0.0.1/x"], "ftp://127.0.0.1/x"),
        ([*CACHE, "--origin", "http://"], "'http://'"),
        ([*CACHE, "--origin", "s3://"], "'s3://'"),
        ([*CACHE, "--origin", "http://127.0.0.1:99999/x"], "99999"),
        ([*CACHE, *ONE, "--origin", "http://127.0.0.1:9/y"], "--origin: duplicate"),
        ([*CACHE, *ONE, "--origin", "y=http://127.0.0.1:9/y"], "--origin NAME=URL"),
        (
            [*CACHE, "--origin", "a=http://127.0.0.1:9/x", "--origin", "a=http://127.0.0.1:9/y"],
            "--origin: duplicate a;",
        ),
        ([*CACHE, "--origin", "A B=http://127.0.0.1:9/x"], "'A B'"),
        ([*ONE, "--dir", "{tmp}/cache", "--size", "much"], "expected a size"),
        ([*ONE, "--dir", "{tmp}/cache", "--size", "-5GiB"], "expected a size"),
        ([*ONE, "--dir", "{tmp}/cache", "--size", "4PiB"], "--size is 4 PiB"),
        ([*ONE, "--dir", "{tmp}/cache", "--size", "1MiB"], "must be at least 32 MiB"),
        ([*CACHE, *ONE, "--revalidate-after", "-1"], "--revalidate-after"),
        ([*CACHE, *ONE, "--revalidate-after", "nan"], "nan"),
        ([*CACHE, *ONE, "--port", "65536"], "65536"),
        ([*CACHE, *ONE, "--token-file", "{tmp}/nothing"], "{tmp}/nothing"),
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
        expect_refusal(capsys, 5, "choose another --port", "serve", root, "--port", port, "--engine", engine)
        words = ["cache", *ONE, "--dir", tmp_path / "cache", "--size", "64MiB", "--port", port, "--engine", engine]
        expect_refusal(capsys, 5, "choose another --port", *words)
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
        expect_refusal(capsys, 2, str(tmp_path / "cache"), *words)


# --- warm


class RemoteSet(NamedTuple):
    """A shard set at an origin, a cache in front of it, and the same set on disk."""

    origin: OriginServer
    cache: str
    url: str
    local: str


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty images in twelve shards."""
    folder = tmp_path_factory.mktemp("warm")
    make_tree(folder / "pets", {"ant": 20, "bee": 20, "cat": 20})
    assert stoker("data", "convert", folder / "pets", folder / "shards", "--shard-samples", 5) == 0
    return folder / "shards" / "train"


@pytest.fixture
def far(shards: Path, tmp_path: Path) -> Iterator[RemoteSet]:
    files = {
        f"/set/train/{path.relative_to(shards)}": path.read_bytes() for path in shards.rglob("*") if path.is_file()
    }
    with ExitStack() as stack:
        one = stack.enter_context(run_origin(files))
        settings = CacheSettings(origins=(("pets", f"{one.url}/set"),), dir=tmp_path / "cache", size=1 << 26, port=0)
        cache = stack.enter_context(running(settings))
        yield RemoteSet(one, cache, f"{one.url}/set/train", str(shards))


def loader_order(local: str, sampling: str = "exact", seed: int = 0, epoch: int = 0) -> list[str]:
    """Return the shards in the order in which the Loader first reads them."""
    one = find_shard_set(local)
    drawn = plan_sampling(one, sampling=sampling, seed=seed).epoch(epoch, Rank(0, 1))
    return list(dict.fromkeys(one.shards[number].name for number in drawn.upcoming_shards(0, windows=100).tolist()))


def fetched_shards(far: RemoteSet) -> list[str]:
    """Return the shards requested from the origin, in order."""
    return [path.rpartition("/")[2] for path, _ in far.origin.get_requests if path.endswith(".tar")]


def run_warm(capsys: pytest.CaptureFixture[str], far: RemoteSet, *words: object) -> Any:
    capsys.readouterr()
    assert stoker("data", "warm", far.url, "--via", far.cache, "--jobs", 1, *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "drawn"),
    [
        ([], ("exact", 0, 0)),
        (["--seed", 7], ("exact", 7, 0)),
        (["--seed", 7, "--epoch", 3], ("exact", 7, 3)),
        (["--sampling", "join", "--seed", 2], ("join", 2, 0)),
        (["--sampling", "resampled", "--seed", 2], ("resampled", 2, 0)),
    ],
)
def test_warm_follows_the_sampling_plan(
    far: RemoteSet, capsys: pytest.CaptureFixture[str], words: Sequence[object], drawn: tuple[str, int, int]
) -> None:
    expected = loader_order(far.local, *drawn)
    report = run_warm(capsys, far, *words)
    assert report["shards"] == fetched_shards(far) == expected
    assert report["bytes"] == sum((Path(far.local) / name).stat().st_size for name in expected)
    for name in expected:
        assert send_request(far.cache, f"/pets/train/{name}").headers["x-cache"] == "HIT"
    assert fetched_shards(far) == expected


def test_warm_skips_shards_that_would_evict_earlier_ones() -> None:
    shards = [Entry(f"{number}", 10) for number in range(10)]
    assert select_fitting(shards, 50) == shards[:4]
    assert select_fitting(shards, 1000) == shards


def test_first_batches_use_the_first_warmed_shards(far: RemoteSet) -> None:
    one = find_shard_set(far.local)
    plan = plan_sampling(one, seed=3)
    epoch = plan.epoch(0, Rank(0, 1))
    first = epoch.locate(np.arange(8)).shards
    names = loader_order(far.local, seed=3)
    assert {one.shards[number].name for number in first.tolist()} <= set(names[: plan.lanes * plan.window])


def test_resampled_plan_warms_every_drawn_shard() -> None:
    sizes = np.array([1000, 1, 1, 1], dtype=np.int64)
    shards = [Entry(str(number), 1) for number in range(4)]
    for seed in range(50):
        plan = SamplingPlan(data="", sizes=sizes, mode="resampled", seed=seed, lanes=1, window=1)
        needed = set(plan.epoch(0, Rank(0, 1)).locate(np.arange(plan.samples)).shards.tolist())
        assert {int(entry.name) for entry in order_shards(plan, shards)} == needed


def test_warm_a_range_of_shards(far: RemoteSet, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_warm(capsys, far, "--shards", "0..3")["shards"] == fetched_shards(far) == loader_order(far.local)[:4]
    assert run_warm(capsys, far, "--shards", "10..")["shards"] == loader_order(far.local)[10:]
    for text in ("3", "a..b", "3..1", "12..20", "-1..3", ""):
        capsys.readouterr()
        assert stoker("data", "warm", far.url, "--via", far.cache, f"--shards={text}") == 2
        assert "--shards" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        ("program: {module: x}\ndata: {train: http://x/train}", ("exact", 0)),
        ("program: {module: x}\ndata: {sampling: join, cache: {dir: /c, size: 2Gi}}\nworkers: 4", ("join", 0)),
        ("program: {module: x, args: [--epochs, 90, --seed, 7]}\ndata: {sampling: resampled}", ("resampled", 7)),
        ("program: {script: x.py, args: [--seed=11, -v]}", ("exact", 11)),
    ],
)
def test_warm_takes_sampling_and_seed_from_a_job_file(
    far: RemoteSet, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, drawn: tuple[str, int]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"name: x\n{text}")
    expected = loader_order(far.local, *drawn)
    assert run_warm(capsys, far, "--job", job, "--shards", "0..3")["shards"] == expected[:4]
    assert run_warm(capsys, far, "--job", job)["shards"] == expected
    assert run_warm(capsys, far, "--job", job, "--seed", 5)["shards"] == loader_order(far.local, drawn[0], 5)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("name: x", "program"),
        ("", "name"),
        ("data: [", "YAML"),
        ("data: http://x/train", "data: "),
        ("data: {sampling: often}", "data.sampling: "),
        ("name: x\nprogram: {module: x, args: [--seed, x]}", "'x'"),
        ("name: x\nprogram: {module: x, args: [--seed]}", "--seed"),
        (None, "job.yaml"),
    ],
)
def test_warm_refuses_bad_job_files(
    far: RemoteSet, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, part: str
) -> None:
    if text is not None:
        (tmp_path / "job.yaml").write_text(text)
    expect_refusal(capsys, 2, part, "warm", far.url, "--via", far.cache, "--job", tmp_path / "job.yaml")
    assert fetched_shards(far) == []


def test_warm_a_pattern_through_a_cache_with_a_token(
    far: RemoteSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = CacheSettings(
        origins=(("", far.origin.url),), dir=tmp_path / "guarded", size=1 << 26, port=0, token=TOKEN
    )
    with running(settings) as url:
        via = url.replace("://", f"://stoker:{TOKEN}@")
        assert stoker("data", "warm", f"{far.url}/pets-train-{{000000..000003}}.tar", "--via", via) == 0
        err = capsys.readouterr().err
        assert "4 shards" in err
        assert TOKEN not in err
        assert len(set(fetched_shards(far))) == 4
        expect_refusal(capsys, 5, "", "warm", far.url, "--via", url)


def test_warm_refuses_a_cache_that_does_not_serve_the_set(
    far: RemoteSet, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(ServeSettings(root=root, port=0)) as url:
        expect_refusal(capsys, 5, "stoker data cache", "warm", far.url, "--via", url)
    expect_refusal(
        capsys, 5, "tried 5 times", "warm", far.url, "--via", f"http://127.0.0.1:{servers.free_port()}"
    )
    for url in (f"{far.origin.url}/other/train", f"{far.origin.url}/setting", "s3://bucket/set"):
        expect_refusal(capsys, 2, "its origins are", "warm", url, "--via", far.cache)
    expect_refusal(capsys, 2, "no such", "warm", f"{far.origin.url}/set/none/a.tar", "--via", far.cache)
    expect_refusal(capsys, 2, "--jobs", "warm", far.url, "--via", far.cache, "--jobs", 0)
    expect_refusal(capsys, 2, "--epoch", "warm", far.url, "--via", far.cache, "--epoch", -1)


# --- loadtest


def run_loadtest(capsys: pytest.CaptureFixture[str], url: str, *words: object) -> Any:
    capsys.readouterr()
    assert stoker("data", "loadtest", url, "--clients", 4, "--seconds", 0.5, *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_loadtest_measures_a_server(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(ServeSettings(root=root, port=0)) as url:
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
    with running(ServeSettings(root=root, port=0)) as url:
        report = run_loadtest(capsys, url, "--range", "64KiB")
    assert report["errors"] == 0
    assert report["requests"] * 65536 <= report["bytes"] <= (report["requests"] + 4) * 65536


def test_loadtest_with_a_token(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(ServeSettings(root=root, port=0, token=TOKEN)) as url:
        assert run_loadtest(capsys, url.replace("://", f"://stoker:{TOKEN}@"))["errors"] == 0
        expect_refusal(capsys, 5, "denied", "loadtest", url)


LISTING = servers.json_reply(
    [{"name": "a.tar", "type": "file", "size": 5}, {"name": "b.tar", "type": "file", "size": 5}]
)


@pytest.mark.usefixtures("_quiet")
def test_loadtest_counts_errors_by_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def half(asked: servers.RecordedRequest, _: int) -> servers.Reply:
        if asked.path.endswith("/"):
            return LISTING
        return servers.Reply(body=b"right") if asked.path == "/a.tar" else servers.Reply(500)

    def short(asked: servers.RecordedRequest, _: int) -> servers.Reply:
        return LISTING if asked.path.endswith("/") else servers.Reply(body=b"odd")

    with servers.scripted_server(half) as one:
        report = run_loadtest(capsys, one.url)
        assert report["errors"] == report["reasons"]["server responded with HTTP 500"] > 0
        assert report["requests"] > 0
        assert stoker("data", "loadtest", one.url, "--clients", 4, "--seconds", 0.3) == 0
        assert "HTTP 500" in capsys.readouterr().err
    with servers.scripted_server(short) as one:
        report = run_loadtest(capsys, one.url)
        assert report["requests"] == 0
        assert report["reasons"]["received 3 bytes, expected 5"] == report["errors"]


@pytest.mark.usefixtures("_quiet")
def test_loadtest_fails_when_nothing_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    def failing(asked: servers.RecordedRequest, _: int) -> servers.Reply:
        return LISTING if asked.path.endswith("/") else servers.Reply(500)

    with servers.scripted_server(failing) as one:
        words = ["loadtest", one.url, "--clients", 2, "--seconds", 0.3]
        expect_refusal(capsys, 5, "HTTP 500", *words)
    with servers.scripted_server(lambda *_: servers.Reply(500)) as one:
        expect_refusal(capsys, 5, "500", "loadtest", one.url, "--seconds", 0.3)
    nowhere = f"http://127.0.0.1:{servers.free_port()}"
    expect_refusal(capsys, 5, "tried 5 times", "loadtest", nowhere, "--seconds", 0.3)


@pytest.mark.usefixtures("_quiet")
def test_loadtest_does_not_wait_for_a_silent_server(capsys: pytest.CaptureFixture[str]) -> None:
    over = threading.Event()

    def silent(asked: servers.RecordedRequest, _: int) -> servers.Reply:
        if asked.path.endswith("/"):
            return LISTING
        over.wait(60)
        return servers.Reply(500)

    with servers.scripted_server(silent) as one:
        began = time.monotonic()
        try:
            words = ["loadtest", one.url, "--clients", 4, "--seconds", 0.3]
            expect_refusal(capsys, 5, "no client received any data", *words)
            assert time.monotonic() - began < 50  # the server would answer after 60 s
        finally:
            over.set()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["s3://bucket/x"], "http"),
        (["{tmp}"], "http"),
        (["http://127.0.0.1:9", "--clients", "0"], "--clients"),
        (["http://127.0.0.1:9", "--seconds", "0"], "--seconds"),
        (["http://127.0.0.1:9", "--seconds", "nan"], "nan"),
        (["http://127.0.0.1:9", "--range", "much"], "expected a size"),
        (["http://127.0.0.1:9", "--range", "0"], "--range"),
        (["http://127.0.0.1:99999"], "http://127.0.0.1:99999: "),
    ],
)
def test_loadtest_refuses_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], part: str
) -> None:
    expect_refusal(capsys, 2, part, "loadtest", *(word.format(tmp=tmp_path) for word in words))


def test_loadtest_refuses_an_empty_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    with running(ServeSettings(root=tmp_path / "empty", port=0)) as url:
        expect_refusal(capsys, 2, url, "loadtest", url)
