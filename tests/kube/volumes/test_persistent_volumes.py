"""PersistentVolumes of a file: every fault is reported, and other objects are rejected."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from stoker.errors import InputError
from stoker.kube.storage_classes import FSX
from stoker.kube.volumes import check_persistent_volume, read_persistent_volumes
from tests.support.volume_objects import build_volume

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


def test_all_faults_of_a_volume_are_reported_at_once() -> None:
    invalid = {
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
    paths = {fault.path.partition(": ")[2] for fault in check_persistent_volume(invalid)}
    assert paths == {
        "spec.capacity.storage",
        "spec.accessModes",
        "spec.volumeMode",
        "spec.persistentVolumeReclaimPolicy",
        "spec.csi.volumeHandle",
        "spec.csi.volumeAttributes.mountname",
    }


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        (
            "kind: StorageClass\napiVersion: storage.k8s.io/v1\n",
            "object 1: must be a v1 PersistentVolume, got StorageClass",
        ),
        (FSX_VOLUME + "---\n- 1\n", "object 2: must be a v1 PersistentVolume, got no kind"),
        ("# nothing\n", "no PersistentVolume"),
        ("kind: List\napiVersion: v1\nitems: 5\n", "object 1: must be a v1 PersistentVolume, got List"),
        ("a: [", "YAML"),
    ],
)
def test_file_with_other_content(text: str, fragment: str, tmp_path: Path) -> None:
    path = tmp_path / "pv.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_persistent_volumes(path)
    assert caught.value.where == str(path)
    assert fragment in caught.value.what


def test_items_of_a_list_are_read(tmp_path: Path) -> None:
    items = [build_volume("a"), build_volume("b")]
    (tmp_path / "pv.yaml").write_text(yaml.safe_dump({"kind": "List", "items": items}))
    assert [volume["metadata"]["name"] for volume in read_persistent_volumes(tmp_path / "pv.yaml")] == ["a", "b"]
