from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from stoker.errors import InputError
from stoker.serve.nginx.config import CacheSettings, ServeSettings, cache_config, quoted, serve_config

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
PREFIX = Path("/prefix")
SERVE = ServeSettings(root=Path("/data"), host="127.0.0.1", port=8080)
CACHE = CacheSettings(origins=(("o", "http://127.0.0.1:1"),), dir=Path("/c"), size=1 << 30, host="127.0.0.1", port=1)

nasty = st.text(
    st.one_of(st.sampled_from("\"'\\ ;{}#$`%/?&=<>|*~^[]().:,@-_\n\t\r\0\x7f"), st.characters(codec="utf-8")),
    max_size=40,
)


def accepts(text: str, prefix: Path) -> str:
    """Ask the real nginx; return its complaint, or nothing."""
    if NGINX is None:
        pytest.skip("nginx is not installed")
    config = prefix / "nginx.conf"
    config.write_bytes(text.encode(errors="surrogateescape"))
    done = subprocess.run([NGINX, "-t", "-p", prefix, "-c", config, "-e", prefix / "e"], capture_output=True)
    return "" if done.returncode == 0 else done.stderr.decode(errors="replace")


@pytest.fixture(scope="module")
def prefix() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="nginx-t-"))
    (folder / "c").mkdir()
    return folder


@pytest.fixture(scope="module", autouse=True)
def _removed(prefix: Path) -> object:
    yield
    shutil.rmtree(prefix)


@trials(max_examples=60, deadline=None)
@given(nasty)
def test_any_root_is_quoted_or_refused(prefix: Path, name: str) -> None:
    try:
        text = serve_config(replace(SERVE, root=Path("/data", name)), prefix)
    except InputError:
        assert any(letter == "$" or ord(letter) < 32 or ord(letter) == 127 for letter in name)
    else:
        assert accepts(text, prefix) == ""


@trials(max_examples=60, deadline=None)
@given(nasty, nasty, nasty)
def test_any_origin_is_quoted_or_refused(prefix: Path, name: str, host: str, path: str) -> None:
    for origin in ((name, "http://127.0.0.1"), ("o", f"http://{host}"), ("o", f"http://127.0.0.1/{path}")):
        try:
            text = cache_config(replace(CACHE, origins=(origin,), dir=prefix / "c"), prefix)
        except InputError:
            continue
        complaint = accepts(text, prefix)
        assert complaint == "" or "host not found" in complaint


@trials(max_examples=40, deadline=None)
@given(st.text(max_size=30))
def test_any_token_is_kept_out_or_refused(prefix: Path, token: str) -> None:
    try:
        text = serve_config(replace(SERVE, token=token), prefix)
    except InputError:
        assert not token.isascii() or not token.isprintable() or " " in token or not token
    else:
        assert accepts(text, prefix) == ""


def test_a_token_does_not_stand_in_the_configuration() -> None:
    assert "sesame" not in serve_config(replace(SERVE, token="sesame-open"), PREFIX)


@pytest.mark.parametrize("word", ["a$b", "a\nb", "a\0b", "${x}", "a\x7f", "x" * 4000])
def test_refuses_what_nginx_cannot_say(word: str) -> None:
    with pytest.raises(InputError):
        quoted(word)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket",
        "ftp://h",
        "file:///etc",
        "http://",
        "http://user:secret@h",
        "http://h/?q",
        "http://h/#f",
        "http://h:0x50",
        "http://h:99999",
        "http://h/%24host",
        "http://h/a/../b",
        "http://h/%2e%2e/b",
        "http://h/a%0ab",
        "http://h/a%3Fb",
        "http://h;evil",
        "http://$host",
        "http://[fe80::1%25x;]",
        'http://h"',
        "http://h h",
        "http://unix:/tmp/x",
    ],
)
def test_refuses_origins_that_are_not_plain_urls(url: str) -> None:
    with pytest.raises(InputError) as raised:
        cache_config(replace(CACHE, origins=(("o", url),)), PREFIX)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("name", ["-", "a/b", "..", ".", "a b", "$x", "a;b", "é", "x" * 65])
def test_refuses_names_that_could_mean_something_else(name: str) -> None:
    with pytest.raises(InputError, match="origin's name"):
        cache_config(replace(CACHE, origins=((name, "http://h"),)), PREFIX)


@pytest.mark.parametrize("origins", [(), (("a", "http://h"), ("a", "http://i")), (("", "http://h"), ("a", "http://i"))])
def test_wants_names_that_tell_origins_apart(origins: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(InputError, match="a name each"):
        cache_config(replace(CACHE, origins=origins), PREFIX)


@pytest.mark.parametrize("host", ["", "a b", "h;", "fe80::1%eth0;x", "$h", "[::1"])
def test_refuses_hosts_that_are_none(host: str) -> None:
    with pytest.raises(InputError):
        serve_config(replace(SERVE, host=host), PREFIX)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"writable": True, "host": "0.0.0.0", "admin_socket": Path("/s")}, "token"),
        ({"writable": True}, "checks where writes lead"),
        ({"admin_socket": Path("/a:b")}, "colon"),
        ({"port": 0}, "port"),
        ({"token": "two words"}, "token"),
        ({"user": "a;b"}, "user"),
    ],
)
def test_refuses_settings_that_would_be_unsafe_or_broken(changes: dict[str, object], what: str) -> None:
    with pytest.raises(InputError, match=what):
        serve_config(replace(SERVE, **changes), PREFIX)


def test_an_https_origin_needs_certificates(prefix: Path) -> None:
    settings = replace(CACHE, origins=(("", "https://127.0.0.1/data"),), dir=prefix / "c")
    with pytest.raises(InputError, match="certificates"):
        cache_config(settings, prefix)
    text = cache_config(replace(settings, ca_file=Path("/etc/ssl/certs/ca-certificates.crt")), prefix)
    assert accepts(text, prefix) == ""


def test_a_cache_without_a_supervisor_stands_on_its_own(prefix: Path) -> None:
    """As it will in a cluster: no log that nobody shortens, no socket, names resolved by the cluster's DNS."""
    origins = (("data", "http://data.default.svc:7888/x"), ("other", "http://h"))
    text = cache_config(replace(CACHE, origins=origins, dir=prefix / "c", resolver="127.0.0.1"), prefix)
    assert "unix:" not in text
    assert "access_log off;" in text
    assert accepts(text, prefix) == ""


def test_the_same_settings_make_the_same_text() -> None:
    settings = replace(SERVE, token="a" * 16)
    assert serve_config(settings, PREFIX) == serve_config(settings, PREFIX)
