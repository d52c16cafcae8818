"""Small datasets in the real formats of ImageNet, CIFAR-10 and MNIST, with their expected samples."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

# Sorted differently than by ILSVRC2012_ID, which counts from 1 in this order.
WNIDS_BY_ID = ("n03000000", "n01440764", "n02119789", "n01000000")
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class Expected(NamedTuple):
    """A sample that a source must yield."""

    label: int
    image: bytes


@dataclass
class Imagenet:
    """A miniature ImageNet: every sample by its name, and the classes by their label."""

    folder: Path
    classes: list[str]
    train: dict[str, Expected] = field(default_factory=dict)
    val: dict[str, Expected] = field(default_factory=dict)


def jpeg(number: int) -> bytes:
    """Return a small JPEG with a size and color that depend on the number."""
    out = io.BytesIO()
    color = (number * 37 % 256, number * 91 % 256, number * 151 % 256)
    Image.new("RGB", (8 + number % 19, 8 + number % 13), color).save(out, "JPEG")
    return out.getvalue()


def make_tar(files: Mapping[str, bytes], mode: str = "w") -> bytes:
    """Return a tar archive with these files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=tarfile.GNU_FORMAT) as tar:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def make_imagenet(
    folder: Path,
    *,
    layout: str = "tars",
    wnids_by_id: Sequence[str] = WNIDS_BY_ID,
    per_class: int = 3,
    val: int = 10,
    truth: str = "devkit.tar.gz",
) -> Imagenet:
    """Make ImageNet in the layout `tars`, `class tars`, `folders`, `val by class` or `kaggle`.

    A split of 0 images is absent. `truth` is `devkit.tar.gz`, `devkit` (a folder), `csv` or `none`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dataset = Imagenet(folder, sorted(wnids_by_id))
    data = folder / "ILSVRC/Data/CLS-LOC" if layout == "kaggle" else folder
    images = {
        wnid: {f"{wnid}_{number}.JPEG": jpeg(100 * label + number) for number in range(per_class)}
        for label, wnid in enumerate(dataset.classes)
    }
    for label, wnid in enumerate(dataset.classes):
        dataset.train |= {f"{wnid}/{name}": Expected(label, image) for name, image in images[wnid].items()}
    if per_class and layout == "tars":
        tars = {f"{wnid}.tar": make_tar(files) for wnid, files in images.items()}
        (folder / "ILSVRC2012_img_train.tar").write_bytes(make_tar(tars))
    elif per_class:
        for wnid, files in images.items():
            if layout == "class tars":
                _write(data / "train" / f"{wnid}.tar", make_tar(files))
            else:
                for name, image in files.items():
                    _write(data / "train" / wnid / name, image)

    ids = [1 + (number * 3 + number // 4) % len(wnids_by_id) for number in range(val)]
    numbered = {f"ILSVRC2012_val_{number:08d}.JPEG": jpeg(5000 + number) for number in range(1, val + 1)}
    for (name, image), synset_id in zip(numbered.items(), ids, strict=True):
        wnid = wnids_by_id[synset_id - 1]
        dataset.val[f"{wnid}/{name}"] = Expected(dataset.classes.index(wnid), image)
        if layout == "val by class":
            _write(data / "val" / wnid / name, image)
        elif layout != "tars":
            _write(data / "val" / name, image)
    if val and layout == "tars":
        (folder / "ILSVRC2012_img_val.tar").write_bytes(make_tar(numbered))

    _write_ground_truth(folder, truth, wnids_by_id, dict(zip(numbered, ids, strict=True)))
    return dataset


def _write_ground_truth(folder: Path, truth: str, wnids_by_id: Sequence[str], ids: Mapping[str, int]) -> None:
    """Write the synset ids of the validation images, by file name, as `make_imagenet` describes."""
    devkit = {
        "ILSVRC2012_devkit_t12/readme.txt": b"ILSVRC2012",
        "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt": "".join(
            f"{synset_id}\n" for synset_id in ids.values()
        ).encode(),
        "ILSVRC2012_devkit_t12/data/meta.mat": meta_mat(wnids_by_id),
    }
    if truth == "devkit.tar.gz":
        (folder / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(make_tar(devkit, "w:gz"))
    elif truth == "devkit":
        for name, content in devkit.items():
            _write(folder / name, content)
    elif truth == "csv":
        rows = [f"{name[:-5]},{wnids_by_id[synset_id - 1]} 1 2 3 4 \n" for name, synset_id in ids.items()]
        _write(folder / "LOC_val_solution.csv", "".join(["ImageId,PredictionString\n", *reversed(rows)]).encode())


def meta_mat(wnids_by_id: Sequence[str]) -> bytes:
    """Return the devkit's meta.mat: a struct array of the leaf synsets by ID, then of their parents."""
    from scipy.io import savemat

    def synset(number: int, wnid: str, children: Sequence[int], images: int) -> dict[str, Any]:
        return {
            "ILSVRC2012_ID": number,
            "WNID": wnid,
            "words": f"word {number}, other word",
            "gloss": f"what {number} means",
            "num_children": len(children),
            "children": np.array(children, np.float64),
            "wordnet_height": 1 if children else 0,
            "num_train_images": images,
        }

    count = len(wnids_by_id)
    synsets = [synset(number, wnid, (), 1300) for number, wnid in enumerate(wnids_by_id, 1)]
    synsets.append(synset(count + 1, "n00001740", range(1, count + 1), 0))
    synsets.append(synset(count + 2, "n00001930", [count + 1], 0))
    array = np.empty((len(synsets), 1), [(name, object) for name in synsets[0]])
    for row, one in enumerate(synsets):
        array[row, 0] = tuple(one.values())
    out = io.BytesIO()
    savemat(out, {"synsets": array}, do_compression=True)
    return out.getvalue()


