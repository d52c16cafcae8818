"""Splitting, joining and opening paths and URLs."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.errors import InputError
from stoker.storage import join_url, local_path, open_store, split_url


@pytest.mark.parametrize(
    ("url", "root", "name"),
    [
        ("a/b.tar", "a", "b.tar"),
        ("/b.tar", "/", "b.tar"),
        ("b.tar", ".", "b.tar"),
        ("../b 100%.tar", "..", "b 100%.tar"),
        ("file:///a%20b/c%2B.tar", "file:///a%20b", "c+.tar"),
        ("file:///c.tar", "file:///", "c.tar"),
        ("s3://bucket/a/b%.tar", "s3://bucket/a", "b%.tar"),
        ("gs://bucket/b?.tar", "gs://bucket", "b?.tar"),
        ("http://host:80/a/b%20c.tar?token=/x", "http://host:80/a?token=/x", "b c.tar"),
        ("https://u:p@host/b.tar", "https://u:p@host", "b.tar"),
    ],
)
def test_split_and_join_are_inverse(url: str, root: str, name: str) -> None:
    assert split_url(url) == (root, name)
    assert join_url(root, name) == ("./b.tar" if url == "b.tar" else url)


@pytest.mark.parametrize("url", ["a/", "s3://bucket", "s3://bucket/", "http://host", "..", "", "http://host/a/?q=b"])
def test_split_rejects_urls_without_an_object(url: str) -> None:
    with pytest.raises(InputError) as caught:
        split_url(url)
    assert caught.value.where == (url or None)


def test_join_accepts_a_trailing_slash() -> None:
    assert join_url("s3://b/a", "x/y") == join_url("s3://b/a/", "x/y") == "s3://b/a/x/y"
    assert join_url("http://h/a/?t=1", "x y") == "http://h/a/x%20y?t=1"


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("a b%20", Path("a b%20")),
        ("file:///a%20b", Path("/a b")),
        ("FILE://localhost/a", Path("/a")),
        ("s3://bucket/a", None),
        ("https://host/a", None),
    ],
)
def test_local_path(url: str, path: Path | None) -> None:
    assert local_path(url) == path


def test_local_path_rejects_another_host() -> None:
    with pytest.raises(InputError, match="file:///absolute/path") as caught:
        local_path("file://host/a")
    assert caught.value.where == "file://host/a"


def test_unknown_scheme_lists_the_supported_ones() -> None:
    with pytest.raises(InputError, match=r"'ftp'.*file://, gs://, http://, https://, s3://"):
        open_store("ftp://host/a")


@pytest.mark.parametrize("url", ["s3://", "gs://", "http://"])
def test_url_without_host_or_bucket_is_rejected(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    with pytest.raises(InputError) as caught:
        open_store(url)
    assert caught.value.where == url
