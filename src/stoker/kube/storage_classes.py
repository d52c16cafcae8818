"""StorageClasses: find them by name or default, and check a size and an access mode against their provisioner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stoker.errors import Fault
from stoker.kube.objects import Manifest
from stoker.kube.quantity import format_quantity

EFS, FSX = "efs.csi.aws.com", "fsx.csi.aws.com"
SINGLE_NODE_PROVISIONERS = (
    "cinder.csi.openstack.org",
    "disk.csi.azure.com",
    "ebs.csi.aws.com",
    "kubernetes.io/aws-ebs",
    "kubernetes.io/azure-disk",
    "kubernetes.io/gce-pd",
    "pd.csi.storage.gke.io",
)
"""Provisioners of disks, which cannot be mounted read-write on several nodes."""
WAIT_FOR_FIRST_CONSUMER = "WaitForFirstConsumer"
GIB = 2**30
_DEFAULT_ANNOTATIONS = (
    "storageclass.kubernetes.io/is-default-class",
    "storageclass.beta.kubernetes.io/is-default-class",
)


def find_storage_class(classes: Sequence[Manifest] | None, name: str | None) -> Manifest | None:
    """Return the StorageClass with a name; None if there is none."""
    return next((storage_class for storage_class in classes or () if storage_class["metadata"]["name"] == name), None)


def find_default_storage_class(classes: Sequence[Manifest]) -> Manifest | None:
    """Return the default StorageClass: of several, the newest, as Kubernetes does."""
    defaults = [storage_class for storage_class in classes if _is_default(storage_class)]
    return max(
        defaults, key=lambda storage_class: str(storage_class["metadata"].get("creationTimestamp")), default=None
    )


def _is_default(storage_class: Manifest) -> bool:
    annotations = storage_class["metadata"].get("annotations") or {}
    return any(annotations.get(key) == "true" for key in _DEFAULT_ANNOTATIONS)


def check_storage_class(storage_class: Manifest, size: int, access: str) -> Iterator[Fault]:
    """Yield what the provisioner would reject, round up to a higher price, or leave pending forever."""
    provisioner = storage_class.get("provisioner")
    if provisioner in SINGLE_NODE_PROVISIONERS and access == "rwx":
        what = f"{provisioner} creates disks, which only one node can write to; use rwo, or a class of shared storage"
        yield Fault("--access", what)
    if provisioner == FSX and (larger := round_up_fsx_size(size, storage_class.get("parameters") or {})) != size:
        what = f"FSx has no file system of {format_quantity(size)}; the next larger size is {larger // GIB}Gi"
        yield Fault("--size", what)


def round_up_fsx_size(size: int, parameters: Mapping[str, str]) -> int:
    """Round a size up to one that FSx for Lustre offers, by the type of the file system."""
    if parameters.get("storageType") == "HDD":
        step = 6000 if str(parameters.get("perUnitStorageThroughput")) == "12" else 1800
    else:
        large = 3600 if parameters.get("deploymentType", "SCRATCH_1") == "SCRATCH_1" else 2400
        step = 1200 if size <= (2400 if large == 3600 else 1200) * GIB else large
    return max(1, -(-size // (step * GIB))) * step * GIB


def list_remarks(storage_class: Manifest) -> Iterator[str]:
    """Yield what a user of the class should know."""
    provisioner = storage_class.get("provisioner")
    if provisioner == EFS:
        yield "EFS ignores the size: the volume grows with its content"
    if provisioner == FSX:
        yield "FSx creates a separate file system, which takes minutes and is billed until the volume is deleted"
