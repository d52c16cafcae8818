"""`stoker data serve`, `cache`, `warm` and `loadtest` as a user meets them."""

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

from stoker.load.loader import find_one, plan_of
from stoker.sampling.plan import Plan
from stoker.sampling.rank import Seat
from stoker.serve.cache.slices import SliceCache
from stoker.serve.cache.warm import fitting, plan_order
from stoker.serve.embedded import EmbeddedEngine
from stoker.serve.nginx.engine import NginxEngine
from stoker.serve.settings import CacheSettings, ServeSettings
from stoker.storage import Entry
from tests.serve import contract
from tests.serve.contract import DATA, TOKEN, Origin, ask, eventually, has_nginx, origin
from tests.support import servers
from tests.support.trees import digests, make_tree, stoker

ENGINES = [
    "embedded",
    pytest.param("nginx", marks=pytest.mark.skipif(not has_nginx, reason="nginx is not installed")),
]


def running(settings: ServeSettings | CacheSettings) -> AbstractContextManager[str]:
    return contract.running(EmbeddedEngine(settings))


@pytest.fixture
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's server says nothing of clients that leave amid an answer."""
    monkeypatch.setattr(BaseServer, "handle_error", lambda *_: None)


# --- Start and end


class Started(NamedTuple):
    """A command that serves, and what it said until it answered."""

    process: subprocess.Popen[str]
    url: str
    said: str


