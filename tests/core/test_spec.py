from __future__ import annotations

import copy
import enum
import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from stoker.core import spec, yaml_io
from stoker.core.json_schema import json_schema
from stoker.core.units import Bytes, Seconds
from stoker.errors import Fault, SpecError

Count = Annotated[int, Meta(ge=1)]


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Elastic(Struct, frozen=True, kw_only=True):
    min: Count
    max: Count

    def faults(self) -> Iterable[Fault]:
        if self.min > self.max:
            yield Fault("min", f"above max: {self.min} > {self.max}")


class Volume(Struct, frozen=True, kw_only=True):
    path: Annotated[str, Meta(pattern="^/")]
    read_only: bool = False
    size: Bytes | None = None


class Role(Struct, frozen=True, kw_only=True):
    count: Annotated[int, Meta(ge=0, le=100)]
    image: str | None = None


class Local(Struct, frozen=True, kw_only=True, tag_field="kind", tag="local"):
    slots: int = 1


class Ssh(Struct, frozen=True, kw_only=True, tag_field="kind", tag="ssh"):
    hosts: Annotated[list[str], Meta(min_length=1)]


class Job(Struct, frozen=True, kw_only=True, rename={"image_": "image"}):
    name: str
    workers: Count | Elastic = 1
    processes: Annotated[int, Meta(ge=1)] | Literal["auto"] = "auto"
    sampling: Literal["exact", "join", "resampled"] = "exact"
    color: Color = Color.RED
    rate: float = 0.1
    every: Seconds = Seconds("30s")
    roles: dict[str, Role] = {}
    volumes: list[Volume] = []
    pair: tuple[int, str] = (1, "a")
    env: dict[str, str] = {}
    args: tuple[str | int | float, ...] = ()
    place: Local | Ssh | None = None
    image_: str = ""

    def faults(self) -> Iterable[Fault]:
        if self.sampling == "join" and self.workers == 1:
            yield Fault("", "join needs two workers")


def decode_faults(data: object) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        spec.decode(data, Job, "job.yaml")
    assert caught.value.where == "job.yaml"
    faults = {fault.path: fault.what for fault in caught.value.faults}
    assert len(faults) == len(caught.value.faults)
    return faults


def job(**values: object) -> dict[str, object]:
    return {"name": "a", **values}


COUNT = "an integer between 0 and 100"


def test_load_decodes_every_kind_of_field() -> None:
    text = """
    name: a
    workers: {min: 2, max: 8}
    every: 1h30m
    rate: 1e-3
    volumes: [{path: /data, size: 200Gi}]
    args: [--lr, 0.5, 90]
    place: {kind: ssh, hosts: [n1]}
    image: x:1
    """
    assert spec.load(text, Job, "job.yaml") == Job(
        name="a",
        workers=Elastic(min=2, max=8),
        every=Seconds(5400),
        rate=0.001,
        volumes=[Volume(path="/data", size=Bytes("200Gi"))],
        args=("--lr", 0.5, 90),
        place=Ssh(hosts=["n1"]),
        image_="x:1",
    )
    assert type(spec.load(text, Job, None).every) is Seconds


