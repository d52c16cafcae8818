"""Contract of every store: subclass `StorageContract`, or `ReadContract` for a read-only one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from stoker.errors import InputError, NotFoundError, ObjectChangedError, UnavailableError, VerificationError
from stoker.storage import Entry, Store, download, open_store, read_chunks

Fill = Callable[[Mapping[str, bytes]], Store]

TEN = b"0123456789"
SPECIAL_NAMES = ("plus+and space.tar", "per%41cent", "ünïcode", "a=b&c", "#hash?", "it's(1)", "semi;colon:")


class ReadContract:
    """Needs a fixture `fill`, which takes names and bytes and returns a store with exactly these objects."""

    def test_get_reads_the_whole_object(self, fill: Fill) -> None:
        store = fill({"a": TEN, "deep/er/b": b"x", "empty": b""})
        assert (store.get("a"), store.get("deep/er/b"), store.get("empty")) == (TEN, b"x", b"")

    def test_get_reads_at_most_what_is_allowed(self, fill: Fill) -> None:
        store = fill({"a": TEN})
        assert store.get("a", max_bytes=10) == TEN
        with pytest.raises(UnavailableError, match="a: "):
            store.get("a", max_bytes=9)

    def test_size(self, fill: Fill) -> None:
        store = fill({"a": TEN, "deep/b": b"x", "empty": b""})
        assert (store.size("a"), store.size("deep/b"), store.size("empty")) == (10, 1, 0)

    @pytest.mark.parametrize(("start", "length"), [(0, 10), (0, 1), (3, 4), (9, 1), (5, 0)])
    def test_range_reads_exactly_the_requested_bytes(self, fill: Fill, start: int, length: int) -> None:
        assert fill({"a": TEN}).range("a", start, length) == TEN[start : start + length]

    @pytest.mark.parametrize(("start", "got"), [(8, 2), (10, 0), (99, 0)])
    def test_range_past_the_end_reports_expected_and_actual_length(self, fill: Fill, start: int, got: int) -> None:
        with pytest.raises(VerificationError, match=rf"\b30\b.* {start}\b.* {got}$"):
            fill({"a": TEN}).range("a", start, 30)

    def test_head_returns_size_and_etag(self, fill: Fill) -> None:
        store = fill({"a": TEN, "empty": b""})
        first = store.head("a")
        assert (first.size, store.head("empty").size) == (10, 0)
        assert first.etag
        assert store.head("a") == first
        assert store.range("a", 2, 4, etag=first.etag) == TEN[2:6]
        fill({"a": TEN[::-1]})
        second = store.head("a")
        assert second.etag != first.etag
        assert store.range("a", 2, 4, etag=second.etag) == b"7654"

    def test_range_of_another_version_raises_changed_error(self, fill: Fill) -> None:
        store = fill({"a": TEN})
        meta = store.head("a")
        fill({"a": TEN[::-1]})
        with pytest.raises(ObjectChangedError, match="a: "):
            store.range("a", 2, 4, etag=meta.etag)

    def test_conditional_range_can_be_short_or_not_found(self, fill: Fill) -> None:
        store = fill({"a": TEN})
        meta = store.head("a")
        for start, got in ((8, 2), (10, 0)):
            with pytest.raises(VerificationError, match=rf"\b30\b.* {start}\b.* {got}$"):
                store.range("a", start, 30, etag=meta.etag)
        with pytest.raises(NotFoundError, match="none"):
            store.range("none", 0, 1, etag=meta.etag)

    def test_list_is_recursive_and_sorted_by_name(self, fill: Fill) -> None:
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
    def test_list_accepts_any_prefix(self, fill: Fill, prefix: str, names: list[str]) -> None:
        objects = ("train/00.tar", "train/01.tar", "train/10.tar", "train.json", "val/00.tar")
        store = fill(dict.fromkeys(objects, b"x"))
        assert [entry.name for entry in store.list(prefix)] == names

    def test_names_with_special_characters(self, fill: Fill) -> None:
        store = fill(
            {name: name.encode() for name in SPECIAL_NAMES}
            | {f"odd {SPECIAL_NAMES[2]}/{name}": b"" for name in SPECIAL_NAMES}
        )
        assert [store.get(name) for name in SPECIAL_NAMES] == [name.encode() for name in SPECIAL_NAMES]
        assert {entry.name for entry in store.list()} == {
            *SPECIAL_NAMES,
            *(f"odd {SPECIAL_NAMES[2]}/{name}" for name in SPECIAL_NAMES),
        }

    def test_missing_object_raises_not_found(self, fill: Fill) -> None:
        store = fill({"a": TEN})
        for read in (store.get, store.size, store.head, lambda name: store.range(name, 0, 1)):
            with pytest.raises(NotFoundError, match="none"):
                read("none")

    def test_folder_is_not_an_object(self, fill: Fill) -> None:
        store = fill({"deep/a": TEN})
        for read in (store.get, store.size, store.head):
            with pytest.raises(NotFoundError, match="deep"):
                read("deep")

    @pytest.mark.parametrize("prefix", ["../a", "/deep/a", "a/../"])
    def test_prefixes_outside_the_store_are_rejected(self, fill: Fill, prefix: str) -> None:
        with pytest.raises(InputError) as caught:
            list(fill({"a": TEN, "deep/a": TEN}).list(prefix))
        assert caught.value.where == repr(prefix.rpartition("/")[0])

    @pytest.mark.parametrize("name", ["../a", "/a", "deep/../../a", "", "a//b", "./a", "a\0"])
    def test_names_outside_the_store_are_rejected(self, fill: Fill, name: str) -> None:
        store = fill({"a": TEN})
        for read in (store.get, store.size, store.head, lambda name: store.range(name, 0, 1)):
            with pytest.raises(InputError) as caught:
                read(name)
            assert caught.value.where == repr(name)

    def test_read_chunks(self, fill: Fill) -> None:
        assert list(read_chunks(fill({"a": TEN}), "a", 10, chunk=4)) == [b"0123", b"4567", b"89"]

    def test_download(self, fill: Fill, tmp_path: Path) -> None:
        store = fill({"deep/a": TEN, "empty": b""})
        download(store, "deep/a", tmp_path / "new" / "a")
        download(store, "empty", tmp_path / "new" / "empty")
        assert (tmp_path / "new" / "a").read_bytes() == TEN
        assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a", "empty"]

    def test_store_can_be_reopened_by_its_url(self, fill: Fill) -> None:
        assert open_store(fill({"a": TEN}).url).get("a") == TEN


class StorageContract(ReadContract):
    """Needs a fixture `store`: an empty, writable store."""

    @pytest.fixture
    def fill(self, store: Store) -> Fill:
        def fill(objects: Mapping[str, bytes]) -> Store:
            for name, data in objects.items():
                store.put(name, data)
            return store

        return fill

    def test_empty_store_lists_nothing(self, store: Store) -> None:
        assert list(store.list()) == []

    def test_second_put_replaces_the_object(self, store: Store) -> None:
        store.put("a", TEN)
        store.put("a", b"new")
        assert (store.get("a"), list(store.list())) == (b"new", [Entry("a", 3)])

    @pytest.mark.parametrize("size", [0, 10, 20 << 20, (16 << 20) + 1], ids=["0", "10", "20M", "16M+1"])
    def test_put_moves_a_file(self, store: Store, tmp_path: Path, size: int) -> None:
        source = tmp_path / "source"
        data = bytes(range(256)) * (size // 256) + bytes(size % 256)
        source.write_bytes(data)
        store.put("deep/er/moved", source)
        assert not source.exists()
        assert list(store.list()) == [Entry("deep/er/moved", size)]
        assert b"".join(read_chunks(store, "deep/er/moved", size)) == data

    def test_put_of_a_missing_source_names_it(self, store: Store, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError, match="nothing-here"):
            store.put("a", tmp_path / "nothing-here")
        assert list(store.list()) == []

    def test_delete_is_idempotent(self, store: Store) -> None:
        store.put("deep/a", TEN)
        store.delete("deep/a")
        store.delete("deep/a")
        assert list(store.list()) == []

    def test_writes_outside_the_store_are_rejected(self, store: Store) -> None:
        for change in (lambda: store.put("../a", b""), lambda: store.delete("../a")):
            with pytest.raises(InputError) as caught:
                change()
            assert caught.value.where == repr("../a")
