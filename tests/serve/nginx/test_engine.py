"""nginx engine: the data server, writes, the token, and the lifecycle of the process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from stoker.core.processes import child_pids, handles_signal
from stoker.errors import InputError, MissingProgramError, StokerError, UnavailableError
from stoker.serve.nginx.config import NginxCacheConfig, NginxServeConfig
from stoker.serve.nginx.engine import NginxEngine
from tests.support.engines import HAS_NGINX
from tests.support.http_requests import send_raw, send_request
from tests.support.nginx_engines import (
    MIB,
    SECRET,
    TOKEN,
    read_stats,
    run_nginx,
    run_server,
    traversal_paths,
)
from tests.support.waiting import is_alive, wait_until

pytestmark = pytest.mark.skipif(not HAS_NGINX, reason="nginx is not installed")


# --- Data server


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("files")
    (base / "secret").write_bytes(SECRET)
    root = base / "root"
    (root / "sub/deep").mkdir(parents=True)
    (root / "ten").write_bytes(b"0123456789")
    (root / "empty").write_bytes(b"")
    (root / "sub/a b#%é?.tar").write_bytes(b"odd")
    (root / "sub/index.html").write_bytes(b"a file like others")
    (root / "out").symlink_to(base / "secret")
    (root / "outside").symlink_to(base)
    (root / "sub/up").symlink_to("../../secret")
    (root / "sub/folder").symlink_to("../..")
    (root / "loop").symlink_to("loop")
    (root / "inside").symlink_to("ten")
    return root


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with run_server(root) as url:
        yield url


@pytest.mark.parametrize(
    ("range_header", "status", "body", "content_range"),
    [
        ("bytes=0-0", 206, b"0", "bytes 0-0/10"),
        ("bytes=3-5", 206, b"345", "bytes 3-5/10"),
        ("bytes=8-", 206, b"89", "bytes 8-9/10"),
        ("bytes=8-99", 206, b"89", "bytes 8-9/10"),
        ("bytes=-3", 206, b"789", "bytes 7-9/10"),
        ("bytes=10-", 416, None, "bytes */10"),
        ("bytes=5-4", 416, None, "bytes */10"),
        ("lines=1-2", 200, b"0123456789", None),
    ],
)
def test_ranges(url: str, range_header: str, status: int, body: bytes | None, content_range: str | None) -> None:
    response = send_request(url, "/ten", Range=range_header)
    assert (response.status, response.headers.get("content-range")) == (status, content_range)
    assert body is None or response.body == body


def test_multiple_ranges_get_a_multipart_response(url: str) -> None:
    response = send_request(url, "/ten", Range="bytes=0-1,8-9")
    assert response.status == 206
    assert response.headers["content-type"].startswith("multipart/byteranges")
    assert b"\r\n\r\n01\r\n" in response.body
    assert b"\r\n\r\n89\r\n" in response.body


def test_head_has_content_length_and_no_body(url: str) -> None:
    response = send_request(url, "/ten", "HEAD")
    assert (response.status, response.headers["content-length"], response.body) == (200, "10", b"")
    assert response.headers["accept-ranges"] == "bytes"


def test_conditional_requests(url: str) -> None:
    whole = send_request(url, "/ten")
    etag = whole.headers["etag"]
    assert send_request(url, "/ten", If_None_Match=etag).status == 304
    assert send_request(url, "/ten", If_None_Match='"other"').body == b"0123456789"
    assert send_request(url, "/ten", If_Modified_Since=whole.headers["last-modified"]).status == 304
    assert send_request(url, "/ten", If_Match='"other"').status == 412
    assert send_request(url, "/ten", Range="bytes=0-0", If_Range='"other"').status == 200
    assert send_request(url, "/ten", Range="bytes=0-0", If_Range=etag).status == 206


def test_responses_are_not_compressed(url: str) -> None:
    assert "content-encoding" not in send_request(url, "/ten", Accept_Encoding="gzip").headers


def test_folder_listing_is_json_despite_an_index_page(url: str) -> None:
    rows = json.loads(send_request(url, "/sub/").body)
    assert {row["name"] for row in rows} >= {"deep", "a b#%é?.tar", "index.html"}
    response = send_request(url, "/sub", Host="evil.example")
    assert (response.status, response.headers["location"]) == (301, "/sub/")


def test_file_names_with_special_characters(url: str) -> None:
    assert send_request(url, "/sub/a%20b%23%25%C3%A9%3F.tar").body == b"odd"


def test_path_traversal_is_rejected(url: str, root: Path) -> None:
    paths = [*traversal_paths(), str(root.parent / "secret").encode(), f"/{root.parent}/secret".encode()]
    assert len(paths) > 200
    for path in paths:
        response = send_raw(url, b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert SECRET not in response, path
        assert re.match(rb"HTTP/1.1 (400|403|404) ", response) or response == b"" or b"<center>nginx" in response, (
            path,
            response,
        )


@pytest.mark.parametrize(
    "path", ["/out", "/outside/", "/outside/secret", "/sub/up", "/sub/folder/", "/loop", "/inside"]
)
def test_symlinks_are_rejected(url: str, path: str) -> None:
    assert send_request(url, path).status in (403, 404)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "POST", "PATCH", "MKCOL", "MOVE", "OPTIONS", "CONNECT", "TRACE"])
def test_other_methods_are_rejected(url: str, root: Path, method: str) -> None:
    response = send_request(url, "/ten", method)
    assert response.status == 405
    assert (root / "ten").read_bytes() == b"0123456789"


def test_allow_header_lists_the_methods(url: str) -> None:
    assert send_request(url, "/ten", "POST").headers["allow"] == "GET, HEAD"


def test_header_and_body_sizes_are_bounded(url: str) -> None:
    assert send_request(url, "/ten", X_Long="x" * 40_000).status == 400
    assert send_request(url, "/" + "x" * 40_000).status == 414
    assert send_request(url, "/ten", body=b"x" * 100_000).status == 413


def test_slow_clients_are_disconnected(root: Path) -> None:
    with run_server(root, client_timeout_s=1) as url:
        for head in (b"GET /ten HT", b"GET /ten HTTP/1.1\r\nHost: x\r\n"):
            send_raw(url, head, wait_s=25, until_closed=True)  # the default timeout is 30 s


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": f"Bearer {TOKEN}"}, 200),
        ({"Authorization": f"Bearer {TOKEN}x"}, 401),
        ({"Authorization": f"Bearer {TOKEN[:-1]}"}, 401),
        ({"Authorization": f"Basic {TOKEN}"}, 401),
        ({"Authorization": "Basic c3Rva2VyOm9wZW4tc2VzYW1lLTAxMjM="}, 200),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "1/"}, 401),
    ],
)
def test_token_is_required(guarded: str, headers: dict[str, str], status: int) -> None:
    assert send_request(guarded, "/ten", **headers).status == status
    assert send_request(guarded, "/-/stats", **headers).status == status
    assert send_request(guarded, "/-/healthy", **headers).status == 200


@pytest.mark.parametrize(
    "path", ["/-/healthy/../../ten", "/-/healthy%2f..%2f..%2ften", "//ten", "/1/../ten", "/-/%68ealthy/../stats"]
)
def test_no_path_bypasses_the_token(guarded: str, path: str) -> None:
    assert send_request(guarded, path).status in (400, 401)


@pytest.fixture(scope="module")
def guarded(root: Path) -> Iterator[str]:
    with run_server(root, token=TOKEN) as url:
        yield url


def test_401_names_the_auth_scheme(guarded: str) -> None:
    assert send_request(guarded, "/ten").headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("name", ['a "b"', "semi; root {", "back\\slash", "it's #1 (é)", "trail\\"])
def test_root_with_special_characters(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "x").write_bytes(b"here")
    with run_nginx(NginxServeConfig(root=tmp_path / name, host="127.0.0.1", port=0), tmp_path / "prefix" / name) as url:
        assert send_request(url, "/x").body == b"here"


class TestWritable:
    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[tuple[str, Path]]:
        (tmp_path / "root/sub").mkdir(parents=True)
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere/kept").write_bytes(SECRET)
        (tmp_path / "root/link").symlink_to("../elsewhere")
        with run_server(tmp_path / "root", writable=True, max_upload_bytes=MIB) as url:
            yield url, tmp_path

    def test_put_replace_and_delete(self, server: tuple[str, Path]) -> None:
        url, folder = server
        assert send_request(url, "/new/er/a%20b", "PUT", b"one").status == 201
        assert send_request(url, "/new/er/a%20b", "PUT", b"two").status == 204
        assert (folder / "root/new/er/a b").read_bytes() == b"two"
        assert send_request(url, "/new/er/a%20b").body == b"two"
        assert send_request(url, "/new/er/a%20b", "DELETE").status == 204
        assert send_request(url, "/new/er/a%20b").status == 404

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("PUT", "/link/new"),
            ("PUT", "/link/deep/new"),
            ("DELETE", "/link/kept"),
            ("DELETE", "/sub/"),
            ("DELETE", "/"),
            ("DELETE", "/link/"),
            ("PUT", "/-/stats"),
            ("PUT", "/%2e%2e/elsewhere/new"),
            ("PUT", "/a%0d%0aX-Stoker-Path:%20x"),
            ("MKCOL", "/more/"),
            ("MOVE", "/sub"),
        ],
    )
    def test_folders_and_paths_outside_the_root_are_not_changed(
        self, server: tuple[str, Path], method: str, path: str
    ) -> None:
        url, folder = server
        before = sorted(folder.rglob("*"))
        assert send_request(url, path, method, b"x" if method == "PUT" else None).status in (400, 403, 405)
        assert sorted(folder.rglob("*")) == before

    def test_upload_size_is_bounded(self, server: tuple[str, Path]) -> None:
        url, folder = server
        assert send_request(url, "/big", "PUT", b"x" * (MIB + 1)).status == 413
        assert not (folder / "root/big").exists()

    def test_writable_server_on_a_public_address_needs_a_token(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"^0\.0\.0\.0: .*token"):
            NginxEngine(NginxServeConfig(root=tmp_path, host="0.0.0.0", port=0, writable=True)).start()


def test_requests_are_counted_across_log_rotation(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.serve.nginx.stats.MAX_LOG_BYTES", 500)  # rotates many times
    with run_server(root) as url:
        for _ in range(200):
            send_request(url, "/ten")
        send_request(url, "/none")
        wait_until(lambda: read_stats(url)["requests"] >= 201)
        stats = read_stats(url)
        assert stats == stats | {"engine": "nginx", "requests": 201, "errors": 0, "hits": 0, "misses": 0}
        assert stats["bytes"] == 2000 + len(send_request(url, "/none").body)
        assert b"\nstoker_requests_total 20" in send_request(url, "/-/metrics").body
        assert send_request(url, "/-/stats", "HEAD").body == b""
        assert send_request(url, "/-/other").status == 404
        assert send_request(url, "/-/guard").status in (403, 404)


# --- Lifecycle

SCRIPT = """
import logging, sys
from pathlib import Path
from stoker.serve.nginx.config import NginxServeConfig
from stoker.serve.nginx.engine import NginxEngine
logging.basicConfig()
root, prefix = Path(sys.argv[1]), Path(sys.argv[2])
def settings():
    token = prefix.with_name("token")
    return NginxServeConfig(root=root, host="127.0.0.1", port=0, token=token.read_text() if token.exists() else None)
