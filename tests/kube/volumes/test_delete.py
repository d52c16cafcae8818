"""Plans of `stoker volume delete`: which PersistentVolumes are deleted, what happens to the data, mounted claims."""

from __future__ import annotations

import re

import pytest

from stoker.errors import ConflictError
from stoker.kube.objects import JOB_LABEL, RUN_LABEL, Manifest
from stoker.kube.volumes import CLAIM_ANNOTATION, plan_deletion
from tests.support.volume_objects import build_claim, build_mounting_pod, build_volume


def build_own_volume(name: str = "pv", policy: str = "Retain") -> Manifest:
    """Build a PersistentVolume that stoker created for the claim ns/data."""
    volume = build_volume(name, persistentVolumeReclaimPolicy=policy)
    volume["metadata"]["annotations"] = {CLAIM_ANNOTATION: "ns/data"}
    return volume


def test_own_volume_is_deleted_with_its_claim() -> None:
    volumes = [build_own_volume(), build_volume("other")]
    deletion = plan_deletion("data", "ns", build_claim(volumeName="pv"), volumes, [])
    assert (deletion.claim, list(deletion.volumes)) == ("data", ["pv"])
    assert "data is kept in /d on the nodes" in deletion.data_note


def test_volume_left_over_from_an_earlier_deletion_is_deleted() -> None:
    deletion = plan_deletion("data", "ns", None, [build_own_volume()], [])
    assert (deletion.claim, list(deletion.volumes)) == (None, ["pv"])


@pytest.mark.parametrize(
    ("policy", "is_deleted", "is_kept"), [("Delete", True, False), ("Recycle", True, True), ("Retain", False, True)]
)
def test_data_of_a_volume_of_others_by_reclaim_policy(policy: str, is_deleted: bool, is_kept: bool) -> None:
    bound = build_volume("pv", persistentVolumeReclaimPolicy=policy)
    deletion = plan_deletion("data", "ns", build_claim(volumeName="pv"), [bound], [])
    assert list(deletion.volumes) == []
    assert f"(reclaim policy {policy})" in deletion.data_note
    assert bool(re.search("its data is deleted|its data are deleted", deletion.data_note)) is is_deleted
    assert ("kept" in deletion.data_note) is is_kept


def test_cluster_deletes_an_own_volume_with_policy_delete() -> None:
    volumes = [build_own_volume(policy="Delete")]
    deletion = plan_deletion("data", "ns", build_claim(volumeName="pv"), volumes, [])
    assert list(deletion.volumes) == []
    assert "and its data are deleted too (reclaim policy Delete)" in deletion.data_note


@pytest.mark.parametrize("policy", ["Delete", "Recycle"])
def test_data_of_an_own_volume_is_not_reported_as_kept(policy: str) -> None:
    note = plan_deletion("data", "ns", None, [build_own_volume(policy=policy)], []).data_note
    assert "PersistentVolume pv and its data are deleted too" in note
    assert f"reclaim policy {policy}" in note
    assert "kept" not in note


def test_own_volume_taken_by_another_claim_is_kept() -> None:
    taken = build_own_volume("second")
    taken["spec"]["claimRef"] = {"namespace": "ns", "name": "theirs"}
    deletion = plan_deletion("data", "ns", build_claim(volumeName="pv"), [build_own_volume(), taken], [])
    assert list(deletion.volumes) == ["pv"]


def test_volumes_that_cannot_be_listed() -> None:
    note = plan_deletion("data", "ns", build_claim(volumeName="pv"), None, []).data_note
    assert "PersistentVolume pv" in note
    assert "it is not known whether its data" in note
    assert "no data" in plan_deletion("data", "ns", build_claim(), None, []).data_note


def test_mounted_claim_is_not_deleted() -> None:
    pods = [build_mounting_pod("p", "data", **{JOB_LABEL: "train", RUN_LABEL: "train-1"})]
    with pytest.raises(ConflictError, match=r"volume data is mounted by pod p of job train") as caught:
        plan_deletion("data", "ns", build_claim(), [], pods)
    assert "stoker job stop train-1" in str(caught.value.hint)


def test_claim_referenced_by_a_finished_pod_is_not_deleted() -> None:
    with pytest.raises(ConflictError, match=r"finished pod p.*kubectl -n ns delete pod p"):
        plan_deletion("data", "ns", build_claim(), [], [build_mounting_pod("p", "data", "Succeeded")])
