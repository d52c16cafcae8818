import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stoker.errors import InputError
from stoker.shards.sources.synthetic import EXAMPLE, Recipe, SyntheticSource, draw_image


def open_synthetic(where: str) -> SyntheticSource:
    return SyntheticSource(where, scratch=Path("/nonexistent"))


def read_pixels(source: SyntheticSource, split: str, index: int) -> np.ndarray:
    item = next(item for item in source.scan(split) if item.offset == index)
    return np.asarray(Image.open(io.BytesIO(source.read(split, item).image)), np.int32)


def test_defaults() -> None:
    source = open_synthetic("synthetic:")
    assert (source.name, source.splits, len(source.classes)) == ("synthetic", ("train",), 10)
    items = list(source.scan("train"))
    assert len(items) == 1000
    assert items[17].name == "class07/00000017.jpg"
    assert [item.label for item in items[:12]] == [*range(10), 0, 1]
    assert items == list(source.scan("train"))
    image = Image.open(io.BytesIO(source.read("train", items[17]).image))
    assert (image.format, image.size) == ("JPEG", (64, 64))


def test_every_setting() -> None:
    source = open_synthetic("synthetic:samples=7,classes=3,size=20x10,val=4,seed=5,kind=png")
    assert source.splits == ("train", "val")
    assert [len(list(source.scan(split))) for split in source.splits] == [7, 4]
    item = next(source.scan("val"))
    image = Image.open(io.BytesIO(source.read("val", item).image))
    assert (image.format, image.size, item.name) == ("PNG", (20, 10), "class00/00000000.png")


def test_image_depends_only_on_seed_split_and_index() -> None:
    recipe = Recipe(samples=5, val=5, size=(33, 17), seed=3)
    first = draw_image(recipe, 0, 1)
    assert first.shape == (17, 33, 3)
    assert (first == draw_image(Recipe(samples=9, size=(33, 17), seed=3), 0, 1)).all()
    others = [draw_image(recipe, 1, 1), draw_image(recipe, 0, 11), draw_image(Recipe(size=(33, 17), seed=4), 0, 1)]
    assert all((first != other).any() for other in others)


def test_pixels_match_recorded_values() -> None:
    """The same settings must produce the same pixels in all versions."""
    corner = draw_image(Recipe(seed=2**64 - 1), 1, 123)[:2, :2]
    assert corner.tolist() == [[[30, 102, 31], [35, 127, 39]], [[35, 116, 16], [27, 119, 28]]]


def test_classes_are_learnable_from_mean_color() -> None:
    source = open_synthetic("synthetic:samples=40,classes=10,size=24,val=40,seed=1")
    means = {split: [read_pixels(source, split, i).mean((0, 1)) for i in range(40)] for split in source.splits}
    hits = 0
    for index, mean in enumerate(means["val"]):
        distances = [np.abs(mean / mean.sum() - other / other.sum()).sum() for other in means["train"]]
        hits += int(np.argmin(distances)) % 10 == index % 10
    assert hits >= 36


@pytest.mark.parametrize("kind", ["jpg", "png"])
def test_estimated_size_is_close(kind: str) -> None:
    source = open_synthetic(f"synthetic:size=320x240,samples=10,kind={kind}")
    for item in source.scan("train"):
        assert 0.5 < len(source.read("train", item).image) / item.size < 1.5


def test_every_fault_is_reported_at_once() -> None:
    with pytest.raises(InputError) as caught:
        open_synthetic("synthetic:samples=0,colour=red,size=9x,kind=bmp,seed=-1,classes,val=1,val=2,classes=1_0")
    message = str(caught.value)
    for pattern in (
        r"\bsamples\b[^;]* 1 and 1000000000000\b[^;]*'0'",
        r"'colour=red'",
        r"\bsize\b[^;]*WIDTHxHEIGHT[^;]*1 and 8192[^;]*'9x'",
        r"\bkind\b[^;]*jpg or png[^;]*'bmp'",
        r"\bseed\b[^;]* 0 and 18446744073709551615\b[^;]*'-1'",
        r"'classes'",
        r"\bval\b[^;]*twice",
        r"\bclasses\b[^;]* 1 and 100000\b[^;]*'1_0'",
        re.escape(EXAMPLE),
    ):
        assert re.search(pattern, message), pattern
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "text", ["size=0", "size=9000", "size=1x8193", "seed=18446744073709551616", "val=" + "9" * 5000]
)
def test_values_out_of_range(text: str) -> None:
    with pytest.raises(InputError, match=f"{text.partition('=')[0]} must be"):
        open_synthetic(f"synthetic:{text}")


def test_can_read_only_synthetic_names() -> None:
    assert SyntheticSource.can_read("synthetic:")
    assert SyntheticSource.can_read("synthetic:nonsense")
    assert not SyntheticSource.can_read("/data/synthetic")


@pytest.mark.parametrize("size", ["1", "1x7", "3x2"])
def test_tiny_images(size: str) -> None:
    source = open_synthetic(f"synthetic:size={size},samples=2,kind=png,classes=1000")
    for item in source.scan("train"):
        assert source.read("train", item).image


def test_scan_starts_immediately_for_huge_datasets() -> None:
    source = open_synthetic("synthetic:samples=1000000000000")
    assert next(source.scan("train")).offset == 0
    source.close()
