"""nginx configuration: quoting, rejected input, and configurations that the real nginx accepts."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from stoker.errors import InputError
from stoker.serve.nginx.config import NginxCacheConfig, NginxServeConfig, render_cache_config, render_serve_config
from stoker.serve.nginx.syntax import quote_word

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
PREFIX = Path("/prefix")
SERVE = NginxServeConfig(root=Path("/data"), host="127.0.0.1", port=8080)
CACHE = NginxCacheConfig(origins=(("o", "http://127.0.0.1:1"),), dir=Path("/c"), size=1 << 30, host="127.0.0.1", port=1)

special_text = st.text(
    st.one_of(st.sampled_from("\"'\\ ;{}#$`%/?&=<>|*~^[]().:,@-_\n\t\r\0\x7f"), st.characters(codec="utf-8")),
    max_size=40,
)


def nginx_test_error(text: str, prefix: Path) -> str:
    """Return the error of `nginx -t` for a configuration, or an empty string."""
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
def _remove_prefix(prefix: Path) -> object:
    yield
    shutil.rmtree(prefix)


@hypothesis_settings(max_examples=60, deadline=None)
@given(special_text)
def test_any_root_is_quoted_or_rejected(prefix: Path, name: str) -> None:
    try:
        text = render_serve_config(replace(SERVE, root=Path("/data", name)), prefix)
    except InputError:
        assert any(letter == "$" or ord(letter) < 32 or ord(letter) == 127 for letter in name)
    else:
        assert nginx_test_error(text, prefix) == ""


@hypothesis_settings(max_examples=60, deadline=None)
@given(special_text, special_text, special_text)
def test_any_origin_is_quoted_or_rejected(prefix: Path, name: str, host: str, path: str) -> None:
    for origin in ((name, "http://127.0.0.1"), ("o", f"http://{host}"), ("o", f"http://127.0.0.1/{path}")):
        try:
            text = render_cache_config(replace(CACHE, origins=(origin,), dir=prefix / "c"), prefix)
        except InputError:
            continue
        error = nginx_test_error(text, prefix)
        assert error == "" or "host not found" in error


@hypothesis_settings(max_examples=40, deadline=None)
@given(st.text(max_size=30))
def test_any_token_is_accepted_or_rejected(prefix: Path, token: str) -> None:
    try:
        text = render_serve_config(replace(SERVE, token=token), prefix)
    except InputError:
        assert not token.isascii() or not token.isprintable() or " " in token or not token
    else:
        assert nginx_test_error(text, prefix) == ""


def test_configuration_does_not_contain_the_token() -> None:
    assert "sesame" not in render_serve_config(replace(SERVE, token="sesame-open"), PREFIX)


@pytest.mark.parametrize("word", ["a$b", "a\nb", "a\0b", "${x}", "a\x7f", "x" * 4000])
def test_words_that_nginx_cannot_escape_are_rejected(word: str) -> None:
    with pytest.raises(InputError):
        quote_word(word)


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
def test_unsupported_origin_urls_are_rejected(url: str) -> None:
    with pytest.raises(InputError) as raised:
        render_cache_config(replace(CACHE, origins=(("o", url),)), PREFIX)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("name", ["-", "a/b", "..", ".", "a b", "$x", "a;b", "é", "x" * 65])
def test_invalid_origin_names_are_rejected(name: str) -> None:
    with pytest.raises(InputError) as caught:
        render_cache_config(replace(CACHE, origins=((name, "http://h"),)), PREFIX)
    assert caught.value.where == repr(name)


@pytest.mark.parametrize("origins", [(), (("a", "http://h"), ("a", "http://i")), (("", "http://h"), ("a", "http://i"))])
def test_origins_need_distinct_names(origins: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(InputError, match="NAME=URL"):
        render_cache_config(replace(CACHE, origins=origins), PREFIX)


@pytest.mark.parametrize("host", ["", "a b", "h;", "fe80::1%eth0;x", "$h", "[::1"])
def test_invalid_hosts_are_rejected(host: str) -> None:
    with pytest.raises(InputError):
        render_serve_config(replace(SERVE, host=host), PREFIX)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"writable": True, "host": "0.0.0.0", "admin_socket": Path("/s")}, "token"),
        ({"writable": True}, "admin socket"),
        ({"admin_socket": Path("/a:b")}, "colon"),
        ({"port": 0}, "port"),
        ({"token": "two words"}, "token"),
        ({"user": "a;b"}, "user"),
    ],
)
def test_unsafe_or_invalid_settings_are_rejected(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        render_serve_config(replace(SERVE, **changes), PREFIX)


def test_https_origin_needs_ca_certificates(prefix: Path) -> None:
    settings = replace(CACHE, origins=(("", "https://127.0.0.1/data"),), dir=prefix / "c")
    with pytest.raises(InputError, match="certificates"):
        render_cache_config(settings, prefix)
    text = render_cache_config(replace(settings, ca_file=Path("/etc/ssl/certs/ca-certificates.crt")), prefix)
    assert nginx_test_error(text, prefix) == ""


def test_cache_without_an_admin_socket(prefix: Path) -> None:
    """No access log, which nothing would rotate, no socket, and names resolved by a DNS server."""
    origins = (("data", "http://data.default.svc:7888/x"), ("other", "http://h"))
    text = render_cache_config(replace(CACHE, origins=origins, dir=prefix / "c", resolver="127.0.0.1"), prefix)
    assert "unix:" not in text
    assert "access_log off;" in text
    assert nginx_test_error(text, prefix) == ""


def test_configuration_is_deterministic() -> None:
    settings = replace(SERVE, token="a" * 16)
    assert render_serve_config(settings, PREFIX) == render_serve_config(settings, PREFIX)
