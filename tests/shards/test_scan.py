"""Sets that were made elsewhere: scanned once, by webdataset's own tars, TFRecords and a real nginx."""

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

from stoker.errors import DataFaultError, InputError, NotFoundError, StokerError
from stoker.shards import scan
from stoker.shards.formats import FORMATS
from stoker.shards.index import IndexBuilder
from stoker.shards.sample import Sample
from stoker.shards.scan import default_scan_cache, ensure_manifest
from stoker.shards.shard_set import MappedFile, ShardSet, find_shard_sets, read_images
from tests.support.servers import nginx
from tests.support.trees import digests, image_bytes, make_dataset, stoker

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset leaves its shards open

LABELS = [number % 4 for number in range(10)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's scans are kept."""
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "scans"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Four tars of up to three samples, as webdataset's ShardWriter writes them."""
    (tmp_path / "theirs").mkdir()
    with webdataset.ShardWriter(str(tmp_path / "theirs/set-%06d.tar"), maxcount=3, verbose=0) as writer:
        for number, label in enumerate(LABELS):
            extras = {"json": {"number": number}} if number % 2 else {}
            writer.write({"__key__": f"{number:03d}", "jpg": image_bytes(number), "cls": label, **extras})
    return tmp_path / "theirs"


def one_set(url: object) -> ShardSet:
    (one,) = find_shard_sets(str(url))
    return one


def pattern(folder: object) -> str:
    return f"{folder}/set-{{000000..000003}}.tar"


def images_of(one: ShardSet) -> list[tuple[bytes, int]]:
    return [(bytes(view), label) for entry in one.shards for view, label in read_images(one, entry.name)]


def expected(numbers: Sequence[int] = range(10)) -> list[tuple[bytes, int]]:
    return [(image_bytes(number), LABELS[number]) for number in numbers]


def rewritten(shard: Path, change: Callable[[bytes], bytes]) -> None:
    """Change a shard's bytes and keep the time it was changed at."""
    status = shard.stat()
    shard.write_bytes(change(shard.read_bytes()))
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))


def refuses(url: object, *parts: str) -> StokerError:
    """Expect one clear sentence."""
    with pytest.raises(InputError) as caught:
        ensure_manifest(one_set(url))
    sentence = str(caught.value)
    assert "\n" not in sentence
    for part in parts:
        assert part in sentence
    return caught.value


@pytest.mark.parametrize("jobs", [1, 3])
def test_tars_of_webdataset_are_scanned_and_read(theirs: Path, cache: Path, jobs: int) -> None:
    one = one_set(pattern(theirs))
    assert one.manifest is None
    told: list[int] = []
    full = ensure_manifest(one, jobs=jobs, progress=told.append)
    assert full.shards == one.shards
    assert images_of(full) == expected()
    assert sorted(told) == sorted(entry.size for entry in one.shards)
    manifest = full.manifest
    assert manifest is not None
    assert [shard.samples for shard in manifest.shards] == [3, 3, 3, 1]
    assert {shard.sha256 for shard in manifest.shards} == {""}
    assert (manifest.samples, manifest.bytes) == (10, sum(told))
    assert (manifest.split, manifest.format, manifest.classes, manifest.source.kind) == ("train", "tar", (), "scan")
    (kept,) = cache.iterdir()
    assert kept.stat().st_mode & 0o055 == 0o055 & ~_umask()
    assert sorted(digests(kept)) == sorted([*(f"index/{entry.name}.npy" for entry in one.shards), "manifest.json"])
    assert sorted(path.name for path in theirs.iterdir()) == [entry.name for entry in one.shards]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_second_call_reads_nothing_of_the_shards(theirs: Path, cache: Path) -> None:
    first = ensure_manifest(one_set(pattern(theirs)))
    for shard in theirs.iterdir():
        rewritten(shard, lambda data: bytes(len(data)))
    told: list[int] = []
    second = ensure_manifest(one_set(pattern(theirs)), progress=told.append)
    assert second.manifest == first.manifest
    assert told == []
    assert np.array_equal(second.read_index("set-000003.tar"), first.read_index("set-000003.tar"))


