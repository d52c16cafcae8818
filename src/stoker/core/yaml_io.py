"""Read and write YAML and JSON documents, with duplicate keys and syntax errors reported by position.

`parse_verbatim` keeps the source text of numbers, booleans and dates, so that `1e-4` or `0755` can be passed to a
program exactly as written. Every parser here limits the size and depth of a document and the expansion of its aliases.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import yaml

from stoker.core import json_io
from stoker.core.json_io import MAX_DEPTH, too_deep
from stoker.core.units import format_bytes
from stoker.errors import Fault, SpecError

MAX_BYTES = 4 << 20
"""Size of a YAML document; JSON may be larger, see `json_io`."""
MAX_ALIAS_NODES = 100_000
"""Number of values that the aliases of a document repeat. Nested aliases grow exponentially."""
MAX_NUMBER_LENGTH = 1000
"""Length of a number in characters. Converting a number takes quadratic time."""


@dataclass(frozen=True, slots=True)
class VerbatimScalar:
    """A scalar of a document that is not a string, with the text it was written as."""

    value: object
    text: str


def parse(text: str | bytes, where: object) -> tuple[Any, list[Fault]]:
    """Parse YAML or JSON; return the data and one fault per duplicate key. `where` names the file in errors."""
    return _parse(text, where, _Loader, {})


def parse_verbatim(text: str | bytes, where: object) -> tuple[Any, list[Fault]]:
    """Parse like `parse`, with every number, boolean and date as a `VerbatimScalar`."""
    return _parse(text, where, _VerbatimLoader, _VERBATIM_JSON)


def parse_documents(text: str | bytes, where: object) -> list[Any]:
    """Parse a stream of YAML documents, or one JSON document; skip empty documents."""
    text = json_io.decode_text(text, where)
    try:
        return [json_io.parse_text(text, where)]
    except ValueError:
        pass
    with _translate_errors(text, where):
        loader = _make_loader(_Loader, text, where)
        documents = []
        while loader.check_node():
            documents.append(_construct(loader, loader.get_node())[0])
    return [document for document in documents if document is not None]


def find_lines(text: str | bytes, where: object) -> dict[str, int]:
    """Return the line of every key and list item of a valid document by its path; the path of the document is ""."""
    text = json_io.decode_text(text, where).replace("\t", " ")  # JSON may be indented with tabs, YAML may not
    lines: dict[str, int] = {}
    with suppress(SpecError), _translate_errors(text, where):  # JSON that is not YAML: no lines
        if node := _make_loader(_Loader, text, where).get_single_node():
            lines[""] = node.start_mark.line + 1
            _add_lines(node, "", lines)
    return lines


def _add_lines(node: yaml.Node, path: str, lines: dict[str, int]) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines.setdefault(f"{path}[{index}]", item.start_mark.line + 1)
            _add_lines(item, f"{path}[{index}]", lines)
    elif isinstance(node, yaml.MappingNode):
        merges: list[yaml.Node] = []
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                merges += value.value if isinstance(value, yaml.SequenceNode) else [value]
            elif isinstance(key, yaml.ScalarNode):
                key_path = join_path(path, path_segment(key.value))
                lines.setdefault(key_path, key.start_mark.line + 1)
                _add_lines(value, key_path, lines)
        for base in merges:  # last: the mapping's own keys take precedence
            _add_lines(base, path, lines)


def parent_path(path: str) -> str:
    """Return the path of the mapping or list that contains a key."""
    return _LAST_SEGMENT.sub("", path)


def to_yaml(data: object) -> str:
    """Write plain data as YAML that parses back to the same data; collections of scalars stay on one line."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100, default_flow_style=None)


def to_yaml_stream(documents: Iterable[object]) -> str:
    """Write a stream of YAML documents, with multi-line strings as block scalars and no line wrapping."""
    options: dict[str, Any] = {"Dumper": _BlockDumper, "sort_keys": False, "width": 2**31 - 1, "allow_unicode": True}
    return str(yaml.dump_all(documents, explicit_start=True, **options))


_LAST_SEGMENT = re.compile(r"""(?:\["[^"]*"\]|\[\d+\]|\.?[^.\[]+)$""")


def join_path(path: str, inner: str) -> str:
    """Append a segment (`gpu`, `[0]`) to the path of a key."""
    return f"{path}{inner}" if not path or not inner or inner.startswith("[") else f"{path}.{inner}"


def path_segment(key: str) -> str:
    """Write a key as a segment of a path; one with dots or slashes goes into brackets."""
    return key if re.fullmatch(r"[\w-]+", key) else f'["{key}"]'


# --- Loaders and dumpers

# The C classes exist where PyYAML was built with libyaml; they have the same interface and are five times as fast.
_SafeLoader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SafeDumper: type[yaml.SafeDumper] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _Loader(_SafeLoader):  # type: ignore[misc, valid-type]
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Report the position of malformed values such as the date 2024-13-45."""
        try:
            if node.tag in _NUMBER_TAGS and len(node.value) > MAX_NUMBER_LENGTH:
                raise ValueError(f"number with more than {MAX_NUMBER_LENGTH} characters")
            return super().construct_object(node, deep=deep)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error
        except (LookupError, AttributeError, TypeError) as error:  # such as `!!int ""`, `!!bool x`, `!!timestamp x`
            what = f"not a valid value of type {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark) from error


class _VerbatimLoader(_Loader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Keep the source text of unquoted scalars that are not strings."""
        value = super().construct_object(node, deep=deep)
        is_plain = isinstance(node, yaml.ScalarNode) and not node.style
        return value if value is None or isinstance(value, str) or not is_plain else VerbatimScalar(value, node.value)