@dataclass
class Cifar10:
    """A miniature CIFAR-10; pixels are height × width × 3, by sample name."""

    where: Path
    train: dict[str, tuple[int, np.ndarray[Any, Any]]] = field(default_factory=dict)
    test: dict[str, tuple[int, np.ndarray[Any, Any]]] = field(default_factory=dict)


def make_cifar10(folder: Path, *, rows: int = 12, packed: bool = True, column_order: bool = False) -> Cifar10:
    """Make CIFAR-10 of `rows` per batch, as the archive or as the folder that it unpacks to."""
    dataset = Cifar10(folder / ("cifar-10-python.tar.gz" if packed else "cifar-10-batches-py"))
    files = {"batches.meta": python2_pickle(cifar_meta())}
    random = np.random.default_rng(0)
    for number, batch in enumerate(
        ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]
    ):
        data = random.integers(0, 256, (rows, 3072), np.uint8)
        labels = [(row * 7 + number) % 10 for row in range(rows)]
        names = [f"{CIFAR_CLASSES[label]}_s_{number * rows + row:06d}.png" for row, label in enumerate(labels)]
        samples = dataset.test if batch == "test_batch" else dataset.train
        for row, (label, name) in enumerate(zip(labels, names, strict=True)):
            samples[f"{CIFAR_CLASSES[label]}/{name}"] = (
                label,
                data[row].reshape(3, 32, 32).transpose(1, 2, 0),
            )
        stored = np.asfortranarray(data) if column_order else data
        files[batch] = python2_pickle(cifar_batch(stored, labels, names, batch))
    folder.mkdir(parents=True, exist_ok=True)
    if packed:
        dataset.where.write_bytes(
            make_tar({f"cifar-10-batches-py/{name}": data for name, data in files.items()}, "w:gz")
        )
    else:
        for name, content in files.items():
            _write(dataset.where / name, content)
    return dataset


def cifar_meta() -> dict[bytes, Any]:
    return {
        b"num_cases_per_batch": 10000,
        b"label_names": [name.encode() for name in CIFAR_CLASSES],
        b"num_vis": 3072,
    }


def cifar_batch(
    data: object, labels: Sequence[object], names: Sequence[str], batch: str = "data_batch_1"
) -> dict[bytes, Any]:
    return {
        b"batch_label": batch.encode(),
        b"labels": list(labels),
        b"data": data,
        b"filenames": [name.encode() for name in names],
    }


def python2_pickle(value: object, numpy_core: str = "numpy.core") -> bytes:
    """Pickle as Python 2 did with protocol 2: `bytes` are its strings, which Python 3 cannot write."""

    def dump(value: object) -> bytes:
        match value:
            case bytes() if len(value) < 256:
                return pickle.SHORT_BINSTRING + bytes([len(value)]) + value
            case bytes():
                return pickle.BINSTRING + struct.pack("<i", len(value)) + value
            case None:
                return pickle.NONE
            case bool():
                return pickle.NEWTRUE if value else pickle.NEWFALSE
            case int():
                return pickle.BININT + struct.pack("<i", value)
            case list():
                return pickle.EMPTY_LIST + pickle.MARK + b"".join(map(dump, value)) + pickle.APPENDS
            case tuple():
                return pickle.MARK + b"".join(map(dump, value)) + pickle.TUPLE
            case dict():
                items = b"".join(dump(key) + dump(one) for key, one in value.items())
                return pickle.EMPTY_DICT + pickle.MARK + items + pickle.SETITEMS
            case np.ndarray():
                kind = value.dtype.str[1:].encode()
                dtype = b"cnumpy\ndtype\n" + dump((kind, 0, 1)) + pickle.REDUCE
                dtype += dump((3, b"|", None, None, None, -1, -1, 0)) + pickle.BUILD
                columns = value.flags.f_contiguous and not value.flags.c_contiguous
                blank = f"c{numpy_core}.multiarray\n_reconstruct\n".encode()
                blank += pickle.MARK + b"cnumpy\nndarray\n" + dump((0,)) + dump(b"b") + pickle.TUPLE + pickle.REDUCE
                state = dump(1) + dump(value.shape) + dtype + dump(columns) + dump(value.tobytes("A"))
                return blank + pickle.MARK + state + pickle.TUPLE + pickle.BUILD
        raise TypeError(type(value))

    return pickle.PROTO + b"\x02" + dump(value) + pickle.STOP


@dataclass
class Mnist:
    """A miniature MNIST: pixels (rows × height × width) and labels by split."""

    folder: Path
    pixels: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    labels: dict[str, list[int]] = field(default_factory=dict)


def make_mnist(
    folder: Path,
    *,
    train: int = 25,
    test: int = 10,
    size: tuple[int, int] = (28, 28),
    packed: bool = True,
    separator: str = "-",
) -> Mnist:
    """Make MNIST, gzipped or not; `separator` is the character before `idx3` in the file names."""
    dataset = Mnist(folder)
    random = np.random.default_rng(1)
    for split, prefix, count in (("train", "train", train), ("test", "t10k", test)):
        if count:
            dataset.pixels[split] = random.integers(0, 256, (count, *size), np.uint8)
            dataset.labels[split] = [(row * 3 + 1) % 10 for row in range(count)]
            for what, array in (
                ("images", dataset.pixels[split]),
                ("labels", np.array(dataset.labels[split], np.uint8)),
            ):
                name = f"{prefix}-{what}{separator}idx{array.ndim}-ubyte"
                data = idx(array)
                _write(folder / (f"{name}.gz" if packed else name), gzip.compress(data) if packed else data)
    return dataset


def idx(array: np.ndarray[Any, Any]) -> bytes:
    """Return an idx file of unsigned bytes."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
