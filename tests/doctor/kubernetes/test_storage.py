"""Checks of storage classes and claims."""

from __future__ import annotations

from typing import Any

import pytest

from tests.doctor.kubernetes.clusters import (
    DENIED,
    EXISTING_CLAIM,
    NEW_CLAIM,
    SHARED_VOLUME,
    check_job_with,
    claim,
    make_job,
    pod,
    storage_class,
    volume,
)


@pytest.mark.parametrize(
    ("keys", "found", "fine", "says"),
    [
        ({"checkpoint": EXISTING_CLAIM}, {}, False, "claim c not found in team"),
        ({"checkpoint": EXISTING_CLAIM}, {"claims": {"c": claim()}}, True, "10 GiB, rwo; 1 pod would mount it"),
        ({"checkpoint": EXISTING_CLAIM}, {"claims": {"c": claim(deletionTimestamp="now")}}, False, "is being deleted"),
        ({"checkpoint": EXISTING_CLAIM}, {"claims": {"c": claim(phase="Lost")}}, False, "lost its volume"),
        ({"checkpoint": EXISTING_CLAIM}, {"claims": {"c": DENIED}}, None, DENIED.what),
        (
            {"checkpoint": EXISTING_CLAIM},
            {
                "claims": {"c": claim(phase="Pending")},
                "claim_events": {"c": [{"message": "no volumes", "metadata": {}}]},
            },
            False,
            "is pending: no volumes",
        ),
        (
            {"checkpoint": EXISTING_CLAIM},
            {"claims": {"c": claim(phase="Pending")}, "classes": [storage_class("late", mode="WaitForFirstConsumer")]},
            True,
            "bound when its first pod is scheduled",
        ),
        (
            {"checkpoint": EXISTING_CLAIM},
            {
                "claims": {"c": claim(phase="Pending")},
                "classes": [storage_class("late", mode="WaitForFirstConsumer")],
                "claim_events": {"c": [{"type": "Warning", "message": "zone is full", "metadata": {}}]},
            },
            False,
            "zone is full",
        ),
        (
            {"checkpoint": EXISTING_CLAIM},
            {"claims": {"c": claim()}, "own_pods": [pod("n1", claim="c")]},
            None,
            "pod-on-n1 on n1",
        ),
        (
            {"volumes": SHARED_VOLUME, "workers": 4},
            {"claims": {"c": claim()}},
            False,
            "only one node can mount it, but 4 pods",
        ),
        (
            {"volumes": SHARED_VOLUME, "workers": 4},
            {"claims": {"c": claim("ReadWriteMany")}},
            True,
            "4 pods would mount it",
        ),
        (
            {"volumes": SHARED_VOLUME, "workers": 2},
            {"claims": {"c": claim("ReadWriteOncePod")}},
            False,
            "only one pod can mount it, but 2 pods",
        ),
        ({"volumes": SHARED_VOLUME, "workers": 2}, {"claims": {"c": claim("ReadOnlyMany")}}, None, "2 pods"),
        (
            {"volumes": [{**SHARED_VOLUME[0], "read_only": True}], "workers": 2},
            {"claims": {"c": claim("ReadOnlyMany")}},
            True,
            "2 pods",
        ),
        ({"checkpoint": EXISTING_CLAIM, "workers": 4}, {"claims": {"c": claim()}}, True, "1 pod would mount it"),
        ({"checkpoint": NEW_CLAIM}, {"classes": [storage_class("std", default=True)]}, True, "of class std"),
        ({"checkpoint": NEW_CLAIM}, {"classes": [storage_class("std")]}, False, "no default storage class"),
        ({"checkpoint": NEW_CLAIM}, {"volumes": [volume("small", "1Gi"), volume("v", "10Gi")]}, True, "using volume v"),
        ({"checkpoint": NEW_CLAIM}, {"volumes": [volume("v", "10Gi", phase="Bound")]}, False, "would stay pending"),
        (
            {"checkpoint": {**NEW_CLAIM, "access": "rwx"}},
            {"classes": [storage_class("gp3", default=True, provisioner="ebs.csi.aws.com")]},
            False,
            "is rwx, but volumes of class gp3 can be mounted on only one node",
        ),
        ({"checkpoint": NEW_CLAIM}, {"classes": DENIED}, None, DENIED.what),
        ({"checkpoint": NEW_CLAIM}, {"claims": {"c": claim()}}, True, "10 GiB, rwo"),
    ],
)
def test_claims(keys: dict[str, Any], found: dict[str, Any], fine: bool | None, says: str) -> None:
    check = check_job_with(make_job(**keys), **found)["claim c"]
    assert check.fine is fine, check
    assert says in check.found
    assert bool(check.fix) or check.fine is not False


def test_storage_classes() -> None:
    assert check_job_with(make_job())["storage"].fine is None
    warning = check_job_with(make_job(), classes=[storage_class("b"), storage_class("a")])["storage"]
    assert (warning.fine, warning.found) == (None, "classes: a, b; no default class")
    check = check_job_with(make_job(), classes=[storage_class("b", default=True), storage_class("a")])["storage"]
    assert (check.fine, check.found) == (True, "b is the default class; also a")
    old, new = storage_class("old", default=True), storage_class("new", default=True)
    old["metadata"]["creationTimestamp"], new["metadata"]["creationTimestamp"] = "2025-01-01", "2026-01-01"
    assert check_job_with(make_job(), classes=[old, new])["storage"].found == "new is the default class; also old"


def test_events_of_a_deleted_claim_of_the_same_name_are_ignored() -> None:
    late = [storage_class("late", mode="WaitForFirstConsumer")]
    about = {"kind": "PersistentVolumeClaim", "name": "c", "uid": "former"}
    event = {"type": "Warning", "message": "zone is full", "metadata": {}, "involvedObject": about}
    given = {"claims": {"c": claim(phase="Pending", uid="now")}, "claim_events": {"c": [event]}, "classes": late}
    assert check_job_with(make_job(checkpoint=EXISTING_CLAIM), **given)["claim c"].fine is True
    about["uid"] = "now"
    assert check_job_with(make_job(checkpoint=EXISTING_CLAIM), **given)["claim c"].fine is False
