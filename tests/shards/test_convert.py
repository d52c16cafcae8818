"""`stoker data convert` from end to end, through the command line."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from stoker.cli.data import INTERRUPTED_HINT
from stoker.shards import index
from stoker.shards.formats import FORMATS
from stoker.shards.pack import ShardWriter
from stoker.shards.shard_set import MappedFile, find_shard_sets, read_images
from stoker.storage.local import LocalStore
from tests.support.trees import digests, image_bytes, make_dataset, make_tree, stoker
from tests.support.waiting import TIMEOUT_S, wait_until


def read_shard_set(url: Path) -> dict[str, tuple[bytes, int, dict[str, bytes]]]:
    """Return every sample of a shard set: image, label and extras by key."""
    (shard_set,) = find_shard_sets(str(url))
    out = {}
    for entry in shard_set.shards:
        view = MappedFile(url / entry.name).view
        for located in FORMATS.get(shard_set.format).iter_samples(view, entry.name, check=True):
            sample = located.sample
            extras = {name: bytes(data) for name, data in sample.extras.items()}
            out[sample.key] = (bytes(sample.image), sample.label, extras)
    return out


@pytest.mark.parametrize("shard_format", ["tar", "tfrecord"])
def test_bytes_labels_and_shuffling(tmp_path: Path, shard_format: str) -> None:
    data = make_dataset(tmp_path / "pets")
    out = tmp_path / "out"
    assert stoker("data", "convert", data, out, "--format", shard_format, "--shard-samples", 8) == 0

    for split in ("train", "val"):
        files = {path.relative_to(data / split): path.read_bytes() for path in (data / split).rglob("*.jpg")}
        samples = read_shard_set(out / split)
        assert {key: image for key, (image, _, _) in samples.items()} == {
            str(path.with_suffix("")): content for path, content in files.items()
        }
        assert all(label == ["ant", "bee", "cat"].index(key.split("/")[0]) for key, (_, label, _) in samples.items())
    manifest = json.loads((out / "train/manifest.json").read_text())
    assert manifest["classes"] == ["ant", "bee", "cat"]
    assert [shard["samples"] for shard in manifest["shards"]] == [7, 8, 7, 8]
    assert manifest["samples"] == 30
    assert (manifest["lanes"], manifest["window"]) == (1, 2)
    assert not (out / "_work").exists()
    # Unshuffled, the label would change twice; shuffled, it changes about twenty times.
    labels = [label for _, label, _ in read_shard_set(out / "train").values()]
    assert sum(label != following for label, following in itertools.pairwise(labels)) > 10


def test_shard_names(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "pets")
    for shard_format, prefix, expected in [
        ("tar", None, "pets-train-000000.tar"),
        ("tar", "my", "my-train-000000.tar"),
        ("tfrecord", None, "train-00000-of-00002"),
        ("tfrecord", "my", "my-train-00000-of-00002"),
    ]:
        out = tmp_path / f"{shard_format}-{prefix}"
        options = [] if prefix is None else ["--prefix", prefix]
        assert stoker("data", "convert", data, out, "--format", shard_format, "--shard-samples", 15, *options) == 0
        assert (out / "train" / expected).is_file()
        assert (out / "train" / "index" / f"{expected}.npy").is_file()


@pytest.mark.parametrize("shard_format", ["tar", "tfrecord"])
def test_index_locates_each_image(tmp_path: Path, shard_format: str) -> None:
    data = make_dataset(tmp_path / "pets")
    out = tmp_path / "out"
    assert stoker("data", "convert", data, out, "--format", shard_format, "--shard-samples", 8) == 0
    images = Counter(path.read_bytes() for path in (data / "train").rglob("*.jpg"))
    located: Counter[bytes] = Counter()
    for shard in (out / "train/index").iterdir():
        content = (out / "train" / shard.name.removesuffix(".npy")).read_bytes()
        rows = np.load(shard)
        assert rows.dtype == index.INDEX_DTYPE
        located.update(content[row["offset"] : row["offset"] + row["length"]] for row in rows)
    assert located == images
    (shard_set,) = find_shard_sets(str(out / "train"))
    read = [(bytes(view), label) for entry in shard_set.shards for view, label in read_images(shard_set, entry.name)]
    assert sorted(read) == sorted((image, label) for image, label, _ in read_shard_set(out / "train").values())


def test_bytes_do_not_depend_on_jobs(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "pets", train=40)
    for jobs in (1, 2, 7):
        assert stoker("data", "convert", data, tmp_path / f"out{jobs}", "--shard-samples", 9, "--jobs", jobs) == 0
    assert digests(tmp_path / "out1") == digests(tmp_path / "out2") == digests(tmp_path / "out7")
    assert stoker("data", "convert", data, tmp_path / "other", "--shard-samples", 9, "--seed", 1) == 0
    assert digests(tmp_path / "other") != digests(tmp_path / "out1")


def test_bytes_do_not_depend_on_location_and_times(tmp_path: Path) -> None:
    make_dataset(tmp_path / "a" / "pets")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for path in (tmp_path / "b").rglob("*.jpg"):
        os.utime(path, (1, 1))
    for name in ("a", "b"):
        assert stoker("data", "convert", tmp_path / name / "pets", tmp_path / f"out-{name}") == 0
    assert digests(tmp_path / "out-a") == digests(tmp_path / "out-b")


def test_limit_samples_all_classes(tmp_path: Path) -> None:
    data = make_tree(tmp_path / "pets", dict.fromkeys("abcdef", 30))
    assert stoker("data", "convert", data, tmp_path / "out", "--limit", 60) == 0
    labels = Counter(label for _, label, _ in read_shard_set(tmp_path / "out/train").values())
    assert labels.total() == 60
    assert len(labels) == 6


def test_dry_run_lists_all_shards_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_dataset(tmp_path / "pets")
    out = tmp_path / "out"
    command = ("data", "convert", data, out, "--shard-samples", 8)
    assert stoker(*command, "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert not out.exists()
    assert stoker(*command) == 0
    written = {str(path.relative_to(out)) for path in out.rglob("*.tar")}
    assert set(plan["shards"]) == written
    assert json.loads((out / "train/manifest.json").read_text())["plan"] == plan["digest"]


def test_bad_images_are_quarantined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_dataset(tmp_path / "pets")
    (data / "train/bee/00010.jpg").write_bytes(image_bytes(10)[:-30])
    (data / "train/cat/00020.jpg").write_bytes(b"")
    (data / "train/cat/00021.jpg").write_text("<html>404</html>")
    out = tmp_path / "out"
    assert stoker("data", "convert", data, out, "--shard-samples", 4) == 0
    assert "3 bad images" in capsys.readouterr().err
    lines = [json.loads(line) for line in (out / "train/quarantine.jsonl").read_text().splitlines()]
    reasons = {line["name"]: line["reason"] for line in lines}
    assert list(reasons) == ["bee/00010.jpg", "cat/00020.jpg", "cat/00021.jpg"]
    for reason, part in zip(reasons.values(), ("truncated", "empty", "not an image"), strict=True):
        assert part in reason
    assert json.loads((out / "train/manifest.json").read_text())["quarantined"] == 3
    assert len(read_shard_set(out / "train")) == 27
    assert not (out / "val/quarantine.jsonl").exists()
    assert stoker("data", "verify", out) == 0


def test_only_bad_images_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_tree(tmp_path / "pets", {"ant": 2})
    for path in data.rglob("*.jpg"):
        path.write_bytes(b"no")
    assert stoker("data", "convert", data, tmp_path / "out") == 2
    assert re.search(r"no usable images \(2 rejected\); .*\.jpg: not an image", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_png_named_jpeg_gets_its_true_extension(tmp_path: Path) -> None:
    data = make_tree(tmp_path / "pets", {"ant": 1})
    (data / "ant/odd.JPEG").write_bytes(image_bytes(7, "PNG"))
    assert stoker("data", "convert", data, tmp_path / "out") == 0
    with tarfile.open(tmp_path / "out/train/pets-train-000000.tar") as tar:
        assert sorted(tar.getnames()) == ["ant/00000.cls", "ant/00000.jpg", "ant/odd.cls", "ant/odd.png"]


def test_max_side_shrinks_larger_images(tmp_path: Path) -> None:
    data = make_tree(tmp_path / "pets", {"ant": 2})
    (data / "ant/large.png").write_bytes(image_bytes(9, "PNG", (300, 200)))
    out = tmp_path / "out"
    assert stoker("data", "convert", data, out, "--max-side", 100, "--quality", 80) == 0
    samples = read_shard_set(out / "train")
    import io

    with Image.open(io.BytesIO(samples["ant/large"][0])) as image:
        assert (image.format, image.size) == ("JPEG", (100, 67))
    assert samples["ant/00000"][0] == (data / "ant/00000.jpg").read_bytes()
    assert json.loads((out / "train/manifest.json").read_text())["shrunk"] == {
        "max_side": 100,
        "quality": 80,
        "images": 1,
    }


@pytest.mark.parametrize("first_format", ["tar", "tfrecord"])
@pytest.mark.parametrize("second_format", ["tar", "tfrecord"])
def test_resharding_keeps_every_sample(tmp_path: Path, first_format: str, second_format: str) -> None:
    data = make_dataset(tmp_path / "pets")
    first, second = tmp_path / "first", tmp_path / "second"
    assert stoker("data", "convert", data, first, "--format", first_format, "--shard-samples", 7) == 0
    assert stoker("data", "convert", first, second, "--format", second_format, "--shard-samples", 11, "--seed", 5) == 0
    for split in ("train", "val"):
        assert read_shard_set(first / split) == read_shard_set(second / split)
    assert json.loads((second / "train/manifest.json").read_text())["classes"] == ["ant", "bee", "cat"]


def test_resharding_keeps_extra_members(tmp_path: Path) -> None:
    import webdataset as wds

    (tmp_path / "shards").mkdir()
    with wds.TarWriter(str(tmp_path / "shards/pets-train-0.tar")) as writer:
        for i in range(5):
            writer.write({"__key__": f"k{i}", "jpg": image_bytes(i), "cls": i, "json": {"n": i}, "txt": f"t{i}"})
    for shard_format in ("tfrecord", "tar"):
        source = tmp_path / ("shards/pets-train-0.tar" if shard_format == "tfrecord" else "tfrecord")
        assert stoker("data", "convert", source, tmp_path / shard_format, "--format", shard_format) == 0
    samples = read_shard_set(tmp_path / "tar/train")
    assert samples["k3"] == (image_bytes(3), 3, {"json": b'{"n": 3}', "txt": b"t3"})


# --- Killed and resumed


def start_convert(data: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "stoker", "data", "convert", str(data), str(out), *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill_when(process: subprocess.Popen[bytes], out: Path, files: int, pause_s: float) -> None:
    """Kill a conversion a moment after its destination contains `files` files."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if sum(1 for path in out.rglob("*") if path.is_file()) >= files:
            time.sleep(pause_s)
            break
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def finished_conversion(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    root = tmp_path_factory.mktemp("kill")
    data = make_dataset(root / "pets", train=150, val=20)
    (data / "train/bee/00200.jpg").write_bytes(b"broken")
    assert stoker("data", "convert", data, root / "whole", "--shard-samples", 5) == 0
    return data, digests(root / "whole")


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kills=st.lists(st.tuples(st.integers(0, 300), st.floats(0, 0.02)), min_size=1, max_size=3))
@pytest.mark.slow
def test_resume_after_kill_at_any_moment_gives_the_same_bytes(
    finished_conversion: tuple[Path, dict[str, str]], tmp_path: Path, kills: list[tuple[int, float]]
) -> None:
    data, expected = finished_conversion
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    for files, pause_s in kills:
        kill_when(start_convert(data, out, "--shard-samples", "5"), out, files, pause_s)
        for path in out.rglob("*.tar"):  # every existing shard is complete
            assert expected[str(path.relative_to(out))] == digests(path.parent)[path.name]
        if (out / "train/manifest.json").exists():
            assert {k for k in expected if k.startswith("train/")} <= set(digests(out))
    assert stoker("data", "convert", data, out, "--shard-samples", 5) == 0
    assert digests(out) == expected