@pytest.mark.parametrize(
    ("data", "path", "what"),
    [
        (job(processes="many"), "processes", "must be an integer >= 1 or 'auto', got 'many'"),
        (job(roles={"ps": {"count": "many"}}), "roles.ps.count", f"must be {COUNT}, got 'many'"),
        (job(roles={"ps": {"count": 101}}), "roles.ps.count", f"must be {COUNT}, got 101"),
        (job(roles={"ps": {"count": 1.5}}), "roles.ps.count", f"must be {COUNT}, got 1.5"),
        (job(roles={"a.b/c": {}}), 'roles["a.b/c"].count', f"missing (must be {COUNT})"),
        (job(roles={"ps": 3}), "roles.ps", "must be a mapping, got 3"),
        (job(roles=None), "roles", "must be a mapping, got null"),
        (job(roles={8: {"count": 1}}), "roles.8", "invalid key: must be a string, got 8 (quote it)"),
        (job(rate="fast"), "rate", "must be a number, got 'fast'"),
        (job(rate=True), "rate", "must be a number, got true"),
        (job(volumes={}), "volumes", "must be a list, got an empty mapping"),
        (job(volumes=[{"path": "data"}]), "volumes[0].path", "must be a string (matching ^/), got 'data'"),
        (job(volumes=[{"path": "/a", "read_only": "yes"}]), "volumes[0].read_only",
         "must be true or false, got 'yes'"),
        (job(volumes=[{"path": "/a", "size": "100m"}]), "volumes[0].size",
         "must be a size such as 200Gi, 1.5GB or 1048576, got '100m'"),
        (job(volumes=[{"path": "/a", "size": -1}]), "volumes[0].size",
         "must be a size such as 200Gi, 1.5GB or 1048576, got -1"),
        (job(every=True), "every",
         "must be a duration such as 30s, 1h30m or 500ms, or a number of seconds, got true"),
        (job(sampling="exat"), "sampling",
         "must be one of 'exact', 'join', 'resampled', got 'exat' (did you mean 'exact'?)"),
        (job(sampling="JOIN"), "sampling",
         "must be one of 'exact', 'join', 'resampled', got 'JOIN' (did you mean 'join'?)"),
        (job(processes="Auto"), "processes",
         "must be an integer >= 1 or 'auto', got 'Auto' (did you mean 'auto'?)"),
        (job(color="bleu"), "color", "must be one of 'red', 'blue', got 'bleu' (did you mean 'blue'?)"),
        (job(color="green"), "color", "must be one of 'red', 'blue', got 'green'"),
        (job(pair=[1]), "pair", "must be a list of length 2, got a list of length 1"),
        (job(pair=[1, 2]), "pair[1]", "must be a string, got 2 (quote it)"),
        (job(args=["a", None]), "args[1]", "must be a string or an integer or a number, got null"),
        (job(workers=0), "workers", "must be an integer >= 1 or a mapping, got 0"),
        (job(workers={"min": 1}), "workers.max", "missing (must be an integer >= 1)"),
        (job(workers={"min": 3, "max": 2}), "workers.min", "above max: 3 > 2"),
        (job(sampling="join"), "", "join needs two workers"),
        (job(place={}), "place.kind", "missing (must be one of 'local', 'ssh')"),
        (job(place={"kind": "moon"}), "place.kind", "must be one of 'local', 'ssh', got 'moon'"),
        (job(place={"kind": "SSH"}), "place.kind",
         "must be one of 'local', 'ssh', got 'SSH' (did you mean 'ssh'?)"),
        (job(place={"kind": ["ssh"]}), "place.kind", "must be one of 'local', 'ssh', got a list of length 1"),
        (job(place={"kind": "ssh", "hosts": [1]}), "place.hosts[0]", "must be a string, got 1 (quote it)"),
        (job(place={"kind": "ssh", "hosts": []}), "place.hosts",
         "must be a list (length >= 1), got an empty list"),
        (job(place={"kind": "local", "slotz": 1}), "place.slotz", "unknown key (did you mean 'slots'?)"),
        (job(image=1.5), "image", "must be a string, got 1.5 (quote it)"),
        (job(image_="x"), "image_", "unknown key (did you mean 'image'?)"),
        (job(workerz=1), "workerz", "unknown key (did you mean 'workers'?)"),
        ({}, "name", "missing (must be a string)"),
        ([], "", "must be a mapping, got an empty list"),
        ("job", "", "must be a mapping, got 'job'"),
    ],
)  # fmt: skip
def test_fault_has_path_expected_type_and_value(data: object, path: str, what: str) -> None:
    assert decode_faults(data) == {path: what}


def test_unknown_key_without_a_close_match_lists_the_known_keys() -> None:
    assert decode_faults(job(roles={"ps": {"count": 1, "zzz": 1}})) == {
        "roles.ps.zzz": "unknown key (known keys: count, image)"
    }


def test_all_faults_are_reported_at_once() -> None:
    data = job(
        nam="b",
        workers={"min": 9, "max": 2},
        roles={"ps": {"count": -1, "image": 3}, "chief": {}},
        volumes=[{"path": "/ok"}, {"pat": "/x"}, 7],
        env={"A": False},
        place={"kind": "ssh", "hosts": ["a", 1], "user": "x"},
    )
    assert set(decode_faults(data)) == {
        "nam",
        "workers.min",
        "roles.ps.count",
        "roles.ps.image",
        "roles.chief.count",
        "volumes[1].pat",
        "volumes[1].path",
        "volumes[2]",
        "env.A",
        "place.hosts[1]",
        "place.user",
    }


def test_combinations_of_valid_fields_are_checked_beside_invalid_fields() -> None:
    assert set(decode_faults(job(sampling="join", rate="x"))) == {"rate", ""}
    assert set(decode_faults(job(workers={"min": 3, "max": 2, "mid": 1}))) == {"workers.mid", "workers.min"}
    assert set(decode_faults({"sampling": "join"})) == {"name", ""}
    assert set(decode_faults(job(sampling="join", roles={"ps": {}}))) == {"roles.ps.count", ""}


