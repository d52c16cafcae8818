import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stoker.errors import InputError
from stoker.shards.sources.synthetic import Recipe, SyntheticSource, draw_image


def source(where: str) -> SyntheticSource:
    return SyntheticSource(where, scratch=Path("/nonexistent"))


def pixels(one: SyntheticSource, split: str, index: int) -> np.ndarray:
    item = next(item for item in one.scan(split) if item.offset == index)
    return np.asarray(Image.open(io.BytesIO(one.read(split, item).image)), np.int32)


def test_defaults() -> None:
    one = source("synthetic:")
    assert (one.name, one.splits, len(one.classes)) == ("synthetic", ("train",), 10)
    items = list(one.scan("train"))
    assert len(items) == 1000
    assert items[17].name == "class07/00000017.jpg"
    assert [item.label for item in items[:12]] == [*range(10), 0, 1]
    assert items == list(one.scan("train"))
    image = Image.open(io.BytesIO(one.read("train", items[17]).image))
    assert (image.format, image.size) == ("JPEG", (64, 64))


def test_every_setting() -> None:
    one = source("synthetic:samples=7,classes=3,size=20x10,val=4,seed=5,kind=png")
    assert one.splits == ("train", "val")
    assert [len(list(one.scan(split))) for split in one.splits] == [7, 4]
    item = next(one.scan("val"))
    image = Image.open(io.BytesIO(one.read("val", item).image))
    assert (image.format, image.size, item.name) == ("PNG", (20, 10), "class00/00000000.png")


def test_an_image_depends_on_seed_split_and_index_only() -> None:
    recipe = Recipe(samples=5, val=5, size=(33, 17), seed=3)
    first = draw_image(recipe, 0, 1)
    assert first.shape == (17, 33, 3)
    assert (first == draw_image(Recipe(samples=9, size=(33, 17), seed=3), 0, 1)).all()
    others = [draw_image(recipe, 1, 1), draw_image(recipe, 0, 11), draw_image(Recipe(size=(33, 17), seed=4), 0, 1)]
    assert all((first != other).any() for other in others)


def test_drawing_never_changes() -> None:
    """Pinned: shards made years apart from one recipe must hold the same pixels."""
    corner = draw_image(Recipe(seed=2**64 - 1), 1, 123)[:2, :2]
    assert corner.tolist() == [[[30, 102, 31], [35, 127, 39]], [[35, 116, 16], [27, 119, 28]]]


def test_a_nearest_mean_colour_learns_the_classes() -> None:
    one = source("synthetic:samples=40,classes=10,size=24,val=40,seed=1")
    means = {split: [pixels(one, split, i).mean((0, 1)) for i in range(40)] for split in one.splits}
    hits = 0
    for index, mean in enumerate(means["val"]):
        distances = [np.abs(mean / mean.sum() - other / other.sum()).sum() for other in means["train"]]
        hits += int(np.argmin(distances)) % 10 == index % 10
    assert hits >= 36


@pytest.mark.parametrize("kind", ["jpg", "png"])
def test_the_size_is_about_right(kind: str) -> None:
    one = source(f"synthetic:size=320x240,samples=10,kind={kind}")
    for item in one.scan("train"):
        assert 0.5 < len(one.read("train", item).image) / item.size < 1.5


def test_every_fault_in_one_sentence() -> None:
    with pytest.raises(InputError) as caught:
        source("synthetic:samples=0,colour=red,size=9x,kind=bmp,seed=-1,classes,val=1,val=2,classes=1_0")
    message = str(caught.value)
    for part in (
        "samples must be a whole number from 1 to",
        "'colour=red' is not a setting",
        "size must be a side or WIDTHxHEIGHT, each from 1 to 8192, not '9x'",
        "kind must be jpg or png, not 'bmp'",
        "seed must be a whole number from 0",
        "'classes' is not a setting",
        "val is given twice",
        "classes must be a whole number from 1 to 100000, not '1_0'",
        "synthetic:samples=1000,classes=10,size=64x48,val=200,seed=0,kind=jpg",
    ):
        assert part in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "text", ["size=0", "size=9000", "size=1x8193", "seed=18446744073709551616", "val=" + "9" * 5000]
)
def test_out_of_range(text: str) -> None:
    with pytest.raises(InputError, match="must be"):
        source(f"synthetic:{text}")


def test_recognises() -> None:
    assert SyntheticSource.can_read("synthetic:")
    assert SyntheticSource.can_read("synthetic:nonsense")
    assert not SyntheticSource.can_read("/data/synthetic")


@pytest.mark.parametrize("size", ["1", "1x7", "3x2"])
def test_tiny_images(size: str) -> None:
    one = source(f"synthetic:size={size},samples=2,kind=png,classes=1000")
    for item in one.scan("train"):
        assert one.read("train", item).image


def test_it_starts_at_once_however_large() -> None:
    one = source("synthetic:samples=1000000000000")
    assert next(one.scan("train")).offset == 0
    one.close()
