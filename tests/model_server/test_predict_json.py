"""JSON requests to tensors and tensors to JSON responses, as TensorFlow Serving defines them."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from stoker.errors import InputError, NotFoundError
from stoker.model_server.predict_json import PredictRequest, format_response, parse_request
from stoker.model_server.signatures import Signature, TensorSpec
from tests.support.model_servers import NumpyModel

SIGNATURES = NumpyModel().signatures


def parse(document: object, signatures: dict[str, Signature] = SIGNATURES) -> PredictRequest:
    return parse_request(json.dumps(document).encode(), signatures, max_bytes=1 << 20)


def parse_value(value: object, dtype: str, shape: tuple[int | None, ...] | None = None) -> Any:
    return parse({"inputs": value}, {"serving_default": Signature({"x": TensorSpec(dtype, shape)})}).inputs["x"]


def test_row_and_column_format_give_the_same_tensors() -> None:
    rows = parse({"instances": [[1, 2], [3, 4.5]]})
    named_rows = parse({"instances": [{"x": [1, 2]}, {"x": [3, 4.5]}]})
    column = parse({"inputs": [[1, 2], [3, 4.5]]})
    named_column = parse({"inputs": {"x": [[1, 2], [3, 4.5]]}, "signature_name": "serving_default"})
    for request in (rows, named_rows, column, named_column):
        assert request.inputs["x"].dtype == np.float32
        assert request.inputs["x"].tolist() == [[1, 2], [3, 4.5]]
    assert rows.is_row_format
    assert named_rows.is_row_format
    assert not column.is_row_format
    assert not named_column.is_row_format


def test_several_inputs_are_named() -> None:
    rows = parse({"signature_name": "pair", "instances": [{"a": [1, 2], "b": 3}, {"a": [4, 5], "b": 6}]})
    column = parse({"signature_name": "pair", "inputs": {"a": [[1, 2], [4, 5]], "b": [3, 6]}})
    for request in (rows, column):
        assert request.inputs["a"].tolist() == [[1, 2], [4, 5]]
        assert request.inputs["b"].dtype == np.int32
        assert request.inputs["b"].tolist() == [3, 6]


def test_base64_and_strings_are_bytes() -> None:
    encoded = {"b64": base64.b64encode(b"\xff\x00").decode()}
    for document in ({"instances": [encoded, "é"]}, {"inputs": [encoded, "é"]}, {"inputs": {"data": [encoded, "é"]}}):
        request = parse({"signature_name": "bytes", **document})
        assert request.inputs["data"].tolist() == [b"\xff\x00", "é".encode()]
    rows = parse({"signature_name": "bytes", "instances": [{"data": encoded}]})
    assert rows.inputs["data"].tolist() == [b"\xff\x00"]


@pytest.mark.parametrize(
    ("document", "part"),
    [
        ([], "object"),
        ({}, "instances"),
        ({"instances": [[1, 2]], "inputs": [[1, 2]]}, "inputs"),
        ({"instances": [[1, 2]], "extra": 1}, "extra"),
        ({"instances": []}, "instances"),
        ({"instances": {"x": [1, 2]}}, "instances"),
        ({"instances": [[1, 2, 3]]}, "1×3, expected N×2"),
        ({"instances": [1, 2]}, "2, expected N×2"),
        ({"inputs": []}, "expected N×2"),
        ({"instances": [[1, 2], [3]]}, "lengths"),
        ({"instances": [["a", "b"]]}, "float32"),
        ({"instances": [[True, False]]}, "float32"),
        ({"instances": [[None, 1]]}, "float32"),
        ({"instances": [[1e300, 1]]}, "range"),
        ({"instances": [{"y": [1, 2]}]}, "'x'"),
        ({"inputs": {"x": [[1, 2]], "y": 1}}, "'y'"),
        ({"instances": [{"x": [1, 2]}, {"y": [1, 2]}]}, "instance 1"),
        ({"signature_name": "pair", "instances": [[1, 2]]}, "2 inputs"),
        ({"signature_name": "pair", "inputs": {"a": [[1, 2]], "b": [1, 2]}}, "rows"),
        ({"signature_name": "pair", "inputs": {"a": [[1, 2]], "b": [1.5]}}, "int32"),
        ({"signature_name": "bytes", "inputs": [{"b64": "?"}]}, "base64"),
        ({"signature_name": "bytes", "inputs": [1]}, "strings"),
        ({"signature_name": "bytes", "inputs": [["a"], "b"]}, "lengths"),
    ],
)
def test_what_the_model_cannot_take_is_rejected_with_a_sentence(document: object, part: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(document)
    assert part in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"instances": ' + b"[" * 5000, b"1" * 5000])
def test_what_is_not_json_is_rejected(body: bytes) -> None:
    with pytest.raises(InputError):
        parse_request(body, SIGNATURES, max_bytes=1 << 20)


def test_unknown_signature() -> None:
    for name in ("none", 3, ["pair"]):
        with pytest.raises(NotFoundError) as caught:
            parse({"signature_name": name, "instances": [[1, 2]]})
        assert "serving_default" in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [("uint8", [0, 255], [256]), ("int8", [-128, 127], [-129]), ("uint64", [2**64 - 1], [-1]), ("bool", [True], [1])],
)
def test_integers_have_the_range_of_their_type(dtype: str, good: list[int], bad: list[int]) -> None:
    array = parse_value(good, dtype)
    assert array.dtype == np.dtype(dtype)
    assert array.tolist() == good
    with pytest.raises(InputError):
        parse_value(bad, dtype)


def test_types_without_json_are_rejected() -> None:
    with pytest.raises(InputError, match="bfloat16"):
        parse_value([1], "bfloat16")


def test_responses_have_names_only_if_there_are_several_outputs() -> None:
    row, column = parse({"instances": [[1, 2], [3, 4]]}), parse({"inputs": [[1, 2], [3, 4]]})
    one = {"sum": np.array([3, 7], dtype=np.float32)}
    assert json.loads(format_response(row, one)) == {"predictions": [3, 7]}
    assert json.loads(format_response(column, one)) == {"outputs": [3, 7]}
    two = {**one, "raw_bytes": np.array([b"\xff", b"a"], dtype=object), "text": np.array([b"\xff", b"a"], dtype=object)}
    raw = [{"b64": "/w=="}, {"b64": "YQ=="}]
    assert json.loads(format_response(column, two)) == {
        "outputs": {"sum": [3, 7], "raw_bytes": raw, "text": [raw[0], "a"]}
    }
    assert json.loads(format_response(row, two)) == {
        "predictions": [
            {"sum": 3, "raw_bytes": raw[0], "text": raw[0]},
            {"sum": 7, "raw_bytes": raw[1], "text": "a"},
        ]
    }


def test_row_format_needs_a_row_per_instance() -> None:
    request = parse({"signature_name": "total", "instances": [[1, 2], [3, 4]]})
    for total in (np.float32(10), np.zeros(3)):
        with pytest.raises(InputError, match="inputs"):
            format_response(request, {"total": np.asarray(total)})
    column = parse({"signature_name": "total", "inputs": [[1, 2], [3, 4]]})
    assert json.loads(format_response(column, {"total": np.asarray(np.float32(10))})) == {"outputs": 10}


def test_special_numbers_are_written_as_tensorflow_serving_does() -> None:
    request = parse({"inputs": [[1, 2]]})
    assert format_response(request, {"x": np.array([np.nan, np.inf])}) == b'{"outputs":[NaN,Infinity]}'
    special = parse_request(b'{"inputs": [[NaN, Infinity]]}', SIGNATURES, max_bytes=100)
    assert np.isnan(special.inputs["x"][0, 0])
    assert np.isinf(special.inputs["x"][0, 1])