@contextmanager
def started(tmp_path: Path, *words: object) -> Iterator[Started]:
    """Start a command as a process, with a folder of its own for temporary files."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "stoker", "data", *map(str, words)]
    environ = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stderr is not None
            said = ""
            while " at http" not in said:
                line = process.stderr.readline()
                assert line, said
                said += line
            yield Started(process, said.split(" at ")[-1].split()[0], said)
        finally:
            process.kill()


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found, left = [], [pid]
    while left:
        left += (more := children.get(left.pop(), []))
        found += more
    return found


def serve_words(root: Path, folder: Path, what: str, far: str) -> list[object]:
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
def test_a_signal_ends_it_and_all_it_started(
    tmp_path: Path, root: Path, what: str, engine: str, number: signal.Signals
) -> None:
    with origin({"/a.tar": DATA}) as far:
        words = serve_words(root, tmp_path / "cache", what, far.url)
        with started(tmp_path, *words, "--port", 0, "--engine", engine) as one:
            assert f"with the {engine} engine" in one.said
            assert ask(one.url, "/a.tar").body == DATA
            below = descendants(one.process.pid)
            assert bool(below) == (engine == "nginx")
            one.process.send_signal(number)
            out, err = one.process.communicate(timeout=10)
            assert (one.process.returncode, out, err) == (0, "", "")
    assert [pid for pid in below if Path(f"/proc/{pid}").exists()] == []
    assert list((tmp_path / "tmp").iterdir()) == []
    assert list(digests(root)) == ["a.tar"]
    if what == "cache" and engine == "embedded":
        names = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
        assert names == {"lock", "about.json", "000000"}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_signal_at_any_moment_after_the_start_is_a_clean_end(tmp_path: Path, root: Path, engine: str) -> None:
    for _ in range(3):
        with started(tmp_path, "serve", root, "--port", 0, "--engine", engine) as one:
            one.process.terminate()
            assert one.process.wait(10) == 0


@pytest.mark.parametrize("what", ["serve", "cache"])
def test_it_ends_though_a_client_is_slow(tmp_path: Path, root: Path, what: str) -> None:
    large = bytes(40 << 20)
    (root / "large.tar").write_bytes(large)
    with origin({"/large.tar": large}) as far:
        words = serve_words(root, tmp_path / "cache", what, far.url)
        with started(tmp_path, *words, "--port", 0, "--engine", "embedded") as one:
            parts = urlsplit(one.url)
            with socket.create_connection((parts.hostname, parts.port)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.sendall(b"GET /large.tar HTTP/1.1\r\nHost: x\r\n\r\n")
                assert client.recv(15) == b"HTTP/1.1 200 OK"
                one.process.terminate()
                assert one.process.wait(5) == 0


@pytest.mark.usefixtures("_quiet")
def test_a_cache_ends_though_its_origin_is_silent(tmp_path: Path) -> None:
    size, over = 30 << 20, threading.Event()

    def only_the_first_slice(asked: servers.Asked, _: int) -> servers.Reply:
        if asked.path != "/a.tar":
            return servers.Reply(404)
        if asked.method == "HEAD":
            return servers.Reply(length=size)
        first, last = map(int, asked.headers["range"].removeprefix("bytes=").split("-"))
        if first:
            over.wait(60)
        return servers.Reply(206, bytes(last - first + 1), {"Content-Range": f"bytes {first}-{last}/{size}"})

    with servers.scripted(only_the_first_slice) as far:
        words = ["cache", "--origin", far.url, "--dir", tmp_path / "cache", "--size", "64MiB", "--port", 0]
        try:
            with started(tmp_path, *words) as one, socket.socket() as client:
                parts = urlsplit(one.url)
                client.connect((parts.hostname, parts.port))
                client.sendall(b"GET /a.tar HTTP/1.1\r\nHost: x\r\n\r\n")
                assert client.recv(15) == b"HTTP/1.1 200 OK"
                eventually(lambda: len(far.asked) >= 5)  # version, manifest, and three slices
                one.process.terminate()
                assert one.process.wait(10) == 0
        finally:
            over.set()


def test_an_engine_in_this_process_leaves_no_thread(tmp_path: Path, root: Path) -> None:
    def ours() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("stoker-")]

    with origin({"/a.tar": DATA}) as far:
        for settings in (
            ServeSettings(root=root, port=0),
            CacheSettings(origins=(("", far.url),), dir=tmp_path / "cache", size=1 << 26, port=0),
        ):
            with running(settings) as url:
                assert ask(url, "/a.tar").body == DATA
                assert ours() != []
    eventually(lambda: ours() == [], 5)


@pytest.mark.parametrize(
    ("host", "token", "warned"),
    [("0.0.0.0", False, True), ("0.0.0.0", True, False), ("127.0.0.1", False, False), ("localhost", False, False)],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_it_warns_of_every_network_without_a_token(
    tmp_path: Path, root: Path, engine: str, host: str, token: bool, warned: bool
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    words = ["--token-file", tmp_path / "token"] if token else []
    with started(tmp_path, "serve", root, "--host", host, "--port", 0, "--engine", engine, *words) as one:
        assert ("warning: 0.0.0.0 can be reached by other machines" in one.said) == warned
        assert TOKEN not in one.said
        one.process.terminate()
        one.process.wait(10)


# --- What is refused


@pytest.fixture
def _never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever would start to serve in this process fails instead."""

    def fail(self: object) -> None:
        pytest.fail("it started to serve")

    for engine in (EmbeddedEngine, NginxEngine):
        monkeypatch.setattr(engine, "wait", fail)


