"""Volumes, without a cluster: what would be made and deleted, what is refused, and what comes out of an archive."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.errors import ConflictError, InputError, NotFoundError, SpecError
from stoker.kube import claims, inspector, volumes
from stoker.kube.claims import MountingPod, describe_binding, find_mounting_pods
from stoker.kube.inspector import (
    check_inspectable,
    extract_tar,
    move_into_place,
    resolve_destination,
    to_path_error,
    volume_path,
)
from stoker.kube.objects import JOB_LABEL, RUN_LABEL, Manifest
from stoker.kube.quantity import format_quantity, quantity_to_bytes
from stoker.kube.volumes import (
    CLAIM_ANNOTATION,
    EFS,
    FSX,
    GIB,
    ExistingObjects,
    VolumeRequest,
    plan_deletion,
    plan_volume,
    read_persistent_volumes,
    round_up_fsx_size,
)
from tests.support.trees import stoker

FSX_VOLUME = """
apiVersion: v1
kind: PersistentVolume
metadata:
  name: fsx-pv
spec:
  capacity:
    storage: 1200Gi
  accessModes: [ReadWriteMany]
  persistentVolumeReclaimPolicy: Retain
  csi:
    driver: fsx.csi.aws.com
    volumeHandle: fs-0199e5a63bd90f796
    volumeAttributes:
      dnsname: fs-0199e5a63bd90f796.fsx.us-east-1.amazonaws.com
      mountname: fsx
