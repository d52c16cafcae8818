"""Strict validation of objects against the schemas of their CRDs: unknown fields are faults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml

from tests.support.paths import SHARED

CRDS = SHARED / "crds"
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


@cache
def load_schema(file: str, version: str) -> dict[str, Any]:
    """Load the schema of one version of a CRD; skip the test if the CRD is not available."""
    path = CRDS / file
    if not path.exists():
        pytest.skip(f"file not found: {path}")
    crd = yaml.safe_load(path.read_text())
    (match,) = [entry for entry in crd["spec"]["versions"] if entry["name"] == version]
    schema: dict[str, Any] = match["schema"]["openAPIV3Schema"]
    return schema


def validate(value: Any, schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the faults of a value."""
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, int | str) or isinstance(value, bool):
            yield f"{path}: {value!r} is neither an integer nor a string"
        return
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{path}: {value!r} is not of type {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is not one of {schema['enum']}"
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{path}: {value!r} does not match {schema['pattern']}"
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from validate(inner, schema.get("items", {}), f"{path}[{index}]")
    if isinstance(value, dict):
        yield from _validate_object(value, schema, path)


def _validate_object(value: dict[str, Any], schema: dict[str, Any], path: str) -> Iterator[str]:
    for name in schema.get("required", []):
        if name not in value:
            yield f"{path}.{name}: missing"
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    for name, inner in value.items():
        if name in known:
            yield from validate(inner, known[name], f"{path}.{name}")
        elif isinstance(others, dict):
            yield from validate(inner, others, f"{path}.{name}")
        elif not others and not schema.get("x-kubernetes-preserve-unknown-fields") and path != ".metadata":
            yield f"{path}.{name}: unknown"
