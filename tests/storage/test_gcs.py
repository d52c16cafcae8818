"""Google Cloud Storage: the contract, resumable uploads, and credentials."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from stoker.errors import (
    AccessDeniedError,
    InputError,
    MissingExtraError,
    NotFoundError,
    ObjectChangedError,
    UnavailableError,
)
from stoker.storage import Entry, Store, open_store
from stoker.storage.gcs import GcsStore, GoogleCredentials, load_credentials
from tests.storage.contract import TEN, Fill, StorageContract
from tests.support.servers import RecordedRequest, Reply, json_reply, scripted_server


@pytest.fixture
def gs(gcs_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Point gs:// at the emulator; return a URL used by this test only."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_url)
    return f"gs://bucket/{uuid.uuid4().hex}"


class GcsContract(StorageContract):
    def test_range_of_another_version_raises_changed_error(self, fill: Fill) -> None:
        """The emulator ignores preconditions; Google responds with 412 to one that fails."""
        with (
            scripted_server(lambda *_: Reply(412)) as server,
            pytest.raises(ObjectChangedError, match="gs://bucket/p/a: "),
        ):
            GcsStore("gs://bucket/p", server.url, GoogleCredentials("none")).range("a", 2, 4, etag="17")
        assert [request.path.partition("?")[2] for request in server.requests] == ["alt=media&ifGenerationMatch=17"]


class TestGcs(GcsContract):
    @pytest.fixture
    def store(self, gs: str) -> Store:
        return open_store(gs)


class TestOddPrefix(GcsContract):
    @pytest.fixture
    def store(self, gs: str) -> Store:
        return open_store(f"{gs}/odd +%41 ü/")


def test_emulator_host_may_omit_the_scheme(gs: str, gcs_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_url.removeprefix("http://"))
    open_store(gs).put("a", TEN)
    assert open_store("gs://bucket").get(f"{gs.removeprefix('gs://bucket/')}/a") == TEN


def test_missing_bucket_is_not_found(gs: str) -> None:
    store = open_store("gs://no-such-bucket/a")
    for use in (lambda: list(store.list()), lambda: store.put("a", b"")):
        with pytest.raises(NotFoundError, match="no such bucket"):
            use()
    with pytest.raises(NotFoundError, match="no such object"):
        store.get("a")


def test_list_follows_pages_and_skips_folder_placeholders() -> None:
    pages = [
        {"items": [{"name": "p/", "size": "0"}, {"name": "p/a", "size": "1"}], "nextPageToken": "more"},
        {"items": [{"name": "p/sub/", "size": "0"}, {"name": "p/sub/b", "size": "2"}]},
    ]
    with scripted_server(lambda _, number: json_reply(pages[number])) as server:
        store = GcsStore("gs://bucket/p", server.url, GoogleCredentials("none"))
        assert list(store.list()) == [Entry("a", 1), Entry("sub/b", 2)]
    assert "pageToken=more" in server.requests[1].path


class TestUpload:
    """Partial and stalled uploads, which the emulator never produces."""

    def upload(self, url: str, size: int) -> None:
        GcsStore("gs://bucket", url, GoogleCredentials("none")).put("a", bytes(size))

    def test_resumes_at_the_offset_of_the_server(self) -> None:
        stored = iter([(4 << 20) - 1, (12 << 20) - 1])

        def reply(request: RecordedRequest, _: int) -> Reply:
            if request.method == "POST":
                return Reply(headers={"Location": f"{server.url}/session"})
            last = next(stored, None)
            return Reply() if last is None else Reply(308, headers={"Range": f"bytes=0-{last}"})

        with scripted_server(reply) as server:
            self.upload(server.url, 13 << 20)
        sent = [request.headers["content-range"] for request in server.requests[1:]]
        total = 13 << 20
        assert sent == [
            f"bytes 0-{(8 << 20) - 1}/{total}",
            f"bytes {4 << 20}-{(12 << 20) - 1}/{total}",
            f"bytes {12 << 20}-{total - 1}/{total}",
        ]

    @pytest.fixture
    def _no_backoff(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("stoker.storage.gcs.time.sleep", lambda _: None)

    @pytest.mark.usefixtures("_no_backoff")
    def test_stalled_upload_fails(self) -> None:
        def reply(request: RecordedRequest, _: int) -> Reply:
            if request.method == "POST":
                return Reply(headers={"Location": f"{server.url}/session"})
            return Reply(308)

        with scripted_server(reply) as server, pytest.raises(UnavailableError, match=r"byte 0\b.*\b5 attempts"):
            self.upload(server.url, 1000)
        assert len(server.requests) == 6

    @pytest.mark.usefixtures("_no_backoff")
    def test_upload_continues_after_a_stall(self) -> None:
        def reply(request: RecordedRequest, number: int) -> Reply:
            if request.method == "POST":
                return Reply(headers={"Location": "/session"})
            return Reply(308) if number < 4 else Reply()

        with scripted_server(reply) as server:
            self.upload(server.url, 1000)
        assert {request.headers["content-range"] for request in server.requests[1:]} == {"bytes 0-999/1000"}
        assert len(server.requests) == 5

    @pytest.mark.usefixtures("_no_backoff")
    def test_offset_beyond_the_sent_bytes_is_not_trusted(self) -> None:
        def reply(request: RecordedRequest, _: int) -> Reply:
            if request.method == "POST":
                return Reply(headers={"Location": "/session"})
            return Reply(308, headers={"Range": f"bytes=0-{10 << 20}"})

        with scripted_server(reply) as server, pytest.raises(UnavailableError, match=r"byte 0\b"):
            self.upload(server.url, 13 << 20)

    @pytest.mark.parametrize("location", ["http://example.invalid/session", "https://{host}/session"])
    def test_session_on_another_server_gets_no_credentials(self, location: str) -> None:
        def reply(*_: object) -> Reply:
            return Reply(headers={"Location": location.format(host=server.url.removeprefix("http://"))})

        expected_error = pytest.raises(UnavailableError, match=r"upload to https?://.* credentials")
        with scripted_server(reply) as server, expected_error:
            self.upload(server.url, 10)
        assert len(server.requests) == 1


def test_kill_9_leaves_no_object(gs: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(20 << 20))
    program = """
