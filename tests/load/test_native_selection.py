"""Which decoder the loader selects, and what it logs and counts."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from stoker import Loader
from stoker.errors import SpecError
from stoker.load import native
from tests.load.jpegs import (
    UNSUPPORTED,
    needs_native,
)
from tests.support.trees import make_tree, stoker


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard set of thirty images of two classes."""
    root = tmp_path_factory.mktemp("native")
    make_tree(root / "pets", {"ant": 15, "bee": 15})
    assert stoker("data", "convert", root / "pets", root / "shards", "--shard-samples", 8) == 0
    return root / "shards" / "train"


@needs_native
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_batches_are_the_same_with_either_decoder(shards: Path, layout: str) -> None:
    batches = {}
    for decoder in ("native", "python"):
        with Loader(shards, global_batch=7, size=48, layout=layout, decoder=decoder, rank=(0, 1)) as loader:
            batches[decoder] = list(loader)
    for batch, other in zip(batches["native"], batches["python"], strict=True):
        assert batch.labels.tolist() == other.labels.tolist()
        assert batch.images.shape == other.images.shape
        assert np.abs(batch.images.astype(int) - other.images).max() <= 3


def test_an_unknown_decoder_is_rejected(shards: Path) -> None:
    with pytest.raises(SpecError, match=r"decoder: .*auto, native, python.*'gpu'"):
        Loader(shards, global_batch=4, decoder="gpu", rank=(0, 1))


WITHOUT_NATIVE = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "stoker_native" else find_spec(name, *more)
"""
LOAD_TWICE = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
from stoker import Loader
from stoker.errors import MissingError
for _ in range(2):
    with Loader(sys.argv[1], global_batch=8, size=32, rank=(0, 1)) as loader:
        print(sum(batch.count for batch in loader))
try:
    Loader(sys.argv[1], global_batch=8, decoder="native", rank=(0, 1))
except MissingError as error:
    print(error)
"""


def test_without_stoker_native_the_choice_is_logged_once(shards: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NATIVE + LOAD_TWICE, shards], capture_output=True, text=True, check=True
    )
    logged, first, second, missing = done.stdout.splitlines()
    assert "simplejpeg and OpenCV" in logged
    assert logged.endswith(f"native decoder {native.NOT_INSTALLED}")
    assert int(first) == int(second) > 0
    assert missing == f"native decoder {native.NOT_INSTALLED}; {native.INSTALL_HINT}"


LOAD_IN_WORKERS = """
import logging, sys
logging.basicConfig(format="%(message)s", stream=sys.stdout)
from torch.utils.data import DataLoader
from stoker.load.torch import Dataset
for _ in range(2):
    dataset = Dataset(sys.argv[1], global_batch=8, size=32, rank=(0, 1))
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=sys.argv[2])
    print(sum(batch.count for batch in loader))
"""


def environment_with(folder: Path, module: str) -> dict[str, str]:
    """An environment in which stoker_native is this module."""
    (folder / "stoker_native.py").write_text(module)
    return os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_worker_processes_do_not_log_the_choice(shards: Path, tmp_path: Path, start: str) -> None:
    command = [sys.executable, "-c", LOAD_IN_WORKERS, str(shards), start]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment_with(tmp_path, "API = 99")
    )
    logged, first, second = done.stdout.splitlines()
    assert "simplejpeg and OpenCV" in logged
    assert "simplejpeg" not in done.stderr  # where processes without logging configuration write
    assert int(first) == int(second) > 0


@pytest.mark.parametrize(
    ("module", "part"),
    [
        ("API = 99", f"version (interface 99, expected {native.API})"),
        ("", f"version (interface None, expected {native.API})"),
        ("import no_such", "cannot be imported (No module named 'no_such')"),
    ],
)
def test_an_incompatible_stoker_native_is_reported_and_not_used(
    shards: Path, tmp_path: Path, module: str, part: str
) -> None:
    command = [sys.executable, "-c", LOAD_TWICE, str(shards)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment_with(tmp_path, module))
    logged, first, _, missing = done.stdout.splitlines()
    assert "simplejpeg and OpenCV" in logged
    assert part in logged
    assert int(first) > 0
    assert part in missing
    assert missing.endswith(f"; {native.INSTALL_HINT}")


def test_without_avx2_the_native_decoder_must_be_requested(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "why_unavailable", lambda: "")
    monkeypatch.setattr(native, "import_native", lambda: SimpleNamespace(SIMD=0))
    native._log_once.cache_clear()
    assert native.select_decoder("native") == "native"
    assert native.select_decoder("auto") == "python"
    assert native.select_decoder("auto") == "python"
    (record,) = caplog.records
    assert "simplejpeg and OpenCV" in record.getMessage()
    assert "AVX2" in record.getMessage()


@needs_native
def test_natively_decoded_images_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tree(tmp_path / "plain", {"ant": 6})
    folder = tmp_path / "plain/ant"
    for number in range(3):
        (folder / f"progressive-{number}.jpg").write_bytes(UNSUPPORTED["progressive"])
    assert stoker("data", "convert", tmp_path / "plain", tmp_path / "shards") == 0
    for decoder, expected in (("native", 6), ("python", 0)):
        with Loader(tmp_path / "shards/train", global_batch=4, size=32, decoder=decoder, rank=(0, 1)) as loader:
            assert sum(batch.count for batch in loader) == 9
            assert (loader.times.native_images, loader.times.images) == (expected, 9)
    bench = ("data", "bench", tmp_path / "shards/train", "--batch-size", "9", "--size", "32", "--seconds", "0.2")
    capsys.readouterr()
    assert stoker(*bench, "--decoder", "native", "--json") == 0
    assert json.loads(capsys.readouterr().out)["native_share"] == pytest.approx(6 / 9)
    for decoder, mentioned in (("native", True), ("python", False)):
        assert stoker(*bench, "--decoder", decoder) == 0
        assert bool(re.search(r"33%.*simplejpeg", " ".join(capsys.readouterr().err.split()))) is mentioned


def test_the_native_decoder_requires_a_built_in_transform(shards: Path) -> None:
    for transform in (None, lambda pixels, _: pixels):
        with pytest.raises(SpecError, match=r"decoder: .*native.*transforms.*\bpython\b"):
            Loader(shards, global_batch=4, decoder="native", transform=transform, rank=(0, 1))


@needs_native
def test_with_stoker_native_the_choice_is_logged_once(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    native._log_once.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            Loader(shards, global_batch=8, rank=(0, 1)).close()
    (record,) = caplog.records
    assert "stoker-native" in record.getMessage()
