"""S3 store: the contract, credentials, and multipart uploads."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import boto3
import pytest

from stoker import storage
from stoker.errors import AccessDeniedError, InputError, MissingExtraError, NotFoundError, UnavailableError
from stoker.storage import Store, open_store
from stoker.storage import s3 as s3_module
from stoker.storage.s3 import S3Store, _find_credentials
from tests.storage.contract import StorageContract
from tests.support.servers import RecordedRequest, Reply, aws_environ, scripted_server

DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


@pytest.fixture
def s3(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Point s3:// at moto; return a URL used by this test only."""
    for key, value in aws_environ(moto_url).items():
        monkeypatch.setenv(key, value)
    return f"s3://bucket/{uuid.uuid4().hex}"


class TestS3(StorageContract):
    @pytest.fixture
    def store(self, s3: str) -> Store:
        return open_store(s3)


class TestOddPrefix(StorageContract):
    @pytest.fixture
    def store(self, s3: str) -> Store:
        return open_store(f"{s3}/odd +%41 ü/")


def test_bucket_root_is_a_store(s3: str) -> None:
    folder = s3.removeprefix("s3://bucket/")
    open_store(s3).put("a", b"data")
    assert open_store("s3://bucket").get(f"{folder}/a") == b"data"


def test_s3_specific_endpoint_takes_precedence(s3: str, moto_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", moto_url)
    open_store(s3).put("a", b"data")
    assert open_store(s3).get("a") == b"data"


def test_missing_bucket_is_not_found(s3: str) -> None:
    store = open_store("s3://no-such-bucket/a")
    for use in (lambda: store.get("a"), lambda: list(store.list()), lambda: store.put("a", b"")):
        with pytest.raises(NotFoundError, match="no such bucket"):
            use()


def test_permission_denied_names_the_credentials_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_server(lambda *_: Reply(403, DENIED)) as server:
        for key, value in aws_environ(server.url).items():
            monkeypatch.setenv(key, value)
        store = open_store("s3://bucket/folder")
        for use in (
            lambda: store.get("a"),
            lambda: store.size("a"),
            lambda: list(store.list()),
            lambda: store.put("a", b""),
            lambda: store.delete("a"),
        ):
            with pytest.raises(AccessDeniedError, match="AWS_ACCESS_KEY_ID") as caught:
                use()
            assert "Debug" not in str(caught.value)
            assert caught.value.__cause__ is not None
    assert len(server.requests) == 5


def test_profile_is_read_through_boto3(s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _write_profile(tmp_path, monkeypatch)
    open_store(s3).put("a", b"data")
    assert open_store(s3).get("a") == b"data"
    with scripted_server(lambda *_: Reply(403, DENIED)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        with pytest.raises(AccessDeniedError, match=r"permission denied; .*default profile"):
            open_store(s3).get("a")
    assert "Credential=FROMPROFILE/" in server.requests[0].headers["authorization"]


def test_missing_profile_is_named(s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _write_profile(tmp_path, monkeypatch)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(InputError, match="nobody"):
        open_store(s3)


def test_profile_without_credentials_is_reported(s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _write_profile(tmp_path, monkeypatch)
    (tmp_path / ".aws" / "credentials").unlink()
    with pytest.raises(AccessDeniedError, match=r"no credentials; .*default profile"):
        open_store(s3)


def test_profiles_need_boto3(s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _write_profile(tmp_path, monkeypatch)
    for module in ("botocore.exceptions", "boto3"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"stoker\[s3\]"):
        open_store(s3)


def test_missing_credentials_are_reported(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(InputError, match=r"AccessKeyId; .*AWS_"):
        open_store(s3)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(AccessDeniedError, match=r"no credentials; .*AWS_ACCESS_KEY_ID.*AWS_SKIP_SIGNATURE"):
        open_store(s3).get("a")


def test_public_bucket_needs_no_credentials(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = f"{s3.removeprefix('s3://bucket/')}/a"
    boto3.client("s3").put_object(Bucket="bucket", Key=key, Body=b"data", ACL="public-read")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert open_store(s3).get("a") == b"data"


@pytest.mark.parametrize(
    ("value", "skips"), [("true", True), ("1", True), ("yes", True), ("false", False), ("0", False)]
)
def test_aws_skip_signature_values(value: str, skips: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for key in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", value)
    tried, _ = _find_credentials("s3://bucket")
    assert tried.startswith("sent no credentials") == skips


def test_error_message_of_the_server_is_included(monkeypatch: pytest.MonkeyPatch) -> None:
    response = b"<Error><Code>Odd</Code><Message>Something odd.</Message></Error>"
    with scripted_server(lambda *_: Reply(400, response)) as server:
        for key, value in aws_environ(server.url).items():
            monkeypatch.setenv(key, value)
        with pytest.raises(Exception, match=r"^s3://bucket/a: .*\b400: Something odd\.$"):
            open_store("s3://bucket").get("a")


def list_page(objects: int, token: str = "") -> Reply:
    rows = "".join(
        f"<Contents><Key>{n}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>"
        for n in range(objects)
    )
    more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return Reply(body=f"<ListBucketResult>{more}{rows}</ListBucketResult>".encode())


def test_objects_of_a_folder_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MAX_LISTED_OBJECTS", 10)
    with scripted_server(lambda *_: list_page(objects.pop())) as server:
        for key, value in aws_environ(server.url).items():
            monkeypatch.setenv(key, value)
        store = S3Store("s3://bucket")
        objects = [11, 10]
        assert len(store.list_folder("")[1]) == 10
        with pytest.raises(UnavailableError, match="more than 10 objects"):
            store.list_folder("")


@pytest.mark.parametrize(("use", "limit"), [("list_folder", "FOLDER_TIMEOUT_S"), ("list", "METADATA_TIMEOUT_S")])
def test_listing_that_never_ends_is_reported_with_its_time_limit(
    use: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, limit, 0.5)
    with scripted_server(lambda _, number: list_page(0, token=str(number))) as server:
        for key, value in aws_environ(server.url).items():
            monkeypatch.setenv(key, value)
        with pytest.raises(UnavailableError, match=r"^s3://bucket: .* within 0\.5 s$") as caught:
            getattr(S3Store("s3://bucket"), use)("")
    assert "no response" not in str(caught.value)  # there were many


def test_failed_multipart_upload_is_aborted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"

    def reply(request: RecordedRequest, _: int) -> Reply:
        return {"POST": Reply(body=started), "DELETE": Reply(204)}.get(request.method, Reply(403, DENIED))

    source = tmp_path / "source"
    source.write_bytes(bytes(20 << 20))
    with scripted_server(reply) as server:
        for key, value in aws_environ(server.url).items():
            monkeypatch.setenv(key, value)
        with pytest.raises(AccessDeniedError):
            open_store("s3://bucket").put("a", source)
    assert source.exists()
    assert [request.method for request in server.requests if request.method != "PUT"] == ["POST", "DELETE"]


def test_kill_9_leaves_no_object(s3: str, moto_url: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.truncate(256 << 20)
    client = boto3.client("s3")
    program = (
        "import sys; from pathlib import Path; from stoker.storage import open_store;"
        "open_store(sys.argv[1]).put('a', Path(sys.argv[2]))"
    )
    with subprocess.Popen([sys.executable, "-c", program, s3, str(source)]) as child:
        while not client.list_multipart_uploads(Bucket="bucket").get("Uploads"):
            assert child.poll() is None
            time.sleep(0.001)
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert list(open_store(s3).list()) == []
    assert source.exists()


def _write_profile(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Move the credentials from the environment to a profile."""
    (home / ".aws").mkdir()
    (home / ".aws" / "credentials").write_text(
        "[default]\naws_access_key_id = FROMPROFILE\naws_secret_access_key = test\n"
    )
    (home / ".aws" / "config").write_text("[default]\nregion = eu-west-1\n")
    monkeypatch.setenv("HOME", str(home))
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(key)


def test_use_in_a_forked_process_raises_instead_of_hanging(s3: str) -> None:
    """obstore's threads exist only in the parent; a child would wait for them forever."""
    program = (
        "import os, sys\n"
        "from stoker.errors import UnavailableError\n"
        "from stoker.storage import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "store.put('a', b'1')\n"
        "if child := os.fork():\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "try:\n"
        "    store.get('a')\n"
        "except UnavailableError as error:\n"
        "    os._exit(0 if 'forkserver or spawn' in str(error) else 1)\n"
        "os._exit(2)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, s3], timeout=60, check=False).returncode == 0