import os, signal, sys
from pathlib import Path
from stoker.storage import open_store

store = open_store(sys.argv[1])
request = store._client.request

def request_and_die(method, *args, **kwargs):
    response = request(method, *args, **kwargs)
    if method == "PUT":
        os.kill(os.getpid(), signal.SIGKILL)
    return response

store._client.request = request_and_die
store.put("a", Path(sys.argv[2]))
"""
    done = subprocess.run([sys.executable, "-c", program, gs, str(source)])
    assert done.returncode == -signal.SIGKILL
    assert source.exists()
    assert list(open_store(gs).list()) == []
    open_store(gs).put("a", source)
    assert open_store(gs).size("a") == 20 << 20


def test_permission_denied_names_the_credentials_used() -> None:
    with scripted_server(lambda *_: Reply(403)) as server:
        store = GcsStore("gs://bucket", server.url, GoogleCredentials("tried these"))
        for use in (lambda: store.get("a"), lambda: list(store.list()), lambda: store.put("a", b"")):
            with pytest.raises(AccessDeniedError, match=r"permission denied; tried these$"):
                use()
    assert len(server.requests) == 3


def test_real_buckets_need_google_auth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.auth", None)
    with pytest.raises(MissingExtraError, match=r"stoker\[gcs\]"):
        open_store("gs://bucket")


@pytest.fixture(scope="module")
def key() -> str:
    """The private key of a service account."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import rsa

    private_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return private_key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()).decode()


