"""Model servers for tests: in a thread of this process with a model of numpy, or as the real command."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import urllib3

from stoker.errors import InputError
from stoker.model_server.model import ServedModel
from stoker.model_server.server import ModelServer
from stoker.model_server.settings import ModelServerSettings
from stoker.model_server.signatures import Signature, Tensors, TensorSpec
from stoker.model_server.sources import Candidate, ModelSource
from stoker.trainers.model_description import ModelDescription
from tests.support.waiting import wait_until


class Answer(NamedTuple):
    """Status, headers and body of a response."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The sentence of an error response."""
        sentence = self.json["error"]
        assert isinstance(sentence, str)
        assert len(sentence.split()) >= 3
        assert "Traceback" not in sentence
        return sentence


class ModelClient:
    """A client of one server; several threads may use it."""

    def __init__(self, url: str, *, headers: dict[str, str] | None = None, connections: int = 8) -> None:
        self.url = url
        self._headers = headers or {}
        self._pool = urllib3.PoolManager(maxsize=connections, retries=False, timeout=60)

    def get(self, path: str, **headers: str) -> Answer:
        return self._request("GET", path, None, headers)

    def post(self, path: str, body: object, **headers: str) -> Answer:
        """Send bytes as they are, anything else as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._request("POST", path, data, headers)

    def _request(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Answer:
        response = self._pool.request(method, f"{self.url}{path}", body=body, headers={**self._headers, **headers})
        return Answer(response.status, response.headers, response.data)


class NumpyModel:
    """A model without a framework: `serving_default` adds the two numbers of a row, and 100 times the version."""

    def __init__(self, version: int = 1, description: ModelDescription | None = None) -> None:
        self.version, self.description = version, description
        self.batches: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        row = TensorSpec("float32", (None, 2))
        self.signatures = {
            "serving_default": Signature({"x": row}, {"sum": TensorSpec("float32", (None,))}),
            "pair": Signature(
                {"a": row, "b": TensorSpec("int32", (None,))},
                {"both": row, "text": TensorSpec("string", (None,)), "raw_bytes": TensorSpec("string", (None,))},
            ),
            "bytes": Signature({"data": TensorSpec("string", (None,))}, {"length": TensorSpec("int64", (None,))}),
            "total": Signature({"x": row}, {"total": TensorSpec("float32", ())}),
        }
        if description is not None:
            size = description.image.size
            shape = (None, size, size, 3)
            self.signatures["serving_default"] = Signature(
                {"images": TensorSpec(description.image.dtype, shape)},
                {"scores": TensorSpec("float32", (None, len(description.classes)))},
            )

    def run(self, signature: str, inputs: Tensors) -> Tensors:
        self.gate.wait(60)
        self.batches.append(len(next(iter(inputs.values()))))
        match signature:
            case "pair":
                texts = [f"é{number}".encode() for number in inputs["b"].tolist()]
                return {
                    "both": inputs["a"] + inputs["b"][:, None],
                    "text": np.array(texts, dtype=object),
                    "raw_bytes": np.array([b"\xff"] * len(texts), dtype=object),
                }
            case "bytes":
                return {"length": np.array([len(data) for data in inputs["data"]])}
            case "total":
                return {"total": inputs["x"].sum()}
        if self.description is not None:
            means = inputs["images"].reshape(len(inputs["images"]), -1, 3).mean(1)
            return {"scores": means[:, np.arange(len(self.description.classes)) % 3].astype(np.float32)}
        if (inputs["x"] == 666).any():
            raise InputError("model rejected the input: 666")
        if (inputs["x"] == 667).any():
            raise RuntimeError("the model is broken")
        return {"sum": inputs["x"].sum(1) + np.float32(100 * self.version)}


class ListedModels:
    """A source whose versions a test adds and removes; a value that is an exception cannot be loaded."""

    where, poll_s = "test", 0.05

    def __init__(self, *models: NumpyModel) -> None:
        self.models: dict[int, NumpyModel | Exception] = {model.version: model for model in models}
        self.loads: list[int] = []

    def list_candidates(self) -> Sequence[Candidate]:
        return [Candidate(number, str(number), str(id(model))) for number, model in self.models.items()]

    def load(self, candidate: Candidate) -> ServedModel:
        self.loads.append(candidate.order)
        model = self.models[candidate.order]
        if isinstance(model, Exception):
            raise model
        return model


@contextmanager
def model_server(
    source: ModelSource, *, keep: int = 1, max_batch: int = 32, connections: int = 8, **settings: Any
) -> Iterator[tuple[ModelServer, ModelClient]]:
    """Run a server in a thread; it must stop by itself at the end."""
    chosen = ModelServerSettings(**{"name": "pets", "port": 0, "poll_s": 0.05, "shutdown_s": 10, **settings})
    server = ModelServer(chosen, source, keep=keep, max_batch=max_batch)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.is_started)
        yield server, ModelClient(server.url, connections=connections)
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


@contextmanager
def model_serve_command(
    *words: object, log: Path, connections: int = 8
) -> Iterator[tuple[subprocess.Popen[bytes], ModelClient]]:
    """Run `stoker model serve` as a process on a free port."""
    command = [sys.executable, "-m", "stoker", "model", "serve", *map(str, words), "--port", "0"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield process, ModelClient(_wait_for_url(process, log), connections=connections)
    finally:
        process.terminate()
        process.wait(60)


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    def find() -> str | None:
        found = [word for word in log.read_text().split() if word.startswith("http://")]
        return found[0].rstrip(";") if found else None

    wait_until(lambda: find() or process.poll() is not None, 120)
    url = find()
    assert url is not None, log.read_text()
    client = ModelClient(url)
    wait_until(lambda: _is_healthy(client))
    return url


def _is_healthy(client: ModelClient) -> bool:
    try:
        return client.get("/healthz").status == 200
    except urllib3.exceptions.HTTPError:
        return False


def run_concurrently(count: int, function: Callable[[int], None]) -> None:
    """Call a function in many threads at once; raise the first error."""
    errors: list[BaseException] = []

    def call(number: int) -> None:
        try:
            function(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