def test_combinations_that_need_an_invalid_field_are_not_checked() -> None:
    assert set(decode_faults(job(sampling="join", workers="x"))) == {"workers"}
    assert set(decode_faults(job(workers={"min": 3, "max": "x"}))) == {"workers.max"}


def test_checks_of_a_partial_value_stop_where_they_read_an_invalid_field() -> None:
    partial, faults = spec.decode_partial(job(rate="x", volumes=[{"path": "/a"}, {}], roles={"a": {}, "b": 3}), Job)
    assert partial is not None
    assert len(faults) == 4

    def check_rate(value: Job) -> Iterable[Fault]:
        yield Fault("before", value.sampling)
        yield Fault("after", str(value.rate))

    def check_volumes(value: Job) -> Iterable[Fault]:
        yield from (Fault("volume", volume.path) for volume in value.volumes)

    found = spec.run_checks(partial, check_rate, check_volumes, lambda value: [Fault(name, "") for name in value.roles])
    assert [fault.path for fault in found] == ["before", "volume", "a"]
    assert isinstance(partial, Job)


def test_combinations_of_all_nested_structs_are_reported() -> None:
    class Pair(Struct, frozen=True, kw_only=True):
        jobs: dict[str, Job]
        ranges: list[Elastic]

    wrong = {"min": 2, "max": 1}
    data = {
        "jobs": {"x": job(sampling="join"), "y": job(workers=wrong)},
        "ranges": [wrong, {"min": 1, "max": 1}],
    }
    with pytest.raises(SpecError) as caught:
        spec.decode(data, Pair)
    assert [fault.path for fault in caught.value.faults] == ["jobs.x", "jobs.y.workers.min", "ranges[0].min"]


def test_error_of_post_init_becomes_the_fault() -> None:
    class Even(msgspec.Struct, frozen=True):
        n: int

        def __post_init__(self) -> None:
            if self.n % 2:
                raise ValueError("must be even")

    with pytest.raises(SpecError) as caught:
        spec.decode([{"n": 2}, {"n": 3}], list[Even])
    assert caught.value.faults == (Fault("[1]", "must be even"),)


def test_struct_that_allows_unknown_fields_ignores_them() -> None:
    class Loose(msgspec.Struct, frozen=True):
        n: int

    assert spec.decode({"n": 1, "later": 2}, Loose) == Loose(1)
    with pytest.raises(SpecError) as caught:
        spec.decode({"n": "x", "later": 2}, Loose)
    assert [fault.path for fault in caught.value.faults] == ["n"]


def load_faults(text: str | bytes) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        spec.load(text, Job, "job.yaml")
    assert caught.value.where == "job.yaml"
    return {fault.path: fault.what for fault in caught.value.faults}


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("name: no", {"name": "must be a string, got false (quote it: YAML reads off, no, false as false)"}),
        ("name: 1.10", {"name": "must be a string, got 1.1 (quote it)"}),
        ("name: 2024-01-02", {"name": "must be a string, got 2024-01-02 (quote it)"}),
        ("name:", {"name": "must be a string, got null"}),
        ("name: a\non: 1",
         {"true": "invalid key: must be a string, got true (quote it: YAML reads on, yes, true as true)"}),
        ("", {"": "must be a mapping, got null"}),
        ("name: a\nname: b", {"name": "duplicate key (lines 1 and 2)"}),
        ("{name: a, name: b}", {"name": "duplicate key (lines 1 and 1)"}),
        ('{"name": "a", "name": "b", "rate": 1e-3}', {"name": "duplicate key (lines 1 and 1)"}),
        ("name: a\nenv:\n  A: x\n  B: y\n  A: z\nrate: x",
         {"env.A": "duplicate key (lines 3 and 5)", "rate": "must be a number, got 'x'"}),
    ],
)  # fmt: skip
def test_yaml_pitfalls(text: str, faults: dict[str, str]) -> None:
    assert load_faults(text) == faults


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ("name: a\n b: 2", "at line 2, column 3"),
        ("name: [1", "at line 2, column 1"),
        ("a: é\nb: \x07", "at line 2, column 4"),
        ("name: a\nrate: !moon 1", "at line 2, column 7"),
        ("name: a\nrate: 2024-13-45", "at line 2, column 7"),
        ("name: a\nenv: &e {A: *e}", "at line 2, column 13"),
        ("? [1]\n: 2", "at line 1, column 3"),
        ("name: a\n---\nname: b", "at line 2, column 1"),
        (b"name: \xff", "not UTF-8 text, at byte 6"),
    ],
)
def test_invalid_yaml_is_reported_with_its_position(text: str | bytes, ending: str) -> None:
    (what,) = load_faults(text).values()
    assert what.endswith(ending)


