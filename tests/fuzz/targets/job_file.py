"""Job files: YAML and JSON that users write or download."""

from __future__ import annotations

import json
from pathlib import Path

from stoker.core.spec import to_json
from stoker.jobs.spec import parse_job
from tests.fuzz.limits import Target

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(data: bytes) -> None:
    """Decode a job file, and write what was decoded."""
    to_json(parse_job(data, "job.yaml"))


def _nested_aliases(levels: int) -> bytes:
    lines = ["l0: &l0 [a, a, a, a, a, a, a, a, a, a]"]
    lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines).encode()


def _with(**keys: object) -> bytes:
    return json.dumps({"name": "a", "program": {"script": "train.py"}, **keys}).encode()


TARGET = Target(
    run,
    valid=[path.read_bytes() for path in sorted(EXAMPLES.glob("*.yaml"))] + [_with()],
    hostile=[
        b"",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"{a: " * 100_000,
        b"- " * 100_000,
        b'{"name": ' * 100_000,
        _nested_aliases(12),
        b"a: &a [*a]",
        b"a: &a {b: *a}",
        b"<<: &a {<<: *a}",
        b"name: !!python/object/apply:os.system [true]\n",
        b"name: " + b"9" * 1_000_000,
        *(
            b"name: !!%s '%s'" % (tag, value)
            for tag in (b"int", b"float", b"bool", b"timestamp", b"binary")
            for value in (b"", b"x")
        ),
        b"name: !!int [1]",
        b"? [a, b]\n: c\n",
        b"name: 2024-13-45\n",
        b"--- a\n--- b\n",
        b"name: a\nname: b\n",
        _with(workers=10**30),
        _with(workers=float("nan")),
        _with(retries=-(2**63)),
        _with(env={"A" * 100_000: "b" * 100_000}),
        _with(env={f"K{i}": "" for i in range(50_000)}),
        _with(program={"script": "a", "args": ["x"] * 200_000}),
        _with(data={"train": "shards-{0..99999999999}.tar"}),
        _with(name="\u0000\ud800"),
        _with(roles=[[[[[[{}]]]]]]),
        _with(ssh={"hosts": ["a:" + "9" * 5000]}),
        _with(resources={"memory": "1" * 5000 + "Gi"}),
        _with(resources={"memory": "1e999999999"}),
        _with(profile={"every": "1e400"}),
    ],
    tokens=[
        b"&a ",
        b"*a",
        b"<<: *a\n",
        b"!!int ",
        b"!!float ",
        b"{",
        b"[",
        b"]",
        b"}",
        b": ",
        b"\n- ",
        b"|\n  ",
        b"null",
    ],
)