def test_a_relative_path_is_the_same_set(theirs: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_manifest(one_set(pattern(theirs)))
    monkeypatch.chdir(theirs)
    ensure_manifest(one_set("set-{000000..000003}.tar"))
    ensure_manifest(one_set(f"file://{pattern(theirs)}"))
    assert len(list(cache.iterdir())) == 1
    # The same name from elsewhere, with the same sizes and times, is another set.
    other = theirs.parent / "other"
    shutil.copytree(theirs, other / "theirs")
    monkeypatch.chdir(other / "theirs")
    ensure_manifest(one_set("set-{000000..000003}.tar"))
    assert len(list(cache.iterdir())) == 2


def test_a_changed_shard_is_scanned_anew(theirs: Path, cache: Path) -> None:
    ensure_manifest(one_set(pattern(theirs)))
    shard = theirs / "set-000001.tar"
    status = shard.stat()
    with webdataset.TarWriter(str(shard)) as writer:  # as many bytes as before
        for number in (5, 4, 3):
            extras = {"json": {"number": number}} if number % 2 else {}
            writer.write({"__key__": f"{number:03d}", "jpg": image_bytes(number), "cls": LABELS[number], **extras})
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert shard.stat().st_size == status.st_size
    assert images_of(ensure_manifest(one_set(pattern(theirs)))) == expected([0, 1, 2, 5, 4, 3, 6, 7, 8, 9])


def test_part_of_a_set_is_a_set_of_its_own(theirs: Path, cache: Path) -> None:
    ensure_manifest(one_set(pattern(theirs)))
    part = ensure_manifest(one_set(f"{theirs}/set-{{000001,000003}}.tar"))
    assert images_of(part) == expected([3, 4, 5, 9])


def test_one_place_read_as_two_splits(theirs: Path, cache: Path) -> None:
    """A folder's name tells the split only to those that look from above."""
    root = theirs.parent / "root"
    root.mkdir()
    theirs.rename(root / "val")
    above, inside = (ensure_manifest(one_set(url)) for url in (root, pattern(root / "val")))
    assert above.url == inside.url
    assert above.manifest is not None
    assert inside.manifest is not None
    assert (above.manifest.split, inside.manifest.split) == (above.split, inside.split) == ("val", "train")


def test_records_without_a_manifest(tmp_path: Path, cache: Path) -> None:
    data = make_dataset(tmp_path / "pets")
    assert stoker("data", "convert", data, tmp_path / "out", "--shard-samples", 7, "--format", "tfrecord") == 0
    own = one_set(tmp_path / "out/train")
    before = {entry.name: own.read_index(entry.name) for entry in own.shards}
    (tmp_path / "out/train/manifest.json").unlink()
    shutil.rmtree(tmp_path / "out/train/index")
    full = ensure_manifest(one_set(tmp_path / "out/train"), jobs=2)
    assert own.manifest is not None
    assert full.manifest is not None
    assert [shard.index_sha256 for shard in full.manifest.shards] == [s.index_sha256 for s in own.manifest.shards]
    assert all(np.array_equal(full.read_index(name), rows) for name, rows in before.items())


def test_a_web_server_is_asked_once(theirs: Path, cache: Path) -> None:
    with nginx(theirs) as url:
        one = one_set(pattern(url.replace("http://", "http://me:hunter2@")))
        assert images_of(ensure_manifest(one, jobs=2)) == expected()
    # The server is gone: whatever is told now was kept.
    full = ensure_manifest(one)
    assert [len(full.read_index(entry.name)) for entry in full.shards] == [3, 3, 3, 1]
    assert not any(b"hunter2" in path.read_bytes() for path in cache.rglob("*") if path.is_file())


def test_a_manifest_beside_the_shards_is_kept(tmp_path: Path, cache: Path) -> None:
    assert stoker("data", "convert", make_dataset(tmp_path / "pets"), tmp_path / "out", "--shard-samples", 7) == 0
    for url in (tmp_path / "out/train", tmp_path / "out/train/pets-train-{000001..000002}.tar"):
        one = one_set(url)
        assert ensure_manifest(one) is one
    assert not cache.exists()


def test_an_empty_shard_among_others(theirs: Path, cache: Path) -> None:
    (theirs / "set-000001.tar").write_bytes(FORMATS.get("tar").trailer)
    full = ensure_manifest(one_set(pattern(theirs)))
    assert full.manifest is not None
    assert [shard.samples for shard in full.manifest.shards] == [3, 0, 3, 1]
    assert images_of(full) == expected([0, 1, 2, 6, 7, 8, 9])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda data: data[:-11_000], "truncated at byte"),
        (lambda _: b"", "truncated at byte 0"),
        (lambda data: bytes(range(256)) * (len(data) // 256), "not a tar header at byte 0"),
        (lambda data: data.replace(b"004.cls", b"004.txt"), "has no label (.cls)"),
        (lambda data: data.replace(b"004.jpg", b"004.txt"), "sample '004' at byte"),
    ],
)
def test_a_damaged_shard_keeps_nothing(theirs: Path, cache: Path, change: Callable[[bytes], bytes], what: str) -> None:
    shard = theirs / "set-000001.tar"
    whole = shard.read_bytes()
    rewritten(shard, change)
    error = refuses(pattern(theirs), f"{shard}: ", what, "; mend or leave out this shard")
    assert isinstance(error, DataFaultError)
    assert list(cache.iterdir()) == []
    rewritten(shard, lambda _: whole)
    assert images_of(ensure_manifest(one_set(pattern(theirs)))) == expected()