def test_merge_keys_can_be_overridden() -> None:
    text = "name: a\nenv: &base {A: x, B: y}\n"
    both = text + "roles: {one: &one {count: 1, image: i}, two: {<<: *one, count: 2}, three: {<<: *one}}"
    roles = spec.load(both, Job, None).roles
    assert (roles["two"], roles["three"]) == (Role(count=2, image="i"), Role(count=1, image="i"))


def test_byte_order_mark_is_ignored() -> None:
    assert spec.load(b"\xef\xbb\xbfname: a", Job, None).name == "a"


@given(st.text(), st.floats(allow_nan=False, allow_infinity=False), st.dictionaries(st.text(), st.text()))
def test_json_round_trip(name: str, rate: float, env: dict[str, str]) -> None:
    before = Job(name=name, rate=rate, env=env, volumes=[Volume(path="/", size=Bytes("1Gi"))])
    assert spec.load(spec.to_json(before), Job, None) == before


def test_json_is_deterministic() -> None:
    text = spec.to_json({"b": Bytes("1Ki"), "a": [Seconds("1m")]})
    assert text == b'{\n  "a": [\n    60.0\n  ],\n  "b": 1024\n}\n'
    assert list(json.loads(spec.to_json(Job(name="a")))) == sorted(json.loads(spec.to_json(Job(name="a"))))


def test_schema_has_units_and_defaults() -> None:
    definitions = json_schema(Job)["$defs"]
    properties = definitions["Job"]["properties"]
    assert properties["every"]["type"] == ["number", "string"]
    assert properties["every"]["default"] == 30
    assert properties["volumes"] == {"type": "array", "items": {"$ref": "#/$defs/Volume"}, "default": []}
    assert properties["roles"]["additionalProperties"] == {"$ref": "#/$defs/Role"}
    assert properties["workers"]["anyOf"][0] == {"type": "integer", "minimum": 1}
    assert properties["color"] == {"$ref": "#/$defs/Color", "default": "red"}
    assert definitions["Color"]["enum"] == ["blue", "red"]
    assert definitions["Ssh"]["properties"]["hosts"]["minItems"] == 1
    assert definitions["Ssh"]["required"] == ["kind", "hosts"]
    assert definitions["Job"]["required"] == ["name"]
    assert definitions["Job"]["additionalProperties"] is False


def test_schema_equals_that_of_msgspec_without_units() -> None:
    class Tree(Struct, frozen=True, kw_only=True):
        """A tree."""

        size: Annotated[float, Meta(gt=0, description="how large")] = 1.5
        names: Annotated[dict[str, list[int | None]], Meta(max_length=3)] = {}
        pair: tuple[int, str] = (1, "a")
        depth: Annotated[int | None, Meta(description="how deep")] = None
        branch: Annotated[Local | None, Meta(description="where to")] = None
        modes: tuple[Literal["a", "b"], ...] = ("a",)

    assert json_schema(Tree) == msgspec.json.schema(Tree)


VALID: dict[str, Any] = {
    "name": "a",
    "workers": {"min": 1, "max": 4},
    "rate": 0.5,
    "every": "10m",
    "roles": {"ps": {"count": 1, "image": "i"}, "chief": {"count": 1}},
    "volumes": [{"path": "/a", "size": "1Gi"}, {"path": "/b", "read_only": True}],
    "env": {"A": "x", "B": "y"},
    "args": ["--lr", 1],
    "place": {"kind": "ssh", "hosts": ["a", "b"]},
}

Keys = tuple[str | int, ...]


def to_path(keys: Keys) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def leaves(data: Any, keys: Keys = ()) -> list[Keys]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else None
    if items is None:
        return [keys]
    return [leaf for key, value in items for leaf in leaves(value, (*keys, key))]


# The tag decides how the other fields are decoded, so a fault in it hides theirs.
LEAVES = [keys for keys in leaves(VALID) if keys[-1] != "kind"]
REQUIRED: list[Keys] = [
    ("workers", "min"),
    ("roles", "ps", "count"),
    ("volumes", 1, "path"),
    ("place", "hosts"),
]
STRUCTS: list[Keys] = [(), ("workers",), ("roles", "chief"), ("volumes", 0), ("volumes", 1), ("place",)]


