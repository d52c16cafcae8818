"""`stoker volume`: invalid arguments exit with code 2 and name the argument, before a cluster is contacted."""

from __future__ import annotations

import pytest

from tests.support.trees import stoker


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["inspect", "data", "cat"], ["PATH: "]),
        (["inspect", "data", "ls", "a", "b", "--write", "--force"], ["DEST: ", "--write: ", "--force: "]),
        (["inspect", "data", "shell", "--write"], ["shell: ", "terminal"]),
        (["list", "--on", "ssh"], ["--on ssh"]),
        (["create", "data", "--size", "10Gi", "--pv", "/nowhere.yaml"], ["/nowhere.yaml: "]),
    ],
)
def test_invalid_arguments(words: list[str], named: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("volume", *words) == 2
    err = capsys.readouterr().err
    assert all(name in err for name in named), err
