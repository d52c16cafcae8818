"""Conversion to and from buckets and web servers: moto, gcp-storage-emulator and a real nginx."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.storage import download, open_store
from tests.support.servers import RecordedRequest, Reply, aws_environ, nginx, scripted_server
from tests.support.trees import digests, make_dataset, make_tree, stoker
from tests.support.waiting import wait_until


@pytest.fixture(params=["s3", "gs"])
def bucket(
    request: pytest.FixtureRequest, moto_url: str, gcs_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> str:
    """Return the URL of a new folder in a bucket."""
    if request.param == "s3":
        for name, value in aws_environ(moto_url).items():
            monkeypatch.setenv(name, value)
    else:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_url)
    return f"{request.param}://bucket/{tmp_path.name}"


def download_all(url: str, to: Path) -> dict[str, str]:
    """Download a folder of a bucket and return the digests of its files."""
    store = open_store(url)
    for entry in list(store.list()):
        (to / entry.name).parent.mkdir(parents=True, exist_ok=True)
        download(store, entry.name, to / entry.name)
    return digests(to)


def test_bucket_gets_the_same_bytes_as_a_folder(tmp_path: Path, bucket: str) -> None:
    data = make_dataset(tmp_path / "pets")
    options = ("--shard-samples", 7)
    assert stoker("data", "convert", data, tmp_path / "here", *options) == 0
    assert stoker("data", "convert", data, bucket, *options) == 0
    assert download_all(bucket, tmp_path / "there") == digests(tmp_path / "here")


def test_verify_summary_and_resharding_from_a_bucket(
    tmp_path: Path, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_dataset(tmp_path / "pets")
    assert stoker("data", "convert", data, bucket, "--shard-samples", 7) == 0
    assert stoker("data", "verify", bucket, "--deep") == 0
    capsys.readouterr()
    assert stoker("data", "summary", bucket, "--json") == 0
    train, _ = json.loads(capsys.readouterr().out)
    assert train["pattern"] == f"{bucket}/train/pets-train-{{000000..000004}}.tar"
    assert stoker("data", "summary", train["pattern"], "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["bytes"] == train["bytes"]
    assert stoker("data", "convert", bucket, tmp_path / "back", "--format", "tfrecord") == 0
    assert stoker("data", "verify", tmp_path / "back") == 0


def test_killed_upload_is_resumed(tmp_path: Path, bucket: str) -> None:
    data = make_dataset(tmp_path / "pets", train=60)
    assert stoker("data", "convert", data, tmp_path / "here", "--shard-samples", 4) == 0
    command = [sys.executable, "-m", "stoker", "data", "convert", str(data), bucket, "--shard-samples", "4"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    store = open_store(bucket)
    wait_until(lambda: sum(1 for entry in store.list() if entry.name.endswith(".tar")) >= 3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not any(entry.name.endswith("manifest.json") for entry in store.list())
    assert stoker("data", "convert", data, bucket, "--shard-samples", 4) == 0
    assert download_all(bucket, tmp_path / "there") == digests(tmp_path / "here")


def test_bucket_with_another_dataset_is_not_changed(
    tmp_path: Path, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stoker("data", "convert", make_dataset(tmp_path / "pets"), bucket) == 0
    before = download_all(bucket, tmp_path / "before")
    assert stoker("data", "convert", make_tree(tmp_path / "other", {"x": 2}), bucket) == 2
    assert re.search(rf"{bucket}: .*\bpets \(30 train samples\b", capsys.readouterr().err)
    assert download_all(bucket, tmp_path / "after") == before


def test_bucket_without_permission_exits_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def deny(_: RecordedRequest, __: int) -> Reply:
        return Reply(403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")

    data = make_dataset(tmp_path / "pets")
    with scripted_server(deny) as server:
        for name, value in aws_environ(server.url).items():
            monkeypatch.setenv(name, value)
        assert stoker("data", "convert", data, "s3://private/pets") == 5
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        assert stoker("data", "convert", data, "gs://private/pets") == 5
    first, second = capsys.readouterr().err.strip().splitlines()
    assert re.match(r"stoker: s3://private/pets: permission denied; .*AWS_ACCESS_KEY_ID", first)
    assert re.match(r"stoker: gs://private/pets: permission denied; .*STORAGE_EMULATOR_HOST", second)


def test_read_only_bucket_exits_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reply(request: RecordedRequest, _: int) -> Reply:
        if request.method == "GET" and "list-type=2" in request.path:
            return Reply(200, b'<?xml version="1.0"?><ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>')
        return (
            Reply(404) if request.method in ("GET", "HEAD") else Reply(403, b"<Error><Code>AccessDenied</Code></Error>")
        )

    data = make_dataset(tmp_path / "pets")
    with scripted_server(reply) as server:
        for name, value in aws_environ(server.url).items():
            monkeypatch.setenv(name, value)
        assert stoker("data", "convert", data, "s3://private/pets") == 5
        assert not any(request.method == "PUT" and "manifest" in request.path for request in server.requests)
    assert re.search("s3://private/pets.*: permission denied; .*AWS_ACCESS_KEY_ID", capsys.readouterr().err)


@pytest.mark.parametrize("index", ["json", "html"])
def test_web_server_with_directory_listing(tmp_path: Path, index: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_dataset(tmp_path / "pets")
    assert stoker("data", "convert", data, tmp_path / "out", "--shard-samples", 7) == 0
    with nginx(tmp_path / "out", index=index) as url:
        assert stoker("data", "verify", url, "--deep") == 0
        assert stoker("data", "verify", f"{url}/train") == 0
        capsys.readouterr()
        assert stoker("data", "summary", f"{url}/train/pets-train-{{000000..000004}}.tar", "--json") == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert row["bytes"] == sum(path.stat().st_size for path in (tmp_path / "out/train").glob("*.tar"))
        assert stoker("data", "convert", f"{url}/train", tmp_path / "back") == 0
    assert stoker("data", "verify", tmp_path / "back") == 0


def test_web_server_without_directory_listing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_dataset(tmp_path / "pets")
    assert stoker("data", "convert", data, tmp_path / "out", "--shard-samples", 7) == 0
    with nginx(tmp_path / "out", directives="location ~ /$ { return 403; }") as url:
        assert stoker("data", "verify", f"{url}/train") == 0
        assert stoker("data", "summary", f"{url}/train/pets-train-{{000000..000004}}.tar") == 0
        capsys.readouterr()
        assert stoker("data", "summary", url) != 0
        assert "brace pattern" in capsys.readouterr().err
        assert stoker("data", "summary", f"{url}/train/pets-train-{{000000..000005}}.tar") == 0
        assert "pets-train-000005.tar" in capsys.readouterr().err
        assert stoker("data", "verify", f"{url}/train/pets-train-{{000000..000005}}.tar") == 2


def test_password_is_never_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = make_dataset(tmp_path / "pets")
    assert stoker("data", "convert", data, tmp_path / "out") == 0
    with nginx(tmp_path / "out") as url:
        secret = url.replace("http://", "http://me:hunter2@")
        assert stoker("data", "verify", secret) == 0
        assert stoker("data", "summary", f"{secret}/train") == 0
        assert stoker("data", "verify", f"{secret}/nowhere") == 2
        assert stoker("data", "convert", f"{secret}/nowhere", tmp_path / "x") == 2
        assert stoker("data", "convert", data, secret) == 2
        assert stoker("data", "summary", f"{secret}/train/pets-train-{{000000..000000}}.tar?token=hunter2") == 0
        shard = next((tmp_path / "out/train").glob("*.tar"))
        shard.write_bytes(shard.read_bytes()[:-5000])
        assert stoker("data", "verify", secret) == 2
    captured = capfd.readouterr()
    assert "hunter2" not in captured.out + captured.err
    assert "/nowhere" in captured.err


def test_unreachable_server_exits_5(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.support.servers import free_port

    for words in (["verify"], ["summary"], ["convert"]):
        more = ["/tmp/never"] if words == ["convert"] else []
        assert stoker("data", *words, f"http://127.0.0.1:{free_port()}/set", *more) == 5
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert "127.0.0.1" in err


def test_server_error_during_verify_is_not_a_data_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("data", "convert", make_dataset(tmp_path / "pets"), tmp_path / "out", "--shard-samples", 5) == 0

    def reply(request: RecordedRequest, number: int) -> Reply:
        if number > 4:
            return Reply(503)
        path = tmp_path / "out/train" / request.path.lstrip("/")
        return Reply(200, path.read_bytes()) if path.is_file() else Reply(404)

    with scripted_server(reply) as server:
        assert stoker("data", "verify", server.url, "--jobs", 1) == 5
    assert re.search(rf"{server.url}/.*\b503\b", capsys.readouterr().err)


def test_scratch_folder_is_left_empty(tmp_path: Path, bucket: str) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    data = make_dataset(tmp_path / "pets")
    assert stoker("data", "convert", data, bucket, "--scratch", scratch) == 0
    assert os.listdir(scratch) == []
