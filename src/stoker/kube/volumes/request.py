"""The request of `stoker volume create`, and the checks of it that need no cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from stoker.core.units import check_min_size
from stoker.errors import Fault, SpecError
from stoker.kube.claims import NAME_RULE, is_object_name
from stoker.kube.objects import ACCESS_MODES, Manifest
from stoker.kube.volumes.persistent_volumes import check_persistent_volume, get_name


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeRequest:
    """Options of `stoker volume create`; None: derived from the others."""

    name: str
    namespace: str = ""
    """Empty until the cluster is known."""
    size: int | None = None
    access: str | None = None
    storage_class: str | None = None
    host_path: str | None = None
    volumes: Sequence[Manifest] = ()
    """PersistentVolumes of a file; the claim gets the smallest that fits."""

    @property
    def claim_key(self) -> str:
        """The claim as `namespace/name`."""
        return f"{self.namespace}/{self.name}"

    @property
    def host_path_volume_name(self) -> str:
        """Name of the PersistentVolume for --host-path; unique, since a namespace contains no dots."""
        return f"stoker.{self.namespace}.{self.name}"


def validate_request(request: VolumeRequest) -> None:
    """Raise SpecError with every fault of the request."""
    if faults := list(check_request(request)):
        raise SpecError(faults)


def check_request(request: VolumeRequest) -> Iterator[Fault]:
    """Yield every fault of the options and of the PersistentVolumes of the file."""
    yield from _check_options(request)
    if request.host_path is not None:
        yield from _check_host_path(request)
    names = [get_name(volume) for volume in request.volumes]
    for name in sorted({name for name in names if name and names.count(name) > 1}):
        yield Fault(f"PersistentVolume {name}", "is defined twice")
    for volume in request.volumes:
        yield from check_persistent_volume(volume)


def _check_options(request: VolumeRequest) -> Iterator[Fault]:
    if not is_object_name(request.name):
        yield Fault("NAME", f"{request.name!r} is not a valid volume name: {NAME_RULE}")
    if request.volumes and request.host_path is not None:
        yield Fault("--host-path", "cannot be combined with --pv")
    if request.size is None and not request.volumes:
        yield Fault("--size", "required, for example --size 10Gi")
    yield from check_min_size("--size", request.size)
    if request.access is not None and request.access not in ACCESS_MODES:
        yield Fault("--access", f"must be one of {', '.join(ACCESS_MODES)}, got {request.access!r}")


def _check_host_path(request: VolumeRequest) -> Iterator[Fault]:
    if request.storage_class:
        yield Fault("--storage-class", "cannot be combined with --host-path: such a volume has no storage class")
    path = PurePosixPath(request.host_path or "")
    if not path.is_absolute() or ".." in path.parts:
        yield Fault("--host-path", f"must be an absolute path without '..', got {request.host_path!r}")
    if len(request.host_path_volume_name) > 253:
        yield Fault("NAME", "is too long: the PersistentVolume is named after it and the namespace")
