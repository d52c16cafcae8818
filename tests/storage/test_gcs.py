from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from stoker.errors import AccessError, ChangedError, InputError, MissingExtraError, NotFoundError, UnavailableError
from stoker.storage import Entry, Store, open_store
from stoker.storage.gcs import GcsStore, Login, log_in
from tests.storage.contract import TEN, Fill, StorageContract
from tests.support.servers import Asked, Reply, as_json, scripted


@pytest.fixture
def gs(gcs_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Lead gs:// to the emulator, and give a URL there that is this test's own."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_url)
    return f"gs://bucket/{uuid.uuid4().hex}"


class GcsContract(StorageContract):
    def test_bytes_of_another_version_are_refused(self, fill: Fill) -> None:
        """The emulator knows no conditions; Google's answer to one that fails is 412."""
        with scripted(lambda *_: Reply(412)) as server, pytest.raises(ChangedError, match="gs://bucket/p/a: was repl"):
            GcsStore("gs://bucket/p", server.url, Login("none")).range("a", 2, 4, etag="17")
        assert [asked.path.partition("?")[2] for asked in server.asked] == ["alt=media&ifGenerationMatch=17"]


class TestGcs(GcsContract):
    @pytest.fixture
    def store(self, gs: str) -> Store:
        return open_store(gs)


class TestOddPrefix(GcsContract):
    @pytest.fixture
    def store(self, gs: str) -> Store:
        return open_store(f"{gs}/odd +%41 ü/")


def test_an_emulator_may_be_given_without_a_scheme(gs: str, gcs_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_url.removeprefix("http://"))
    open_store(gs).put("a", TEN)
    assert open_store("gs://bucket").get(f"{gs.removeprefix('gs://bucket/')}/a") == TEN


def test_a_missing_bucket_is_not_found(gs: str) -> None:
    store = open_store("gs://no-such-bucket/a")
    for use in (lambda: list(store.list()), lambda: store.put("a", b"")):
        with pytest.raises(NotFoundError, match="no such bucket"):
            use()
    with pytest.raises(NotFoundError, match="no such object"):
        store.get("a")


def test_lists_page_by_page_without_the_marks_of_folders() -> None:
    pages = [
        {"items": [{"name": "p/", "size": "0"}, {"name": "p/a", "size": "1"}], "nextPageToken": "more"},
        {"items": [{"name": "p/sub/", "size": "0"}, {"name": "p/sub/b", "size": "2"}]},
    ]
    with scripted(lambda _, number: as_json(pages[number])) as server:
        store = GcsStore("gs://bucket/p", server.url, Login("none"))
        assert list(store.list()) == [Entry("a", 1), Entry("sub/b", 2)]
    assert "pageToken=more" in server.asked[1].path


class TestUpload:
    """What the emulator never does: keeping less than it was sent, and standing still."""

    def upload(self, url: str, size: int) -> None:
        GcsStore("gs://bucket", url, Login("none")).put("a", bytes(size))

    def test_goes_on_where_the_server_stands(self) -> None:
        kept = iter([(4 << 20) - 1, (12 << 20) - 1])

        def reply(asked: Asked, _: int) -> Reply:
            if asked.method == "POST":
                return Reply(headers={"Location": f"{server.url}/session"})
            last = next(kept, None)
            return Reply() if last is None else Reply(308, headers={"Range": f"bytes=0-{last}"})

        with scripted(reply) as server:
            self.upload(server.url, 13 << 20)
        sent = [asked.headers["content-range"] for asked in server.asked[1:]]
        total = 13 << 20
        assert sent == [
            f"bytes 0-{(8 << 20) - 1}/{total}",
            f"bytes {4 << 20}-{(12 << 20) - 1}/{total}",
            f"bytes {12 << 20}-{total - 1}/{total}",
        ]

    @pytest.fixture
    def _soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("stoker.storage.gcs.time.sleep", lambda _: None)

    @pytest.mark.usefixtures("_soon")
    def test_that_stands_still_is_given_up(self) -> None:
        def reply(asked: Asked, _: int) -> Reply:
            if asked.method == "POST":
                return Reply(headers={"Location": f"{server.url}/session"})
            return Reply(308)

        wanted = pytest.raises(UnavailableError, match="stands still at byte 0; tried 5 times")
        with scripted(reply) as server, wanted:
            self.upload(server.url, 1000)
        assert len(server.asked) == 6

    @pytest.mark.usefixtures("_soon")
    def test_that_stands_still_for_a_while_goes_on(self) -> None:
        def reply(asked: Asked, number: int) -> Reply:
            if asked.method == "POST":
                return Reply(headers={"Location": "/session"})
            return Reply(308) if number < 4 else Reply()

        with scripted(reply) as server:
            self.upload(server.url, 1000)
        assert {asked.headers["content-range"] for asked in server.asked[1:]} == {"bytes 0-999/1000"}
        assert len(server.asked) == 5

    @pytest.mark.usefixtures("_soon")
    def test_a_server_that_claims_more_than_it_was_sent_is_not_believed(self) -> None:
        def reply(asked: Asked, _: int) -> Reply:
            if asked.method == "POST":
                return Reply(headers={"Location": "/session"})
            return Reply(308, headers={"Range": f"bytes=0-{10 << 20}"})

        wanted = pytest.raises(UnavailableError, match="stands still at byte 0")
        with scripted(reply) as server, wanted:
            self.upload(server.url, 13 << 20)

    @pytest.mark.parametrize("location", ["http://example.invalid/session", "https://{host}/session"])
    def test_another_server_is_told_nothing(self, location: str) -> None:
        def reply(*_: object) -> Reply:
            return Reply(headers={"Location": location.format(host=server.url.removeprefix("http://"))})

        wanted = pytest.raises(UnavailableError, match=r"leads the upload to https?://.*, which gets no credentials")
        with scripted(reply) as server, wanted:
            self.upload(server.url, 10)
        assert len(server.asked) == 1


def test_kill_9_leaves_no_object(gs: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(20 << 20))
    program = """
import os, signal, sys
from pathlib import Path
from stoker.storage import open_store

store = open_store(sys.argv[1])
ask = store._client.ask

def ask_and_die(method, *args, **kwargs):
    answer = ask(method, *args, **kwargs)
    if method == "PUT":
        os.kill(os.getpid(), signal.SIGKILL)
    return answer

store._client.ask = ask_and_die
store.put("a", Path(sys.argv[2]))
"""
    done = subprocess.run([sys.executable, "-c", program, gs, str(source)])
    assert done.returncode == -signal.SIGKILL
    assert source.exists()
    assert list(open_store(gs).list()) == []
    open_store(gs).put("a", source)
    assert open_store(gs).size("a") == 20 << 20


def test_denied_names_the_credentials_that_were_tried() -> None:
    with scripted(lambda *_: Reply(403)) as server:
        store = GcsStore("gs://bucket", server.url, Login("tried these"))
        for use in (lambda: store.get("a"), lambda: list(store.list()), lambda: store.put("a", b"")):
            with pytest.raises(AccessError, match="permission denied; tried these"):
                use()
    assert len(server.asked) == 3


def test_real_buckets_need_google_auth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.auth", None)
    with pytest.raises(MissingExtraError, match=r"stoker\[gcs\]"):
        open_store("gs://bucket")


@pytest.fixture(scope="module")
def key() -> str:
    """Make the private key of a service account."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import rsa

    made = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return made.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()).decode()


class TestLogin:
    """Google's own library against a login server of ours."""

    @pytest.fixture(autouse=True)
    def _google(self) -> None:
        pytest.importorskip("google.auth", reason="google-auth is not installed")

    def account(self, path: Path, key: str, login: str, environ: pytest.MonkeyPatch) -> None:
        content = {"type": "service_account", "client_email": "a@b", "private_key": key, "token_uri": login}
        path.write_text(json.dumps(content))
        environ.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))

    def test_a_service_account_logs_in_once(self, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def reply(asked: Asked, _: int) -> Reply:
            if asked.path == "/login":
                return as_json({"access_token": "t0ken", "expires_in": 3600})
            return Reply(body=TEN)

        with scripted(reply) as server:
            self.account(tmp_path / "key.json", key, f"{server.url}/login", monkeypatch)
            store = GcsStore("gs://bucket", server.url, log_in("gs://bucket"))
            assert store.get("a") == store.get("b") == TEN
        assert [asked.headers.get("authorization") for asked in server.asked] == [
            None,
            "Bearer t0ken",
            "Bearer t0ken",
        ]

    def test_a_refused_login_names_its_file(self, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        refused = Reply(400, b'{"error": "invalid_grant"}', {"Content-Type": "application/json"})
        with scripted(lambda *_: refused) as server:
            self.account(tmp_path / "key.json", key, server.url, monkeypatch)
            store = GcsStore("gs://bucket", server.url, log_in("gs://bucket"))
            with pytest.raises(AccessError, match=r"login; tried GOOGLE_APPLICATION_CREDENTIALS=.*key\.json"):
                store.get("a")

    def test_a_login_that_does_not_answer_is_reported(
        self, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.account(tmp_path / "key.json", key, "http://127.0.0.1:1", monkeypatch)
        with pytest.raises(UnavailableError, match="login does not answer"):
            open_store("gs://bucket").get("a")

    def test_a_broken_file_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
        with pytest.raises(InputError, match=r"absent\.json"):
            open_store("gs://bucket")

    def test_the_role_of_a_machine_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        google = {"Metadata-Flavor": "Google", "Content-Type": "application/json"}

        def reply(asked: Asked, _: int) -> Reply:
            if asked.path.startswith("/computeMetadata/v1/instance/service-accounts/default/token"):
                return Reply(body=b'{"access_token": "r0le", "expires_in": 3600}', headers=google)
            if asked.path.startswith("/computeMetadata/v1/instance/service-accounts/default"):
                return Reply(body=b'{"email": "a@b", "scopes": ["x"]}', headers=google)
            if asked.path.startswith("/storage/"):
                return Reply(body=TEN)
            return Reply(body=b"project", headers=google | {"Content-Type": "text/plain"})

        program = (
            "import sys; from stoker.storage.gcs import GcsStore, log_in;"
            "print(GcsStore('gs://bucket', sys.argv[1], log_in('gs://bucket')).get('a'))"
        )
        with scripted(reply) as server:
            # Google's library reads its environment as it is imported, hence in a process of its own.
            monkeypatch.delenv("NO_GCE_CHECK")
            for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
                monkeypatch.setenv(name, server.url.removeprefix("http://"))
            printed = subprocess.run([sys.executable, "-c", program, server.url], stdout=subprocess.PIPE)
        assert printed.stdout.decode().strip() == str(TEN)
        assert server.asked[-1].headers["authorization"] == "Bearer r0le"

    def test_without_any_public_buckets_can_be_read(self) -> None:
        with scripted(lambda *_: Reply(body=TEN)) as server:
            store = GcsStore("gs://bucket", server.url, log_in("gs://bucket"))
            assert store.get("a") == TEN
        assert "authorization" not in server.asked[0].headers
