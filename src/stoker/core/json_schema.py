"""JSON Schema of msgspec structs, with the unit types `Bytes` and `Seconds`.

msgspec describes the leaf types. It has no hook for the defaults of struct fields and so fails on unit types; hence
structs and the types that may contain them are assembled here.
"""

from __future__ import annotations

from inspect import cleandoc
from typing import Annotated, Any, get_args

import msgspec

from stoker.core.type_hints import (
    default_of,
    is_struct,
    is_union,
    is_verbatim,
    metadata,
    origin_of,
    struct_config,
    unwrap,
)
from stoker.core.units import Bytes, Seconds, to_number


def json_schema(into: type) -> dict[str, Any]:
    """Return the JSON Schema of a type, for editors."""
    definitions: dict[str, Any] = {}
    return {**_schema(into, definitions), "$defs": definitions}


def _schema(into: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = origin_of(into), get_args(unwrap(into))
    if is_struct(into):
        name = origin.__name__
        if name not in definitions:
            definitions[name] = {}  # reserve the name: a struct may contain itself
            definitions[name].update(_struct_schema(origin, definitions))
        return {"$ref": f"#/$defs/{name}", **_description(into)}
    if is_union(into):
        return {"anyOf": [_schema(member, definitions) for member in arguments], **_description(into)}
    is_collection = origin in (dict, list, tuple, set, frozenset)
    outer: Any = origin if is_collection else unwrap(into)
    for note in metadata(into):
        outer = Annotated[outer, note]
    (schema,), named = msgspec.json.schema_components([outer], schema_hook=_unit_schema)
    definitions.update(named)
    if is_verbatim(into):
        schema["type"] = ["string", "number", "boolean"]
    inner = [_schema(argument, definitions) for argument in arguments if is_collection and argument is not ...]
    if origin is dict and inner:
        schema["additionalProperties"] = inner[1]
        if inner[0] != {"type": "string"}:
            schema["propertyNames"] = inner[0]
    elif origin is tuple and ... not in arguments and inner:
        schema |= {"prefixItems": inner, "minItems": len(inner), "maxItems": len(inner), "items": False}
    elif inner:
        schema["items"] = inner[0]
    return schema


def _description(into: Any) -> dict[str, str]:
    descriptions = [note.description for note in metadata(into) if note.description is not None]
    return {"description": descriptions[-1]} if descriptions else {}


def _struct_schema(struct: type[msgspec.Struct], definitions: dict[str, Any]) -> dict[str, Any]:
    config = struct_config(struct)
    tag = {} if config.tag_field is None else {config.tag_field: {"enum": [config.tag]}}
    properties: dict[str, Any] = dict(tag)
    required = list(tag)
    for field in msgspec.structs.fields(struct):
        properties[field.encode_name] = _schema(field.type, definitions)
        if field.required:
            required.append(field.encode_name)
        elif not callable(field.default_factory) or isinstance(field.default_factory, type):
            default = default_of(field)
            if not isinstance(default, msgspec.Struct):  # its fields state their own defaults
                properties[field.encode_name]["default"] = msgspec.to_builtins(default, enc_hook=to_number)
    schema: dict[str, Any] = {
        "title": struct.__name__,
        "type": "object",
        "properties": properties,
        "required": required,
    }
    if struct.__doc__:
        schema["description"] = cleandoc(struct.__doc__)
    if config.forbid_unknown_fields:
        schema["additionalProperties"] = False
    return schema


def _unit_schema(unit: type) -> dict[str, Any]:
    if issubclass(unit, Bytes):
        return {"type": ["integer", "string"], "minimum": 0, "description": Bytes.expected}
    if issubclass(unit, Seconds):
        return {"type": ["number", "string"], "minimum": 0, "description": Seconds.expected}
    raise NotImplementedError(f"no schema for {unit}")
