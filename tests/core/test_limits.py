"""Limits of the YAML and JSON parsers: depth, size, aliases, long numbers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.core import json_io, yaml_io
from stoker.core.json_io import MAX_DEPTH
from stoker.errors import InputError, SpecError
from stoker.jobs.spec import load_job
from stoker.kube.config import KubeTarget, resolve_target
from stoker.kube.manifest_files import load_documents
from tests.fuzz.resources import limited_resources

DEEP = 100_000


def nest(depth: int) -> str:
    return "[" * depth + "]" * depth


def aliases(levels: int) -> str:
    """Every level repeats the one before it ten times."""
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


TOO_DEEP = {
    "flow": "a: " + nest(DEEP),
    "json": nest(DEEP),
    "unclosed": "[" * DEEP,
    "mappings": "{a: " * DEEP,
    "sequences": "- " * DEEP,
    "blocks": "\n".join(" " * n + "a:" for n in range(MAX_DEPTH + 2)),
    "through an alias": f"- &a {nest(MAX_DEPTH // 2)}\n- {'[' * 60}*a{']' * 60}",
}


@pytest.mark.parametrize("text", TOO_DEEP.values(), ids=TOO_DEEP)
def test_deep_documents_are_rejected_with_the_limit_and_the_position(text: str) -> None:
    for parse in (yaml_io.parse, yaml_io.parse_verbatim, yaml_io.parse_documents):
        with pytest.raises(SpecError) as caught:
            parse(text, "x.yaml")
        assert re.match(rf"x\.yaml: .*\b{MAX_DEPTH} levels, at line \d+, column \d+$", str(caught.value))


def test_deep_json_is_rejected_with_the_position_of_the_first_excessive_level() -> None:
    assert json_io.parse(nest(MAX_DEPTH), "x") == json.loads(nest(MAX_DEPTH))
    with pytest.raises(SpecError, match=rf"^x: .*{MAX_DEPTH} levels, at line 2, column {MAX_DEPTH + 1}$"):
        json_io.parse("\n" + nest(MAX_DEPTH + 1), "x")
    brackets_in_text = '["[[", '
    with pytest.raises(SpecError, match=rf"line 1, column {len(brackets_in_text) + MAX_DEPTH}$"):
        json_io.parse(brackets_in_text + nest(MAX_DEPTH) + "]", "x")


@pytest.mark.parametrize("content", ["x" * 8_000_000, r"\"" * 4_000_000], ids=["plain", "escaped"])
def test_a_long_string_in_a_deep_document_takes_little_memory(content: str) -> None:
    document = f'["{content}", {nest(MAX_DEPTH)}]'
    with limited_resources(), pytest.raises(SpecError, match=rf"column {len(content) + 5 + MAX_DEPTH}$"):
        json_io.parse(document, "x")


def test_a_shallow_document_at_the_end_of_the_stack_is_an_error_of_the_document(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def overflow(*_: object, **__: object) -> None:
        raise RecursionError

    monkeypatch.setattr(json, "loads", overflow)
    with pytest.raises(SpecError, match=r"^x: nested too deeply"):
        json_io.parse("[[]]", "x")


def test_the_allowed_depth_parses() -> None:
    document = "a: " + nest(MAX_DEPTH - 1)
    assert yaml_io.parse(document, "x")[1] == []
    assert yaml_io.parse_documents(document, "x")


def test_aliases_that_expand_without_bound_are_rejected() -> None:
    with pytest.raises(SpecError, match=r"^x: aliases expand to more than 100,000 values, at line 5, column "):
        yaml_io.parse(aliases(12), "x")
    merges = "\n".join(["- &m0 {a: 1}", *(f"- &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}" for n in range(1, 12))])
    with pytest.raises(SpecError, match=r"^x: aliases expand"):
        yaml_io.parse_documents(merges, "x")


def test_ordinary_aliases_still_work() -> None:
    data, _ = yaml_io.parse("base: &b {x: 1}\nmerged: {<<: *b, y: 2}\nlist: [*b, *b]", "x")
    assert data == {"base": {"x": 1}, "merged": {"x": 1, "y": 2}, "list": [{"x": 1}, {"x": 1}]}


def test_numbers_that_take_quadratic_time_are_rejected() -> None:
    for number in ("1" + ":1" * 1_000_000, "1" + ":1" * 1_000_000 + ".5", "1" * 1_000_000):
        with pytest.raises(SpecError, match=r"^x: not valid YAML: .*line 1, column 4"):
            yaml_io.parse(f"a: {number}", "x")
    with pytest.raises(SpecError, match=r"^x: not valid JSON"):
        json_io.parse("1" * 1_000_000, "x")


def test_several_documents_are_rejected_with_a_whole_sentence() -> None:
    with pytest.raises(SpecError, match=r"^x: not valid YAML: expected a single document.*, but found another"):
        yaml_io.parse("a: 1\n---\nb: 2", "x")


def test_large_documents_are_rejected_with_the_limit(tmp_path: Path) -> None:
    for parse, text, limit in (
        (yaml_io.parse, "a: " + "b" * yaml_io.MAX_BYTES, "4 MiB"),
        (yaml_io.parse_documents, "a: " + "b" * yaml_io.MAX_BYTES, "4 MiB"),
        (json_io.parse, " " * (json_io.MAX_BYTES + 1), "64 MiB"),
    ):
        with pytest.raises(SpecError, match=rf"^x: .*\b{limit}"):
            parse(text, "x")
    with pytest.raises(SpecError, match=r"^/dev/zero: larger than the limit of 1 KiB$"):
        json_io.read_file(Path("/dev/zero"), 1024)


def read_kubeconfig(path: Path) -> Any:
    return resolve_target(KubeTarget("a", "b"), {"KUBECONFIG": str(path)})


@pytest.mark.parametrize("read", [load_job, load_documents, read_kubeconfig])
@pytest.mark.parametrize("text", [TOO_DEEP["flow"], TOO_DEEP["json"], aliases(12)], ids=["flow", "json", "aliases"])
def test_every_file_that_users_provide_is_limited(read: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=rf"^{re.escape(str(path))}: .*line \d+"):
        read(path)


def test_a_deep_job_file_is_bad_input_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: " + nest(DEEP))
    argv = [sys.executable, "-m", "stoker", "job", "plan", str(path)]
    process = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert process.returncode == InputError.exit_code
    assert str(MAX_DEPTH) in process.stderr
