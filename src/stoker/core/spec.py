"""Decode settings into frozen msgspec structs, reporting every fault at once.

A settings struct is `msgspec.Struct, frozen=True, forbid_unknown_fields=True`. It may define
`def faults(self) -> Iterable[Fault]` to reject invalid combinations of valid values; the paths of these faults are
relative to the struct, and the method is called only if the whole struct could be decoded.

A type may describe itself for error messages with `Meta(extra={"expected": "a port"})`. A string type with
`Meta(extra={"verbatim": True})` takes numbers, booleans and dates exactly as they are written, if the document was
parsed with `parse_verbatim` and passed through `resolve_verbatim`.

msgspec stops at the first error. A document that it rejects is therefore decoded again part by part: a rejected part
is split further, and a rejected part that cannot be split is one fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from difflib import get_close_matches
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from msgspec import inspect

from stoker.core import yaml_io
from stoker.core.type_hints import (
    field_types,
    is_struct,
    is_union,
    is_verbatim,
    origin_of,
    struct_config,
    union_members,
    unwrap,
)
from stoker.core.units import Bytes, Seconds, to_number, to_unit
from stoker.core.yaml_io import VerbatimScalar, join_path
from stoker.errors import Fault, InputError, SpecError

T = TypeVar("T")


def decode(data: object, into: type[T], where: object = None) -> T:
    """Decode plain data; `where` names its origin in the error."""
    value: T
    value, faults = _decode(data, into, "")
    return _raise_faults(value, faults, where)


def load(text: str | bytes, into: type[T], where: object) -> T:
    """Decode YAML or JSON text; `where` names the file in the error."""
    data, duplicates = yaml_io.parse(text, where)
    value: T
    value, faults = _decode(data, into, "")
    return _raise_faults(value, [*duplicates, *faults], where)


def try_decode(data: object, into: type[T]) -> tuple[T | None, list[Fault]]:
    """Decode plain data; return the value, or None, and every fault."""
    value: T | None
    value, faults = _decode(data, into, "")
    return value, faults


def describe_type(into: Any) -> str:
    """Describe the values that a type accepts: "an integer >= 1"."""
    return _describe(inspect.type_info(into))


def to_json(value: object) -> bytes:
    """Encode as deterministic JSON: sorted keys, indented."""
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=to_number, order="sorted"), indent=2) + b"\n"


def resolve_verbatim(data: Any, into: Any) -> Any:
    """Replace each `VerbatimScalar`: by its text where the type is verbatim, by its value elsewhere."""
    match data:
        case Mapping():
            return {_plain_value(key): resolve_verbatim(value, _type_at(key, into)) for key, value in data.items()}
        case list() | tuple():
            sequence = next((member for member in union_members(into) if origin_of(member) in (list, tuple)), Any)
            item_type = (*get_args(unwrap(sequence)), Any)[0]
            return [resolve_verbatim(item, item_type) for item in data]
        case VerbatimScalar() if is_verbatim(into) or (into is Any and isinstance(data.value, date)):
            return data.text
        case bool() if is_verbatim(into):
            return "true" if data else "false"
        case int() | float() if is_verbatim(into):
            return str(data)
        case _:
            return _plain_value(data)


def _plain_value(data: Any) -> Any:
    return data.value if isinstance(data, VerbatimScalar) else data


def _type_at(key: object, into: Any) -> Any:
    """Return the type of the value that a mapping holds under a key."""
    for member in union_members(into):
        if is_struct(member):
            return field_types(origin_of(member)).get(str(key), Any)
        if origin_of(member) is dict:
            return (*get_args(unwrap(member)), Any, Any)[1]
    return Any


def _raise_faults(value: T, faults: Sequence[Fault], where: object) -> T:
    if faults:
        raise SpecError(faults, where=where)
    return value


# --- Decode part by part, to find every fault


def _decode(raw: object, into: Any, path: str) -> tuple[Any, list[Fault]]:
    """Convert `raw`; return the value and its invalid combinations, or None and every fault in `raw`."""
    try:
        value = msgspec.convert(raw, into, dec_hook=to_unit)
    except (msgspec.ValidationError, InputError) as error:
        return None, list(_find_faults(raw, into, path)) or [Fault(path, _describe_mismatch(raw, into, error))]
    return value, list(_find_combinations(value, path))


def _find_faults(raw: object, into: Any, path: str) -> Iterator[Fault]:
    """Yield the faults of the parts of `raw`; none if it has no parts, or the wrong kind of parts."""
    into = unwrap(into)
    origin = get_origin(into) or into
    arguments = get_args(into)
    if is_union(into):
        yield from _find_faults_in_union(raw, arguments, path)
    elif isinstance(raw, Mapping) and is_struct(into):
        yield from _find_faults_in_struct(raw, into, path)
    elif isinstance(raw, Mapping) and origin is dict and arguments:
        key_type, value_type = arguments
        for key, value in raw.items():
            key_path = join_path(path, _segment(key))
            yield from (Fault(key_path, f"invalid key: {fault.what}") for fault in _decode(key, key_type, key_path)[1])
            yield from _decode(value, value_type, key_path)[1]
    elif isinstance(raw, list | tuple) and origin in (list, tuple, set, frozenset) and arguments:
        is_fixed = origin is tuple and arguments[-1] is not Ellipsis
        types = arguments if is_fixed else arguments[:1] * len(raw)
        for index, (item, item_type) in enumerate(zip(raw, types, strict=False)):
            yield from _decode(item, item_type, f"{path}[{index}]")[1]


def _find_faults_in_union(raw: object, members: Iterable[Any], path: str) -> Iterator[Fault]:
    """Decode `raw` as the one member of the union that has its shape; structs are told apart by their tag."""
    if isinstance(raw, Mapping):
        candidates = [member for member in members if is_struct(member) or origin_of(member) is dict]
    elif isinstance(raw, list | tuple):
        candidates = [member for member in members if origin_of(member) in (list, tuple, set, frozenset)]
    else:
        return
    if isinstance(raw, Mapping) and len(candidates) > 1:
        by_tag = {struct_config(member).tag: member for member in candidates}
        field = str(struct_config(candidates[0]).tag_field)
        tag = raw.get(field)
        if not isinstance(tag, str | int) or tag not in by_tag:
            expected = _describe_choices(by_tag)
            what = (
                f"must be {expected}, got {_describe_value(tag)}" if field in raw else f"missing (must be {expected})"
            )
            yield Fault(join_path(path, field), what)
            return
        candidates = [by_tag[tag]]
    for member in candidates:
        yield from _decode(raw, member, path)[1]


def _find_faults_in_struct(raw: Mapping[Any, object], into: Any, path: str) -> Iterator[Fault]:
    fields = {field.encode_name: field for field in msgspec.structs.fields(into)}
    config = struct_config(into)
    for key, value in raw.items():
        key_path = join_path(path, _segment(key))
        if key in fields:
            yield from _decode(value, fields[key].type, key_path)[1]
        elif not isinstance(key, str):
            yield Fault(key_path, f"invalid key: {_describe_mismatch(key, str)}")
        elif key == config.tag_field:
            if value != config.tag:
                yield Fault(key_path, f"must be {config.tag!r}, got {_describe_value(value)}")
        elif config.forbid_unknown_fields:
            close = get_close_matches(key, fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(fields)}"
            yield Fault(key_path, f"unknown key ({hint})")
    for name, field in fields.items():
        if field.required and name not in raw:
            yield Fault(join_path(path, _segment(name)), f"missing (must be {describe_type(field.type)})")


def _find_combinations(value: object, path: str) -> Iterator[Fault]:
    """Call `faults` of every struct in a decoded value."""
    if isinstance(value, msgspec.Struct):
        faults = getattr(type(value), "faults", None)
        if callable(faults):
            yield from (Fault(join_path(path, fault.path), fault.what) for fault in faults(value))
        for name, key in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True):
            yield from _find_combinations(getattr(value, name), join_path(path, _segment(key)))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _find_combinations(item, join_path(path, _segment(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _find_combinations(item, f"{path}[{index}]")


def _segment(key: object) -> str:
    return yaml_io.path_segment(key if isinstance(key, str) else _describe_value(key))


# --- Descriptions of types and values

_BOUNDS = {"ge": ">= {}", "gt": "> {}", "le": "<= {}", "lt": "< {}"}
_LIMITS = {
    "multiple_of": "a multiple of {}",
    "min_length": "length >= {}",
    "max_length": "length <= {}",
    "pattern": "matching {}",
}

_YAML_BOOLEANS = {True: ("on", "yes", "true"), False: ("off", "no", "false")}
"""Unquoted words that YAML 1.1 reads as booleans."""


def _describe_mismatch(raw: object, into: Any, error: Exception | None = None) -> str:
    if isinstance(error, msgspec.ValidationError) and error.__cause__ is not None:
        return str(error.__cause__)  # raised by __post_init__ of the struct
    return f"must be {describe_type(into)}, got {_describe_value(raw)}{_quote_hint(raw, into)}"


def _quote_hint(raw: object, into: Any) -> str:
    """Return a hint if a string is expected and the value only lacks quotes."""
    if isinstance(raw, bool):
        words = [word for word in _YAML_BOOLEANS[raw] if _can_convert(word, into)]
        return f" (quote it: YAML reads {', '.join(words)} as {_describe_value(raw)})" if words else ""
    return " (quote it)" if isinstance(raw, int | float | date) and _can_convert(str(raw), into) else ""


def _can_convert(raw: object, into: Any) -> bool:
    try:
        msgspec.convert(raw, into, dec_hook=to_unit)
    except (msgspec.ValidationError, InputError):
        return False
    return True


def _describe(info: inspect.Type) -> str:
    match info:
        case inspect.Metadata():
            return str((info.extra or {}).get("expected") or _describe(info.type))
        case inspect.UnionType():
            return " or ".join(_describe(member) for member in info.types if not isinstance(member, inspect.NoneType))
        case inspect.LiteralType():
            return _describe_choices(info.values)
        case inspect.EnumType():
            return _describe_choices(member.value for member in info.cls)
        case inspect.CustomType(cls=unit) if issubclass(unit, Bytes | Seconds):
            return unit.expected
        case inspect.BoolType():
            noun = "true or false"
        case inspect.IntType():
            noun = "an integer"
        case inspect.FloatType():
            noun = "a number"
        case inspect.StrType():
            noun = "a string"
        case inspect.NoneType():
            noun = "null"
        case inspect.TupleType():
            noun = f"a list of length {len(info.item_types)}"
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            noun = "a list"
        case inspect.DictType() | inspect.StructType():
            noun = "a mapping"
        case _:
            noun = "another value"
    low, high = getattr(info, "ge", None), getattr(info, "le", None)
    if low is not None and high is not None:
        noun += f" between {low} and {high}"
    elif bounds := _format_limits(info, _BOUNDS):
        noun += f" {' and '.join(bounds)}"
    limits = _format_limits(info, _LIMITS)
    return f"{noun} ({', '.join(limits)})" if limits else noun


def _format_limits(info: inspect.Type, phrases: Mapping[str, str]) -> list[str]:
    return [
        phrase.format(limit) for name, phrase in phrases.items() if (limit := getattr(info, name, None)) is not None
    ]


def _describe_choices(values: Iterable[object]) -> str:
    choices = [repr(value) for value in values]
    return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"


def _describe_value(raw: object) -> str:
    match raw:
        case None:
            return "null"
        case bool():
            return "true" if raw else "false"
        case str():
            return repr(raw if len(raw) <= 60 else f"{raw[:60]}…")
        case Mapping():
            return "a mapping" if raw else "an empty mapping"
        case list() | tuple():
            return f"a list of length {len(raw)}" if raw else "an empty list"
        case _:
            return str(raw)