@pytest.mark.parametrize("label", [-1, 2**31])
def test_a_label_that_no_index_holds(tmp_path: Path, cache: Path, label: int) -> None:
    kind = FORMATS.get("tfrecord")
    data = b"".join(bytes(chunk) for chunk in kind.encode(Sample("a", image_bytes(0), "jpg", label)).chunks)
    (tmp_path / "a.tfrecord").write_bytes(data)
    refuses(tmp_path / "a.tfrecord", "a.tfrecord: sample 'a' at byte 0", f"the label {label}, not 0 to")
    assert list(cache.iterdir()) == []


def test_a_shard_that_grows_meanwhile(theirs: Path, cache: Path) -> None:
    one = one_set(pattern(theirs))
    rewritten(theirs / "set-000002.tar", lambda data: data + bytes(512))
    with pytest.raises(DataFaultError, match=r"set-000002\.tar: .* a moment ago"):
        ensure_manifest(one)
    assert list(cache.iterdir()) == []


def test_no_samples_at_all(theirs: Path, cache: Path) -> None:
    for shard in theirs.iterdir():
        shard.write_bytes(FORMATS.get("tar").trailer)
    refuses(pattern(theirs), f"{theirs}: there are no samples in its 4 shards; ")
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written(theirs: Path, cache: Path) -> None:
    cache.parent.write_text("a file")
    with pytest.raises(StokerError, match=r"cache.*set STOKER_CACHE_DIR"):
        ensure_manifest(one_set(pattern(theirs)))


def test_a_broken_cache_says_what_to_remove(theirs: Path, cache: Path) -> None:
    ensure_manifest(one_set(pattern(theirs)))
    (kept,) = cache.iterdir()
    (kept / "manifest.json").write_text("")
    refuses(pattern(theirs), "not a manifest", f"remove {kept}")
    (kept / "manifest.json").unlink()
    refuses(pattern(theirs), f"remove {kept}")
    shutil.rmtree(kept)
    assert images_of(ensure_manifest(one_set(pattern(theirs)))) == expected()


def test_where_scans_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STOKER_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_scan_cache() == Path.home() / ".cache/stoker/scans"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_scan_cache() == tmp_path / "xdg/stoker/scans"
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "own"))
    assert default_scan_cache() == tmp_path / "own/scans"


