"""Foreign shard sets, written by other tools, are scanned once: tars of webdataset, TFRecords, a real nginx."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import webdataset

from stoker.errors import InputError, NotFoundError, StokerError, VerificationError
from stoker.shards import scan
from stoker.shards.formats import FORMATS
from stoker.shards.index import IndexBuilder
from stoker.shards.sample import Sample
from stoker.shards.scan import default_scan_cache, ensure_manifest
from stoker.shards.shard_set import MappedFile, ShardSet, find_shard_sets, read_images
from tests.support.servers import nginx
from tests.support.trees import digests, image_bytes, make_dataset, stoker

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset does not close its shards

LABELS = [number % 4 for number in range(10)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for the scans of this test."""
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "scans"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Write four tars of up to three samples with webdataset's ShardWriter."""
    (tmp_path / "theirs").mkdir()
    with webdataset.ShardWriter(str(tmp_path / "theirs/set-%06d.tar"), maxcount=3, verbose=0) as writer:
        for number, label in enumerate(LABELS):
            extras = {"json": {"number": number}} if number % 2 else {}
            writer.write({"__key__": f"{number:03d}", "jpg": image_bytes(number), "cls": label, **extras})
    return tmp_path / "theirs"


def find_shard_set(url: object) -> ShardSet:
    (shard_set,) = find_shard_sets(str(url))
    return shard_set


def make_pattern(folder: object) -> str:
    return f"{folder}/set-{{000000..000003}}.tar"


def list_images(shard_set: ShardSet) -> list[tuple[bytes, int]]:
    return [(bytes(view), label) for entry in shard_set.shards for view, label in read_images(shard_set, entry.name)]


def expected_images(numbers: Sequence[int] = range(10)) -> list[tuple[bytes, int]]:
    return [(image_bytes(number), LABELS[number]) for number in numbers]