def refused(capsys: pytest.CaptureFixture[str], code: int, part: str, *words: object) -> None:
    """Expect one sentence with a part in it, and an exit code."""
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
        (["{tmp}/nothing"], 2, "no such folder"),
        (["{tmp}/root/a.tar"], 2, "is a file"),
        ([""], 2, "DIR is empty"),
        (["{tmp}/root", "--port", "65536"], 2, "--port is 65536"),
        (["{tmp}/root", "--port", "-1"], 2, "--port is -1"),
        (["{tmp}/root", "--writable", "--host", "0.0.0.0", "--port", "0"], 2, "needs a token"),
        (["{tmp}/root", "--token-file", "{tmp}/nothing"], 2, "no such file"),
        (["{tmp}/root", "--token-file", "{tmp}/empty"], 2, "16 or more letters"),
        (["{tmp}/root", "--token-file", "{tmp}/short"], 2, "16 or more letters"),
        (["{tmp}/root", "--token-file", "{tmp}/root"], 2, "is a directory"),
    ],
)
def test_serve_refuses(
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
    refused(capsys, code, part, "serve", *(word.format(tmp=tmp_path) for word in words), "--engine", engine)


CACHE = ["--dir", "{tmp}/cache", "--size", "64MiB"]
ONE = ["--origin", "http://127.0.0.1:9/x"]


@pytest.mark.usefixtures("_never_runs")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([*CACHE, "--origin", "127.0.0.1:9/x"], "must be [NAME=]URL with http, https, s3 or gs"),
        ([*CACHE, "--origin", "ftp://127.0.0.1/x"], "must be [NAME=]URL"),
        ([*CACHE, "--origin", "http://"], "must be [NAME=]URL"),
        ([*CACHE, "--origin", "s3://"], "must be [NAME=]URL"),
        ([*CACHE, "--origin", "http://127.0.0.1:99999/x"], "must be [NAME=]URL"),
        ([*CACHE, *ONE, "--origin", "http://127.0.0.1:9/y"], "comes twice; name each"),
        ([*CACHE, *ONE, "--origin", "y=http://127.0.0.1:9/y"], "several origins need a name each"),
        ([*CACHE, "--origin", "a=http://127.0.0.1:9/x", "--origin", "a=http://127.0.0.1:9/y"], "a comes twice"),
        ([*CACHE, "--origin", "A B=http://127.0.0.1:9/x"], "is no name"),
        ([*ONE, "--dir", "{tmp}/cache", "--size", "much"], "expected a size"),
        ([*ONE, "--dir", "{tmp}/cache", "--size", "-5GiB"], "expected a size"),
        ([*ONE, "--dir", "{tmp}/cache", "--size", "4PiB"], "are free"),
        ([*ONE, "--dir", "{tmp}/cache", "--size", "1MiB"], "must be at least 32 MiB"),
        ([*CACHE, *ONE, "--fresh", "-1"], "--fresh is -1"),
        ([*CACHE, *ONE, "--fresh", "nan"], "--fresh is nan"),
        ([*CACHE, *ONE, "--port", "65536"], "--port is 65536"),
        ([*CACHE, *ONE, "--token-file", "{tmp}/nothing"], "no such file"),
    ],
)
def test_cache_refuses_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str, words: list[str], part: str
) -> None:
    refused(capsys, 2, part, "cache", *(word.format(tmp=tmp_path) for word in words), "--engine", engine)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_never_runs")
def test_engines_that_there_are_not(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, 2, "one of auto, embedded, nginx", "serve", root, "--engine", "apache")
    words = ["cache", "--dir", tmp_path / "cache", "--size", "64MiB", "--origin"]
    refused(capsys, 2, "one of auto, embedded, nginx", *words, ONE[1], "--engine", "apache")
    refused(capsys, 2, "use --engine embedded for buckets", *words, "s3://bucket/set", "--engine", "nginx")
    assert not (tmp_path / "cache").exists()


def test_without_nginx_there_is_the_embedded_engine(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(EmbeddedEngine, "wait", lambda _: None)
    refused(capsys, 3, "nginx is not installed; run: apt-get install", "serve", root, "--engine", "nginx")
    assert stoker("data", "serve", root, "--port", 0) == 0
    assert "with the embedded engine" in capsys.readouterr().err


@pytest.mark.usefixtures("_never_runs")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_port_that_is_taken(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str], engine: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(capsys, 5, "is taken; choose another --port", "serve", root, "--port", port, "--engine", engine)
        words = ["cache", *ONE, "--dir", tmp_path / "cache", "--size", "64MiB", "--port", port, "--engine", engine]
        refused(capsys, 5, "is taken; choose another --port", *words)
    SliceCache(tmp_path / "cache", 1 << 26).close()  # it was let go


@pytest.mark.usefixtures("_never_runs")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_cache_folder_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str) -> None:
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
def test_a_cache_folder_without_permission(tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str) -> None:
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
def test_one_folder_is_for_one_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str) -> None:
    words = ["cache", *ONE, "--dir", tmp_path / "cache", "--size", "64MiB", "--port", 0, "--engine", engine]
    with started(tmp_path, *words):
        refused(capsys, 2, "uses this folder", *words)


# --- warm


