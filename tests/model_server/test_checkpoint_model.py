"""A real checkpoint of the PyTorch trainer: the same inputs and outputs as its validation, class names, reload."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.errors import InputError, VerificationError
from stoker.load.loader import Loader
from stoker.load.torch import normalize
from stoker.model_server.checkpoint_model import CheckpointModel
from stoker.model_server.images import ImageDecoder
from stoker.model_server.sources import open_source
from stoker.trainers.checkpoints import read_weights
from stoker.trainers.model_description import ModelDescription, describe_checkpoint
from stoker.trainers.models import build_model
from tests.support.model_servers import model_server
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def model(trained: Path) -> CheckpointModel:
    return CheckpointModel(str(trained / "checkpoints"), "best.pt", device="cpu")


def validation_batch(trained: Path, **settings: Any) -> Any:
    with Loader(str(trained / "shards/val"), global_batch=21, size=16, threads=1, **settings) as loader:
        return next(iter(loader))


def describe(model: CheckpointModel) -> ModelDescription:
    assert model.description is not None
    return model.description


def test_description_has_the_classes_and_the_image_of_the_training(trained: Path, model: CheckpointModel) -> None:
    description = describe(model)
    assert description.classes == open_classes(trained)
    assert (description.image.size, description.image.transform) == (16, "whole")
    assert model.version in (3, 6)  # 60 samples in batches of 20, two epochs


def open_classes(trained: Path) -> tuple[str, ...]:
    return tuple(json.loads((trained / "shards/val/manifest.json").read_text())["classes"])


def test_images_become_the_pixels_of_the_validation(trained: Path, model: CheckpointModel) -> None:
    decoder = ImageDecoder(describe(model).image)
    encoded = validation_batch(trained, transform=None).images
    expected = validation_batch(trained, transform="whole").images
    assert len(encoded) == 21
    for data, pixels in zip(encoded, expected, strict=True):
        np.testing.assert_array_equal(decoder.decode(bytes(data))[0], pixels)


def test_logits_are_those_of_the_moving_average(trained: Path, model: CheckpointModel) -> None:
    weights = read_weights(str(trained / "checkpoints/best.pt"))
    assert weights.ema is not None
    expected = build_model("small", num_classes=5, size=16).eval()
    expected.load_state_dict(weights.ema)
    pixels = np.asarray(validation_batch(trained, transform="whole").images)
    with torch.inference_mode():
        logits = expected(normalize(torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2))).numpy()
    np.testing.assert_allclose(model.run("serving_default", {"images": pixels})["logits"], logits, rtol=1e-4, atol=1e-5)


def test_a_run_is_served_and_reloaded(trained: Path, tmp_path: Path) -> None:
    checkpoints = trained / "checkpoints"
    steps = sorted(path.name for path in checkpoints.glob("step-*.pt"))
    served = tmp_path / "checkpoints"
    served.mkdir()
    shutil.copy(checkpoints / steps[0], served)
    image = bytes(validation_batch(trained, transform=None).images[0])
    with model_server(open_source(str(served), checkpoint="newest", device="cpu")) as (_, client):
        first = client.post("/classify", image)
        assert first.status == 200
        assert first.json["version"] == str(int(steps[0][5:-3]))
        assert {each["name"] for each in first.json["classes"]} == set(open_classes(trained))
        (served / steps[-1]).write_bytes(b"truncated")
        wait_until(lambda: len(client.get("/v1/models/pets").json["model_version_status"]) == 2)
        assert client.post("/classify", image).json == first.json
        shutil.copy(checkpoints / steps[-1], served / ".copy")
        (served / ".copy").replace(served / steps[-1])
        newest = str(int(steps[-1][5:-3]))
        wait_until(lambda: client.post("/classify", image).json["version"] == newest)
        pixels = np.asarray(validation_batch(trained, transform="whole").images)[:2].tolist()
        answer = client.post("/v1/models/pets:predict", {"instances": pixels})
        assert np.array(answer.json["predictions"]).shape == (2, 5)
        wrong = client.post("/v1/models/pets:predict", {"instances": [pixels[0][:3]]})
        assert wrong.status == 400
        assert "1×3×16×3, expected N×16×16×3" in wrong.error


def test_damaged_checkpoints_are_rejected(trained: Path, tmp_path: Path) -> None:
    data = (trained / "checkpoints/best.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(data[:-100])
    with pytest.raises(VerificationError):
        CheckpointModel(str(tmp_path), "cut.pt")


def test_checkpoints_without_class_names_have_numbers() -> None:
    meta = {"num_classes": 3, "args": {"size": 8, "val_transform": "whole"}}
    assert describe_checkpoint(meta, where="x").classes == ("0", "1", "2")
    assert describe_checkpoint({**meta, "classes": ["ant", "bee"]}, where="x").classes == ("ant", "bee", "2")
    for broken in ({}, {"num_classes": 3}, {"num_classes": 3, "args": {"size": 8}}):
        with pytest.raises(InputError):
            describe_checkpoint(broken, where="x")