def crash(data: Path, out: Path, at: int, *options: object) -> bool:
    """Convert in a child that exits, without cleanup, before its `at`-th visible step; return whether it did."""
    if (child := os.fork()) == 0:
        steps = 0

        def exit_at(step: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: object, **kwargs: object) -> object:
                nonlocal steps
                steps += 1
                if steps == at:
                    os._exit(9)
                return step(*args, **kwargs)

            return wrapper

        LocalStore.put = exit_at(LocalStore.put)  # type: ignore[method-assign]
        LocalStore.delete = exit_at(LocalStore.delete)  # type: ignore[method-assign]
        ShardWriter._flush = exit_at(ShardWriter._flush)  # type: ignore[method-assign]
        os._exit(stoker("data", "convert", data, out, "--jobs", 1, *options))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 9


def test_resume_after_crash_at_every_step_gives_the_same_bytes(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "pets", train=4, val=2)
    (data / "train/bee/00004.jpg").write_bytes(b"broken")
    options = ("--shard-samples", 4)
    assert stoker("data", "convert", data, tmp_path / "whole", *options) == 0
    expected = digests(tmp_path / "whole")
    steps = 0
    while crash(data, out := tmp_path / f"out{steps + 1}", steps + 1, *options):
        steps += 1
        whole = {path: digest for path, digest in digests(out).items() if path.endswith(".tar")}
        assert whole.items() <= expected.items()
        if not (out / "_work/plan.json").exists() and any(out.rglob("manifest.json")):
            assert digests(out).items() >= expected.items()
        assert stoker("data", "convert", data, out, *options) == 0
        assert digests(out) == expected, steps
    assert steps > 30  # proves that it was interrupted
    assert digests(out) == expected


