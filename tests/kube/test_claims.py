"""Claims: the pods that mount them, and whether they are bound or why not."""

from __future__ import annotations

import pytest

from stoker.kube.claims import MountingPod, describe_binding, find_mounting_pods
from stoker.kube.objects import JOB_LABEL, RUN_LABEL, Manifest
from tests.support.volume_objects import STORAGE_CLASSES, build_claim, build_mounting_pod, build_storage_class


def test_find_mounting_pods() -> None:
    pods = [
        build_mounting_pod("b", "data", **{JOB_LABEL: "train", RUN_LABEL: "train-1"}),
        build_mounting_pod("a", "data", "Pending"),
        build_mounting_pod("finished", "data", "Succeeded"),
        build_mounting_pod("unrelated", "other"),
    ]
    expected = [MountingPod(pod="a"), MountingPod(pod="b", job="train", run="train-1")]
    assert find_mounting_pods(pods, "data") == expected


@pytest.mark.parametrize(
    ("claim", "events", "fragment"),
    [
        (build_claim(volumeName="pv"), [], "is bound to PersistentVolume pv"),
        (build_claim(phase="Pending", storageClassName="late"), [], "WaitForFirstConsumer"),
        (build_claim(phase="Pending"), [{"type": "Warning", "message": "no\n quota."}], "is not bound: no quota"),
        (build_claim(phase="Pending", volumeName="pv"), [], "is not bound to PersistentVolume pv"),
        (
            build_claim(phase="Pending"),
            [{"type": "Normal", "message": "waiting for disks"}],
            "not bound yet: waiting for disks",
        ),
        (build_claim(phase="Lost", volumeName="pv"), [], "is lost: its PersistentVolume pv"),
    ],
)
def test_describe_binding(claim: Manifest, events: list[Manifest], fragment: str) -> None:
    late = build_storage_class("late", volumeBindingMode="WaitForFirstConsumer")
    assert fragment in describe_binding(claim, events, [*STORAGE_CLASSES, late])