engine = NginxEngine(settings(), prefix, load_config=settings)
engine.start()
print(engine.url, flush=True)
engine.wait()
"""


class Supervisor(NamedTuple):
    process: subprocess.Popen[str]
    url: str
    nginx: list[int]


@pytest.fixture
def supervisor(root: Path, tmp_path: Path) -> Iterator[Supervisor]:
    argv = [sys.executable, "-c", SCRIPT, str(root), str(tmp_path / "prefix")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            master = child_pids(process.pid)
            wait_until(lambda: handles_signal(process.pid, signal.SIGHUP))
            yield Supervisor(process, url, master + child_pids(master[0]))
        finally:
            process.kill()


def test_sighup_reloads_and_invalid_settings_change_nothing(supervisor: Supervisor, tmp_path: Path) -> None:
    process, url, nginx = supervisor
    token = tmp_path / "token"
    assert send_request(url, "/ten").status == 200
    token.write_text(TOKEN)
    process.send_signal(signal.SIGHUP)
    wait_until(lambda: send_request(url, "/ten").status == 401)
    assert send_request(url, "/ten", Authorization=f"Bearer {TOKEN}").status == 200
    token.write_text("two words")
    process.send_signal(signal.SIGHUP)
    assert process.stderr is not None
    assert re.search("keeping the current settings: .*token", process.stderr.readline())
    assert send_request(url, "/ten", Authorization=f"Bearer {TOKEN}").status == 200
    assert is_alive(nginx[0])
    process.terminate()
    process.communicate(timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nginx_does_not_outlive_its_supervisor(supervisor: Supervisor, number: signal.Signals) -> None:
    process, url, nginx = supervisor
    assert len(nginx) > 1
    assert send_request(url, "/ten").status == 200
    process.send_signal(number)
    assert process.wait(60) == (-number if number == signal.SIGKILL else 0)
    wait_until(lambda: not any(map(is_alive, nginx)))
    with pytest.raises(ConnectionError):
        send_request(url, "/ten")


def test_stop_finishes_running_transfers(root: Path, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * (32 * MIB))
    engine = NginxEngine(NginxServeConfig(root=tmp_path, host="127.0.0.1", port=0))
    engine.start()
    where = urlsplit(engine.url)
    with socket.create_connection((where.hostname, where.port)) as sock, ThreadPoolExecutor(1) as pool:
        sock.sendall(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
        received = len(sock.recv(65536))
        stopped = pool.submit(engine.stop)
        while chunk := sock.recv(MIB):
            received += len(chunk)
        stopped.result(60)
    assert received > 32 * MIB


def test_unexpected_exit_of_nginx_raises(root: Path) -> None:
    engine = NginxEngine(NginxServeConfig(root=root, host="127.0.0.1", port=0))
    previous = child_pids(os.getpid())
    engine.start()
    (master,) = set(child_pids(os.getpid())) - set(previous)
    workers = child_pids(master)
    os.kill(master, signal.SIGKILL)
    with pytest.raises(StokerError, match=r"^nginx exited unexpectedly: ") as caught:
        engine.wait()
    assert type(caught.value) is StokerError  # not a subclass such as UnavailableError
    assert not any(map(is_alive, [master, *workers]))
    engine.stop()


def test_stop_leaves_no_files_and_no_processes(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    previous = child_pids(os.getpid())
    with run_server(root) as url:
        assert send_request(url, "/ten").status == 200
        assert list(tmp_path.iterdir()) != []
    assert list(tmp_path.iterdir()) == []
    assert child_pids(os.getpid()) == previous


def test_no_worker_blocks_in_accept(url: str) -> None:
    """A worker that waits for a connection taken by another would block its other clients."""
    with ThreadPoolExecutor(8) as pool:
        assert all(response.status == 200 for response in pool.map(lambda _: send_request(url, "/ten"), range(400)))


def test_port_in_use_is_reported(url: str, root: Path) -> None:
    with pytest.raises(UnavailableError, match=rf"^cannot listen on 127\.0\.0\.1:{urlsplit(url).port}: .*--port"):
        NginxEngine(NginxServeConfig(root=root, host="127.0.0.1", port=urlsplit(url).port or 0)).start()


def test_rejected_configuration_is_reported_in_one_line(tmp_path: Path) -> None:
    settings = NginxCacheConfig(
        origins=(("", "http://no-such-host.invalid"),), dir=tmp_path, size=1 << 30, host="127.0.0.1", port=0
    )
    with pytest.raises(InputError, match=r"host not found in upstream [^\n]*$") as raised:
        NginxEngine(settings).start()
    assert "nginx.conf" not in str(raised.value)


def test_missing_modules_and_missing_nginx_are_reported(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nginx"
    program.write_text("#!/bin/sh\necho 'configure arguments: --with-http_slice_module' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(InputError, match="dav and auth_request"):
        NginxEngine(NginxServeConfig(root=root, host="127.0.0.1", port=0, writable=True)).start()
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(MissingProgramError, match="apt-get install nginx"):
        NginxEngine(NginxServeConfig(root=root, host="127.0.0.1", port=0)).start()
