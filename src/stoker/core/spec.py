"""Decode settings into frozen msgspec structs, reporting every fault at once.

A settings struct is `msgspec.Struct, frozen=True, forbid_unknown_fields=True`. It may define
`def faults(self) -> Iterable[Fault]` to reject invalid combinations of valid values; the paths of these faults are
relative to the struct. If a field of the struct is invalid, the method runs until it reads that field. Several
independent checks should be passed to `run_checks`, so that an invalid field stops only those that need it.

A type may describe itself for error messages with `Meta(extra={"expected": "a port"})`. A string type with
`Meta(extra={"verbatim": True})` takes numbers, booleans and dates exactly as they are written, if the document was
parsed with `parse_verbatim` and passed through `resolve_verbatim`.

msgspec stops at the first error. A document that it rejects is therefore decoded again part by part: a rejected part
is split further, and a rejected part that cannot be split is one fault. The valid parts form a partial value, in which
reading an invalid field raises InvalidFieldError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from difflib import get_close_matches
from typing import Any, Never, TypeVar, get_args, get_origin

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

_INVALID = object()
"""The value of a part that could not be decoded."""


class InvalidFieldError(Exception):
    """A check read a field of a partial value that could not be decoded."""


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


def decode_partial(data: object, into: type[T]) -> tuple[T | None, list[Fault]]:
    """Decode plain data; return the value and every fault. With faults, the value is partial, or None."""
    value, faults = _decode(data, into, "")
    return None if value is _INVALID else value, faults


def run_checks(value: T, *checks: Callable[[T], Iterable[Fault]]) -> Iterator[Fault]:
    """Yield the faults that checks find in a value; if it is partial, stop each check that needs an invalid field."""
    for check in checks:
        with suppress(InvalidFieldError):
            yield from check(value)


def describe_type(into: Any) -> str:
    """Describe the values that a type accepts: "an integer >= 1"."""
    return _describe(inspect.type_info(into))


def describe_wrong_choice(value: object, choices: Iterable[object]) -> str:
    """Describe a value that is not among the choices, and suggest a similar one."""
    choices = list(choices)
    return f"must be {_describe_choices(choices)}, got {_describe_value(value)}{_suggest(value, choices)}"


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
    """Convert `raw`; return the value and its invalid combinations, or a partial value and every fault in `raw`."""
    try:
        value = msgspec.convert(raw, into, dec_hook=to_unit)
    except (msgspec.ValidationError, InputError) as error:
        value, faults = _decode_parts(raw, into, path)
        return (value, faults) if faults else (_INVALID, [Fault(path, _describe_mismatch(raw, into, error))])
    return value, list(_find_combinations(value, path))


def _decode_parts(raw: object, into: Any, path: str) -> tuple[Any, list[Fault]]:
    """Decode the parts of `raw`; return no faults if it has no parts, or the wrong kind of parts."""
    into = unwrap(into)
    origin = get_origin(into) or into
    arguments = get_args(into)
    if is_union(into):
        return _decode_union(raw, arguments, path)
    if isinstance(raw, Mapping) and is_struct(into):
        return _decode_struct(raw, into, path)
    if isinstance(raw, Mapping) and origin is dict and arguments:
        return _decode_dict(raw, arguments, path)
    if not isinstance(raw, list | tuple) or origin not in (list, tuple, set, frozenset) or not arguments:
        return _INVALID, []
    is_fixed = origin is tuple and arguments[-1] is not Ellipsis
    types = arguments if is_fixed else arguments[:1] * len(raw)
    items = [_decode(item, type_, f"{path}[{n}]") for n, (item, type_) in enumerate(zip(raw, types, strict=False))]
    values = [value for value, _ in items]
    is_complete = not any(value is _INVALID for value in values)
    return origin(values) if is_complete else _INVALID, [fault for _, faults in items for fault in faults]


def _decode_dict(raw: Mapping[Any, object], types: tuple[Any, ...], path: str) -> tuple[Any, list[Fault]]:
    """Decode the entries of a mapping; a partial mapping has the valid ones."""
    key_type, value_type = types
    values: dict[Any, Any] = {}
    faults: list[Fault] = []
    for key, item in raw.items():
        key_path = join_path(path, _segment(key))
        name, key_faults = _decode(key, key_type, key_path)
        value, value_faults = _decode(item, value_type, key_path)
        faults += [Fault(key_path, f"invalid key: {fault.what}") for fault in key_faults] + value_faults
        if name is not _INVALID and value is not _INVALID:
            values[name] = value
    return values, faults


def _decode_union(raw: object, members: Iterable[Any], path: str) -> tuple[Any, list[Fault]]:
    """Decode `raw` as the one member of the union that has its shape; structs are told apart by their tag."""
    if isinstance(raw, Mapping):
        candidates = [member for member in members if is_struct(member) or origin_of(member) is dict]
    elif isinstance(raw, list | tuple):
        candidates = [member for member in members if origin_of(member) in (list, tuple, set, frozenset)]
    else:
        return _INVALID, []
    if isinstance(raw, Mapping) and len(candidates) > 1:
        by_tag = {struct_config(member).tag: member for member in candidates}
        field = str(struct_config(candidates[0]).tag_field)
        tag = raw.get(field)
        if not isinstance(tag, str | int) or tag not in by_tag:
            is_missing = field not in raw
            what = (
                f"missing (must be {_describe_choices(by_tag)})" if is_missing else describe_wrong_choice(tag, by_tag)
            )
            return _INVALID, [Fault(join_path(path, field), what)]
        candidates = [by_tag[tag]]
    return _decode(raw, candidates[0], path) if candidates else (_INVALID, [])


def _decode_struct(raw: Mapping[Any, object], into: Any, path: str) -> tuple[Any, list[Fault]]:
    fields = {field.encode_name: field for field in msgspec.structs.fields(into)}
    config = struct_config(into)
    values: dict[str, Any] = {}
    faults: list[Fault] = []
    for key, value in raw.items():
        key_path = join_path(path, _segment(key))
        if key in fields:
            values[fields[key].name], field_faults = _decode(value, fields[key].type, key_path)
            faults += field_faults
        elif not isinstance(key, str):
            faults.append(Fault(key_path, f"invalid key: {_describe_mismatch(key, str)}"))
        elif key == config.tag_field:
            if value != config.tag:
                faults.append(Fault(key_path, f"must be {config.tag!r}, got {_describe_value(value)}"))
        elif config.forbid_unknown_fields:
            hint = _suggest(key, fields) or f" (known keys: {', '.join(fields)})"
            faults.append(Fault(key_path, f"unknown key{hint}"))
    for name, field in fields.items():
        if field.required and name not in raw:
            values[field.name] = _INVALID
            what = f"missing (must be {describe_type(field.type)})"
            faults.append(Fault(join_path(path, _segment(name)), what))
    if not faults or hasattr(into, "__post_init__"):
        return _INVALID, faults
    partial = _make_partial(origin_of(into), values)
    return partial, [*faults, *_find_own_combinations(partial, path)]


def _make_partial(struct: type[msgspec.Struct], values: Mapping[str, Any]) -> msgspec.Struct:
    """Create a struct with the valid values; its other fields raise InvalidFieldError."""

    def fail(_: object) -> Never:
        raise InvalidFieldError

    invalid: dict[str, Any] = {name: property(fail) for name, value in values.items() if value is _INVALID}
    if invalid:
        struct = msgspec.defstruct(struct.__name__, [], bases=(struct,), namespace=invalid, frozen=True, kw_only=True)
    return struct(**values)


def _find_combinations(value: object, path: str) -> Iterator[Fault]:
    """Call `faults` of every struct in a decoded value."""
    if isinstance(value, msgspec.Struct):
        yield from _find_own_combinations(value, path)
        for name, key in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True):
            yield from _find_combinations(getattr(value, name), join_path(path, _segment(key)))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _find_combinations(item, join_path(path, _segment(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _find_combinations(item, f"{path}[{index}]")


def _find_own_combinations(value: msgspec.Struct, path: str) -> Iterator[Fault]:
    """Call `faults` of a struct, if it has one."""
    faults = getattr(type(value), "faults", None)
    if callable(faults):
        yield from (fault._replace(path=join_path(path, fault.path)) for fault in run_checks(value, faults))


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
    hint = _quote_hint(raw, into) or _suggest(raw, _find_choices(into))
    return f"must be {describe_type(into)}, got {_describe_value(raw)}{hint}"


def _find_choices(into: Any) -> list[object]:
    """Return the values of the enums in a type: those of "auto" | int are ["auto"]."""
    choices: list[object] = []
    for member in union_members(into):
        match inspect.type_info(unwrap(member)):
            case inspect.LiteralType(values=values):
                choices += values
            case inspect.EnumType(cls=enum):
                choices += [item.value for item in enum]
    return choices


def _suggest(raw: object, choices: Iterable[object]) -> str:
    """Return a hint if a misspelled word, in any case, is close to one of the choices."""
    words = {choice.lower(): choice for choice in choices if isinstance(choice, str)}
    close = get_close_matches(raw.lower(), words, n=1) if isinstance(raw, str) else []
    return f" (did you mean {words[close[0]]!r}?)" if close else ""


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
