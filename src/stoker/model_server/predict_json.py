"""JSON of the predict API, as TensorFlow Serving defines it: requests to tensors, tensors to responses.

A request has `instances` (row format: a list with one entry per row) or `inputs` (column format: one value per tensor).
A value is a number, a string or a nested list; `{"b64": "…"}` is binary data.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from stoker.core import json_io
from stoker.core.text import join_all
from stoker.errors import InputError, NotFoundError
from stoker.model_server.signatures import DTYPE_NAMES, Array, Signature, Tensors, TensorSpec, format_shape
from stoker.trainers.model_description import DEFAULT_SIGNATURE

KEYS = ("instances", "inputs", "signature_name")


class PredictRequest(NamedTuple):
    """The tensors of a request, and whether the response has rows too."""

    signature: str
    inputs: Tensors
    is_row_format: bool


def parse_request(body: bytes, signatures: Mapping[str, Signature], *, max_bytes: int) -> PredictRequest:
    """Parse and check a request; raise InputError for what the model cannot take."""
    document = json_io.parse(body, "request", max_bytes=max_bytes)
    if not isinstance(document, dict):
        raise InputError('request must be a JSON object with "instances" or "inputs"')
    if unknown := [key for key in document if key not in KEYS]:
        raise InputError(f"unknown key {unknown[0]!r} in the request", hint=f"use {join_all(KEYS, 'or')}")
    if ("instances" in document) == ("inputs" in document):
        raise InputError('request must have either "instances" or "inputs"')
    name = document.get("signature_name") or DEFAULT_SIGNATURE
    if not isinstance(name, str) or name not in signatures:
        raise NotFoundError(f"model has no signature {name!r}", hint=f"it has {join_all(sorted(signatures), 'and')}")
    signature = signatures[name]
    is_row_format = "instances" in document
    columns = (
        _split_rows(document["instances"], signature)
        if is_row_format
        else _split_columns(document["inputs"], signature)
    )
    if missing := [key for key in signature.inputs if key not in columns]:
        raise InputError(f"input {missing[0]!r} is missing")
    if extra := [key for key in columns if key not in signature.inputs]:
        raise InputError(
            f"signature {name!r} has no input {extra[0]!r}", hint=f"it has {join_all(sorted(signature.inputs), 'and')}"
        )
    inputs = {key: to_array(columns[key], spec, key) for key, spec in signature.inputs.items()}
    _check_rows(inputs, signature)
    return PredictRequest(name, inputs, is_row_format)


def format_response(request: PredictRequest, outputs: Tensors) -> bytes:
    """Return the response: `predictions` by row, or `outputs` by tensor; without names if there is one output."""
    columns = {name: _to_plain(array, name) for name, array in outputs.items()}
    if not request.is_row_format:
        return _dump({"outputs": columns if len(columns) != 1 else next(iter(columns.values()))})
    rows = len(next(iter(request.inputs.values())))
    for name, array in outputs.items():
        if array.ndim == 0 or len(array) != rows:
            raise InputError(
                f"output {name!r} has shape {format_shape(array.shape)}, not one row for each of the {rows} instances",
                hint='send the request in the column format, with "inputs"',
            )
    if len(columns) == 1:
        return _dump({"predictions": next(iter(columns.values()))})
    names = list(columns)
    return _dump({"predictions": [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]})


def to_array(value: object, spec: TensorSpec, name: str) -> Array:
    """Convert a JSON value to an array; raise InputError if its type or shape does not match."""
    if spec.dtype not in DTYPE_NAMES:
        raise InputError(f"input {name!r} has type {spec.dtype}, which cannot be sent as JSON")
    array = _to_bytes_array(value, name) if spec.dtype == "string" else _to_numbers(value, spec.dtype, name)
    if not spec.accepts(array.shape):
        raise InputError(f"input {name!r} has shape {format_shape(array.shape)}, expected {format_shape(spec.shape)}")
    return array


def _split_rows(instances: object, signature: Signature) -> dict[str, list[Any]]:
    if not isinstance(instances, list) or not instances:
        raise InputError('"instances" must be a list with at least one entry')
    if all(_is_named(instance) for instance in instances):
        columns: dict[str, list[Any]] = {key: [] for key in instances[0]}
        for number, instance in enumerate(instances):
            if instance.keys() != columns.keys():
                raise InputError(f"instance {number} has other inputs than instance 0")
            for key, value in instance.items():
                columns[key].append(value)
        return columns
    return {_single_input(signature): instances}


def _split_columns(inputs: object, signature: Signature) -> dict[str, Any]:
    if isinstance(inputs, dict) and _is_named(inputs):
        return inputs
    return {_single_input(signature): inputs}


def _is_named(value: object) -> bool:
    """Return whether a value is an object with a value for each input, and not binary data."""
    return isinstance(value, dict) and value.keys() != {"b64"}


def _single_input(signature: Signature) -> str:
    if len(signature.inputs) != 1:
        names = join_all(sorted(signature.inputs), "and")
        raise InputError(f"model has {len(signature.inputs)} inputs: {names}", hint="send an object with their names")
    return next(iter(signature.inputs))


def _check_rows(inputs: Tensors, signature: Signature) -> None:
    """Raise InputError if batched inputs have different numbers of rows, or none."""
    rows = {name: len(inputs[name]) for name, spec in signature.inputs.items() if spec.is_batched}
    if len(set(rows.values())) > 1:
        raise InputError(f"inputs have different numbers of rows: {rows}")
    if any(count == 0 for count in rows.values()):
        raise InputError("request has no rows")


def _to_numbers(value: object, dtype: str, name: str) -> Array:
    try:
        array = np.array(value)
    except ValueError as error:
        raise InputError(f"input {name!r} is not a tensor: its lists have different lengths") from error
    kinds = {"b": "b", "i": "iu", "u": "iu", "f": "fiu"}[np.dtype(dtype).kind]
    if array.size and array.dtype.kind not in kinds:
        found = {"f": "fractions", "b": "booleans", "U": "strings"}.get(array.dtype.kind, "other values")
        raise InputError(f"input {name!r} must be {dtype}, got {found}")
    if np.dtype(dtype).kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise InputError(f"input {name!r} must be {dtype}, between {limits.min} and {limits.max}")
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    if converted.dtype.kind == "f" and bool((np.isinf(converted) & ~np.isinf(array.astype(np.float64))).any()):
        raise InputError(f"input {name!r} has a value that is out of range for {dtype}")
    return converted


def _to_bytes_array(value: object, name: str) -> Array:
    array = np.array(_decode_strings(value, name), dtype=object)
    if any(not isinstance(item, bytes) for item in array.flat):
        raise InputError(f"input {name!r} is not a tensor: its lists have different lengths")
    return array


def _decode_strings(value: object, name: str) -> Any:
    if isinstance(value, list):
        return [_decode_strings(item, name) for item in value]
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and isinstance(value.get("b64"), str) and len(value) == 1:
        try:
            return base64.b64decode(value["b64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise InputError(f"input {name!r} has invalid base64 data") from error
    raise InputError(f'input {name!r} must be strings or {{"b64": "…"}}, got {type(value).__name__}')


def _to_plain(array: Array, name: str) -> Any:
    """Return an array as nested lists; TensorFlow Serving encodes outputs named `…_bytes` as base64."""
    return array.tolist() if array.dtype.kind not in "OS" else _plain_strings(array.tolist(), name.endswith("_bytes"))


def _plain_strings(value: Any, is_binary: bool) -> Any:
    if isinstance(value, list):
        return [_plain_strings(item, is_binary) for item in value]
    if not is_binary:
        try:
            return value.decode()
        except UnicodeDecodeError:
            pass
    return {"b64": base64.b64encode(value).decode()}


def _dump(value: object) -> bytes:
    """Encode as JSON; like TensorFlow Serving, write NaN and Infinity as they are."""
    return json.dumps(value, separators=(",", ":")).encode()