def rewrite_shard(shard: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of a shard, but not its modification time."""
    status = shard.stat()
    shard.write_bytes(change(shard.read_bytes()))
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))


def assert_rejected(url: object, *parts: str) -> StokerError:
    """Expect an InputError whose message is one line that contains all parts; return it."""
    with pytest.raises(InputError) as caught:
        ensure_manifest(find_shard_set(url))
    sentence = str(caught.value)
    assert "\n" not in sentence
    for part in parts:
        assert part in sentence
    return caught.value


@pytest.mark.parametrize("jobs", [1, 3])
def test_tars_of_webdataset_are_scanned_and_read(theirs: Path, cache: Path, jobs: int) -> None:
    shard_set = find_shard_set(make_pattern(theirs))
    assert shard_set.manifest is None
    reported: list[int] = []
    full = ensure_manifest(shard_set, jobs=jobs, progress=reported.append)
    assert full.shards == shard_set.shards
    assert list_images(full) == expected_images()
    assert sorted(reported) == sorted(entry.size for entry in shard_set.shards)
    manifest = full.manifest
    assert manifest is not None
    assert [shard.samples for shard in manifest.shards] == [3, 3, 3, 1]
    assert {shard.sha256 for shard in manifest.shards} == {""}
    assert (manifest.samples, manifest.bytes) == (10, sum(reported))
    assert (manifest.split, manifest.format, manifest.classes, manifest.source.kind) == ("train", "tar", (), "scan")
    (cached,) = cache.iterdir()
    assert cached.stat().st_mode & 0o055 == 0o055 & ~_umask()
    assert sorted(digests(cached)) == sorted(
        [*(f"index/{entry.name}.npy" for entry in shard_set.shards), "manifest.json"]
    )
    assert sorted(path.name for path in theirs.iterdir()) == [entry.name for entry in shard_set.shards]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_second_call_does_not_read_the_shards(theirs: Path, cache: Path) -> None:
    first = ensure_manifest(find_shard_set(make_pattern(theirs)))
    for shard in theirs.iterdir():
        rewrite_shard(shard, lambda data: bytes(len(data)))
    reported: list[int] = []
    second = ensure_manifest(find_shard_set(make_pattern(theirs)), progress=reported.append)
    assert second.manifest == first.manifest
    assert reported == []
    assert np.array_equal(second.read_index("set-000003.tar"), first.read_index("set-000003.tar"))


def test_relative_path_is_the_same_shard_set(theirs: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_manifest(find_shard_set(make_pattern(theirs)))
    monkeypatch.chdir(theirs)
    ensure_manifest(find_shard_set("set-{000000..000003}.tar"))
    ensure_manifest(find_shard_set(f"file://{make_pattern(theirs)}"))
    assert len(list(cache.iterdir())) == 1
    # The same relative path in another folder, with the same sizes and times, is another shard set.
    other = theirs.parent / "other"
    shutil.copytree(theirs, other / "theirs")
    monkeypatch.chdir(other / "theirs")
    ensure_manifest(find_shard_set("set-{000000..000003}.tar"))
    assert len(list(cache.iterdir())) == 2


def test_changed_shard_is_scanned_again(theirs: Path, cache: Path) -> None:
    ensure_manifest(find_shard_set(make_pattern(theirs)))
    shard = theirs / "set-000001.tar"
    status = shard.stat()
    with webdataset.TarWriter(str(shard)) as writer:  # as many bytes as before
        for number in (5, 4, 3):
            extras = {"json": {"number": number}} if number % 2 else {}
            writer.write({"__key__": f"{number:03d}", "jpg": image_bytes(number), "cls": LABELS[number], **extras})
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert shard.stat().st_size == status.st_size
    assert list_images(ensure_manifest(find_shard_set(make_pattern(theirs)))) == expected_images(
        [0, 1, 2, 5, 4, 3, 6, 7, 8, 9]
    )


def test_subset_is_another_shard_set(theirs: Path, cache: Path) -> None:
    ensure_manifest(find_shard_set(make_pattern(theirs)))
    part = ensure_manifest(find_shard_set(f"{theirs}/set-{{000001,000003}}.tar"))
    assert list_images(part) == expected_images([3, 4, 5, 9])


def test_same_folder_as_two_splits(theirs: Path, cache: Path) -> None:
    """The split is guessed from the folder name only for URLs above that folder."""
    root = theirs.parent / "root"
    root.mkdir()
    theirs.rename(root / "val")
    above, inside = (ensure_manifest(find_shard_set(url)) for url in (root, make_pattern(root / "val")))
    assert above.url == inside.url
    assert above.manifest is not None
    assert inside.manifest is not None
    assert (above.manifest.split, inside.manifest.split) == (above.split, inside.split) == ("val", "train")


def test_tfrecords_without_manifest(tmp_path: Path, cache: Path) -> None:
    data = make_dataset(tmp_path / "pets")
    assert stoker("data", "convert", data, tmp_path / "out", "--shard-samples", 7, "--format", "tfrecord") == 0
    own = find_shard_set(tmp_path / "out/train")
    before = {entry.name: own.read_index(entry.name) for entry in own.shards}
    (tmp_path / "out/train/manifest.json").unlink()
    shutil.rmtree(tmp_path / "out/train/index")
    full = ensure_manifest(find_shard_set(tmp_path / "out/train"), jobs=2)
    assert own.manifest is not None
    assert full.manifest is not None
    assert [shard.index_sha256 for shard in full.manifest.shards] == [s.index_sha256 for s in own.manifest.shards]
    assert all(np.array_equal(full.read_index(name), rows) for name, rows in before.items())


def test_web_server_is_read_once(theirs: Path, cache: Path) -> None:
    with nginx(theirs) as url:
        shard_set = find_shard_set(make_pattern(url.replace("http://", "http://me:hunter2@")))
        assert list_images(ensure_manifest(shard_set, jobs=2)) == expected_images()
    # The server has stopped, so everything comes from the cache.
    full = ensure_manifest(shard_set)
    assert [len(full.read_index(entry.name)) for entry in full.shards] == [3, 3, 3, 1]
    assert not any(b"hunter2" in path.read_bytes() for path in cache.rglob("*") if path.is_file())


def test_existing_manifest_is_used(tmp_path: Path, cache: Path) -> None:
    assert stoker("data", "convert", make_dataset(tmp_path / "pets"), tmp_path / "out", "--shard-samples", 7) == 0
    for url in (tmp_path / "out/train", tmp_path / "out/train/pets-train-{000001..000002}.tar"):
        shard_set = find_shard_set(url)
        assert ensure_manifest(shard_set) is shard_set
    assert not cache.exists()


def test_empty_shard_among_others(theirs: Path, cache: Path) -> None:
    (theirs / "set-000001.tar").write_bytes(FORMATS.get("tar").trailer)
    full = ensure_manifest(find_shard_set(make_pattern(theirs)))
    assert full.manifest is not None
    assert [shard.samples for shard in full.manifest.shards] == [3, 0, 3, 1]
    assert list_images(full) == expected_images([0, 1, 2, 6, 7, 8, 9])


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda data: data[:-11_000], "truncated at byte"),
        (lambda _: b"", "truncated at byte 0"),
        (lambda data: bytes(range(256)) * (len(data) // 256), "header at byte 0"),
        (lambda data: data.replace(b"004.cls", b"004.txt"), ".cls"),
        (lambda data: data.replace(b"004.jpg", b"004.txt"), "sample '004' at byte"),
    ],
)
def test_scan_of_a_damaged_shard_is_not_cached(
    theirs: Path, cache: Path, change: Callable[[bytes], bytes], part: str
) -> None:
    shard = theirs / "set-000001.tar"
    whole = shard.read_bytes()
    rewrite_shard(shard, change)
    error = assert_rejected(make_pattern(theirs), f"{shard}: ", part, "stoker data verify")
    assert isinstance(error, VerificationError)
    assert list(cache.iterdir()) == []
    rewrite_shard(shard, lambda _: whole)
    assert list_images(ensure_manifest(find_shard_set(make_pattern(theirs)))) == expected_images()


@pytest.mark.parametrize("label", [-1, 2**31])
def test_label_beyond_the_index_is_rejected(tmp_path: Path, cache: Path, label: int) -> None:
    tfrecord = FORMATS.get("tfrecord")
    data = b"".join(bytes(chunk) for chunk in tfrecord.encode(Sample("a", image_bytes(0), "jpg", label)).chunks)
    (tmp_path / "a.tfrecord").write_bytes(data)
    assert_rejected(tmp_path / "a.tfrecord", "a.tfrecord: sample 'a' at byte 0", f"label {label}", "2147483647")
    assert list(cache.iterdir()) == []


def test_shard_that_grows_during_the_scan_is_rejected(theirs: Path, cache: Path) -> None:
    shard_set = find_shard_set(make_pattern(theirs))
    size = shard_set.shards[2].size
    rewrite_shard(theirs / "set-000002.tar", lambda data: data + bytes(512))
    with pytest.raises(VerificationError, match=rf"set-000002\.tar: .*\b{size:,}\b.*\b{size + 512:,} bytes"):
        ensure_manifest(shard_set)
    assert list(cache.iterdir()) == []


def test_shard_set_without_samples_is_rejected(theirs: Path, cache: Path) -> None:
    for shard in theirs.iterdir():
        shard.write_bytes(FORMATS.get("tar").trailer)
    assert_rejected(make_pattern(theirs), f"{theirs}: none of the 4 shards has samples; ", "stoker data convert")
    assert list(cache.iterdir()) == []


def test_cache_that_is_not_writable(theirs: Path, cache: Path) -> None:
    cache.parent.write_text("a file")
    with pytest.raises(StokerError, match=r"cache.*STOKER_CACHE_DIR"):
        ensure_manifest(find_shard_set(make_pattern(theirs)))


def test_damaged_cache_names_the_folder_to_remove(theirs: Path, cache: Path) -> None:
    ensure_manifest(find_shard_set(make_pattern(theirs)))
    (cached,) = cache.iterdir()
    (cached / "manifest.json").write_text("")
    assert_rejected(make_pattern(theirs), "manifest.json: invalid manifest", f"remove {cached}")
    (cached / "manifest.json").unlink()
    assert_rejected(make_pattern(theirs), f"remove {cached}")
    shutil.rmtree(cached)
    assert list_images(ensure_manifest(find_shard_set(make_pattern(theirs)))) == expected_images()


def test_folder_for_scans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STOKER_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_scan_cache() == Path.home() / ".cache/stoker/scans"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_scan_cache() == tmp_path / "xdg/stoker/scans"
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "own"))
    assert default_scan_cache() == tmp_path / "own/scans"


def test_slower_of_two_concurrent_scans_uses_the_other(
    theirs: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without locks both scan every shard; the slower one then finds the result of the other in the cache."""

    def no_locks(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(scan.fcntl, "flock", no_locks)
    shard_set = find_shard_set(make_pattern(theirs))
    move = scan._move_into_cache
    faster: list[ShardSet] = []

    def move_late(finished: Path, cached: Path) -> None:
        monkeypatch.setattr(scan, "_move_into_cache", move)
        faster.append(ensure_manifest(shard_set))
        move(finished, cached)

    monkeypatch.setattr(scan, "_move_into_cache", move_late)
    full = ensure_manifest(shard_set)
    assert [full.manifest] == [other.manifest for other in faster]
    assert list_images(full) == expected_images()
    assert len(list(cache.iterdir())) == 1


def test_concurrent_threads_and_processes_scan_once(theirs: Path, cache: Path) -> None:
    program = (
        "import sys; from stoker.shards.shard_set import find_shard_sets;"
        "from stoker.shards.scan import ensure_manifest;"
        "print(ensure_manifest(find_shard_sets(sys.argv[1])[0]).manifest.source.digest)"
    )
    command = [sys.executable, "-c", program, make_pattern(theirs)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    source_digests = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    (cached,) = cache.iterdir()
    shutil.rmtree(cached)
    shard_set = find_shard_set(make_pattern(theirs))
    scanned: list[int] = []
    with ThreadPoolExecutor(6) as pool:
        sets = list(pool.map(lambda _: ensure_manifest(shard_set, progress=scanned.append), range(6)))
    assert len(scanned) == len(shard_set.shards)  # only one of them scanned
    source_digests |= {full.manifest.source.digest for full in sets if full.manifest is not None}
    assert len(source_digests) == 1
    assert all(list_images(full) == expected_images() for full in sets)
    assert list(cache.iterdir()) == [cached]


def test_killed_scan_is_not_used(theirs: Path, cache: Path) -> None:
    program = (
        "import os, sys; from stoker.shards.shard_set import find_shard_sets;"
        "from stoker.shards.scan import ensure_manifest;"
        "calls = []; die = lambda n: calls.append(n) or len(calls) < 3 or os.kill(os.getpid(), 9);"
        "ensure_manifest(find_shard_sets(sys.argv[1])[0], progress=die)"
    )
    done = subprocess.run([sys.executable, "-c", program, make_pattern(theirs)], check=False)
    assert done.returncode == -9
    assert not list(cache.rglob("manifest.json"))
    assert list_images(ensure_manifest(find_shard_set(make_pattern(theirs)))) == expected_images()


def test_shards_are_mapped_one_at_a_time(theirs: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    most: list[int] = []

    class Counted(MappedFile):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            alive.append(1)
            most.append(len(alive))

        def __del__(self) -> None:
            alive.pop()

    monkeypatch.setattr("stoker.shards.shard_set.MappedFile", Counted)
    ensure_manifest(find_shard_set(make_pattern(theirs)))
    assert most == [1, 1, 1, 1]


# --- Invalid indexes


@pytest.fixture
def own(tmp_path: Path) -> ShardSet:
    """Convert a dataset to a shard set with manifest."""
    assert stoker("data", "convert", make_dataset(tmp_path / "pets"), tmp_path / "out") == 0
    return find_shard_set(tmp_path / "out/train")


def make_index(*rows: tuple[int, int, int]) -> bytes:
    builder = IndexBuilder()
    for row in rows:
        builder.add(*row)
    return builder.to_bytes()


def replace_index(shard_set: ShardSet, data: bytes, **facts: object) -> ShardSet:
    """Replace the index of the first shard, and its entries in the manifest."""
    manifest = shard_set.manifest
    assert manifest is not None
    Path(shard_set.url, f"index/{shard_set.shards[0].name}.npy").write_bytes(data)
    shard = msgspec.structs.replace(manifest.shards[0], **facts)
    return replace(shard_set, manifest=msgspec.structs.replace(manifest, shards=(shard, *manifest.shards[1:])))


def test_index_that_does_not_match_the_manifest(own: ShardSet) -> None:
    name = own.shards[0].name
    rows = own.read_index(name)
    changed = rows.copy()
    changed["label"][0] += 1
    data = make_index(*changed.tolist())
    shard_set = replace_index(own, data)
    for read in (lambda: shard_set.read_index(name), lambda: list(read_images(shard_set, name))):
        with pytest.raises(
            VerificationError, match=rf"^{own.url}/index/{name}\.npy: .*SHA-256.*; .*stoker data verify$"
        ):
            read()
    # Without a digest, the index cannot be checked.
    assert np.array_equal(replace_index(own, data, index_sha256="").read_index(name), changed)


def test_cached_index_that_does_not_match_the_manifest(theirs: Path, cache: Path) -> None:
    full = ensure_manifest(find_shard_set(make_pattern(theirs)))
    (cached,) = cache.iterdir()
    (cached / "index/set-000000.tar.npy").write_bytes(b"")
    with pytest.raises(VerificationError, match=rf"^{cached}/index/set-000000\.tar\.npy: .*; remove {cached}\b"):
        full.read_index("set-000000.tar")


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, None), (1, None), (None, 1), (2**64 - 1, 0), (2**64 - 10, 20), (2**63, 2**32 - 1)],
)
def test_index_beyond_the_end_of_the_shard(own: ShardSet, offset: int | None, length: int | None) -> None:
    """None stands for the size of the shard; some sums of offset and length overflow 64 bits."""
    entry = own.shards[0]
    row = (entry.size if offset is None else offset, entry.size if length is None else length, 0)
    data = make_index((0, 1, 0), row)
    shard_set = replace_index(own, data, samples=2, index_sha256=hashlib.sha256(data).hexdigest())
    if offset == 0:
        assert shard_set.read_index(entry.name).tolist()[1] == row
        return
    with pytest.raises(VerificationError, match=rf"index/{entry.name}\.npy: image 1 at byte {row[0]} "):
        shard_set.read_index(entry.name)


def test_index_with_another_count_than_the_manifest(own: ShardSet) -> None:
    data = make_index((0, 1, 0))
    shard_set = replace_index(own, data, index_sha256=hashlib.sha256(data).hexdigest())
    with pytest.raises(VerificationError, match=r"\b1 samples\b.*manifest.*\b30\b"):
        shard_set.read_index(own.shards[0].name)


def test_invalid_index(own: ShardSet) -> None:
    name = own.shards[0].name
    with pytest.raises(VerificationError, match=rf"index/{name}\.npy: .*shard index"):
        replace_index(own, b"no index", index_sha256="").read_index(name)


def test_truncated_shard_does_not_yield_short_images(own: ShardSet) -> None:
    shard = Path(own.url, own.shards[0].name)
    shard.write_bytes(shard.read_bytes()[:5000])
    with pytest.raises(VerificationError, match=r"\.tar: image \d+ at byte \d+ .*\b5000 bytes; .*stoker data verify$"):
        list(read_images(own, own.shards[0].name))


def test_unknown_shard(own: ShardSet) -> None:
    with pytest.raises(NotFoundError, match=rf"^{own.url}/other\.tar: .*no such shard"):
        own.read_index("other.tar")