class Far(NamedTuple):
    """A set at an origin, a cache in front of it, and the set on disk."""

    origin: Origin
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
def far(shards: Path, tmp_path: Path) -> Iterator[Far]:
    files = {
        f"/set/train/{path.relative_to(shards)}": path.read_bytes() for path in shards.rglob("*") if path.is_file()
    }
    with ExitStack() as stack:
        one = stack.enter_context(origin(files))
        settings = CacheSettings(origins=(("pets", f"{one.url}/set"),), dir=tmp_path / "cache", size=1 << 26, port=0)
        cache = stack.enter_context(running(settings))
        yield Far(one, cache, f"{one.url}/set/train", str(shards))


def order(local: str, sampling: str = "exact", seed: int = 0, epoch: int = 0) -> list[str]:
    """The shards in the order in which the Loader first needs them."""
    one = find_one(local)
    drawn = plan_of(one, sampling=sampling, seed=seed).epoch(epoch, Seat(0, 1))
    return list(dict.fromkeys(one.shards[number].name for number in drawn.ahead(0, windows=100).tolist()))


def fetched(far: Far) -> list[str]:
    """The shards that the origin was asked for, in order."""
    return [path.rpartition("/")[2] for path, _ in far.origin.gets if path.endswith(".tar")]


def warmed(capsys: pytest.CaptureFixture[str], far: Far, *words: object) -> Any:
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
def test_warm_fills_in_the_order_of_the_plan(
    far: Far, capsys: pytest.CaptureFixture[str], words: Sequence[object], drawn: tuple[str, int, int]
) -> None:
    expected = order(far.local, *drawn)
    told = warmed(capsys, far, *words)
    assert told["shards"] == fetched(far) == expected
    assert told["bytes"] == sum((Path(far.local) / name).stat().st_size for name in expected)
    for name in expected:
        assert ask(far.cache, f"/pets/train/{name}").headers["x-cache"] == "HIT"
    assert fetched(far) == expected


def test_warm_leaves_out_what_would_push_out_what_is_needed_first() -> None:
    shards = [Entry(f"{number}", 10) for number in range(10)]
    assert fitting(shards, 50) == shards[:4]
    assert fitting(shards, 1000) == shards


def test_the_first_batches_need_what_is_warmed_first(far: Far) -> None:
    one = find_one(far.local)
    plan = plan_of(one, seed=3)
    epoch = plan.epoch(0, Seat(0, 1))
    first = epoch.at(np.arange(8)).shards
    names = order(far.local, seed=3)
    assert {one.shards[number].name for number in first.tolist()} <= set(names[: plan.lanes * plan.window])


def test_a_plan_that_draws_few_shards_often_is_warmed_whole() -> None:
    sizes = np.array([1000, 1, 1, 1], dtype=np.int64)
    shards = [Entry(str(number), 1) for number in range(4)]
    for seed in range(50):
        plan = Plan(data="", sizes=sizes, mode="resampled", seed=seed, lanes=1, window=1)
        needed = set(plan.epoch(0, Seat(0, 1)).at(np.arange(plan.samples)).shards.tolist())
        assert {int(entry.name) for entry in plan_order(plan, shards)} == needed


