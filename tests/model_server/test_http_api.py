"""The HTTP API on a real server: protocol, errors, limits, tokens, versions under load, shutdown."""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from stoker.errors import UnavailableError
from stoker.model_server import guard
from stoker.model_server.server import ModelServer
from stoker.model_server.settings import ModelServerSettings
from stoker.model_server.signatures import Tensors
from stoker.trainers.model_description import ImageInput, ModelDescription
from tests.support.model_servers import (
    ListedModels,
    ModelClient,
    NumpyModel,
    model_server,
    run_concurrently,
)
from tests.support.trees import image_bytes
from tests.support.waiting import wait_until

COLORS = ModelDescription(
    classes=("red", "green", "blue"), image=ImageInput(size=8, transform="whole"), scores="logits"
)
TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def client() -> Iterator[ModelClient]:
    with model_server(ListedModels(NumpyModel(7)), max_body_bytes=1 << 20) as (_, client):
        yield client


@pytest.fixture(scope="module")
def classifier() -> Iterator[ModelClient]:
    with model_server(ListedModels(NumpyModel(7, COLORS))) as (_, client):
        yield client


def encode_image(color: tuple[int, int, int], size: tuple[int, int] = (40, 30), kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, kind)
    return out.getvalue()


def test_status_and_metadata(client: ModelClient) -> None:
    status = {"version": "7", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
    for path in ("/v1/models/pets", "/v1/models/pets/versions/7"):
        assert client.get(path).json == {"model_version_status": [status]}
    for path in ("/v1/models/pets/metadata", "/v1/models/pets/versions/7/metadata"):
        answer = client.get(path)
        assert answer.json["model_spec"] == {"name": "pets", "signature_name": "", "version": "7"}
        signature = answer.json["metadata"]["signature_def"]["signature_def"]["serving_default"]
        shape = {"dim": [{"size": "-1", "name": ""}, {"size": "2", "name": ""}], "unknown_rank": False}
        assert signature["inputs"]["x"] == {"dtype": "DT_FLOAT", "tensor_shape": shape, "name": ""}
        assert signature["method_name"] == "tensorflow/serving/predict"


def test_predict_by_row_and_by_column(client: ModelClient) -> None:
    for path in ("/v1/models/pets:predict", "/v1/models/pets/versions/7:predict"):
        assert client.post(path, {"instances": [[1, 2], [3, 4]]}).json == {"predictions": [703, 707]}
        assert client.post(path, {"inputs": {"x": [[1, 2], [3, 4]]}}).json == {"outputs": [703, 707]}
    data = {"b64": base64.b64encode(b"\xff\xfe").decode()}
    answer = client.post("/v1/models/pets:predict", {"signature_name": "bytes", "instances": [data]})
    assert answer.json == {"predictions": [2]}
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/models/dogs", b"", 404),
        ("GET", "/v1/models/pets/versions/8", b"", 404),
        ("GET", "/v1/models/pets/versions/x", b"", 400),
        ("GET", "/nothing", b"", 404),
        ("GET", "/v1/models/pets:predict", b"", 405),
        ("POST", "/v1/models/dogs:predict", b'{"instances": [[1, 2]]}', 404),
        ("POST", "/v1/models/pets/versions/8:predict", b'{"instances": [[1, 2]]}', 404),
        ("POST", "/v1/models/pets:classify", b"{}", 404),
        ("POST", "/v1/models/pets:predict", b"not json", 400),
        ("POST", "/v1/models/pets:predict", b'{"instances": [[1, 2, 3]]}', 400),
        ("POST", "/v1/models/pets:predict", b'{"instances": [[666, 2]]}', 400),
        ("POST", "/v1/models/pets:predict", b'{"signature_name": "no", "instances": [[1, 2]]}', 404),
        ("POST", "/classify", b"x", 404),  # the model has no description
    ],
)
def test_errors_have_a_status_and_a_sentence(
    client: ModelClient, method: str, path: str, body: bytes, status: int
) -> None:
    answer = client.get(path) if method == "GET" else client.post(path, body)
    assert answer.status == status
    assert answer.error


