"""Local folder store: the contract, atomic writes, and errors of the file system."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stoker.errors import AccessDeniedError, NotFoundError, StorageFullError, UnavailableError
from stoker.storage import Entry, Store, open_store
from stoker.storage.local import LocalStore
from tests.storage.contract import StorageContract

Mount = Callable[[str], Path]


class TestLocal(StorageContract):
    @pytest.fixture
    def store(self, folder: Path) -> Store:
        return open_store(str(folder))


class TestFileUrl(StorageContract):
    @pytest.fixture
    def store(self, folder: Path) -> Store:
        (folder / "sp ace").mkdir()
        return open_store(f"file://{folder}/sp%20ace")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """A function that mounts a tmpfs with the given options."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        if os.geteuid() != 0:
            pytest.skip("only root can mount a tmpfs")
        place = tmp_path / f"mount{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)


def test_missing_folder_lists_nothing(tmp_path: Path) -> None:
    assert list(LocalStore(str(tmp_path / "absent")).list()) == []


def test_put_renames_a_file_of_the_same_file_system(tmp_path: Path, folder: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"data")
    inode = source.stat().st_ino
    LocalStore(str(folder)).put("a", source)
    assert (folder / "a").stat().st_ino == inode


def test_put_copies_a_file_of_another_file_system(mount: Mount, folder: Path) -> None:
    source = mount("size=1m") / "source"
    source.write_bytes(b"data")
    LocalStore(str(folder)).put("a", source)
    assert not source.exists()
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert (folder / "a").read_bytes() == b"data"


def test_full_disk_is_reported_and_leaves_no_temporary_file(mount: Mount, tmp_path: Path) -> None:
    place = mount("size=1m")
    store = LocalStore(str(place))
    store.put("a", b"kept")
    source = tmp_path / "source"
    source.write_bytes(bytes(2 << 20))
    for large in (bytes(2 << 20), source):
        with pytest.raises(StorageFullError, match=r"/a: no space left.*; free some space"):
            store.put("a", large)
    assert source.exists()
    assert [path.name for path in place.iterdir()] == ["a"]
    assert store.get("a") == b"kept"


def test_read_only_file_system_is_reported(mount: Mount) -> None:
    store = LocalStore(str(mount("size=1m,ro")))
    with pytest.raises(AccessDeniedError, match="read-only file system") as caught:
        store.put("a", b"")
    assert caught.value.where == str(store.root / "a")


def test_put_onto_a_folder_is_reported(folder: Path) -> None:
    (folder / "a").mkdir()
    with pytest.raises(NotFoundError, match="/a: is a directory") as caught:
        LocalStore(str(folder)).put("a", b"")
    assert caught.value.where == str(folder / "a")
    assert [path.name for path in folder.iterdir()] == ["a"]


def test_failing_source_leaves_no_file(folder: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LocalStore(str(folder)).write("a", chunks())
    assert list(folder.iterdir()) == []


def test_kill_9_leaves_no_object(folder: Path) -> None:
    program = """
import sys, time
from stoker.storage.local import LocalStore

def chunks():
    yield bytes(1 << 20)
    print("half", flush=True)
    time.sleep(60)

LocalStore(sys.argv[1]).write("a", chunks())
"""
    with subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"half\n"
        child.send_signal(signal.SIGKILL)
    assert [path.name[:3] for path in folder.iterdir()] == [".a."]
    assert list(LocalStore(str(folder)).list()) == []


def test_list_follows_symlinks_and_skips_special_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a").write_bytes(b"1")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "dangling").symlink_to(tmp_path / "nothing")
    os.mkfifo(folder / "fifo")
    store = LocalStore(str(folder))
    assert list(store.list()) == [Entry("link/a", 1)]
    with pytest.raises(NotFoundError, match=r"/fifo: not a .*file") as caught:
        store.size("fifo")
    assert caught.value.where == str(folder / "fifo")


def test_listing_ends_despite_symlinks_to_themselves_and_to_parents(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a").write_bytes(b"x")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("up", "also-up"):
        (tmp_path / "deep" / name).symlink_to("..")
    (tmp_path / "other").symlink_to("deep")
    assert [entry.name for entry in LocalStore(str(tmp_path)).list()] == ["deep/a", "other/a"]


def test_listing_of_directories_that_link_to_each_other_ends(tmp_path: Path) -> None:
    names = [f"{number:02}" for number in range(12)]
    for name in names:
        (tmp_path / name).mkdir()
        for other in names:
            (tmp_path / name / other).symlink_to(f"../{other}")
    with pytest.raises(UnavailableError, match="symbolic links") as caught:
        list(LocalStore(str(tmp_path)).list())
    assert caught.value.where == str(tmp_path)


def test_get_reads_no_more_than_the_limit_of_a_file_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(str(tmp_path))
    (tmp_path / "log").write_bytes(b"x" * 10)
    monkeypatch.setattr(LocalStore, "size", lambda *_: 5)  # before it grew
    assert store.get("log", max_bytes=10) == b"x" * 10
    for limit in (0, 4, 5, 9):
        with pytest.raises(UnavailableError, match="larger than"):
            store.get("log", max_bytes=limit)


def test_get_limits_a_file_without_a_size() -> None:
    store = LocalStore("/proc/self")
    assert store.size("status") == 0
    assert store.get("status").startswith(b"Name:")
    with pytest.raises(UnavailableError, match="larger than"):
        store.get("status", max_bytes=20)
