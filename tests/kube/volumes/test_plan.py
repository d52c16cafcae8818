"""Plans of `stoker volume create`: the objects to apply, and requests that are rejected with every fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.errors import ConflictError, InputError, NotFoundError, SpecError
from stoker.kube.objects import Manifest
from stoker.kube.storage_classes import FSX
from stoker.kube.volumes import CLAIM_ANNOTATION, ExistingObjects, VolumeRequest, plan_volume, read_persistent_volumes
from tests.kube.volumes.test_persistent_volumes import FSX_VOLUME
from tests.support.volume_objects import GIB, STORAGE_CLASSES, build_claim, build_storage_class, build_volume


def build_request(**fields: Any) -> VolumeRequest:
    return VolumeRequest(**{"name": "data", "namespace": "ns", "size": 10 * GIB, **fields})


def get_names(objects: list[Manifest]) -> list[str]:
    return [obj["metadata"]["name"] for obj in objects]


# --- Claims of a storage class


def test_claim_of_the_default_class_names_no_class() -> None:
    (claim,) = plan_volume(build_request(), ExistingObjects(classes=STORAGE_CLASSES)).objects
    assert claim["spec"] == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Gi"}}}
    assert claim["metadata"]["namespace"] == "ns"
    assert claim["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "stoker"


def test_unknown_class_lists_the_known_ones() -> None:
    with pytest.raises(NotFoundError, match="'fast'") as caught:
        plan_volume(build_request(storage_class="fast"), ExistingObjects(classes=STORAGE_CLASSES))
    assert "disks (default), files" in str(caught.value.hint)


def test_class_is_required_without_a_default() -> None:
    with pytest.raises(InputError) as caught:
        plan_volume(build_request(), ExistingObjects(classes=STORAGE_CLASSES[1:]))
    assert "no default storage class" in caught.value.what
    assert "--storage-class" in str(caught.value.hint)
    assert "known: files" in str(caught.value.hint)
    with pytest.raises(InputError, match="known: none"):
        plan_volume(build_request(), ExistingObjects(classes=[]))


def test_classes_that_cannot_be_listed_are_not_checked() -> None:
    plan = plan_volume(build_request(storage_class="any"), ExistingObjects(classes=None))
    assert plan.objects[0]["spec"]["storageClassName"] == "any"
    (remark,) = plan.remarks
    assert "storage classes were not checked" in remark


def test_remark_that_efs_ignores_the_size() -> None:
    request = build_request(storage_class="files", access="rwx")
    plan = plan_volume(request, ExistingObjects(classes=STORAGE_CLASSES))
    assert any("EFS ignores the size" in remark for remark in plan.remarks)


def test_size_that_fsx_does_not_offer_names_the_next_one() -> None:
    existing = ExistingObjects(classes=[build_storage_class("fsx-sc", FSX)])
    with pytest.raises(SpecError, match=r"10Gi.*next .*1200Gi") as caught:
        plan_volume(build_request(storage_class="fsx-sc", access="rwx"), existing)
    assert [fault.path for fault in caught.value.faults] == ["--size"]
    assert plan_volume(build_request(size=1200 * GIB, storage_class="fsx-sc", access="rwx"), existing).objects


def test_disk_cannot_be_rwx() -> None:
    classes = [build_storage_class("gp3", "ebs.csi.aws.com")]
    with pytest.raises(SpecError, match=r"ebs\.csi\.aws\.com creates disks.*\brwo\b") as caught:
        plan_volume(build_request(storage_class="gp3", access="rwx"), ExistingObjects(classes=classes))
    assert [fault.path for fault in caught.value.faults] == ["--access"]


def test_all_faults_of_a_request_are_reported_at_once() -> None:
    request = VolumeRequest(name="Data_", namespace="ns", access="rw", host_path="../x", storage_class="c")
    with pytest.raises(SpecError) as caught:
        plan_volume(request, ExistingObjects(classes=STORAGE_CLASSES))
    paths = [fault.path for fault in caught.value.faults]
    assert paths == ["NAME", "--size", "--access", "--storage-class", "--host-path"]


# --- Existing claims


def test_same_request_again_changes_nothing() -> None:
    plan = plan_volume(build_request(), ExistingObjects(claim=build_claim(), classes=STORAGE_CLASSES))
    assert plan.objects == []


@pytest.mark.parametrize(
    ("request_fields", "claim_fields", "fragments"),
    [
        ({"access": "rwx"}, {}, ["access rwo", "rwx"]),
        ({"size": GIB}, {}, ["10Gi", "cannot shrink to 1Gi"]),
        ({"storage_class": "files"}, {}, ["class disks", "files"]),
        ({"size": 20 * GIB}, {"storageClassName": "files"}, ["20Gi", "files", "allowVolumeExpansion"]),
        ({"size": 20 * GIB}, {"storageClassName": ""}, ["20Gi", "no storage class"]),
        ({"size": 20 * GIB}, {"phase": "Pending"}, ["20Gi", "not bound"]),
    ],
)
def test_conflict_with_an_existing_claim(
    request_fields: dict[str, Any], claim_fields: dict[str, Any], fragments: list[str]
) -> None:
    existing = ExistingObjects(claim=build_claim(**claim_fields), classes=STORAGE_CLASSES)
    with pytest.raises(ConflictError, match="volume data") as caught:
        plan_volume(build_request(**request_fields), existing)
    assert all(fragment in caught.value.what for fragment in fragments), caught.value.what
    assert "stoker volume delete data" in str(caught.value.hint)


def test_all_conflicts_are_reported_at_once() -> None:
    with pytest.raises(ConflictError, match=r"access rwo, not rwx.*cannot shrink to 1Gi"):
        plan_volume(
            build_request(access="rwx", size=GIB), ExistingObjects(claim=build_claim(), classes=STORAGE_CLASSES)
        )


def test_claim_is_expanded_if_its_class_allows_it() -> None:
    existing = ExistingObjects(claim=build_claim(volumeName="pv-1"), classes=STORAGE_CLASSES)
    plan = plan_volume(build_request(size=20 * GIB), existing)
    assert plan.apply == []
    assert plan.expand is not None
    assert plan.expand["spec"]["resources"]["requests"]["storage"] == "20Gi"
    assert plan.expand["spec"]["volumeName"] == "pv-1"


def test_terminating_claim_is_a_conflict() -> None:
    terminating = build_claim()
    terminating["metadata"]["deletionTimestamp"] = "2026-11-16T00:00:00Z"
    with pytest.raises(ConflictError, match="volume data is being deleted"):
        plan_volume(build_request(), ExistingObjects(claim=terminating, classes=STORAGE_CLASSES))


# --- PersistentVolumes of a file, and host paths


def test_claim_is_bound_to_the_volume_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "pv.yaml").write_text(FSX_VOLUME)
    request = build_request(size=None, volumes=read_persistent_volumes(tmp_path / "pv.yaml"))
    volume, claim = plan_volume(request, ExistingObjects(classes=STORAGE_CLASSES)).objects
    claim_ref = volume["spec"]["claimRef"]
    assert (claim_ref["namespace"], claim_ref["name"]) == ("ns", "data")
    assert volume["metadata"]["annotations"][CLAIM_ANNOTATION] == "ns/data"
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1200Gi"}},
        "storageClassName": "",
        "volumeName": "fsx-pv",
    }


def test_claim_has_the_class_of_its_volume() -> None:
    request = build_request(volumes=[build_volume(storageClassName="efs-sc")])
    assert plan_volume(request, ExistingObjects()).objects[-1]["spec"]["storageClassName"] == "efs-sc"


def test_smallest_fitting_volume_is_chosen_and_reserved() -> None:
    volumes = [build_volume("large", "90Gi"), build_volume("small", "1Gi"), build_volume("right", "20Gi")]
    *applied, claim = plan_volume(build_request(volumes=volumes), ExistingObjects()).objects
    assert claim["spec"]["volumeName"] == "right"
    assert get_names([volume for volume in applied if "claimRef" in volume["spec"]]) == ["right"]
    assert len(applied) == 3


def test_several_claims_of_one_file_get_a_volume_each() -> None:
    volumes = [build_volume("one"), build_volume("two")]
    first = plan_volume(build_request(volumes=volumes), ExistingObjects()).objects[0]
    assert first["metadata"]["annotations"][CLAIM_ANNOTATION] == "ns/data"
    second = plan_volume(build_request(name="other", volumes=volumes), ExistingObjects(volumes={"one": first})).objects
    assert get_names(second) == ["two", "other"]


def test_existing_volume_of_others_is_not_modified() -> None:
    plan = plan_volume(build_request(volumes=[build_volume()]), ExistingObjects(volumes={"pv": build_volume()}))
    assert [obj["kind"] for obj in plan.objects] == ["PersistentVolumeClaim"]


@pytest.mark.parametrize(
    ("volume", "fields", "fragments"),
    [
        (build_volume(storage="1Gi"), {}, ["1Gi", "--size 10Gi"]),
        (build_volume(), {"access": "rwx"}, ["access rwo", "rwx"]),
        (build_volume(storageClassName="a"), {"storage_class": "b"}, ["'a'", "'b'", "--storage-class"]),
        (build_volume(claimRef={"namespace": "n", "name": "c"}), {}, ["claim c in namespace n"]),
        ({**build_volume(), "status": {"phase": "Released"}}, {}, ["kubectl delete pv pv"]),
    ],
)
def test_volume_that_does_not_fit(volume: Manifest, fields: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        plan_volume(build_request(volumes=[volume], **fields), ExistingObjects(volumes={"pv": volume}))
    assert [fault.path for fault in caught.value.faults] == ["PersistentVolume pv"]
    assert all(fragment in caught.value.what for fragment in fragments), caught.value.what


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": [], "spec": {}},
        {"metadata": {"name": 3, "labels": []}, "spec": []},
        {"metadata": {"name": "a"}, "spec": {"csi": {"driver": FSX, "volumeAttributes": []}, "claimRef": 3}},
        {},
    ],
)
def test_malformed_volume_is_a_spec_error(fields: Manifest) -> None:
    volume = {"apiVersion": "v1", "kind": "PersistentVolume", **fields}
    with pytest.raises(SpecError):
        plan_volume(build_request(volumes=[volume]), ExistingObjects())


def test_host_path_volume() -> None:
    volume, claim = plan_volume(build_request(host_path="/srv/data", access="rwx"), ExistingObjects()).objects
    assert volume["metadata"]["name"] == "stoker.ns.data"
    assert volume["spec"]["hostPath"] == {"path": "/srv/data", "type": "DirectoryOrCreate"}
    assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
    assert claim["spec"]["volumeName"] == "stoker.ns.data"
    assert claim["spec"]["storageClassName"] == ""
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_host_path_volume_keeps_its_access_mode() -> None:
    volume, claim = plan_volume(build_request(host_path="/srv/data", access="rwx"), ExistingObjects()).objects
    again = plan_volume(
        build_request(host_path="/srv/data"),
        ExistingObjects(claim=claim | {"status": {"phase": "Bound"}}, volumes={"stoker.ns.data": volume}),
    )
    assert again.objects == [volume]