def test_a_model_that_fails_is_a_500_with_a_sentence(client: ModelClient, caplog: pytest.LogCaptureFixture) -> None:
    answer = client.post("/v1/models/pets:predict", {"instances": [[667, 2]]})
    assert answer.status == 500
    assert "the model is broken" in answer.error
    assert client.post("/v1/models/pets:predict", {"instances": [[1, 2]]}).status == 200


def test_bodies_are_bounded(client: ModelClient) -> None:
    answer = client.post("/v1/models/pets:predict", b" " * ((1 << 20) + 1))
    assert answer.status == 413
    assert "1 MiB" in answer.error
    chunked = http.client.HTTPConnection(urlsplit(client.url).netloc, timeout=60)
    chunked.request("POST", "/v1/models/pets:predict", iter([b" " * (1 << 19)] * 3), encode_chunked=True)
    assert chunked.getresponse().status == 413
    chunked.close()
    declared = http.client.HTTPConnection(urlsplit(client.url).netloc, timeout=60)
    declared.putrequest("POST", "/classify")
    declared.putheader("Content-Length", str(10 << 30))
    declared.endheaders()
    assert declared.getresponse().status == 413  # without waiting for the body
    declared.close()
    assert client.get("/healthz").status == 200


def test_a_body_of_100_mb_is_413_with_a_sentence(classifier: ModelClient) -> None:
    """The client sends the whole body before it reads the response, so the server must not close too early."""
    connection = http.client.HTTPConnection(urlsplit(classifier.url).netloc, timeout=60)
    connection.request("POST", "/classify", bytes(100 << 20))
    response = connection.getresponse()
    assert response.status == 413
    assert "32 MiB" in json.loads(response.read())["error"]
    connection.close()