"""


def storage_class(name: str, provisioner: str = "example.com/disks", *, default: bool = False, **more: Any) -> Manifest:
    notes = {"storageclass.kubernetes.io/is-default-class": "true"} if default else {}
    return {"metadata": {"name": name, "annotations": notes}, "provisioner": provisioner, **more}


def claim(
    name: str = "data", *, phase: str = "Bound", uses: str = "10Gi", mode: str = "ReadWriteOnce", **spec: Any
) -> Manifest:
    given = {"accessModes": [mode], "resources": {"requests": {"storage": uses}}, "storageClassName": "disks", **spec}
    return {"metadata": {"name": name, "namespace": "ns"}, "spec": given, "status": {"phase": phase}}


def volume(name: str = "pv", storage: str = "10Gi", mode: str = "ReadWriteOnce", **spec: Any) -> Manifest:
    body = {"capacity": {"storage": storage}, "accessModes": [mode], "hostPath": {"path": "/d"}, **spec}
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": body}


def pod(name: str, uses: str, phase: str = "Running", **labels: str) -> Manifest:
    mounted = [{"name": "v", "persistentVolumeClaim": {"claimName": uses}}]
    return {"metadata": {"name": name, "labels": labels}, "spec": {"volumes": mounted}, "status": {"phase": phase}}


def wish(**more: Any) -> VolumeRequest:
    return VolumeRequest(**{"name": "data", "namespace": "ns", "size": 10 * GIB, **more})


DISKS = [storage_class("disks", default=True, allowVolumeExpansion=True), storage_class("files", EFS)]


# --- Quantities


@pytest.mark.parametrize(
    ("text", "size"),
    [("10Gi", 10 * GIB), ("5G", 5 * 10**9), ("1e3", 1000), ("1.5Ki", 1536), ("1Ei", 2**60), ("100m", 1), ("7", 7)],
)
def test_quantities_are_read_as_kubernetes_means_them(text: str, size: int) -> None:
    assert quantity_to_bytes(text) == size


@pytest.mark.parametrize("text", ["", "Gi", "10GB", "ten", None, "1 Gi"])
def test_what_is_no_quantity(text: object) -> None:
    assert quantity_to_bytes(text) is None


@pytest.mark.parametrize("size", [1, 1000, 1024, 1536, 10 * GIB, 1200 * GIB, 2**50, 3 * 10**9])
def test_sizes_are_written_so_that_they_are_read_the_same(size: int) -> None:
    assert quantity_to_bytes(format_quantity(size)) == size


def test_round_sizes_are_written_short() -> None:
    assert [format_quantity(10 * GIB), format_quantity(1200 * GIB), format_quantity(2048 * GIB)] == [
        "10Gi",
        "1200Gi",
        "2Ti",
    ]


# --- Making a claim of a class


def test_a_claim_of_the_default_class_names_none() -> None:
    (made,) = plan_volume(wish(), ExistingObjects(classes=DISKS)).objects
    assert made["spec"] == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Gi"}}}
    assert made["metadata"]["namespace"] == "ns"
    assert made["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "stoker"


def test_a_class_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(NotFoundError, match=r"no storage class 'fast'; known: disks \(default\), files"):
        plan_volume(wish(storage_class="fast"), ExistingObjects(classes=DISKS))


def test_without_a_default_class_one_has_to_be_named() -> None:
    with pytest.raises(InputError, match=r"no default storage class; name one with --class \(known: files\)"):
        plan_volume(wish(), ExistingObjects(classes=DISKS[1:]))
    with pytest.raises(InputError, match="known: none"):
        plan_volume(wish(), ExistingObjects(classes=[]))


def test_classes_that_may_not_be_listed_stop_nobody() -> None:
    decided = plan_volume(wish(storage_class="any"), ExistingObjects(classes=None))
    assert decided.objects[0]["spec"]["storageClassName"] == "any"
    assert decided.remarks


def test_the_newest_of_several_defaults_counts_as_in_kubernetes() -> None:
    old, new = storage_class("old", default=True), storage_class("new", default=True)
    old["metadata"]["creationTimestamp"], new["metadata"]["creationTimestamp"] = "2026-01-01", "2026-02-01"
    chosen = claims.find_default_storage_class([new, old])
    assert chosen is new


def test_efs_tells_that_it_takes_no_notice_of_the_size() -> None:
    decided = plan_volume(wish(storage_class="files", access="rwx"), ExistingObjects(classes=DISKS))
    assert any("EFS takes no notice of the size" in one for one in decided.remarks)


@pytest.mark.parametrize(
    ("asked", "parameters", "made"),
    [
        (1, {}, 1200),
        (1200, {}, 1200),
        (1201, {}, 2400),
        (2401, {}, 3600),
        (3601, {}, 7200),
        (1300, {"deploymentType": "PERSISTENT_2"}, 2400),
        (2500, {"deploymentType": "SCRATCH_2"}, 4800),
        (100, {"deploymentType": "PERSISTENT_1", "storageType": "HDD", "perUnitStorageThroughput": "12"}, 6000),
        (1900, {"deploymentType": "PERSISTENT_1", "storageType": "HDD", "perUnitStorageThroughput": "40"}, 3600),
    ],
)
def test_sizes_of_fsx(asked: int, parameters: dict[str, str], made: int) -> None:
    assert round_up_fsx_size(asked * GIB, parameters) == made * GIB


def test_a_size_that_fsx_does_not_have_is_refused_with_the_next_one() -> None:
    classes = [storage_class("fsx-sc", FSX)]
    with pytest.raises(SpecError, match="no file system of 10Gi; the next larger one is 1200Gi"):
        plan_volume(wish(storage_class="fsx-sc", access="rwx"), ExistingObjects(classes=classes))
    assert plan_volume(
        wish(size=1200 * GIB, storage_class="fsx-sc", access="rwx"), ExistingObjects(classes=classes)
    ).objects


def test_a_disk_is_not_for_many_nodes() -> None:
    classes = [storage_class("gp3", "ebs.csi.aws.com")]
    with pytest.raises(SpecError, match=r"ebs\.csi\.aws\.com makes disks"):
        plan_volume(wish(storage_class="gp3", access="rwx"), ExistingObjects(classes=classes))


def test_faults_of_a_wish_come_all_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        plan_volume(
            VolumeRequest(name="Data_", namespace="ns", access="rw", host_path="../x", storage_class="c"),
            ExistingObjects(classes=DISKS),
        )
    told = [fault.path for fault in caught.value.faults]
    assert told == ["NAME", "--size", "--access", "--class", "--host-path"]


# --- The same again


def test_the_same_again_changes_nothing() -> None:
    decided = plan_volume(wish(), ExistingObjects(claim=claim(), classes=DISKS))
    assert decided.objects == []


@pytest.mark.parametrize(
    ("asked", "has", "told"),
    [
        ({"access": "rwx"}, {}, "it has access rwo, not rwx"),
        ({"size": GIB}, {}, "it has 10Gi, and no volume can shrink to 1Gi"),
        ({"storage_class": "files"}, {}, "it is of class disks, not files"),
        ({"size": 20 * GIB}, {"storageClassName": "files"}, "its class files does not let it grow to 20Gi"),
        ({"size": 20 * GIB}, {"storageClassName": ""}, "one of no class does not let it grow"),
        ({"size": 20 * GIB}, {"phase": "Pending"}, "cannot grow before it is bound"),
    ],
)
def test_another_claim_of_that_name_is_refused(asked: dict[str, Any], has: dict[str, Any], told: str) -> None:
    with pytest.raises(ConflictError) as caught:
        plan_volume(wish(**asked), ExistingObjects(claim=claim(**has), classes=DISKS))
    assert told in str(caught.value)
    assert "stoker volume delete data" in str(caught.value)


def test_all_differences_are_told_at_once() -> None:
    with pytest.raises(ConflictError, match="access rwo, not rwx; it has 10Gi, and no volume can shrink"):
        plan_volume(wish(access="rwx", size=GIB), ExistingObjects(claim=claim(), classes=DISKS))


def test_a_claim_grows_where_its_class_allows_it() -> None:
    decided = plan_volume(wish(size=20 * GIB), ExistingObjects(claim=claim(volumeName="pv-1"), classes=DISKS))
    assert decided.apply == []
    assert decided.expand is not None
    assert decided.expand["spec"]["resources"]["requests"]["storage"] == "20Gi"
    assert decided.expand["spec"]["volumeName"] == "pv-1"


def test_a_claim_that_is_being_deleted_is_not_taken_for_one() -> None:
    ending = claim()
    ending["metadata"]["deletionTimestamp"] = "2026-11-16T00:00:00Z"
    with pytest.raises(ConflictError, match="is being deleted"):
        plan_volume(wish(), ExistingObjects(claim=ending, classes=DISKS))


# --- Volumes by file, and folders


def test_a_claim_is_bound_to_the_volume_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "pv.yaml").write_text(FSX_VOLUME)
    asked = wish(size=None, volumes=read_persistent_volumes(tmp_path / "pv.yaml"))
    made, bound = plan_volume(asked, ExistingObjects(classes=DISKS)).objects
    assert made["spec"]["claimRef"] | {"apiVersion": "", "kind": ""} == {
        "namespace": "ns",
        "name": "data",
        "apiVersion": "",
        "kind": "",
    }
    assert made["metadata"]["annotations"][CLAIM_ANNOTATION] == "ns/data"
    assert bound["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1200Gi"}},
        "storageClassName": "",
        "volumeName": "fsx-pv",
    }


def test_a_volume_of_a_class_gets_a_claim_of_that_class() -> None:
    asked = wish(volumes=[volume(storageClassName="efs-sc")])
    assert plan_volume(asked, ExistingObjects()).objects[-1]["spec"]["storageClassName"] == "efs-sc"


def test_the_smallest_volume_that_fits_is_taken_and_only_that_is_kept() -> None:
    asked = wish(volumes=[volume("large", "90Gi"), volume("small", "1Gi"), volume("right", "20Gi")])
    *made, bound = plan_volume(asked, ExistingObjects()).objects
    assert bound["spec"]["volumeName"] == "right"
    assert [one["metadata"]["name"] for one in made if "claimRef" in one["spec"]] == ["right"]
    assert len(made) == 3


def test_of_one_file_several_claims_each_keep_their_own_volume() -> None:
    file = [volume("one"), volume("two")]
    first = plan_volume(wish(volumes=file), ExistingObjects()).objects[0]
    assert first["metadata"]["annotations"][CLAIM_ANNOTATION] == "ns/data"
    second = plan_volume(wish(name="other", volumes=file), ExistingObjects(volumes={"one": first})).objects
    assert [one["metadata"]["name"] for one in second] == ["two", "other"]


def test_a_volume_that_somebody_else_made_is_not_touched() -> None:
    decided = plan_volume(wish(volumes=[volume()]), ExistingObjects(volumes={"pv": volume()}))
    assert [one["kind"] for one in decided.objects] == ["PersistentVolumeClaim"]


@pytest.mark.parametrize(
    ("given", "asked", "told"),
    [
        (volume(storage="1Gi"), {}, "has 1Gi, which is less than --size 10Gi"),
        (volume(), {"access": "rwx"}, "has access rwo, not rwx"),
        (volume(storageClassName="a"), {"storage_class": "b"}, "is of class 'a', not 'b'"),
        (volume(claimRef={"namespace": "n", "name": "c"}), {}, "is kept for claim c in namespace n"),
        ({**volume(), "status": {"phase": "Released"}}, {}, "kubectl delete pv pv"),
    ],
)
def test_a_volume_that_does_not_fit(given: Manifest, asked: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError) as caught:
        plan_volume(wish(volumes=[given], **asked), ExistingObjects(volumes={"pv": given}))
    assert told in str(caught.value)


def test_faults_of_a_volume_come_all_at_once() -> None:
    broken = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "fsx"},
        "spec": {
            "capacity": {"storage": "lots"},
            "accessModes": ["rwx"],
            "persistentVolumeReclaimPolicy": "Recycle",
            "volumeMode": "Block",
            "csi": {"driver": FSX, "volumeAttributes": {"dnsname": "fs"}},
        },
    }
    told = {fault.path.partition(": ")[2] for fault in volumes.check_persistent_volume(broken)}
    assert told == {
        "spec.capacity.storage",
        "spec.accessModes",
        "spec.volumeMode",
        "spec.persistentVolumeReclaimPolicy",
        "spec.csi.volumeHandle",
        "spec.csi.volumeAttributes.mountname",
    }


@pytest.mark.parametrize(
    "one",
    [
        {"metadata": [], "spec": {}},
        {"metadata": {"name": 3, "labels": []}, "spec": []},
        {"metadata": {"name": "a"}, "spec": {"csi": {"driver": FSX, "volumeAttributes": []}, "claimRef": 3}},
        {},
    ],
)
def test_a_volume_of_any_shape_is_refused_in_words(one: Manifest) -> None:
    given = {"apiVersion": "v1", "kind": "PersistentVolume", **one}
    with pytest.raises(SpecError):
        plan_volume(wish(volumes=[given]), ExistingObjects())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "kind: StorageClass\napiVersion: storage.k8s.io/v1\n",
            "object 1: expected a v1 PersistentVolume, got StorageClass",
        ),
        (FSX_VOLUME + "---\n- 1\n", "object 2: expected a v1 PersistentVolume, got no kind"),
        ("# nothing\n", "has no PersistentVolume in it"),
        ("kind: List\napiVersion: v1\nitems: 5\n", "object 1: expected a v1 PersistentVolume, got List"),
        ("a: [", "is no YAML"),
    ],
)
def test_files_with_something_else_in_them(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "pv.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        read_persistent_volumes(tmp_path / "pv.yaml")
    assert told in str(caught.value)


def test_a_list_of_volumes_is_taken_apart(tmp_path: Path) -> None:
    (tmp_path / "pv.yaml").write_text(yaml.safe_dump({"kind": "List", "items": [volume("a"), volume("b")]}))
    assert [one["metadata"]["name"] for one in read_persistent_volumes(tmp_path / "pv.yaml")] == ["a", "b"]


def test_a_folder_of_the_nodes() -> None:
    made, bound = plan_volume(wish(host_path="/srv/data", access="rwx"), ExistingObjects()).objects
    assert made["metadata"]["name"] == "stoker.ns.data"
    assert made["spec"]["hostPath"] == {"path": "/srv/data", "type": "DirectoryOrCreate"}
    assert made["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
    assert bound["spec"]["volumeName"] == "stoker.ns.data"
    assert bound["spec"]["storageClassName"] == ""
    assert bound["spec"]["accessModes"] == ["ReadWriteMany"]


def test_a_folder_again_keeps_the_access_it_has() -> None:
    made, bound = plan_volume(wish(host_path="/srv/data", access="rwx"), ExistingObjects()).objects
    again = plan_volume(
        wish(host_path="/srv/data"),
        ExistingObjects(claim=bound | {"status": {"phase": "Bound"}}, volumes={"stoker.ns.data": made}),
    )
    assert again.objects == [made]


# --- How it is with a claim


def test_who_mounts_a_claim() -> None:
    pods = [
        pod("b", "data", **{JOB_LABEL: "train", RUN_LABEL: "train-1"}),
        pod("a", "data", "Pending"),
        pod("over", "data", "Succeeded"),
        pod("else", "other"),
    ]
    assert find_mounting_pods(pods, "data") == [MountingPod(pod="a"), MountingPod(pod="b", job="train", run="train-1")]


@pytest.mark.parametrize(
    ("one", "events", "told"),
    [
        (claim(volumeName="pv"), [], "is bound to PersistentVolume pv"),
        (claim(phase="Pending", storageClassName="late"), [], "waits for the first pod that mounts it"),
        (claim(phase="Pending"), [{"type": "Warning", "message": "no\n quota."}], "is not bound: no quota"),
        (claim(phase="Pending", volumeName="pv"), [], "waits to be bound to PersistentVolume pv"),
        (
            claim(phase="Pending"),
            [{"type": "Normal", "message": "waiting for disks"}],
            "not bound yet: waiting for disks",
        ),
        (claim(phase="Lost", volumeName="pv"), [], "has lost its PersistentVolume pv"),
    ],
)
def test_whether_a_claim_is_bound_and_why_not(one: Manifest, events: list[Manifest], told: str) -> None:
    late = storage_class("late", volumeBindingMode="WaitForFirstConsumer")
    assert told in describe_binding(one, events, [*DISKS, late])


# --- Deleting


def made_by_us(name: str = "pv", policy: str = "Retain") -> Manifest:
    one = volume(name, persistentVolumeReclaimPolicy=policy)
    one["metadata"]["annotations"] = {CLAIM_ANNOTATION: "ns/data"}
    return one


def test_what_was_made_for_a_claim_goes_with_it() -> None:
    decided = plan_deletion("data", "ns", claim(volumeName="pv"), [made_by_us(), volume("other")], [])
    assert (decided.claim, list(decided.volumes)) == ("data", ["pv"])
    assert "the data stays in /d on the nodes" in decided.data_note


def test_what_was_left_of_an_earlier_deletion_is_found() -> None:
    decided = plan_deletion("data", "ns", None, [made_by_us()], [])
    assert (decided.claim, list(decided.volumes)) == (None, ["pv"])


@pytest.mark.parametrize(
    ("policy", "told"),
    [("Delete", "all data in it are deleted"), ("Recycle", "all data in it are deleted"), ("Retain", "its data stay")],
)
def test_what_becomes_of_the_data_of_others(policy: str, told: str) -> None:
    behind = volume("pv", persistentVolumeReclaimPolicy=policy)
    decided = plan_deletion("data", "ns", claim(volumeName="pv"), [behind], [])
    assert list(decided.volumes) == []
    assert told in decided.data_note


def test_the_cluster_itself_deletes_what_has_that_policy() -> None:
    decided = plan_deletion("data", "ns", claim(volumeName="pv"), [made_by_us(policy="Delete")], [])
    assert list(decided.volumes) == []
    assert "deleted with it" in decided.data_note


@pytest.mark.parametrize("policy", ["Delete", "Recycle"])
def test_data_that_goes_with_its_volume_is_not_said_to_stay(policy: str) -> None:
    fate = plan_deletion("data", "ns", None, [made_by_us(policy=policy)], []).data_note
    assert fate == f"PersistentVolume pv goes too; its data too, by its policy {policy}."


def test_a_volume_that_another_claim_took_meanwhile_stays() -> None:
    taken = made_by_us("second")
    taken["spec"]["claimRef"] = {"namespace": "ns", "name": "theirs"}
    assert list(plan_deletion("data", "ns", claim(volumeName="pv"), [made_by_us(), taken], []).volumes) == ["pv"]


def test_volumes_that_may_not_be_looked_at() -> None:
    assert "is not known" in plan_deletion("data", "ns", claim(volumeName="pv"), None, []).data_note
    assert "there is no data" in plan_deletion("data", "ns", claim(), None, []).data_note


def test_nothing_is_deleted_under_a_pod() -> None:
    with pytest.raises(ConflictError, match=r"mounted by pod p of job train; .*stoker job stop train-1"):
        plan_deletion("data", "ns", claim(), [], [pod("p", "data", **{JOB_LABEL: "train", RUN_LABEL: "train-1"})])


def test_a_pod_that_has_ended_holds_a_claim_until_it_is_forgotten() -> None:
    with pytest.raises(ConflictError, match=r"held by pod p, which has ended.*kubectl -n \S+ delete pod p"):
        plan_deletion("data", "ns", claim(), [], [pod("p", "data", "Succeeded")])


# --- The inspector


def test_the_inspector_reads_and_no_more() -> None:
    made = inspector.build_inspector_pod("data", "ls", name="i")
    (container,) = made["spec"]["containers"]
    assert container["volumeMounts"][0]["readOnly"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["DAC_OVERRIDE"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert made["spec"]["automountServiceAccountToken"] is False
    assert made["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert made["spec"]["activeDeadlineSeconds"] <= 12 * 3600
    assert (
        inspector.build_inspector_pod("data", "shell", write=True)["spec"]["containers"][0]["volumeMounts"][0][
            "readOnly"
        ]
        is False
    )


def test_names_of_inspectors_fit() -> None:
    name = inspector.generate_pod_name("a" * 39 + ".-" + "b" * 200)
    assert len(name) <= 63
    assert claims.is_object_name(name)


@pytest.mark.parametrize(
    ("path", "seen"),
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
def test_no_path_leads_out_of_the_volume(path: str, seen: str) -> None:
    assert volume_path(path) == seen


def test_a_claim_for_one_node_is_left_to_who_has_it() -> None:
    holder = pod("train-0", "data", **{JOB_LABEL: "train", RUN_LABEL: "train-1"})
    for mode in ("ReadWriteOnce", "ReadWriteOncePod"):
        with pytest.raises(ConflictError, match=r"pod train-0 of job train has it; .*stoker job stop train-1"):
            check_inspectable(claim(mode=mode), [holder], write=False)
    check_inspectable(claim(mode="ReadWriteMany"), [holder], write=False)
    check_inspectable(claim(), [pod("train-0", "data", "Succeeded")], write=False)


def test_a_claim_that_is_not_bound_has_nothing_in_it() -> None:
    with pytest.raises(ConflictError, match="not bound yet"):
        check_inspectable(claim(phase="Pending"), [], write=False)
    check_inspectable(claim(phase="Pending"), [], write=True)
    with pytest.raises(InputError, match="can only be read"):
        check_inspectable(claim(mode="ReadOnlyMany"), [], write=True)


@pytest.mark.parametrize(
    ("code", "said", "told"),
    [
        (1, "ls: /volume/x: No such file or directory", "there is no 'x' in it"),
        (1, "cat: read error: Is a directory", "'x' is a folder"),
        (1, "tar: x: Permission denied", "may not be read"),
        (9, "odd\nwords", "ls failed with exit code 9: odd words"),
    ],
)
def test_what_a_program_says_in_our_words(code: int, said: str, told: str) -> None:
    assert told in str(to_path_error("ls", code, said, "x", "volume data"))


# --- Copies


def archive(*members: tuple[str, bytes | str | int]) -> io.BytesIO:
    """A tar of files (bytes), symbolic links (text) and hard links or devices (a type as number)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        for name, content in members:
            one = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                one.size = len(content)
                file.addfile(one, io.BytesIO(content))
            elif isinstance(content, str):
                one.type, one.linkname = tarfile.SYMTYPE, content
                file.addfile(one)
            else:
                one.type, one.linkname = str(content).encode(), "/etc/passwd"
                file.addfile(one)
    out.seek(0)
    return out


