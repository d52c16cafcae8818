"""Settings into frozen msgspec structs, refused with every fault at once.

A struct of settings is `msgspec.Struct, frozen=True, forbid_unknown_fields=True`. It may define
`def faults(self) -> Iterable[Fault]` for combinations that are impossible although each value is fine; its
paths are relative to the struct, and it runs only when all of the struct could be decoded.

A type may carry words of its own for its faults, `Meta(extra={"wanted": "a port"})`. Text that is
`Meta(extra={"as_written": True})` takes numbers, truth values and dates as they are written, when the document
was read with `parse` and put through `settle`.

msgspec stops at the first fault. So a document that it refuses is taken apart: a part that it accepts is
fine, a part that it refuses is taken apart further, and what cannot be taken apart is a fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from difflib import get_close_matches
from functools import cache
from inspect import cleandoc
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec
import yaml
from msgspec import inspect as shape

from stoker.core.units import Bytes, Seconds
from stoker.errors import Fault, InputError, SpecError

T = TypeVar("T")


def decode(data: object, into: type[T], where: object = None) -> T:
    """Decode plain data; `where` names its origin in the error."""
    value: T
    value, faults = _examine(data, into, "")
    return _accept(value, faults, where)


def load(text: str | bytes, into: type[T], where: object) -> T:
    """Decode YAML or JSON text; `where` names the file in the error."""
    data, repeats = _parse(text, where)
    value: T
    value, faults = _examine(data, into, "")
    return _accept(value, [*repeats, *faults], where)


def examine(data: object, into: type[T]) -> tuple[T | None, list[Fault]]:
    """Decode plain data into a value, or None, and its faults."""
    value: T | None
    value, faults = _examine(data, into, "")
    return value, faults


@cache
def field_types(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the types of a struct's fields, by the keys they have in a document."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(struct)}


def wanted(into: Any) -> str:
    """Say in plain words what a type takes."""
    return _wanted(shape.type_info(into))


def to_json(value: object) -> bytes:
    """Encode as JSON that is the same for equal values and pleasant to compare: sorted, indented."""
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=_plain, order="sorted"), indent=2) + b"\n"


def schema(into: type) -> dict[str, Any]:
    """Return the JSON Schema of a type, for editors and for `stoker job schema`."""
    definitions: dict[str, Any] = {}
    return {**_schema(into, definitions), "$defs": definitions}


def _accept(value: T, faults: Sequence[Fault], where: object) -> T:
    if faults:
        raise SpecError(faults, where=where)
    return value


# --- Units, which msgspec does not know


def _unit(kind: type, value: Any) -> object:
    if issubclass(kind, Bytes | Seconds):
        return kind(value)
    raise NotImplementedError(f"no decoder for {kind}")


def _plain(value: object) -> object:
    if isinstance(value, Bytes):
        return int(value)
    if isinstance(value, Seconds):
        return float(value)
    raise NotImplementedError(f"no encoder for {type(value)}")


# --- Scalars as they are written


@dataclass(frozen=True, slots=True)
class Written:
    """A scalar of a document that is not text, and the text that it was written as."""

    value: object
    text: str


def parse(text: str | bytes, where: object) -> tuple[Any, list[Fault]]:
    """Read YAML or JSON into data whose numbers, truth values and dates are `Written`, and find keys given twice."""
    return _parse(text, where, written=True)


def settle(data: Any, into: Any) -> Any:
    """Make data plain: a `Written` becomes text where `into` wants it as written, and its value elsewhere."""
    match data:
        case Mapping():
            return {_unwritten(key): settle(value, _type_at(key, into)) for key, value in data.items()}
        case list() | tuple():
            holder = next((option for option in _options(into) if _origin(option) in (list, tuple)), Any)
            inner = (*get_args(_bare(holder)), Any)[0]
            return [settle(item, inner) for item in data]
        case Written() if _wants_as_written(into) or (into is Any and isinstance(data.value, date)):
            return data.text
        case bool() if _wants_as_written(into):
            return "true" if data else "false"
        case int() | float() if _wants_as_written(into):
            return str(data)
        case _:
            return _unwritten(data)


def _unwritten(data: Any) -> Any:
    return data.value if isinstance(data, Written) else data


def _type_at(key: object, into: Any) -> Any:
    """Find the type of what a mapping holds under a key."""
    for option in _options(into):
        if _is_struct(option):
            return field_types(_origin(option)).get(str(key), Any)
        if _origin(option) is dict:
            return (*get_args(_bare(option)), Any, Any)[1]
    return Any


def _options(into: Any) -> tuple[Any, ...]:
    return get_args(_bare(into)) if _origin(into) in (Union, UnionType) else (into,)


def _wants_as_written(into: Any) -> bool:
    return any((note.extra or {}).get("as_written") for note in _notes(into))


# --- JSON Schema
#
# msgspec describes the leaves. It asks no hook for the defaults of a struct's fields and so fails on units;
# hence structs, and what may hold them, are put together here.


def _schema(into: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = _origin(into), get_args(_bare(into))
    if _is_struct(into):
        name = origin.__name__
        if name not in definitions:
            definitions[name] = {}  # taken, for a struct that holds itself
            definitions[name].update(_schema_of_struct(origin, definitions))
        return {"$ref": f"#/$defs/{name}", **_words(into)}
    if origin in (Union, UnionType):
        return {"anyOf": [_schema(option, definitions) for option in arguments], **_words(into)}
    is_holder = origin in (dict, list, tuple, set, frozenset)
    outside: Any = origin if is_holder else _bare(into)
    for note in _notes(into):
        outside = Annotated[outside, note]
    (described,), named = msgspec.json.schema_components([outside], schema_hook=_schema_of_unit)
    definitions.update(named)
    if _wants_as_written(into):
        described["type"] = ["string", "number", "boolean"]
    inner = [_schema(argument, definitions) for argument in arguments if is_holder and argument is not ...]
    if origin is dict and inner:
        described["additionalProperties"] = inner[1]
        if inner[0] != {"type": "string"}:
            described["propertyNames"] = inner[0]
    elif origin is tuple and ... not in arguments and inner:
        described |= {"prefixItems": inner, "minItems": len(inner), "maxItems": len(inner), "items": False}
    elif inner:
        described["items"] = inner[0]
    return described


def _words(into: Any) -> dict[str, str]:
    described = [note.description for note in _notes(into) if note.description is not None]
    return {"description": described[-1]} if described else {}


def _schema_of_struct(struct: type[msgspec.Struct], definitions: dict[str, Any]) -> dict[str, Any]:
    config = _config(struct)
    tag = {} if config.tag_field is None else {config.tag_field: {"enum": [config.tag]}}
    properties: dict[str, Any] = dict(tag)
    required = list(tag)
    for field in msgspec.structs.fields(struct):
        properties[field.encode_name] = _schema(field.type, definitions)
        if field.required:
            required.append(field.encode_name)
        elif not callable(field.default_factory) or isinstance(field.default_factory, type):
            default = field.default_factory() if callable(field.default_factory) else field.default
            if not isinstance(default, msgspec.Struct):  # whose fields have their own
                properties[field.encode_name]["default"] = msgspec.to_builtins(default, enc_hook=_plain)
    described: dict[str, Any] = {
        "title": struct.__name__,
        "type": "object",
        "properties": properties,
        "required": required,
    }
    if struct.__doc__:
        described["description"] = cleandoc(struct.__doc__)
    if config.forbid_unknown_fields:
        described["additionalProperties"] = False
    return described


def _schema_of_unit(kind: type) -> dict[str, Any]:
    if issubclass(kind, Bytes):
        return {"type": ["integer", "string"], "minimum": 0, "description": Bytes.wanted}
    if issubclass(kind, Seconds):
        return {"type": ["number", "string"], "minimum": 0, "description": Seconds.wanted}
    raise NotImplementedError(f"no schema for {kind}")


# --- Every fault of a document


def _examine(raw: object, into: Any, path: str) -> tuple[Any, list[Fault]]:
    """Convert `raw`; return the value and its impossible combinations, or None and every fault in `raw`."""
    try:
        value = msgspec.convert(raw, into, dec_hook=_unit)
    except (msgspec.ValidationError, InputError) as error:
        return None, list(_inner(raw, into, path)) or [Fault(path, _reason(raw, into, error))]
    return value, list(_combinations(value, path))


def _inner(raw: object, into: Any, path: str) -> Iterator[Fault]:
    """Yield the faults of the parts of `raw`; none when it has no parts, or not of the right kind."""
    into = _bare(into)
    origin = get_origin(into) or into
    arguments = get_args(into)
    if origin in (Union, UnionType):
        yield from _inner_of_union(raw, arguments, path)
    elif isinstance(raw, Mapping) and _is_struct(into):
        yield from _inner_of_struct(raw, into, path)
    elif isinstance(raw, Mapping) and origin is dict and arguments:
        key_type, value_type = arguments
        for key, value in raw.items():
            at = _under(path, _segment(key))
            yield from (Fault(at, f"as a key: {fault.what}") for fault in _examine(key, key_type, at)[1])
            yield from _examine(value, value_type, at)[1]
    elif isinstance(raw, list | tuple) and origin in (list, tuple, set, frozenset) and arguments:
        fixed = origin is tuple and arguments[-1] is not Ellipsis
        types = arguments if fixed else arguments[:1] * len(raw)
        for index, (item, item_type) in enumerate(zip(raw, types, strict=False)):
            yield from _examine(item, item_type, f"{path}[{index}]")[1]


def _inner_of_union(raw: object, options: Iterable[Any], path: str) -> Iterator[Fault]:
    """Take `raw` for the one option that has its shape; a tag tells structs apart."""
    if isinstance(raw, Mapping):
        fitting = [option for option in options if _is_struct(option) or _origin(option) is dict]
    elif isinstance(raw, list | tuple):
        fitting = [option for option in options if _origin(option) in (list, tuple, set, frozenset)]
    else:
        return
    if isinstance(raw, Mapping) and len(fitting) > 1:
        by_tag = {_config(option).tag: option for option in fitting}
        field = str(_config(fitting[0]).tag_field)
        tag = raw.get(field)
        if not isinstance(tag, str | int) or tag not in by_tag:
            wanted = _choice(by_tag)
            what = f"expected {wanted}, got {_shown(tag)}" if field in raw else f"missing (expected {wanted})"
            yield Fault(_under(path, field), what)
            return
        fitting = [by_tag[tag]]
    for option in fitting:
        yield from _examine(raw, option, path)[1]


def _inner_of_struct(raw: Mapping[Any, object], into: Any, path: str) -> Iterator[Fault]:
    fields = {field.encode_name: field for field in msgspec.structs.fields(into)}
    config = _config(into)
    for key, value in raw.items():
        at = _under(path, _segment(key))
        if key in fields:
            yield from _examine(value, fields[key].type, at)[1]
        elif not isinstance(key, str):
            yield Fault(at, f"as a key: {_reason(key, str)}")
        elif key == config.tag_field:
            if value != config.tag:
                yield Fault(at, f"expected {config.tag!r}, got {_shown(value)}")
        elif config.forbid_unknown_fields:
            close = get_close_matches(key, fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(fields)}"
            yield Fault(at, f"unknown key ({hint})")
    for name, field in fields.items():
        if field.required and name not in raw:
            yield Fault(_under(path, _segment(name)), f"missing (expected {_wanted(shape.type_info(field.type))})")


def _combinations(value: object, path: str) -> Iterator[Fault]:
    """Ask every struct in a decoded value for its impossible combinations."""
    if isinstance(value, msgspec.Struct):
        faults = getattr(type(value), "faults", None)
        if callable(faults):
            yield from (Fault(_under(path, fault.path), fault.what) for fault in faults(value))
        for name, key in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True):
            yield from _combinations(getattr(value, name), _under(path, _segment(key)))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _combinations(item, _under(path, _segment(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _combinations(item, f"{path}[{index}]")


def _bare(into: Any) -> Any:
    return get_args(into)[0] if get_origin(into) is Annotated else into


def _notes(into: Any) -> tuple[Any, ...]:
    return into.__metadata__ if get_origin(into) is Annotated else ()


def _origin(into: Any) -> Any:
    bare = _bare(into)
    return get_origin(bare) or bare


def _is_struct(into: Any) -> bool:
    origin = _origin(into)
    return isinstance(origin, type) and issubclass(origin, msgspec.Struct) and not _config(origin).array_like


def _config(into: Any) -> msgspec.structs.StructConfig:
    config: msgspec.structs.StructConfig = _origin(into).__struct_config__
    return config


def _segment(key: object) -> str:
    """Write a key as a part of a path, so that one with dots or slashes stays readable."""
    text = key if isinstance(key, str) else _shown(key)
    return text if re.fullmatch(r"[\w-]+", text) else f'["{text}"]'


def _under(path: str, inner: str) -> str:
    return f"{path}{inner}" if not path or not inner or inner.startswith("[") else f"{path}.{inner}"


# --- Plain words

_LIMITS = {
    "ge": "at least {}",
    "gt": "above {}",
    "le": "at most {}",
    "lt": "below {}",
    "multiple_of": "a multiple of {}",
    "min_length": "at least {} long",
    "max_length": "at most {} long",
    "pattern": "matching {}",
}

# What YAML 1.1 reads as true and false without being told so.
_WORDS = {True: ("on", "yes", "true"), False: ("off", "no", "false")}


def _reason(raw: object, into: Any, error: Exception | None = None) -> str:
    if isinstance(error, msgspec.ValidationError) and error.__cause__ is not None:
        return str(error.__cause__)  # the struct's own words, from __post_init__
    return f"expected {_wanted(shape.type_info(into))}, got {_shown(raw)}{_quote_hint(raw, into)}"


def _quote_hint(raw: object, into: Any) -> str:
    """Say so when text was meant and only its quotes are missing."""
    if isinstance(raw, bool):
        meant = [word for word in _WORDS[raw] if _converts(word, into)]
        return f" (quote it: a bare {' or '.join(meant)} means {_shown(raw)})" if meant else ""
    return " (quote it)" if isinstance(raw, int | float | date) and _converts(str(raw), into) else ""


def _converts(raw: object, into: Any) -> bool:
    try:
        msgspec.convert(raw, into, dec_hook=_unit)
    except (msgspec.ValidationError, InputError):
        return False
    return True


def _wanted(info: shape.Type) -> str:
    match info:
        case shape.Metadata():
            return str((info.extra or {}).get("wanted") or _wanted(info.type))
        case shape.UnionType():
            return " or ".join(_wanted(option) for option in info.types if not isinstance(option, shape.NoneType))
        case shape.LiteralType():
            return _choice(info.values)
        case shape.EnumType():
            return _choice(member.value for member in info.cls)
        case shape.CustomType(cls=unit) if issubclass(unit, Bytes | Seconds):
            return unit.wanted
        case shape.BoolType():
            word = "true or false"
        case shape.IntType():
            word = "an integer"
        case shape.FloatType():
            word = "a number"
        case shape.StrType():
            word = "text"
        case shape.NoneType():
            word = "nothing"
        case shape.TupleType():
            word = f"a list of {len(info.item_types)}"
        case shape.ListType() | shape.VarTupleType() | shape.SetType() | shape.FrozenSetType():
            word = "a list"
        case shape.DictType() | shape.StructType():
            word = "a mapping"
        case _:
            word = "another value"
    limits = [
        words.format(limit) for name, words in _LIMITS.items() if (limit := getattr(info, name, None)) is not None
    ]
    return f"{word} ({', '.join(limits)})" if limits else word


def _choice(values: Iterable[object]) -> str:
    words = [repr(value) for value in values]
    return words[0] if len(words) == 1 else f"one of {', '.join(words)}"


def _shown(raw: object) -> str:
    match raw:
        case None:
            return "nothing"
        case bool():
            return "true" if raw else "false"
        case str():
            return repr(raw if len(raw) <= 60 else f"{raw[:60]}…")
        case Mapping():
            return "a mapping" if raw else "an empty mapping"
        case list() | tuple():
            return f"a list of {len(raw)}" if raw else "an empty list"
        case _:
            return str(raw)


# --- YAML

# The fast loader is there wherever PyYAML was built with libyaml; both are the same to their users.
_SafeLoader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):  # type: ignore[misc, valid-type]
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Give a position to values that look right and are not, such as the date 2024-13-45."""
        try:
            return super().construct_object(node, deep=deep)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error