def test_resume_writes_only_missing_shards(tmp_path: Path, finished_conversion: tuple[Path, dict[str, str]]) -> None:
    data, expected = finished_conversion
    out = tmp_path / "out"
    assert crash(data, out, 100, "--shard-samples", 5)
    shards = {path: path.stat().st_mtime_ns for path in (out / "train").glob("*.tar")}
    assert len(shards) > 10
    assert stoker("data", "convert", data, out, "--shard-samples", 5) == 0
    assert digests(out) == expected
    assert {path: path.stat().st_mtime_ns for path in shards} == shards


def test_unfinished_conversion_is_not_a_shard_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_dataset(tmp_path / "pets")
    out = tmp_path / "out"
    assert crash(data, out, 12, "--shard-samples", 4)
    for words in (("verify", out), ("summary", out), ("verify", out / "train"), ("convert", out, tmp_path / "again")):
        assert stoker("data", *words) == 2
        assert "unfinished conversion" in capsys.readouterr().err


def test_resume_with_changed_files_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_dataset(tmp_path / "pets")
    out = tmp_path / "out"
    assert crash(data, out, 12, "--shard-samples", 4)
    image = data / "train/ant/00000.jpg"
    image.write_bytes(bytes(reversed(image.read_bytes())))
    os.utime(image, ns=(1, 1))
    assert stoker("data", "convert", data, out, "--shard-samples", 4) == 2
    assert re.search(rf"{out}: .*changed .*; .*--restart", capsys.readouterr().err)
    assert stoker("data", "convert", data, out, "--shard-samples", 4, "--restart") == 0
    assert stoker("data", "verify", out) == 0


