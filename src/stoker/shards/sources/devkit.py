"""The classes of ImageNet's validation images, which their names do not tell."""

from __future__ import annotations

import csv
import io
import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stoker.errors import MissingExtraError, SourceError
from stoker.shards.sources.files import open_decompressed
from stoker.shards.sources.tarfiles import iter_members

WNID = re.compile(r"n\d{8}", re.ASCII)
VAL_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG", re.ASCII)
DEVKIT = "ILSVRC2012_devkit_t12"
DEVKIT_TAR = f"{DEVKIT}.tar.gz"
GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
META = "data/meta.mat"
SOLUTION = "LOC_val_solution.csv"


class GroundTruth(NamedTuple):
    """The class of each validation image: image number n is of class `wnids[classes[n - 1]]`."""

    wnids: Sequence[str]
    classes: array[int]
    where: str

    def __len__(self) -> int:
        return len(self.classes)

    def wnid(self, number: int) -> str:
        """Return the class of image `number`, counted from 1."""
        return self.wnids[self.classes[number - 1]]

    def used_wnids(self) -> set[str]:
        """Return the classes that have an image."""
        return {self.wnids[index] for index in set(self.classes)}


def find_ground_truth(root: Path, scratch: Path) -> GroundTruth | None:
    """Find the devkit or Kaggle's solution file in `root`; the latter first, for it needs no scipy."""
    if (root / SOLUTION).is_file():
        return read_solution(root / SOLUTION)
    if (root / DEVKIT / GROUND_TRUTH).is_file() or (root / DEVKIT / META).is_file():
        return read_devkit(root / DEVKIT, scratch)
    if (root / DEVKIT_TAR).is_file():
        return read_devkit(root / DEVKIT_TAR, scratch)
    return None


def read_devkit(devkit: Path, scratch: Path) -> GroundTruth:
    """Read the ground truth, which counts in ILSVRC2012_ID, and translate it with meta.mat."""
    truth, meta = _read_devkit_tar(devkit, scratch) if devkit.is_file() else _read_devkit_folder(devkit)
    leaves = _read_class_ids(meta, f"{devkit}/{META}")
    wnids = sorted(leaves.values())
    places = {wnid: place for place, wnid in enumerate(wnids)}
    where = f"{devkit}/{GROUND_TRUTH}"
    classes = array("i")
    for number, line in enumerate(truth.split(), 1):
        wnid = leaves.get(int(line)) if line.isdigit() and len(line) < 10 else None
        if wnid is None:
            text = line.decode(errors="replace")
            raise SourceError(f"line {number} is {text!r:.50}, no class's ILSVRC2012_ID in meta.mat", where=where)
        classes.append(places[wnid])
    return GroundTruth(wnids, classes, where)


def read_solution(path: Path) -> GroundTruth:
    """Read Kaggle's `ImageId,PredictionString`, in any order, where a prediction starts with the wnid."""
    found: dict[int, str] = {}
    try:
        with open(path, newline="", encoding="utf-8", errors="replace") as file:
            for line, row in enumerate(csv.reader(file), 1):
                if line == 1 and row[:2] == ["ImageId", "PredictionString"]:
                    continue
                image = VAL_IMAGE.fullmatch(f"{row[0]}.JPEG") if len(row) >= 2 else None
                wnid = row[1].split(" ", 1)[0] if image else ""
                if image is None or not WNID.fullmatch(wnid) or int(image[1]) in found:
                    text = ",".join(row)
                    raise SourceError(f"line {line} is {text!r:.80}, not a new image and its class", where=path)
                found[int(image[1])] = wnid
    except csv.Error as error:
        raise SourceError(f"is not a CSV file: {error}", where=path) from error
    for number in range(1, len(found) + 1):
        if number not in found:
            raise SourceError(f"holds {len(found)} images, but none has number {number}", where=path)
    wnids = sorted(set(found.values()))
    places = {wnid: place for place, wnid in enumerate(wnids)}
    return GroundTruth(wnids, array("i", (places[found[number]] for number in range(1, len(found) + 1))), str(path))


def _read_class_ids(meta: bytes, where: str) -> dict[int, str]:
    """Map ILSVRC2012_ID to wnid for the classes of meta.mat; its other synsets only group them."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise MissingExtraError("scipy", "imagenet", purpose="reading meta.mat of ImageNet's devkit") from error
    try:
        synsets = loadmat(io.BytesIO(meta), variable_names=["synsets"])["synsets"].ravel()
        leaves = {
            int(synset["ILSVRC2012_ID"].item()): str(synset["WNID"].item())
            for synset in synsets
            if synset["num_children"].item() == 0
        }
    except Exception as error:  # scipy raises whatever a damaged file leads it to
        raise SourceError(f"is not ImageNet's meta.mat: {type(error).__name__}: {error}", where=where) from error
    if not leaves or len(set(leaves.values())) < len(leaves) or not all(map(WNID.fullmatch, leaves.values())):
        raise SourceError("does not give each class a wnid of its own", where=where)
    return leaves


def _read_devkit_folder(devkit: Path) -> tuple[bytes, bytes]:
    for inside in (GROUND_TRUTH, META):
        if not (devkit / inside).is_file():
            raise _missing_file_error(devkit, inside)
    return (devkit / GROUND_TRUTH).read_bytes(), (devkit / META).read_bytes()


def _read_devkit_tar(devkit: Path, scratch: Path) -> tuple[bytes, bytes]:
    found: dict[str, bytes] = {}
    with open_decompressed(devkit, scratch) as file:
        for name, offset, size in iter_members(file):
            inside = name.removeprefix("./").removeprefix(f"{DEVKIT}/")
            if inside in (GROUND_TRUTH, META):
                found[inside] = file.read(offset, size)
    for inside in (GROUND_TRUTH, META):
        if inside not in found:
            raise _missing_file_error(devkit, inside)
    return found[GROUND_TRUTH], found[META]


def _missing_file_error(devkit: Path, inside: str) -> SourceError:
    return SourceError(f"lacks {inside}", where=devkit, hint=f"download {DEVKIT_TAR} again")
