"""What every store must do: subclass `StorageContract`, or `ReadContract` for one that only reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from stoker.errors import ChangedError, DataFaultError, InputError, NotFoundError
from stoker.storage import Entry, Store, download, open_store, read_chunks

Fill = Callable[[Mapping[str, bytes]], Store]

TEN = b"0123456789"
ODD = ("plus+and space.tar", "per%41cent", "ünïcode", "a=b&c", "#hash?", "it's(1)", "semi;colon:")


class ReadContract:
    """Give a fixture `fill`: called with names and bytes, it returns a store that holds just these."""

    def test_reads_a_whole_object(self, fill: Fill) -> None:
        store = fill({"a": TEN, "deep/er/b": b"x", "empty": b""})
        assert (store.get("a"), store.get("deep/er/b"), store.get("empty")) == (TEN, b"x", b"")

    def test_tells_sizes(self, fill: Fill) -> None:
        store = fill({"a": TEN, "deep/b": b"x", "empty": b""})
        assert (store.size("a"), store.size("deep/b"), store.size("empty")) == (10, 1, 0)

    @pytest.mark.parametrize(("start", "length"), [(0, 10), (0, 1), (3, 4), (9, 1), (5, 0)])
    def test_reads_exactly_a_range(self, fill: Fill, start: int, length: int) -> None:
        assert fill({"a": TEN}).range("a", start, length) == TEN[start : start + length]

    @pytest.mark.parametrize(("start", "got"), [(8, 2), (10, 0), (99, 0)])
    def test_a_short_range_says_what_it_wanted_and_got(self, fill: Fill, start: int, got: int) -> None:
        with pytest.raises(DataFaultError, match=f"wanted 30 bytes from {start}, got {got}"):
            fill({"a": TEN}).range("a", start, 30)

    def test_a_tag_tells_the_size_and_the_version(self, fill: Fill) -> None:
        store = fill({"a": TEN, "empty": b""})
        first = store.tag("a")
        assert (first.size, store.tag("empty").size) == (10, 0)
        assert first.etag
        assert store.tag("a") == first
        assert store.range("a", 2, 4, etag=first.etag) == TEN[2:6]
        fill({"a": TEN[::-1]})
        second = store.tag("a")
        assert second.etag != first.etag
        assert store.range("a", 2, 4, etag=second.etag) == b"7654"

    def test_bytes_of_another_version_are_refused(self, fill: Fill) -> None:
        store = fill({"a": TEN})
        tag = store.tag("a")
        fill({"a": TEN[::-1]})
        with pytest.raises(ChangedError, match="a: was replaced while it was read"):
            store.range("a", 2, 4, etag=tag.etag)

    def test_a_range_of_a_version_may_be_short_or_missing(self, fill: Fill) -> None:
        store = fill({"a": TEN})
        tag = store.tag("a")
        for start, got in ((8, 2), (10, 0)):
            with pytest.raises(DataFaultError, match=f"wanted 30 bytes from {start}, got {got}"):
                store.range("a", start, 30, etag=tag.etag)
        with pytest.raises(NotFoundError, match="none"):
            store.range("none", 0, 1, etag=tag.etag)

    def test_lists_in_order_of_name_with_folders_entered(self, fill: Fill) -> None:
        store = fill({"b": b"22", "a/x/1": b"", "a-b": b"1", "a.b": b"1", "ab": b"1", "a/y": b"333"})
        sizes = {"a-b": 1, "a.b": 1, "a/x/1": 0, "a/y": 3, "ab": 1, "b": 2}
        assert list(store.list()) == [Entry(name, size) for name, size in sizes.items()]

    @pytest.mark.parametrize(
        ("prefix", "names"),
        [
            ("train/0", ["train/00.tar", "train/01.tar"]),
            ("train/", ["train/00.tar", "train/01.tar", "train/10.tar"]),
            ("tr", ["train.json", "train/00.tar", "train/01.tar", "train/10.tar"]),
            ("train.json", ["train.json"]),
            ("none/", []),
            ("none", []),
        ],
    )
    def test_lists_by_any_prefix(self, fill: Fill, prefix: str, names: list[str]) -> None:
        held = ("train/00.tar", "train/01.tar", "train/10.tar", "train.json", "val/00.tar")
        store = fill(dict.fromkeys(held, b"x"))
        assert [entry.name for entry in store.list(prefix)] == names

    def test_names_may_hold_odd_characters(self, fill: Fill) -> None:
        store = fill({name: name.encode() for name in ODD} | {f"odd {ODD[2]}/{name}": b"" for name in ODD})
        assert [store.get(name) for name in ODD] == [name.encode() for name in ODD]
        assert {entry.name for entry in store.list()} == {*ODD, *(f"odd {ODD[2]}/{name}" for name in ODD)}

    def test_what_is_missing_is_not_found(self, fill: Fill) -> None:
        store = fill({"a": TEN})
        for read in (store.get, store.size, store.tag, lambda name: store.range(name, 0, 1)):
            with pytest.raises(NotFoundError, match="none"):
                read("none")

    def test_a_folder_is_not_an_object(self, fill: Fill) -> None:
        store = fill({"deep/a": TEN})
        for read in (store.get, store.size, store.tag):
            with pytest.raises(NotFoundError, match="deep"):
                read("deep")

    @pytest.mark.parametrize("prefix", ["../a", "/deep/a", "a/../"])
    def test_prefixes_that_lead_elsewhere_are_refused(self, fill: Fill, prefix: str) -> None:
        with pytest.raises(InputError, match="not an object's name"):
            list(fill({"a": TEN, "deep/a": TEN}).list(prefix))

    @pytest.mark.parametrize("name", ["../a", "/a", "deep/../../a", "", "a//b", "./a", "a\0"])
    def test_names_that_lead_elsewhere_are_refused(self, fill: Fill, name: str) -> None:
        store = fill({"a": TEN})
        for read in (store.get, store.size, store.tag, lambda name: store.range(name, 0, 1)):
            with pytest.raises(InputError, match="not an object's name"):
                read(name)

    def test_reads_in_chunks(self, fill: Fill) -> None:
        assert list(read_chunks(fill({"a": TEN}), "a", 10, chunk=4)) == [b"0123", b"4567", b"89"]

    def test_downloads(self, fill: Fill, tmp_path: Path) -> None:
        store = fill({"deep/a": TEN, "empty": b""})
        download(store, "deep/a", tmp_path / "new" / "a")
        download(store, "empty", tmp_path / "new" / "empty")
        assert (tmp_path / "new" / "a").read_bytes() == TEN
        assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a", "empty"]

    def test_opens_again_by_its_url(self, fill: Fill) -> None:
        assert open_store(fill({"a": TEN}).url).get("a") == TEN


class StorageContract(ReadContract):
    """Give a fixture `store`: an empty store that takes writes."""

    @pytest.fixture
    def fill(self, store: Store) -> Fill:
        def fill(objects: Mapping[str, bytes]) -> Store:
            for name, data in objects.items():
                store.put(name, data)
            return store

        return fill

    def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        assert list(store.list()) == []

    def test_a_second_put_replaces(self, store: Store) -> None:
        store.put("a", TEN)
        store.put("a", b"new")
        assert (store.get("a"), list(store.list())) == (b"new", [Entry("a", 3)])

    @pytest.mark.parametrize("size", [0, 10, 20 << 20, (16 << 20) + 1], ids=["0", "10", "20M", "16M+1"])
    def test_a_file_is_moved_in(self, store: Store, tmp_path: Path, size: int) -> None:
        source = tmp_path / "source"
        data = bytes(range(256)) * (size // 256) + bytes(size % 256)
        source.write_bytes(data)
        store.put("deep/er/moved", source)
        assert not source.exists()
        assert list(store.list()) == [Entry("deep/er/moved", size)]
        assert b"".join(read_chunks(store, "deep/er/moved", size)) == data

    def test_a_missing_source_is_named(self, store: Store, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError, match="nothing-here"):
            store.put("a", tmp_path / "nothing-here")
        assert list(store.list()) == []

    def test_deletes_once_or_twice(self, store: Store) -> None:
        store.put("deep/a", TEN)
        store.delete("deep/a")
        store.delete("deep/a")
        assert list(store.list()) == []

    def test_names_that_lead_elsewhere_are_not_written(self, store: Store) -> None:
        for change in (lambda: store.put("../a", b""), lambda: store.delete("../a")):
            with pytest.raises(InputError, match="not an object's name"):
                change()