class _Dumper(_SafeDumper):  # type: ignore[misc, valid-type]
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        """Write repeated values in full instead of as anchors and aliases."""
        return True


class _BlockDumper(_Dumper):
    """Dumper that writes multi-line strings as block scalars (`|`)."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_BlockDumper.add_representer(str, _represent_text)

# YAML 1.2 and JSON read 1e-3 as a number; PyYAML implements YAML 1.1, which requires 1.0e-3.
for _class in (_Loader, _VerbatimLoader, _Dumper, _BlockDumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )

_VERBATIM_JSON: dict[str, Any] = {
    "parse_int": lambda text: VerbatimScalar(int(text), text),
    "parse_float": lambda text: VerbatimScalar(float(text), text),
}


# --- Parsing


def _parse(
    text: str | bytes, where: object, loader_class: type[_Loader], json_hooks: dict[str, Any]
) -> tuple[Any, list[Fault]]:
    json_io.check_size(text, json_io.MAX_BYTES, where)
    text = json_io.decode_text(text, where)
    try:
        return json_io.parse_text(text, where, object_pairs_hook=_to_unique_dict, **json_hooks), []
    except ValueError as error:  # not JSON, or a duplicate key: the YAML parser reports the position
        if len(text) > MAX_BYTES:
            size, limit = format_bytes(len(text)), format_bytes(MAX_BYTES)
            what = f"{size} is larger than the limit of {limit} for YAML, and it is not valid JSON: {error}"
            raise SpecError([Fault("", what)], where=where) from error
    with _translate_errors(text, where):
        return _construct(loader := _make_loader(loader_class, text, where), loader.get_single_node())


def _make_loader(loader_class: type[_Loader], text: str, where: object) -> _Loader:
    json_io.check_size(text, MAX_BYTES, where)
    _check_limits(text, where)
    return loader_class(text)


def _construct(loader: _Loader, node: yaml.Node | None) -> tuple[Any, list[Fault]]:
    """Return the value of a document and its duplicate keys."""
    if node is None:
        return None, []
    duplicates = list(_find_duplicate_keys(node, "", set()))  # first: constructing expands merge keys in place
    return loader.construct_object(node, deep=True), duplicates


@contextmanager
def _translate_errors(text: str, where: object) -> Iterator[None]:
    try:
        yield
    except yaml.YAMLError as error:
        raise SpecError([Fault("", f"not valid YAML: {_describe_error(error, text)}")], where=where) from error


@dataclass(slots=True)
class _Extent:
    """Number of values and levels in a node of a YAML document, with its aliases expanded."""

    anchor: str | None
    nodes: int = 1
    levels: int = 0


def _check_limits(text: str, where: object) -> None:
    """Raise SpecError if a stream is nested too deeply or its aliases expand to too many values.

    This reads parser events, because libyaml composes nodes recursively in C and overflows the stack.
    """
    anchors: dict[str, _Extent] = {}
    open_nodes = [_Extent(None)]  # the stream, then one for each open collection
    alias_nodes = 0
    for event in yaml.parse(text, Loader=_SafeLoader):
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        match event:
            case yaml.CollectionStartEvent():
                inner = _Extent(event.anchor, levels=1)
            case yaml.CollectionEndEvent():
                inner = open_nodes.pop()
            case yaml.ScalarEvent():
                inner = _Extent(event.anchor)
            case yaml.AliasEvent():
                if any(node.anchor == event.anchor for node in open_nodes):
                    what = f"alias *{event.anchor} is inside its own value, at line {line}, column {column}"
                    raise SpecError([Fault("", what)], where=where)
                inner = anchors.get(str(event.anchor)) or _Extent(None)
                alias_nodes += inner.nodes
            case _:
                continue
        if len(open_nodes) - 1 + inner.levels > MAX_DEPTH:
            raise too_deep(where, (line, column))
        if alias_nodes > MAX_ALIAS_NODES:
            what = f"aliases expand to more than {MAX_ALIAS_NODES:,} values, at line {line}, column {column}"
            raise SpecError([Fault("", what)], where=where)
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append(inner)
            continue
        outer = open_nodes[-1]
        outer.nodes, outer.levels = outer.nodes + inner.nodes, max(outer.levels, inner.levels + 1)
        if inner.anchor is not None:
            anchors[inner.anchor] = inner


def _to_unique_dict(pairs: list[tuple[str, object]]) -> dict[str, object]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("duplicate key")
    return mapping


def _find_duplicate_keys(node: yaml.Node, path: str, visited: set[int]) -> Iterator[Fault]:
    """Yield a fault for every duplicate key; `visited` skips nodes that aliases repeat."""
    if id(node) in visited:
        return
    visited.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _find_duplicate_keys(item, f"{path}[{index}]", visited)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # rejected when the mapping is constructed, with its position
            key_path = join_path(path, path_segment(key.value))
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                yield Fault(key_path, f"duplicate key (lines {lines[name]} and {line})", line)
            lines[name] = line
            yield from _find_duplicate_keys(value, key_path, visited)


def _describe_error(error: yaml.YAMLError, text: str) -> str:
    match error:
        case yaml.MarkedYAMLError(problem_mark=mark) if mark is not None:
            problem = str(error.problem)
            if problem.startswith("but "):  # the second half of a sentence
                problem = f"{error.context}, {problem}"
            return f"{problem}, at line {mark.line + 1}, column {mark.column + 1}"
        case yaml.reader.ReaderError():
            index = text.index(chr(error.character))
            line, column = text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index)
            return f"{error.reason}, at line {line}, column {column}"
        case _:
            return str(error)
