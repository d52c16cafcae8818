"""Introspection of the type hints of msgspec structs: annotations, unions, struct fields."""

from __future__ import annotations

from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec


def unwrap(hint: Any) -> Any:
    """Return a type without its `Annotated[…]`."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def metadata(hint: Any) -> tuple[Any, ...]:
    """Return what `Annotated[…]` attaches to a type."""
    return hint.__metadata__ if get_origin(hint) is Annotated else ()


def origin_of(hint: Any) -> Any:
    """Return the class behind a type: `dict` for `Annotated[dict[str, int], …]`."""
    bare = unwrap(hint)
    return get_origin(bare) or bare


def is_union(hint: Any) -> bool:
    """Return whether a type is `A | B`."""
    return origin_of(hint) in (Union, UnionType)


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return get_args(unwrap(hint)) if is_union(hint) else (hint,)


def is_struct(hint: Any) -> bool:
    """Return whether a type is a struct that is encoded as a mapping."""
    origin = origin_of(hint)
    return isinstance(origin, type) and issubclass(origin, msgspec.Struct) and not struct_config(origin).array_like


def struct_config(hint: Any) -> msgspec.structs.StructConfig:
    """Return the configuration of a struct: its tag, whether it forbids unknown fields."""
    config: msgspec.structs.StructConfig = origin_of(hint).__struct_config__
    return config


@cache
def field_types(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the types of a struct's fields, by the keys they have in a document."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(struct)}


def default_of(field: msgspec.structs.FieldInfo) -> Any:
    """Return the default value of a struct's field."""
    return field.default_factory() if callable(field.default_factory) else field.default


def is_verbatim(hint: Any) -> bool:
    """Return whether a string type takes numbers, booleans and dates exactly as they are written."""
    return any((note.extra or {}).get("verbatim") for note in metadata(hint))
