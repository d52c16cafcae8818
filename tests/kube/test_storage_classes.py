"""StorageClasses: the default class, and the sizes of FSx for Lustre."""

from __future__ import annotations

import pytest

from stoker.kube.storage_classes import find_default_storage_class, round_up_fsx_size
from tests.support.volume_objects import GIB, build_storage_class


def test_newest_of_several_default_classes_is_used() -> None:
    old, new = build_storage_class("old", default=True), build_storage_class("new", default=True)
    old["metadata"]["creationTimestamp"], new["metadata"]["creationTimestamp"] = "2026-01-01", "2026-02-01"
    assert find_default_storage_class([new, old]) is new


@pytest.mark.parametrize(
    ("requested", "parameters", "rounded"),
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
def test_fsx_sizes(requested: int, parameters: dict[str, str], rounded: int) -> None:
    assert round_up_fsx_size(requested * GIB, parameters) == rounded * GIB
