"""Create, expand and delete volumes: plan and apply the changes to claims and their PersistentVolumes.

A volume is a PersistentVolumeClaim of the namespace, either of a StorageClass or bound to a PersistentVolume that a
file defines or that is a directory on the nodes.
"""

from stoker.kube.volumes.delete import VolumeDeletion, delete_volume, find_deletion, plan_deletion
from stoker.kube.volumes.persistent_volumes import (
    CLAIM_ANNOTATION,
    check_persistent_volume,
    read_persistent_volumes,
)
from stoker.kube.volumes.plan import ExistingObjects, VolumePlan, apply_plan, find_existing_objects, plan_volume
from stoker.kube.volumes.request import VolumeRequest, validate_request

__all__ = [
    "CLAIM_ANNOTATION",
    "ExistingObjects",
    "VolumeDeletion",
    "VolumePlan",
    "VolumeRequest",
    "apply_plan",
    "check_persistent_volume",
    "delete_volume",
    "find_deletion",
    "find_existing_objects",
    "plan_deletion",
    "plan_volume",
    "read_persistent_volumes",
    "validate_request",
]