def at(data: Any, keys: Keys) -> Any:
    for key in keys:
        data = data[key]
    return data


@given(
    wrong=st.sets(st.sampled_from(LEAVES)),
    missing=st.sets(st.sampled_from(REQUIRED)),
    unknown=st.sets(st.sampled_from(STRUCTS)),
)
def test_exactly_the_injected_faults_are_found(wrong: set[Keys], missing: set[Keys], unknown: set[Keys]) -> None:
    data = copy.deepcopy(VALID)
    for keys in wrong:
        at(data, keys[:-1])[keys[-1]] = [{}]  # invalid for every leaf
    for keys in unknown:
        at(data, keys)["zzz"] = 1
    for keys in missing:
        del at(data, keys[:-1])[keys[-1]]
    hidden = {keys for keys in wrong for gone in missing if keys[: len(gone)] == gone}
    expected = {to_path(keys) for keys in (wrong - hidden) | missing | {(*keys, "zzz") for keys in unknown}}
    if expected:
        assert set(decode_faults(data)) == expected
    else:
        assert spec.decode(data, Job).name == "a"


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("abc/0"),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["name", "workers", "min", "kind"]), inner),
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(Job.__struct_encode_fields__, ANYTHING)))
def test_messages_do_not_mention_python_types(data: dict[str, object]) -> None:
    message = ""
    try:
        spec.decode(data, Job)
    except SpecError as error:
        message = str(error)
    assert not re.search(r"msgspec|`|\bstr\b|\bint\b|\bobject\b|NoneType", message)


class Verbatim(Struct, frozen=True, kw_only=True):
    words: tuple[Annotated[str, Meta(extra={"verbatim": True})], ...] = ()
    by_name: dict[Annotated[str, Meta(pattern="^a")], Annotated[str, Meta(extra={"verbatim": True})]] = {}
    port: Annotated[int, Meta(ge=1, extra={"expected": "a port"})] = 1
    rest: Any = None


def test_verbatim_scalars_keep_their_text() -> None:
    text = "words: [1e-4, 0755, yes, 2024-01-01, 'x']\nby_name: {a: 1.10}\nport: 0x10\n"
    text += "rest: {a: [1.0, 2024-01-01], 1: yes}"
    data, duplicates = yaml_io.parse_verbatim(text, "x")
    plain = spec.resolve_verbatim(data, Verbatim)
    assert duplicates == []
    assert plain == {
        "words": ["1e-4", "0755", "yes", "2024-01-01", "x"],
        "by_name": {"a": "1.10"},
        "port": 16,
        "rest": {"a": [1.0, "2024-01-01"], 1: True},
    }
    assert spec.decode(plain, Verbatim).port == 16
    data, _ = yaml_io.parse_verbatim('{"words": [1.50, true, null], "port": [1]}', "x")
    assert spec.resolve_verbatim(data, Verbatim) == {"words": ["1.50", "true", None], "port": [1]}


def test_type_with_its_own_description() -> None:
    _, faults = spec.decode_partial({"port": 0, "by_name": {"b": "c"}}, Verbatim)
    assert list(map(str, faults)) == [
        "port: must be a port, got 0",
        "by_name.b: invalid key: must be a string (matching ^a), got 'b'",
    ]
    assert spec.describe_type(Annotated[int, Meta(ge=1, extra={"expected": "a port"})]) == "a port"


def test_schema_of_verbatim_strings_and_of_keys() -> None:
    properties = json_schema(Verbatim)["$defs"]["Verbatim"]["properties"]
    assert properties["words"]["items"]["type"] == ["string", "number", "boolean"]
    assert properties["by_name"]["propertyNames"] == {"type": "string", "pattern": "^a"}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
        max_leaves=6,
    )
)
def test_yaml_round_trip(data: object) -> None:
    again, duplicates = yaml_io.parse_verbatim(yaml_io.to_yaml(data), "x")
    assert (spec.resolve_verbatim(again, Any), duplicates) == (data, [])


@pytest.mark.parametrize("text", ["[" * 9000 + "]" * 9000, "a: " + "[" * 9000 + "]" * 9000])
def test_deeply_nested_document_is_rejected(text: str) -> None:
    with pytest.raises(SpecError, match=r"^x: nested too deeply"):
        spec.load(text, Verbatim, "x")