def test_an_archive_is_unpacked(tmp_path: Path) -> None:
    got = extract_tar(archive(("./a/b", b"12"), ("./c", b"345"), ("./a/link", "../c")), tmp_path)
    assert (got.files, got.size, got.skipped) == (2, 5, ())
    assert (tmp_path / "a/link").read_bytes() == b"345"


def test_an_archive_writes_nothing_outside(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    hardlink, device, fifo = 1, 3, 6
    got = extract_tar(
        archive(
            ("../evil", b"x"),
            ("out", ".."),
            ("out/evil", b"x"),
            ("abs", "/etc"),
            ("up", "a/../../x"),
            ("hard", hardlink),
            ("null", device),
            ("pipe", fifo),
            ("good", b"y"),
        ),
        folder,
    )
    assert sorted(got.skipped) == ["../evil", "abs", "hard", "null", "out", "pipe", "up"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["evil", "good", "in", "out"]
    assert (folder / "out/evil").read_bytes() == b"x"
    assert not (folder / "out").is_symlink()


def test_a_link_is_not_followed_to_make_another(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    got = extract_tar(archive(("a", "deep"), ("a/b", ".."), ("deep/c", "../..")), folder)
    assert got.skipped == ("deep/c",)
    assert sorted(tmp_path.iterdir()) == [folder]


def test_a_cut_archive_is_an_error(tmp_path: Path) -> None:
    whole = archive(("a", b"x" * 5000)).getvalue()
    with pytest.raises(tarfile.TarError):
        extract_tar(io.BytesIO(whole[:3000]), tmp_path)


def test_where_a_copy_goes(tmp_path: Path) -> None:
    assert resolve_destination(tmp_path, "a/model.pt", "data") == tmp_path / "model.pt"
    assert resolve_destination(tmp_path / "new.pt", "a/model.pt", "data") == tmp_path / "new.pt"
    assert resolve_destination(tmp_path, "/", "data") == tmp_path / "data"


@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize("was_folder", [True, False])
def test_a_copy_takes_the_place_of_what_was_there_only_by_force(
    tmp_path: Path, is_folder: bool, was_folder: bool
) -> None:
    made, target = tmp_path / "made", tmp_path / "target"
    for path, folder in ((made, is_folder), (target, was_folder)):
        if folder:
            path.mkdir()
            (path / path.name).touch()
        else:
            path.write_text(path.name)
    with pytest.raises(ConflictError, match="--force"):
        move_into_place(made, target, force=False)
    move_into_place(made, target, force=True)
    assert os.listdir(tmp_path) == ["target"]
    assert os.listdir(target) == ["made"] if is_folder else target.read_text() == "made"


# --- Words


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["inspect", "data", "cat"], "PATH: is missing"),
        (["inspect", "data", "ls", "a", "b", "--write", "--force"], "DEST: goes with get only; --write"),
        (["inspect", "data", "shell", "--write"], "shell: needs a terminal"),
        (["list", "--on", "ssh"], "`--on ssh` is no cluster"),
        (["create", "data", "--size", "10Gi", "--pv", "/nowhere.yaml"], "/nowhere.yaml: there is no such file"),
    ],
)
def test_words_that_do_not_go_together(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("volume", *words) == 2
    assert told in capsys.readouterr().err