def test_bodies_of_all_requests_together_are_bounded(client: ModelClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as limits:
        limits.setattr(guard, "MAX_TOTAL_BYTES", 10)
        answer = client.post("/v1/models/pets:predict", {"instances": [[1, 2]]})
        assert answer.status == 503
        assert answer.headers["retry-after"]
        assert answer.error
        limits.setattr(guard, "MAX_TOTAL_BYTES", 100)  # what was rejected is no longer counted
        for _ in range(5):
            assert client.post("/v1/models/pets:predict", {"instances": [[1, 2]]}).status == 200


def test_a_slow_body_is_408(client: ModelClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_TIMEOUT_S", 0.05)
    connection = http.client.HTTPConnection(urlsplit(client.url).netloc, timeout=60)
    connection.putrequest("POST", "/classify")
    connection.putheader("Content-Length", "10")
    connection.endheaders(b"x")
    assert connection.getresponse().status == 408
    connection.close()


def test_classify_names_the_best_classes(classifier: ModelClient) -> None:
    answer = classifier.post("/classify", encode_image((20, 240, 200)))
    assert answer.status == 200
    assert answer.json["model"] == "pets"
    assert answer.json["version"] == "7"
    classes = answer.json["classes"]
    assert [(each["index"], each["name"]) for each in classes] == [(1, "green"), (2, "blue"), (0, "red")]
    assert sum(each["probability"] for each in classes) == pytest.approx(1)
    assert len(classifier.post("/classify?top=1", encode_image((1, 2, 3), kind="JPEG")).json["classes"]) == 1


@pytest.mark.parametrize(
    ("body", "query"),
    [
        (b"", ""),
        (b"no image", ""),
        (image_bytes(1)[:200], ""),
        (image_bytes(1, size=(640, 480))[:-500], ""),
        (encode_image((1, 2, 3))[:50], ""),
        (image_bytes(1), "?top=0"),
        (image_bytes(1), "?top=x"),
    ],
)
def test_a_bad_image_is_400_with_a_sentence(classifier: ModelClient, body: bytes, query: str) -> None:
    answer = classifier.post(f"/classify{query}", body)
    assert answer.status == 400
    assert answer.error


def test_responses_have_a_strict_policy(client: ModelClient, classifier: ModelClient) -> None:
    for answer in (client.get("/"), client.get("/page.js"), client.get("/nothing"), classifier.post("/classify", b"x")):
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "server" not in answer.headers
    page = client.get("/").body.decode()
    assert "style=" not in page
    assert "//" not in page
    assert client.get("/model").json == {"name": "pets", "version": "7", "image": None}
    assert classifier.get("/model").json["image"] == {"size": 8, "classes": 3}


def test_metrics_count_requests_and_batches() -> None:
    with model_server(ListedModels(NumpyModel(7))) as (_, client):
        client.post("/v1/models/pets:predict", {"instances": [[1, 2]]})
        client.post("/v1/models/pets:predict", {"instances": [[1]]})
        text = client.get("/metrics").body.decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert lines['stoker_model_requests_total{endpoint="predict",code="200"}'] == "1"
    assert lines['stoker_model_requests_total{endpoint="predict",code="400"}'] == "1"
    assert lines["stoker_model_batches_total"] == "1"
    assert lines['stoker_model_version_loaded{version="7"}'] == "1"
    assert lines["stoker_model_request_seconds_count"] == lines['stoker_model_request_seconds_bucket{le="+Inf"}']


def test_a_token_is_required_for_all_but_health() -> None:
    with model_server(ListedModels(NumpyModel(7)), token=TOKEN) as (_, client):
        assert client.get("/healthz").status == 200
        for path in ("/", "/metrics", "/v1/models/pets"):
            answer = client.get(path)
            assert answer.status == 401
            assert answer.headers["www-authenticate"].startswith("Basic")
            assert client.get(path, authorization=f"Bearer {TOKEN}x").status == 401
            assert client.get(path, authorization=f"Bearer {TOKEN}").status == 200
            basic = base64.b64encode(f"any:{TOKEN}".encode()).decode()
            assert client.get(path, authorization=f"Basic {basic}").status == 200
            assert client.get(path, host="model.example", authorization=f"Bearer {TOKEN}").status == 200


def test_a_web_page_cannot_reach_a_local_server_by_another_name(client: ModelClient) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
        answer = client.get("/v1/models/pets", host=host)
        assert answer.status in (400, 421)
    for host in ("localhost", "127.0.0.1:9", "[::1]:9", "[::1]"):
        assert client.get("/v1/models/pets", host=host).status == 200


def test_a_used_port_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = ModelServerSettings(name="pets", port=taken.getsockname()[1])
        with pytest.raises(UnavailableError, match="--port"):
            ModelServer(settings, ListedModels(NumpyModel()))


def test_concurrent_requests_share_batches_and_get_their_own_results() -> None:
    model = NumpyModel(1)
    with model_server(ListedModels(model), connections=32) as (server, client):
        model.batches.clear()

        def send(number: int) -> None:
            for step in range(10):
                value = number * 100 + step
                answer = client.post("/v1/models/pets:predict", {"instances": [[value, 1], [value, 2]]})
                assert answer.json == {"predictions": [value + 101, value + 102]}

        run_concurrently(32, send)
        assert sum(model.batches) == 32 * 10 * 2
        assert server.metrics.batches < 320
        assert max(model.batches) <= 32


def test_requests_finish_on_the_old_version_while_a_new_one_is_served() -> None:
    old, new = NumpyModel(1), NumpyModel(2)
    source = ListedModels(old)
    with model_server(source) as (server, client):
        old.gate.clear()
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(client.post("/v1/models/pets:predict", {"instances": [[0, 0]]}))
        )
        thread.start()
        wait_until(lambda: server.metrics.in_flight == 1)
        source.models[2] = new
        wait_until(lambda: client.get("/v1/models/pets").json["model_version_status"][0]["version"] == "2")
        assert client.post("/v1/models/pets:predict", {"instances": [[0, 0]]}).json == {"predictions": [200]}
        assert client.post("/v1/models/pets/versions/1:predict", {"instances": [[0, 0]]}).status == 404
        assert not answers
        old.gate.set()
        thread.join(60)
        assert answers[0].json == {"predictions": [100]}


def test_reload_under_load_loses_no_request() -> None:
    source = ListedModels(NumpyModel(1))
    with model_server(source, connections=16) as (_, client):
        done = threading.Event()
        seen: set[float] = set()

        def send(number: int) -> None:
            if number == 0:
                for version in range(2, 12):
                    source.models = {version: NumpyModel(version)}
                    wait_until(lambda v=version: 100 * v in seen)  # type: ignore[misc]
                done.set()
                return
            while not done.is_set():
                answer = client.post("/v1/models/pets:predict", {"instances": [[0, 0]]})
                assert answer.status == 200, answer.body
                seen.add(answer.json["predictions"][0])

        run_concurrently(9, send)
        assert seen == {100 * version for version in range(1, 12)}


def test_a_broken_version_is_in_the_status() -> None:
    source = ListedModels(NumpyModel(1))
    with model_server(source) as (_, client):
        source.models[2] = ValueError("no such op\nand a long traceback")
        wait_until(lambda: len(client.get("/v1/models/pets").json["model_version_status"]) == 2)
        broken = client.get("/v1/models/pets/versions/2").json["model_version_status"][0]
        assert broken["state"] == "END"
        assert broken["status"] == {"error_code": "INTERNAL", "error_message": "no such op"}
        assert client.post("/v1/models/pets:predict", {"instances": [[0, 0]]}).json == {"predictions": [100]}


def test_stop_lets_requests_finish() -> None:
    model = NumpyModel(1)
    answers = []
    with model_server(ListedModels(model)) as (server, client):
        model.gate.clear()
        thread = threading.Thread(
            target=lambda: answers.append(client.post("/v1/models/pets:predict", {"instances": [[1, 2]]}))
        )
        thread.start()
        wait_until(lambda: server.metrics.in_flight == 1)
        server.stop()
        wait_until(lambda: _is_refused(server.url))
        assert not answers
        model.gate.set()
        thread.join(60)
    assert answers[0].json == {"predictions": [103]}


def _is_refused(url: str) -> bool:
    try:
        socket.create_connection((urlsplit(url).hostname or "", urlsplit(url).port or 0), 1).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


class BrokenModel(NumpyModel):
    """A model whose scores are set by the test."""

    scores = np.full((1, 3), np.nan)

    def run(self, signature: str, inputs: Tensors) -> Tensors:
        return {"scores": self.scores}


def test_scores_that_make_no_sense_are_the_fault_of_the_model() -> None:
    broken = BrokenModel(1, COLORS)
    with model_server(ListedModels(broken)) as (_, client):
        for part in ("finite", "3 classes"):
            answer = client.post("/classify", encode_image((1, 2, 3)))
            assert answer.status == 500
            assert part in answer.error
            broken.scores = np.zeros((1, 2))


def test_float_images_are_normalized_in_both_layouts() -> None:
    from stoker.model_server.images import ImageDecoder

    mean, std = (0.5, 0.4, 0.3), (0.1, 0.2, 0.3)
    data = encode_image((255, 0, 51))
    expected = np.array([(1 - 0.5) / 0.1, -0.4 / 0.2, (0.2 - 0.3) / 0.3], dtype=np.float32)
    for layout in ("NHWC", "NCHW"):
        image = ImageInput(size=4, transform="whole", dtype="float32", layout=layout, mean=mean, std=std)  # type: ignore[arg-type]
        row = ImageDecoder(image).decode(data)
        assert row.shape == ((1, 4, 4, 3) if layout == "NHWC" else (1, 3, 4, 4))
        channels = row if layout == "NHWC" else row.transpose(0, 2, 3, 1)
        np.testing.assert_allclose(channels, np.broadcast_to(expected, (1, 4, 4, 3)), rtol=1e-5)
    plain = ImageDecoder(ImageInput(size=4, transform="whole", dtype="float32")).decode(data)
    assert plain.dtype == np.float32
    assert plain[0, 0, 0].tolist() == [255, 0, 51]
    assert json.dumps(plain.tolist())