def test_warm_takes_only_some_shards(far: Far, capsys: pytest.CaptureFixture[str]) -> None:
    assert warmed(capsys, far, "--shards", "0..3")["shards"] == fetched(far) == order(far.local)[:4]
    assert warmed(capsys, far, "--shards", "10..")["shards"] == order(far.local)[10:]
    for text in ("3", "a..b", "3..1", "12..20", "-1..3", ""):
        capsys.readouterr()
        assert stoker("data", "warm", far.url, "--via", far.cache, f"--shards={text}") == 2
        assert "--shards is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        ("program: {module: x}\ndata: {train: http://x/train}", ("exact", 0)),
        ("program: {module: x}\ndata: {sampling: join, cache: {dir: /c, size: 2Gi}}\nworkers: 4", ("join", 0)),
        ("program: {module: x, args: [--epochs, 90, --seed, 7]}\ndata: {sampling: resampled}", ("resampled", 7)),
        ("program: {script: x.py, args: [--seed=11, -v]}", ("exact", 11)),
    ],
)
def test_warm_takes_the_order_from_a_job(
    far: Far, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, drawn: tuple[str, int]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"name: x\n{text}")
    expected = order(far.local, *drawn)
    assert warmed(capsys, far, "--plan", job, "--shards", "0..3")["shards"] == expected[:4]
    assert warmed(capsys, far, "--plan", job)["shards"] == expected
    assert warmed(capsys, far, "--plan", job, "--seed", 5)["shards"] == order(far.local, drawn[0], 5)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("name: x", "program: missing"),
        ("", "name: missing"),
        ("data: [", "not valid YAML"),
        ("data: http://x/train", "data: expected a mapping"),
        ("data: {sampling: often}", "data.sampling: expected one of 'exact', 'join', 'resampled', got 'often'"),
        ("name: x\nprogram: {module: x, args: [--seed, x]}", "--seed is 'x', and must be a whole number"),
        ("name: x\nprogram: {module: x, args: [--seed]}", "--seed is '', and must be a whole number"),
        (None, "cannot be read: no such file"),
    ],
)
def test_jobs_that_tell_no_order_are_refused(
    far: Far, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, part: str
) -> None:
    if text is not None:
        (tmp_path / "job.yaml").write_text(text)
    refused(capsys, 2, part, "warm", far.url, "--via", far.cache, "--plan", tmp_path / "job.yaml")
    assert fetched(far) == []


