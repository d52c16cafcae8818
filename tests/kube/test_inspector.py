"""The inspector pod: least privilege, paths inside of the volume, and claims that it must not take from a pod."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.errors import AccessDeniedError, ConflictError, InputError, NotFoundError, UnavailableError
from stoker.kube.claims import is_object_name
from stoker.kube.inspector import (
    build_inspector_pod,
    check_inspectable,
    generate_pod_name,
    resolve_destination,
    to_path_error,
    volume_path,
)
from stoker.kube.objects import JOB_LABEL, RUN_LABEL
from tests.support.volume_objects import build_claim, build_mounting_pod


def test_pod_is_read_only_with_least_privilege() -> None:
    pod = build_inspector_pod("data", "ls", name="i")
    (container,) = pod["spec"]["containers"]
    assert container["volumeMounts"][0]["readOnly"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["DAC_OVERRIDE"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["spec"]["activeDeadlineSeconds"] <= 12 * 3600
    (container,) = build_inspector_pod("data", "shell", write=True)["spec"]["containers"]
    assert container["volumeMounts"][0]["readOnly"] is False


def test_pod_name_is_valid() -> None:
    name = generate_pod_name("a" * 39 + ".-" + "b" * 200)
    assert len(name) <= 63
    assert is_object_name(name)


@pytest.mark.parametrize(
    ("path", "in_pod"),
    [
        ("/", "/volume"),
        ("", "/volume"),
        ("a/b", "/volume/a/b"),
        ("/a/../../../etc/passwd", "/volume/etc/passwd"),
        ("..", "/volume"),
        ("//x", "/volume/x"),
        ("-rf", "/volume/-rf"),
        ("$(reboot); 'x", "/volume/$(reboot); 'x"),
    ],
)
def test_no_path_leaves_the_volume(path: str, in_pod: str) -> None:
    assert volume_path(path) == in_pod


def test_single_node_claim_is_not_taken_from_a_running_pod() -> None:
    holder = build_mounting_pod("train-0", "data", **{JOB_LABEL: "train", RUN_LABEL: "train-1"})
    for mode in ("ReadWriteOnce", "ReadWriteOncePod"):
        with pytest.raises(
            ConflictError, match=r"volume data .*one node.*pod train-0 of job train.*stoker job stop train-1"
        ):
            check_inspectable(build_claim(mode=mode), [holder], write=False)
    check_inspectable(build_claim(mode="ReadWriteMany"), [holder], write=False)
    check_inspectable(build_claim(), [build_mounting_pod("train-0", "data", "Succeeded")], write=False)


def test_unbound_claim_can_only_be_written() -> None:
    with pytest.raises(ConflictError, match=r"volume data is not bound yet.*stoker volume list"):
        check_inspectable(build_claim(phase="Pending"), [], write=False)
    check_inspectable(build_claim(phase="Pending"), [], write=True)


def test_read_only_claim_cannot_be_written() -> None:
    with pytest.raises(InputError, match=r"volume data.*rox.*--write"):
        check_inspectable(build_claim(mode="ReadOnlyMany"), [], write=True)


@pytest.mark.parametrize(
    ("code", "stderr", "kind", "fragment"),
    [
        (1, "ls: /volume/x: No such file or directory", NotFoundError, "'x': no such file or directory"),
        (1, "cat: read error: Is a directory", InputError, "'x' is a directory"),
        (1, "tar: x: Permission denied", AccessDeniedError, "'x': permission denied"),
        (9, "odd\nwords", UnavailableError, "ls failed with exit code 9: odd words"),
    ],
)
def test_to_path_error(code: int, stderr: str, kind: type[Exception], fragment: str) -> None:
    error = to_path_error("ls", code, stderr, "x", "volume data")
    assert type(error) is kind
    assert error.where == "volume data"
    assert fragment in error.what


def test_destination_of_a_copy(tmp_path: Path) -> None:
    assert resolve_destination(tmp_path, "a/model.pt", "data") == tmp_path / "model.pt"
    assert resolve_destination(tmp_path / "new.pt", "a/model.pt", "data") == tmp_path / "new.pt"
    assert resolve_destination(tmp_path, "/", "data") == tmp_path / "data"