class _WrittenLoader(_Loader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Keep the text of a scalar that is not text."""
        value = super().construct_object(node, deep=deep)
        is_plain = isinstance(node, yaml.ScalarNode) and not node.style
        return value if value is None or isinstance(value, str) or not is_plain else Written(value, node.value)


_SafeDumper: type[yaml.SafeDumper] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_SafeDumper):  # type: ignore[misc, valid-type]
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        """Write a part that comes twice twice: a reader of the file need not know anchors."""
        return True


# YAML 1.2 and JSON read 1e-3 as a number; PyYAML, which keeps to 1.1, wants 1.0e-3.
for _either in (_Loader, _WrittenLoader, _Dumper):
    _either.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def to_yaml(data: object) -> str:
    """Write plain data as YAML that reads back as the same data; what holds only scalars is kept on a line."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100, default_flow_style=None)


def _parse(text: str | bytes, where: object, *, written: bool = False) -> tuple[Any, list[Fault]]:
    """Return the data, and a fault for every key that is given twice."""
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        raise SpecError([Fault("", f"not UTF-8 text, at byte {error.start}")], where=where) from error
    try:
        return json.loads(text, object_pairs_hook=_unique, **(_AS_WRITTEN if written else {})), []
    except (ValueError, RecursionError):  # not JSON, or a key that is given twice: YAML's marks say where
        pass
    try:
        loader = (_WrittenLoader if written else _Loader)(text)
        node = loader.get_single_node()
        if node is None:
            return None, []
        repeats = list(_repeats(node, "", set()))  # first, since merge keys (<<) are expanded in place
        return loader.construct_object(node, deep=True), repeats
    except yaml.YAMLError as error:
        raise SpecError([Fault("", f"not valid YAML: {_problem(error, text)}")], where=where) from error
    except RecursionError:
        raise SpecError([Fault("", "nested too deeply to be read")], where=where) from None


_AS_WRITTEN: dict[str, Any] = {
    "parse_int": lambda text: Written(int(text), text),
    "parse_float": lambda text: Written(float(text), text),
}


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a key is given twice")
    return mapping


def _repeats(node: yaml.Node, path: str, seen: set[int]) -> Iterator[Fault]:
    """Yield the keys that are given twice; `seen` spares a node that aliases repeat."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _repeats(item, f"{path}[{index}]", seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused later, with its position
            at = _under(path, _segment(key.value))
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                yield Fault(at, f"given twice (lines {lines[name]} and {line})")
            lines[name] = line
            yield from _repeats(value, at, seen)


def _problem(error: yaml.YAMLError, text: str) -> str:
    match error:
        case yaml.MarkedYAMLError(problem_mark=mark) if mark is not None:
            return f"{error.problem}, at line {mark.line + 1}, column {mark.column + 1}"
        case yaml.reader.ReaderError():
            index = text.index(chr(error.character))
            line, column = text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index)
            return f"{error.reason}, at line {line}, column {column}"
        case _:
            return str(error)
