"""Objects as verified local files: fetched once, checked, and never half there."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stoker.errors import DataFaultError, NotFoundError, UnavailableError
from stoker.storage.cached import fetched
from stoker.storage.local import LocalStore

DATA = bytes(range(256)) * 40
SHA256 = hashlib.sha256(DATA).hexdigest()
DAMAGED = DATA[:-1] + b"\x00"


class Counting(LocalStore):
    """A folder that counts what is asked of it, and gives what it is told to give instead."""

    def __init__(self, folder: Path, *answers: bytes | Exception) -> None:
        super().__init__(str(folder))
        self.answers = list(answers)
        self.asked = 0

    def range(self, name: str, start: int, length: int) -> bytes:
        self.asked += 1
        answer = self.answers.pop(0) if self.answers else super().range(name, 0, len(DATA))
        if isinstance(answer, Exception):
            raise answer
        return answer[start : start + length]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def there(folder: Path) -> Path:
    (folder / "train").mkdir()
    (folder / "train/a.tar").write_bytes(DATA)
    return folder


def fetch(store: LocalStore, cache: Path, sha256: str = SHA256) -> Path:
    return fetched(store, "train/a.tar", cache, size=len(DATA), sha256=sha256)


@pytest.mark.parametrize("sha256", [SHA256, ""])
def test_is_fetched_once(there: Path, cache: Path, sha256: str) -> None:
    store = Counting(there)
    path = fetch(store, cache, sha256)
    assert path.read_bytes() == DATA
    asked = store.asked
    assert fetch(store, cache, sha256) == path
    assert store.asked == asked
    assert list(cache.iterdir()) == [path]


def test_one_damaged_on_the_way_is_fetched_again(there: Path, cache: Path) -> None:
    store = Counting(there, DAMAGED)
    assert fetch(store, cache).read_bytes() == DATA
    assert store.asked == 2


def test_one_damaged_twice_is_told_and_not_kept(there: Path, cache: Path) -> None:
    with pytest.raises(DataFaultError, match=r"folder/train/a\.tar: its sha256 is [0-9a-f]{12}….*put the right shard"):
        fetch(Counting(there, DAMAGED, DAMAGED), cache)
    assert list(cache.iterdir()) == []
    assert fetch(Counting(there), cache).read_bytes() == DATA


def test_one_cut_short_is_told_and_not_kept(there: Path, cache: Path) -> None:
    (there / "train/a.tar").write_bytes(DATA[:-100])
    with pytest.raises(DataFaultError, match=r"train/a\.tar.*wanted 10240 bytes from 0, got 10140"):
        fetch(LocalStore(str(there)), cache)
    assert list(cache.iterdir()) == []


def test_a_copy_of_another_size_is_fetched_again(there: Path, cache: Path) -> None:
    path = fetch(Counting(there), cache)
    path.write_bytes(DATA[:-1])
    store = Counting(there)
    assert fetch(store, cache).read_bytes() == DATA
    assert store.asked == 1


def test_what_does_not_answer_or_is_not_there_is_not_asked_again(there: Path, cache: Path) -> None:
    store = Counting(there, UnavailableError("away"), UnavailableError("away"))
    with pytest.raises(UnavailableError):
        fetch(store, cache)
    assert store.asked == 1
    (there / "train/a.tar").unlink()
    with pytest.raises(NotFoundError):
        fetch(LocalStore(str(there)), cache)
    assert list(cache.iterdir()) == []


def test_a_copy_is_known_by_what_it_holds_or_by_where_it_came_from(tmp_path: Path, there: Path, cache: Path) -> None:
    other = tmp_path / "other"
    (other / "train").mkdir(parents=True)
    (other / "train/a.tar").write_bytes(DAMAGED)
    same = fetched(Counting(there), "train/a.tar", cache, size=len(DATA), sha256=SHA256)
    assert fetched(Counting(other), "another/name", cache, size=len(DATA), sha256=SHA256) == same  # by its digest
    one = fetched(Counting(there), "train/a.tar", cache, size=len(DATA))
    two = fetched(Counting(other), "train/a.tar", cache, size=len(DATA))
    assert (one.read_bytes(), two.read_bytes()) == (DATA, DAMAGED)


def test_large_objects_come_in_pieces(folder: Path, cache: Path) -> None:
    class Pieces(LocalStore):
        longest = 0

        def range(self, name: str, start: int, length: int) -> bytes:
            self.longest = max(self.longest, length)
            return super().range(name, start, length)

    data = bytes(20 << 20)
    (folder / "large").write_bytes(data)
    store = Pieces(str(folder))
    sha256 = hashlib.sha256(data).hexdigest()
    assert fetched(store, "large", cache, size=len(data), sha256=sha256).read_bytes() == data
    assert store.longest <= 8 << 20


def test_many_at_once_leave_one_whole_copy(there: Path, cache: Path) -> None:
    gate = threading.Barrier(4)

    class Together(LocalStore):
        def range(self, name: str, start: int, length: int) -> bytes:
            gate.wait(10)
            return super().range(name, start, length)

    with ThreadPoolExecutor(4) as pool:
        paths = {future.result() for future in [pool.submit(fetch, Together(str(there)), cache) for _ in range(4)]}
    (path,) = paths
    assert path.read_bytes() == DATA
    assert list(cache.iterdir()) == [path]


def test_an_empty_object(folder: Path, cache: Path) -> None:
    (folder / "empty").write_bytes(b"")
    assert fetched(LocalStore(str(folder)), "empty", cache, size=0).read_bytes() == b""
