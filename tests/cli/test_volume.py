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
        (["create", "data", "--size", "lots"], ["--size must", "'lots'"]),
        (["create", "data", "--size", "10Gi", "--access", "zz"], ["--access: ", "'zz'"]),
    ],
)
def test_invalid_arguments(
    words: list[str], named: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere/kubeconfig")
    assert stoker("volume", *words) == 2
    err = capsys.readouterr().err
    assert all(name in err for name in named), err
