"""The ground truth of ImageNet's validation images, from the devkit or from Kaggle's solution file."""

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
from stoker.shards.sources.tarfiles import iter_files

WNID = re.compile(r"n\d{8}", re.ASCII)
VAL_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG", re.ASCII)
DEVKIT = "ILSVRC2012_devkit_t12"
DEVKIT_TAR = f"{DEVKIT}.tar.gz"
GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
META = "data/meta.mat"
SOLUTION = "LOC_val_solution.csv"


class GroundTruth(NamedTuple):
    """The class of each validation image: image number n has the class `wnids[classes[n - 1]]`."""

    wnids: Sequence[str]
    classes: array[int]
    where: str

    def __len__(self) -> int:
        return len(self.classes)

    def wnid(self, number: int) -> str:
        """Return the class of image `number`, counted from 1."""
        return self.wnids[self.classes[number - 1]]

    def used_wnids(self) -> set[str]:
        """Return the classes that have images."""
        return {self.wnids[index] for index in set(self.classes)}


def find_ground_truth(root: Path, scratch: Path) -> GroundTruth | None:
    """Find Kaggle's solution file or the devkit in `root`; the former first, as it needs no SciPy."""
    if (root / SOLUTION).is_file():
        return read_solution(root / SOLUTION)
    if (root / DEVKIT / GROUND_TRUTH).is_file() or (root / DEVKIT / META).is_file():
        return read_devkit(root / DEVKIT, scratch)
    if (root / DEVKIT_TAR).is_file():
        return read_devkit(root / DEVKIT_TAR, scratch)
    return None


def read_devkit(devkit: Path, scratch: Path) -> GroundTruth:
    """Read the ground truth, whose lines are ILSVRC2012_IDs, and map them to wnids with meta.mat."""
    truth, meta = _read_devkit_tar(devkit, scratch) if devkit.is_file() else _read_devkit_folder(devkit)
    wnid_by_id = _read_class_ids(meta, f"{devkit}/{META}")
    wnids = sorted(wnid_by_id.values())
    positions = {wnid: position for position, wnid in enumerate(wnids)}
    where = f"{devkit}/{GROUND_TRUTH}"
    classes = array("i")
    for number, line in enumerate(truth.split(), 1):
        wnid = wnid_by_id.get(int(line)) if line.isdigit() and len(line) < 10 else None
        if wnid is None:
            text = line.decode(errors="replace")
            raise SourceError(
                f"line {number} is {text!r:.50}, which is not the ILSVRC2012_ID of a class in meta.mat", where=where
            )
        classes.append(positions[wnid])
    return GroundTruth(wnids, classes, where)


def read_solution(path: Path) -> GroundTruth:
    """Read Kaggle's `ImageId,PredictionString` lines, in any order; a prediction starts with the wnid."""
    wnid_by_number: dict[int, str] = {}
    try:
        with open(path, newline="", encoding="utf-8", errors="replace") as file:
            for line, row in enumerate(csv.reader(file), 1):
                if line == 1 and row[:2] == ["ImageId", "PredictionString"]:
                    continue
                image = VAL_IMAGE.fullmatch(f"{row[0]}.JPEG") if len(row) >= 2 else None
                wnid = row[1].split(" ", 1)[0] if image else ""
                if image is None or not WNID.fullmatch(wnid) or int(image[1]) in wnid_by_number:
                    text = ",".join(row)
                    raise SourceError(f"line {line} is {text!r:.80}, expected another image and its class", where=path)
                wnid_by_number[int(image[1])] = wnid
    except csv.Error as error:
        raise SourceError(f"invalid CSV file: {error}", where=path) from error
    for number in range(1, len(wnid_by_number) + 1):
        if number not in wnid_by_number:
            raise SourceError(f"{len(wnid_by_number)} images, but none has number {number}", where=path)
    wnids = sorted(set(wnid_by_number.values()))
    positions = {wnid: position for position, wnid in enumerate(wnids)}
    return GroundTruth(
        wnids,
        array("i", (positions[wnid_by_number[number]] for number in range(1, len(wnid_by_number) + 1))),
        str(path),
    )


def _read_class_ids(meta: bytes, where: str) -> dict[int, str]:
    """Read the wnids of the classes by ILSVRC2012_ID from meta.mat; its other synsets only group them."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise MissingExtraError("scipy", "imagenet", purpose="reading meta.mat of ImageNet's devkit") from error
    try:
        synsets = loadmat(io.BytesIO(meta), variable_names=["synsets"])["synsets"].ravel()
        wnid_by_id = {
            int(synset["ILSVRC2012_ID"].item()): str(synset["WNID"].item())
            for synset in synsets
            if synset["num_children"].item() == 0
        }
    except Exception as error:  # SciPy may raise anything for a damaged file
        raise SourceError(f"invalid meta.mat: {type(error).__name__}: {error}", where=where) from error
    if (
        not wnid_by_id
        or len(set(wnid_by_id.values())) < len(wnid_by_id)
        or not all(map(WNID.fullmatch, wnid_by_id.values()))
    ):
        raise SourceError("meta.mat has no unique wnid for each class", where=where)
    return wnid_by_id


def _read_devkit_folder(devkit: Path) -> tuple[bytes, bytes]:
    for inside in (GROUND_TRUTH, META):
        if not (devkit / inside).is_file():
            raise _missing_file_error(devkit, inside)
    return (devkit / GROUND_TRUTH).read_bytes(), (devkit / META).read_bytes()


def _read_devkit_tar(devkit: Path, scratch: Path) -> tuple[bytes, bytes]:
    contents: dict[str, bytes] = {}
    with open_decompressed(devkit, scratch) as file:
        for name, offset, size in iter_files(file):
            inside = name.removeprefix("./").removeprefix(f"{DEVKIT}/")
            if inside in (GROUND_TRUTH, META):
                contents[inside] = file.read(offset, size)
    for inside in (GROUND_TRUTH, META):
        if inside not in contents:
            raise _missing_file_error(devkit, inside)
    return contents[GROUND_TRUTH], contents[META]


def _missing_file_error(devkit: Path, inside: str) -> SourceError:
    return SourceError(f"{inside} is missing", where=devkit, hint=f"download {DEVKIT_TAR} again")