class TestCredentials:
    """google-auth against a local auth server."""

    @pytest.fixture(autouse=True)
    def _google(self) -> None:
        pytest.importorskip("google.auth", reason="google-auth is not installed")

    def write_account(self, path: Path, key: str, token_uri: str, environ: pytest.MonkeyPatch) -> None:
        content = {"type": "service_account", "client_email": "a@b", "private_key": key, "token_uri": token_uri}
        path.write_text(json.dumps(content))
        environ.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))

    def test_service_account_token_is_requested_once(
        self, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def reply(request: RecordedRequest, _: int) -> Reply:
            if request.path == "/login":
                return json_reply({"access_token": "t0ken", "expires_in": 3600})
            return Reply(body=TEN)

        with scripted_server(reply) as server:
            self.write_account(tmp_path / "key.json", key, f"{server.url}/login", monkeypatch)
            store = GcsStore("gs://bucket", server.url, load_credentials("gs://bucket"))
            assert store.get("a") == store.get("b") == TEN
        assert [request.headers.get("authorization") for request in server.requests] == [
            None,
            "Bearer t0ken",
            "Bearer t0ken",
        ]

    def test_rejected_credentials_name_their_file(
        self, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rejected = Reply(400, b'{"error": "invalid_grant"}', {"Content-Type": "application/json"})
        with scripted_server(lambda *_: rejected) as server:
            self.write_account(tmp_path / "key.json", key, server.url, monkeypatch)
            store = GcsStore("gs://bucket", server.url, load_credentials("gs://bucket"))
            with pytest.raises(AccessDeniedError, match=r"rejected .*; .*GOOGLE_APPLICATION_CREDENTIALS=.*key\.json"):
                store.get("a")

    def test_unreachable_auth_server_is_reported(
        self, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.write_account(tmp_path / "key.json", key, "http://127.0.0.1:1", monkeypatch)
        with pytest.raises(
            UnavailableError, match=r"auth server; .*GOOGLE_APPLICATION_CREDENTIALS=.*key\.json"
        ) as caught:
            open_store("gs://bucket").get("a")
        assert caught.value.where == "gs://bucket/a"

    def test_missing_credentials_file_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
        with pytest.raises(InputError, match=r"absent\.json"):
            open_store("gs://bucket")

    def test_instance_role_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        google = {"Metadata-Flavor": "Google", "Content-Type": "application/json"}

        def reply(request: RecordedRequest, _: int) -> Reply:
            if request.path.startswith("/computeMetadata/v1/instance/service-accounts/default/token"):
                return Reply(body=b'{"access_token": "r0le", "expires_in": 3600}', headers=google)
            if request.path.startswith("/computeMetadata/v1/instance/service-accounts/default"):
                return Reply(body=b'{"email": "a@b", "scopes": ["x"]}', headers=google)
            if request.path.startswith("/storage/"):
                return Reply(body=TEN)
            return Reply(body=b"project", headers=google | {"Content-Type": "text/plain"})

        program = (
            "import sys; from stoker.storage.gcs import GcsStore, load_credentials;"
            "print(GcsStore('gs://bucket', sys.argv[1], load_credentials('gs://bucket')).get('a'))"
        )
        with scripted_server(reply) as server:
            # google-auth reads the environment at import time, hence a separate process.
            monkeypatch.delenv("NO_GCE_CHECK")
            for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
                monkeypatch.setenv(name, server.url.removeprefix("http://"))
            printed = subprocess.run([sys.executable, "-c", program, server.url], stdout=subprocess.PIPE)
        assert printed.stdout.decode().strip() == str(TEN)
        assert server.requests[-1].headers["authorization"] == "Bearer r0le"

    def test_public_bucket_without_credentials(self) -> None:
        with scripted_server(lambda *_: Reply(body=TEN)) as server:
            store = GcsStore("gs://bucket", server.url, load_credentials("gs://bucket"))
            assert store.get("a") == TEN
        assert "authorization" not in server.requests[0].headers
