"""stoker-model.json: written, read again, and rejected with every fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.errors import SpecError
from stoker.trainers.model_description import (
    FILE_NAME,
    ImageInput,
    ModelDescription,
    read_description,
    write_description,
)


def test_a_description_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_description(tmp_path) is None
    image = ImageInput(
        size=96,
        dtype="float32",
        layout="NCHW",
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        transform="whole",
    )
    description = ModelDescription(classes=("ant", "bee"), image=image, scores="probabilities", signature="classify")
    write_description(description, tmp_path)
    assert read_description(tmp_path) == description


def test_only_classes_and_size_are_required(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text('{"classes": ["ant"], "image": {"size": 224}}')
    description = read_description(tmp_path)
    assert description is not None
    assert (description.image.layout, description.image.dtype) == ("NHWC", "uint8")
    assert (description.image.transform, description.scores) == ("imagenet-val", "logits")


@pytest.mark.parametrize(
    ("change", "paths"),
    [
        ({"classes": []}, {"classes"}),
        ({"class": ["ant"]}, {"class"}),
        ({"scores": "odds"}, {"scores"}),
        ({"image": {"size": 0, "layout": "HWC"}}, {"image.size", "image.layout"}),
        ({"image": {"size": 8, "transform": "none"}}, {"image.transform"}),
        ({"image": {"size": 8, "mean": [0, 0, 0]}}, {"image.std", "image.dtype"}),
        ({"image": {"size": 8, "dtype": "float32", "mean": [0, 0, 0], "std": [1, 0, 1]}}, {"image.std"}),
    ],
)
def test_every_fault_is_reported(tmp_path: Path, change: dict[str, object], paths: set[str]) -> None:
    (tmp_path / FILE_NAME).write_text(json.dumps({"classes": ["ant"], "image": {"size": 8}, **change}))
    with pytest.raises(SpecError) as caught:
        read_description(tmp_path)
    assert {fault.path for fault in caught.value.faults} == paths