def test_a_scan_that_is_overtaken_takes_the_other(theirs: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without locks both walk every shard; the slower finds the place taken when it is done."""

    def no_locks(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(scan.fcntl, "flock", no_locks)
    one = one_set(pattern(theirs))
    rename = scan._move_into_cache
    overtaken: list[ShardSet] = []

    def late(made: Path, kept: Path) -> None:
        monkeypatch.setattr(scan, "_rename", rename)
        overtaken.append(ensure_manifest(one))
        rename(made, kept)

    monkeypatch.setattr(scan, "_rename", late)
    full = ensure_manifest(one)
    assert [full.manifest] == [other.manifest for other in overtaken]
    assert images_of(full) == expected()
    assert len(list(cache.iterdir())) == 1


def test_many_threads_and_processes_at_once(theirs: Path, cache: Path) -> None:
    program = (
        "import sys; from stoker.shards.shard_set import find_sets; from stoker.shards.scan import described;"
        "print(described(find_sets(sys.argv[1])[0]).manifest.source.digest)"
    )
    command = [sys.executable, "-c", program, pattern(theirs)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    (kept,) = cache.iterdir()
    shutil.rmtree(kept)
    one = one_set(pattern(theirs))
    walked: list[int] = []
    with ThreadPoolExecutor(6) as pool:
        sets = list(pool.map(lambda _: ensure_manifest(one, progress=walked.append), range(6)))
    assert len(walked) == len(one.shards)  # one of them did it for all
    found |= {full.manifest.source.digest for full in sets if full.manifest is not None}
    assert len(found) == 1
    assert all(images_of(full) == expected() for full in sets)
    assert list(cache.iterdir()) == [kept]


def test_a_killed_scan_leaves_nothing_that_counts(theirs: Path, cache: Path) -> None:
    program = (
        "import os, sys; from stoker.shards.shard_set import find_sets; from stoker.shards.scan import described;"
        "told = []; die = lambda n: told.append(n) or len(told) < 3 or os.kill(os.getpid(), 9);"
        "described(find_sets(sys.argv[1])[0], progress=die)"
    )
    done = subprocess.run([sys.executable, "-c", program, pattern(theirs)], check=False)
    assert done.returncode == -9
    assert not list(cache.rglob("manifest.json"))
    assert images_of(ensure_manifest(one_set(pattern(theirs)))) == expected()


def test_one_shard_is_mapped_at_a_time(theirs: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    ensure_manifest(one_set(pattern(theirs)))
    assert most == [1, 1, 1, 1]


# --- indexes that are not to be believed


@pytest.fixture
def own(tmp_path: Path) -> ShardSet:
    """A set of ours with its manifest."""
    assert stoker("data", "convert", make_dataset(tmp_path / "pets"), tmp_path / "out") == 0
    return one_set(tmp_path / "out/train")


def index_of(*rows: tuple[int, int, int]) -> bytes:
    builder = IndexBuilder()
    for row in rows:
        builder.add(*row)
    return builder.to_bytes()


def planted(one: ShardSet, data: bytes, **facts: object) -> ShardSet:
    """Put another index beside the first shard, and what the manifest says of it in its manifest."""
    manifest = one.manifest
    assert manifest is not None
    Path(one.url, f"index/{one.shards[0].name}.npy").write_bytes(data)
    shard = msgspec.structs.replace(manifest.shards[0], **facts)
    return replace(one, manifest=msgspec.structs.replace(manifest, shards=(shard, *manifest.shards[1:])))


def test_an_index_that_is_not_the_manifests(own: ShardSet) -> None:
    name = own.shards[0].name
    rows = own.read_index(name)
    changed = rows.copy()
    changed["label"][0] += 1
    data = index_of(*changed.tolist())
    one = planted(own, data)
    for read in (lambda: one.read_index(name), lambda: list(read_images(one, name))):
        with pytest.raises(DataFaultError, match=rf"^{own.url}/index/{name}\.npy: the sha256 .*; see: stoker"):
            read()
    # Without a digest to compare with, the index is taken as it is.
    assert np.array_equal(planted(own, data, index_sha256="").read_index(name), changed)


def test_a_kept_index_that_is_not_the_manifests(theirs: Path, cache: Path) -> None:
    full = ensure_manifest(one_set(pattern(theirs)))
    (kept,) = cache.iterdir()
    (kept / "index/set-000000.tar.npy").write_bytes(b"")
    with pytest.raises(DataFaultError, match=rf"^{kept}/index/set-000000\.tar\.npy: .*; remove {kept} "):
        full.read_index("set-000000.tar")


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, None), (1, None), (None, 1), (2**64 - 1, 0), (2**64 - 10, 20), (2**63, 2**32 - 1)],
)
def test_an_index_that_leads_out_of_its_shard(own: ShardSet, offset: int | None, length: int | None) -> None:
    """Without a length: up to the shard's end, and from byte 1 past it; some sums come out small in 64 bits."""
    entry = own.shards[0]
    row = (entry.size if offset is None else offset, entry.size if length is None else length, 0)
    data = index_of((0, 1, 0), row)
    one = planted(own, data, samples=2, index_sha256=hashlib.sha256(data).hexdigest())
    if offset == 0:
        assert one.read_index(entry.name).tolist()[1] == row
        return
    with pytest.raises(DataFaultError, match=rf"index/{entry.name}\.npy: image 1 would lie at byte {row[0]}, "):
        one.read_index(entry.name)


def test_an_index_of_more_samples_than_the_manifest_counts(own: ShardSet) -> None:
    data = index_of((0, 1, 0))
    one = planted(own, data, index_sha256=hashlib.sha256(data).hexdigest())
    with pytest.raises(DataFaultError, match="tells of 1 samples, and the manifest of 30"):
        one.read_index(own.shards[0].name)


def test_what_is_no_index(own: ShardSet) -> None:
    name = own.shards[0].name
    with pytest.raises(DataFaultError, match=rf"index/{name}\.npy: not a shard index"):
        planted(own, b"no index", index_sha256="").read_index(name)


def test_a_shard_that_was_cut_off_gives_no_short_image(own: ShardSet) -> None:
    shard = Path(own.url, own.shards[0].name)
    shard.write_bytes(shard.read_bytes()[:5000])
    with pytest.raises(
        DataFaultError, match=r"\.tar: image \d+ would lie .* in a shard of 5000 bytes; the shard is cut"
    ):
        list(read_images(own, own.shards[0].name))


def test_a_shard_that_the_set_does_not_have(own: ShardSet) -> None:
    with pytest.raises(NotFoundError, match="no such shard"):
        own.read_index("other.tar")