def test_restart_discards_only_unfinished_conversions(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "pets")
    out = tmp_path / "out"
    assert crash(data, out, 12, "--shard-samples", 4)
    assert stoker("data", "convert", data, out, "--shard-samples", 9) == 2
    assert stoker("data", "convert", data, out, "--shard-samples", 9, "--restart") == 0
    assert stoker("data", "convert", data, tmp_path / "plain", "--shard-samples", 9) == 0
    assert digests(out) == digests(tmp_path / "plain")
    assert stoker("data", "convert", data, out, "--restart") == 2  # a finished shard set is kept


def test_encoding_of_images_is_part_of_the_plan(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert stoker("data", "convert", "synthetic:samples=9,seed=0", out) == 0
    assert stoker("data", "convert", "synthetic:samples=9,seed=1", out) == 2


def test_missing_files_of_a_finished_set_are_written_again(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "pets")
    out = tmp_path / "out"
    assert stoker("data", "convert", data, out, "--shard-samples", 9) == 0
    expected = digests(out)
    for name in ("train/pets-train-000001.tar", "val/index/pets-val-000000.tar.npy"):
        (out / name).unlink()
        assert stoker("data", "convert", data, out, "--shard-samples", 9) == 0
        assert digests(out) == expected


def test_finished_shard_set_is_not_written_again(
    tmp_path: Path, finished_conversion: tuple[Path, dict[str, str]]
) -> None:
    data, _ = finished_conversion
    out = tmp_path / "out"
    assert stoker("data", "convert", data, out, "--shard-samples", 50) == 0
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert stoker("data", "convert", data, out, "--shard-samples", 50) == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == times


def test_files_damaged_by_a_power_failure_are_written_again(
    tmp_path: Path, finished_conversion: tuple[Path, dict[str, str]]
) -> None:
    data, expected = finished_conversion
    out = tmp_path / "out"
    assert crash(data, out, 100, "--shard-samples", 5)
    shards = sorted((out / "train").glob("*.tar"))
    shards[0].write_bytes(shards[0].read_bytes()[:1000])
    (out / "_work/receipts/train" / f"{shards[1].name}.json").write_bytes(b"")
    assert stoker("data", "convert", data, out, "--shard-samples", 5) == 0
    assert digests(out) == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_conversion_exits_130_and_cleans_up(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    words = ["synthetic:samples=4000,size=200", str(out), "--shard-samples", "20", "--scratch", str(tmp_path)]
    command = [sys.executable, "-m", "stoker", "data", "convert", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: list(out.rglob("*.tar")))
    process.send_signal(number)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert re.fullmatch(rf"stoker: {out}: .*; {INTERRUPTED_HINT}", err.strip().splitlines()[-1])
    assert not list(out.rglob("*.part"))
    assert not list(tmp_path.glob("stoker-scratch-*"))
    assert not list(out.rglob("manifest.json"))


def test_concurrent_conversions_do_not_mix(tmp_path: Path, finished_conversion: tuple[Path, dict[str, str]]) -> None:
    data, expected = finished_conversion
    out = tmp_path / "out"
    runs = [start_convert(data, out, "--shard-samples", "5") for _ in range(2)]
    codes = sorted(run.wait() for run in runs)
    assert codes in ([0, 2], [0, 0])  # the second may start after the first has finished
    assert digests(out) == expected


# --- Memory


@pytest.mark.slow
def test_memory_does_not_grow_with_the_dataset(tmp_path: Path) -> None:
    """A tar of 300,000 samples within 400 MB: a Python list of them would need more."""
    shard = tmp_path / "many-train-000000.tar"
    tar = FORMATS.get("tar")
    from stoker.shards.sample import Sample

    image = image_bytes(1, size=(8, 8))
    with shard.open("wb") as file:
        for i in range(300_000):
            file.writelines(tar.encode(Sample(f"{'deep/' * 8}{i:08d}", image, "jpg", 0)).chunks)
        file.write(tar.trailer)
    code = (
        "from stoker.cli.main import run\n"
        f"code = run(['data', 'convert', {str(shard)!r}, {str(tmp_path / 'out')!r}, '--shard-size', '64MiB'])\n"
        "peak = [line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')]\nprint(code, *peak)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    code_text, peak_kb = done.stdout.split()[-2:]
    assert code_text == "0"
    assert int(peak_kb) < 400_000