def test_warm_by_a_pattern_and_through_a_token(far: Far, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = CacheSettings(
        origins=(("", far.origin.url),), dir=tmp_path / "guarded", size=1 << 26, port=0, token=TOKEN
    )
    with running(settings) as url:
        via = url.replace("://", f"://stoker:{TOKEN}@")
        assert stoker("data", "warm", f"{far.url}/pets-train-{{000000..000003}}.tar", "--via", via) == 0
        err = capsys.readouterr().err
        assert "4 shards" in err
        assert TOKEN not in err
        assert len(set(fetched(far))) == 4
        refused(capsys, 5, "", "warm", far.url, "--via", url)


def test_warm_wants_a_cache_that_serves_the_set(far: Far, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(ServeSettings(root=root, port=0)) as url:
        refused(capsys, 5, "is not a cache of stoker's", "warm", far.url, "--via", url)
    refused(
        capsys, 5, "the server does not answer", "warm", far.url, "--via", f"http://127.0.0.1:{servers.free_port()}"
    )
    for url in (f"{far.origin.url}/other/train", f"{far.origin.url}/setting", "s3://bucket/set"):
        refused(capsys, 2, "this cache does not serve", "warm", url, "--via", far.cache)
    refused(capsys, 2, "no such", "warm", f"{far.origin.url}/set/none/a.tar", "--via", far.cache)
    refused(capsys, 2, "--jobs is 0", "warm", far.url, "--via", far.cache, "--jobs", 0)
    refused(capsys, 2, "--epoch is -1", "warm", far.url, "--via", far.cache, "--epoch", -1)


# --- loadtest


def loaded(capsys: pytest.CaptureFixture[str], url: str, *words: object) -> Any:
    capsys.readouterr()
    assert stoker("data", "loadtest", url, "--clients", 4, "--seconds", 0.5, *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_loadtest_measures_a_server(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(ServeSettings(root=root, port=0)) as url:
        told = loaded(capsys, url)
        assert stoker("data", "loadtest", url, "--clients", 2, "--seconds", 0.2) == 0
        out = capsys.readouterr().out
    assert (told["clients"], told["errors"], told["reasons"]) == (4, 0, {})
    assert 0.4 < told["seconds"] < 2
    assert told["requests"] * len(DATA) <= told["bytes"] <= (told["requests"] + 4) * len(DATA)
    assert told["bytes_per_s"] == pytest.approx(told["bytes"] / told["seconds"])
    assert told["requests_per_s"] == pytest.approx(told["requests"] / told["seconds"])
    assert 0 < told["p50_s"] <= told["p99_s"] < told["seconds"] + 0.1
    for column in ("GB/s", "requests/s", "p50 ms", "p99 ms", "errors"):
        assert column in out


def test_loadtest_by_ranges(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(ServeSettings(root=root, port=0)) as url:
        told = loaded(capsys, url, "--range", "64KiB")
    assert told["errors"] == 0
    assert told["requests"] * 65536 <= told["bytes"] <= (told["requests"] + 4) * 65536


def test_loadtest_with_a_token(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(ServeSettings(root=root, port=0, token=TOKEN)) as url:
        assert loaded(capsys, url.replace("://", f"://stoker:{TOKEN}@"))["errors"] == 0
        refused(capsys, 5, "denied", "loadtest", url)


LISTING = servers.as_json([{"name": "a.tar", "type": "file", "size": 5}, {"name": "b.tar", "type": "file", "size": 5}])


@pytest.mark.usefixtures("_quiet")
def test_loadtest_counts_and_tells_errors(capsys: pytest.CaptureFixture[str]) -> None:
    def half(asked: servers.Asked, _: int) -> servers.Reply:
        if asked.path.endswith("/"):
            return LISTING
        return servers.Reply(body=b"right") if asked.path == "/a.tar" else servers.Reply(500)

    def short(asked: servers.Asked, _: int) -> servers.Reply:
        return LISTING if asked.path.endswith("/") else servers.Reply(body=b"odd")

    with servers.scripted(half) as one:
        told = loaded(capsys, one.url)
        assert told["errors"] == told["reasons"]["the server answered 500"] > 0
        assert told["requests"] > 0
        assert stoker("data", "loadtest", one.url, "--clients", 4, "--seconds", 0.3) == 0
        assert "the server answered 500" in capsys.readouterr().err
    with servers.scripted(short) as one:
        told = loaded(capsys, one.url)
        assert told["requests"] == 0
        assert told["reasons"]["3 bytes came instead of 5"] == told["errors"]


@pytest.mark.usefixtures("_quiet")
def test_loadtest_fails_when_nothing_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    def failing(asked: servers.Asked, _: int) -> servers.Reply:
        return LISTING if asked.path.endswith("/") else servers.Reply(500)

    with servers.scripted(failing) as one:
        words = ["loadtest", one.url, "--clients", 2, "--seconds", 0.3]
        refused(capsys, 5, "no client could read anything: the server answered 500", *words)
    with servers.scripted(lambda *_: servers.Reply(500)) as one:
        refused(capsys, 5, "500", "loadtest", one.url, "--seconds", 0.3)
    nowhere = f"http://127.0.0.1:{servers.free_port()}"
    refused(capsys, 5, "the server does not answer", "loadtest", nowhere, "--seconds", 0.3)


@pytest.mark.usefixtures("_quiet")
def test_loadtest_does_not_wait_for_a_silent_server(capsys: pytest.CaptureFixture[str]) -> None:
    over = threading.Event()

    def silent(asked: servers.Asked, _: int) -> servers.Reply:
        if asked.path.endswith("/"):
            return LISTING
        over.wait(60)
        return servers.Reply(500)

    with servers.scripted(silent) as one:
        began = time.monotonic()
        try:
            words = ["loadtest", one.url, "--clients", 4, "--seconds", 0.3]
            refused(capsys, 5, "no client could read anything: nothing came in time", *words)
            assert time.monotonic() - began < 10
        finally:
            over.set()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["s3://bucket/x"], "only http(s) servers"),
        (["{tmp}"], "only http(s) servers"),
        (["http://127.0.0.1:9", "--clients", "0"], "--clients is 0"),
        (["http://127.0.0.1:9", "--seconds", "0"], "--seconds is 0"),
        (["http://127.0.0.1:9", "--seconds", "nan"], "--seconds is nan"),
        (["http://127.0.0.1:9", "--range", "much"], "expected a size"),
        (["http://127.0.0.1:9", "--range", "0"], "--range is 0"),
        (["http://127.0.0.1:99999"], "is not a URL"),
    ],
)
def test_loadtest_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], part: str) -> None:
    refused(capsys, 2, part, "loadtest", *(word.format(tmp=tmp_path) for word in words))


def test_loadtest_of_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    with running(ServeSettings(root=tmp_path / "empty", port=0)) as url:
        refused(capsys, 2, "there are no files to read", "loadtest", url)
