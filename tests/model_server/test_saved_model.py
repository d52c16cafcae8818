"""Real SavedModels of TensorFlow and Keras, served by the real command: predictions, reload, classification."""

from __future__ import annotations

import base64
import io
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.support.model_servers import ModelClient, model_serve_command, run_concurrently
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def served(saved_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ModelClient]]:
    """A server of a directory to which tests move versions."""
    root = tmp_path_factory.mktemp("served")
    directory = root / "half_plus_two"
    shutil.copytree(saved_models / "half_plus_two/1", directory / "1")
    with model_serve_command(directory, "--versions", 4, log=root / "log", connections=16) as (process, client):
        yield directory, client
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (root / "log").read_text()


def publish(source: Path, target: Path) -> None:
    """Copy a version and move it into place, as an export does."""
    copy = target.with_name(f".{target.name}")
    shutil.copytree(source, copy)
    copy.rename(target)


def versions(client: ModelClient) -> dict[str, str]:
    name = "half_plus_two"
    return {each["version"]: each["state"] for each in client.get(f"/v1/models/{name}").json["model_version_status"]}


def test_half_plus_two(served: tuple[Path, ModelClient]) -> None:
    _, client = served
    path = "/v1/models/half_plus_two/versions/1:predict"
    assert client.post(path, {"instances": [1.0, 2.0, 5.0]}).json == {"predictions": [2.5, 3.0, 4.5]}
    assert client.post(path, {"inputs": {"x": [1.0]}}).json == {"outputs": [2.5]}
    pick = {"signature_name": "pick", "inputs": {"table": [[1, 2, 3], [4, 5, 6]], "at": 1}}
    assert client.post(path, pick).json == {"outputs": [2, 5]}
    metadata = client.get("/v1/models/half_plus_two/metadata").json["metadata"]["signature_def"]["signature_def"]
    assert metadata["serving_default"]["inputs"]["x"]["dtype"] == "DT_FLOAT"
    assert metadata["pick"]["inputs"]["at"]["tensor_shape"] == {"dim": [], "unknown_rank": False}


def test_strings_are_bytes(served: tuple[Path, ModelClient]) -> None:
    _, client = served
    data = {"b64": base64.b64encode(b"\xff\x00\x01").decode()}
    request = {"signature_name": "strings", "instances": [data, "ab"]}
    assert client.post("/v1/models/half_plus_two/versions/1:predict", request).json == {
        "predictions": [
            {"length": 3, "copy_bytes": data},
            {"length": 2, "copy_bytes": {"b64": base64.b64encode(b"ab").decode()}},
        ]
    }


def test_what_the_model_rejects_is_400_with_a_sentence(served: tuple[Path, ModelClient]) -> None:
    _, client = served
    path = "/v1/models/half_plus_two/versions/1:predict"
    out_of_range = {"signature_name": "pick", "inputs": {"table": [[1, 2, 3]], "at": 7}}
    for document in (out_of_range, {"instances": [[1, 2]]}, {"instances": ["a"]}):
        answer = client.post(path, document)
        assert answer.status == 400
        assert answer.error
    assert client.post("/classify", b"x").status == 404


def test_newer_versions_are_loaded_under_load(served: tuple[Path, ModelClient], saved_models: Path) -> None:
    directory, client = served
    done = threading.Event()
    seen: set[float] = set()

    def send(number: int) -> None:
        if number == 0:
            try:
                publish(saved_models / "half_plus_two/2", directory / "5")
                wait_until(lambda: 102.5 in seen)
                (directory / "6").mkdir()
                (directory / "6/saved_model.pb").write_bytes(b"not a model")
                wait_until(lambda: versions(client).get("6") == "END")
                publish(saved_models / "half_plus_two/1", directory / "7")
                wait_until(lambda: versions(client).get("7") == "AVAILABLE")
            finally:
                done.set()
            return
        while not done.is_set():
            answer = client.post("/v1/models/half_plus_two:predict", {"instances": [1.0]})
            assert answer.status == 200, answer.body
            seen.add(answer.json["predictions"][0])

    run_concurrently(5, send)
    assert seen == {2.5, 102.5}
    for number, value in (("1", 2.5), ("5", 102.5), ("7", 2.5)):
        path = f"/v1/models/half_plus_two/versions/{number}:predict"
        assert client.post(path, {"instances": [1.0]}).json == {"predictions": [value]}


def test_keras_export_classifies_images(saved_models: Path, tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.new("RGB", (50, 30), (10, 30, 240)).save(out, "PNG")
    with model_serve_command(saved_models / "colors", "--name", "rgb", log=tmp_path / "log") as (_, client):
        answer = client.post("/classify", out.getvalue())
        assert [each["name"] for each in answer.json["classes"]] == ["blue", "green", "red"]
        assert answer.json["model"] == "rgb"
        truncated = client.post("/classify", out.getvalue()[:60])
        assert truncated.status == 400
        assert truncated.error
        pixels = [[[0, 255, 0]] * 16] * 16
        scores = client.post("/v1/models/rgb:predict", {"instances": [pixels]}).json["predictions"]
        assert scores[0] == pytest.approx([0, 10, 0])
