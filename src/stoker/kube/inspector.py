"""A look into a volume: a pod that mounts the claim for the while, and commands in it, whose words are data.

The pod is always deleted afterwards; should this process be killed, the pod's own deadline ends it.
"""

from __future__ import annotations

import os
import posixpath
import secrets
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from stoker.errors import (
    AccessError,
    ChangedError,
    ConflictError,
    DataFaultError,
    InputError,
    NotFoundError,
    StokerError,
    UnavailableError,
)
from stoker.kube.claims import find_mounting_pods, get_claim, get_release_hint, is_shared
from stoker.kube.conditions import get_phase, is_terminating
from stoker.kube.ephemeral_pod import delete_finished, ephemeral_pod
from stoker.kube.objects import (
    ACCESS_MODES,
    GPU_RESOURCE,
    MAIN_CONTAINER,
    PART_LABEL,
    Manifest,
    build_object,
    restricted_security_context,
)

if TYPE_CHECKING:
    from stoker.kube.client import ExecResult, KubeClient
    from stoker.kube.exec import Writer

IMAGE = "busybox:1.37"
MOUNT = "/volume"
"""Where the inspector has the volume."""
START_TIMEOUT_S = 120.0
ENDING_S = 30.0
"""For a command whose output is broken to tell why."""
DEADLINES_S = {"ls": 3600, "cat": 12 * 3600, "get": 12 * 3600, "shell": 12 * 3600}
"""Seconds after which the cluster ends an inspector that was left behind."""


# --- What is wanted, as values


def build_inspector_pod(
    claim: str, action: str, *, image: str = IMAGE, write: bool = False, name: str | None = None
) -> Manifest:
    """Give the pod that mounts a claim; read-only, unless it is to be written to."""
    # Root reads any file by DAC_OVERRIDE alone, which also the stricter namespaces allow.
    more = ["CHOWN", "DAC_OVERRIDE", "FOWNER"] if write else ["DAC_OVERRIDE"]
    security = restricted_security_context()
    security["capabilities"] = {**security["capabilities"], "add": more}
    container = {
        "name": MAIN_CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", str(DEADLINES_S[action])],
        "workingDir": MOUNT,
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}},
        "securityContext": {**security, "readOnlyRootFilesystem": action != "shell"},
        "volumeMounts": [{"name": "volume", "mountPath": MOUNT, "readOnly": not write}],
    }
    spec = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": DEADLINES_S[action],
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsUser": 0, "runAsGroup": 0, "seccompProfile": {"type": "RuntimeDefault"}},
        # A disk may be in reach of the GPU nodes only.
        "tolerations": [{"key": GPU_RESOURCE, "operator": "Exists"}],
        "containers": [container],
        "volumes": [{"name": "volume", "persistentVolumeClaim": {"claimName": claim}}],
    }
    return build_object("v1", "Pod", name or generate_pod_name(claim), {PART_LABEL: "inspector"}, spec=spec)


def generate_pod_name(claim: str) -> str:
    """Name an inspector; no two have the same."""
    return f"inspect-{claim[:40].rstrip('-.')}-{secrets.token_hex(3)}"


def volume_path(path: str) -> str:
    """Give a path of the volume as the inspector sees it; none leads out of the volume by its own words."""
    if "\0" in path:
        raise InputError("a path has no zero byte in it")
    return posixpath.normpath(f"{MOUNT}/{posixpath.normpath(f'/{path}').lstrip('/')}")


def check_inspectable(claim: Manifest, pods: Sequence[Manifest], *, write: bool) -> None:
    """Refuse to look into a claim that the inspector would take from somebody, or that nothing is in yet."""
    name, phase = claim["metadata"]["name"], get_phase(claim)
    if is_terminating(claim):
        raise ConflictError(f"volume {name} is being deleted")
    if holders := [] if is_shared(claim) else find_mounting_pods(pods, name):
        raise ConflictError(
            f"volume {name} can be mounted only once at a time, and {holders[0]} has it", hint=get_release_hint(holders)
        )
    if phase == "Lost":
        raise NotFoundError(f"volume {name} has lost its PersistentVolume {claim['spec'].get('volumeName')}")
    if phase != "Bound" and not write:
        hint = "the first job that mounts it gets it bound; `stoker volume list` tells"
        raise ConflictError(f"volume {name} is not bound yet, so there is nothing in it", hint=hint)
    if write and set(claim["spec"].get("accessModes") or ()) == {ACCESS_MODES["rox"]}:
        raise InputError(f"volume {name} can only be read (rox)", hint="leave --write away")


# --- The pod's life


@contextmanager
def open_inspector(
    cluster: KubeClient,
    name: str,
    action: str,
    *,
    image: str = IMAGE,
    write: bool = False,
    wait_s: float = START_TIMEOUT_S,
    report: Callable[[str], object],
) -> Iterator[Inspection]:
    """Give a running inspector of a claim for the while; it is gone afterwards, whatever happened."""
    claim, pods = get_claim(cluster, name), cluster.list_objects("Pod")
    delete_finished(
        (one for one in pods if (one["metadata"].get("labels") or {}).get(PART_LABEL) == "inspector"), cluster
    )
    check_inspectable(claim, pods, write=write)
    pod = build_inspector_pod(name, action, image=image, write=write)
    with ephemeral_pod(cluster, pod, wait_s=wait_s, report=report) as running:
        yield Inspection(cluster, name, running)


# --- What can be done with it


@dataclass(frozen=True, slots=True)
class Inspection:
    """An inspector that runs: what is in a volume."""

    cluster: KubeClient
    claim: str
    pod: str

    def ls(self, path: str) -> bytes:
        """List a folder, or a file, as `ls` does."""
        return self._run(["ls", "-la", "--", volume_path(path)], path).stdout

    def cat(self, path: str, into: Writer) -> None:
        """Write a file's bytes somewhere, as they come."""
        self._need_regular(path, self.stat(path)[0])
        self._run(["cat", "--", volume_path(path)], path, into)

    def get(
        self, path: str, to: Path, *, force: bool = False, on_bytes: Callable[[int], None] | None = None
    ) -> CopyResult:
        """Copy a file or a folder here; it appears whole or not at all."""
        kind, size = self.stat(path)
        target = resolve_destination(to, path, self.claim, force=force)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.part")
        try:
            if kind == "directory":
                copied = self._get_folder(path, beside, on_bytes)
            else:
                self._need_regular(path, kind)
                copied = self._get_file(path, beside, size, on_bytes)
            move_into_place(beside, target, force=force)
        finally:
            remove_path(beside)
        return CopyResult(target, copied.files, copied.size, copied.skipped)

    def stat(self, path: str) -> tuple[str, int]:
        """Tell what lies at a path (`regular file`, `directory`) and how large it is; links are followed."""
        said = self._run(["stat", "-L", "-c", "%F:%s", "--", volume_path(path)], path).stdout
        kind, _, size = said.decode(errors="replace").strip().rpartition(":")
        return kind, int(size)

    def _need_regular(self, path: str, kind: str) -> None:
        if not kind.startswith("regular"):
            is_folder = kind == "directory"
            hint = "ls lists it, get copies it" if is_folder else None
            raise InputError(f"{path!r} is {'a folder' if is_folder else f'a {kind}'}", where=self._where, hint=hint)

    def _get_file(self, path: str, to: Path, size: int, tell: Callable[[int], None] | None) -> CopyResult:
        with to.open("xb") as file:
            self._run(["cat", "--", volume_path(path)], path, _Counted(file, tell))
            file.flush()
            os.fsync(file.fileno())
            got = file.tell()
        if got != size:
            what = f"{path!r} had {size:,} bytes, and {got:,} came: it is being written to"
            raise ChangedError(what, where=self._where, hint="try again when nothing writes to it")
        return CopyResult(to, 1, size, ())

    def _get_folder(self, path: str, to: Path, tell: Callable[[int], None] | None) -> CopyResult:
        """Unpack an archive while it arrives: a thread reads from the cluster into a pipe."""
        to.mkdir()
        reading, writing = os.pipe()
        failures: list[BaseException] = []

        def send() -> None:
            try:
                with os.fdopen(writing, "wb") as pipe:
                    self._run(["tar", "-c", "-f", "-", "-C", volume_path(path), "."], path, _Counted(pipe, tell))
            except BaseException as error:  # told by the one who waits
                failures.append(error)

        sender = threading.Thread(target=send, name="volume get", daemon=True)
        sender.start()
        # Not waited for after a Ctrl-C: the command may be silent, and ends with its pod.
        try:
            with os.fdopen(reading, "rb") as pipe:
                copied = extract_tar(pipe, to)
                while pipe.read(2**16):  # the blocks that fill up an archive
                    pass
        except tarfile.TarError as error:
            sender.join(ENDING_S)
            raise _first(failures) or DataFaultError(f"the archive of {path!r} is broken: {error}") from error
        sender.join()
        if failure := _first(failures):
            raise failure
        return copied

    def _run(self, argv: Sequence[str], path: str, into: Writer | None = None) -> ExecResult:
        done = self.cluster.exec_in_pod(self.pod, argv, container=MAIN_CONTAINER, output=into)
        if done.exit_code != 0:
            raise to_path_error(argv[0], done.exit_code, done.stderr.decode(errors="replace"), path, self._where)
        return done

    @property
    def _where(self) -> str:
        return f"volume {self.claim}"


def to_path_error(program: str, code: int, said: str, path: str, where: str) -> StokerError:
    """Put what a program said about a path into our words."""
    text = " ".join(said.split())
    if "No such file or directory" in text:
        return NotFoundError(f"there is no {path!r} in it", where=where)
    if "Is a directory" in text:
        return InputError(f"{path!r} is a folder", where=where, hint="ls lists it, get copies it")
    if "Not a directory" in text:
        return InputError(f"a part of {path!r} is no folder", where=where)
    if "Permission denied" in text or "Operation not permitted" in text:
        return AccessError(f"{path!r} may not be read, even by root", where=where)
    return UnavailableError(f"{program} failed with exit code {code}: {text[:300]}", where=where)


@dataclass(frozen=True, slots=True)
class CopyResult:
    """What `get` brought."""

    path: Path
    files: int
    size: int
    skipped: tuple[str, ...] = field(default=())
    """Members that would lie, or lead, outside of the folder, or that are no files."""


def resolve_destination(to: Path, path: str, claim: str, *, force: bool = False) -> Path:
    """Say where a copy goes, as `cp` does: into a folder that is there, under its own name. Nothing else is there."""
    name = posixpath.basename(volume_path(path)) if volume_path(path) != MOUNT else claim
    target = to / name if to.is_dir() else to
    if os.path.lexists(target) and not force:
        raise ConflictError("is there already", where=target, hint="name another place, or give --force")
    return target


def extract_tar(stream: BinaryIO, to: Path) -> CopyResult:
    """Unpack an archive that is not trusted: what would get out of the folder, and what is no file, is left out."""
    files, size, links, left_out = 0, 0, [], []
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            if member.issym():
                links.append(member)  # made last, so that nothing is ever written through one
                continue
            try:
                archive.extract(member, to, filter="data")
            except (tarfile.FilterError, tarfile.ExtractError, KeyError):  # KeyError: a link to what was left out
                left_out.append(member.name)
                continue
            if member.isfile():
                files, size = files + 1, size + member.size
    left_out += [one.name for one in links if not _link(one, to)]
    return CopyResult(to, files, size, tuple(left_out))


def _link(member: tarfile.TarInfo, to: Path) -> bool:
    """Make a link that stays within the folder; tell whether it was made."""
    name = posixpath.normpath(member.name)
    target = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
    if any(posixpath.isabs(one) or one == ".." or one.startswith("../") for one in (name, target)):
        return False
    place = to / name
    if not place.parent.resolve().is_relative_to(to.resolve()):
        return False
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(member.linkname)
    except OSError:
        return False
    return True


def move_into_place(made: Path, target: Path, *, force: bool) -> None:
    """Give a finished copy its name; what was there goes only when the new one has its place."""
    if os.path.lexists(target) and not force:  # since it was looked at
        raise ConflictError("is there already", where=target, hint="name another place, or give --force")
    old = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.old")
    if os.path.lexists(target) and (target.is_dir() or made.is_dir()):
        target.rename(old)
    try:
        made.replace(target)
    except BaseException:
        if os.path.lexists(old):
            old.rename(target)
        raise
    remove_path(old)


def remove_path(path: Path) -> None:
    """Remove a file or folder that may not be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _first(failures: Sequence[BaseException]) -> BaseException | None:
    """Give the failure that counts: a pipe that broke is only the other side's end."""
    return next((one for one in failures if not isinstance(one, BrokenPipeError)), None)


class _Counted:
    """Passes bytes on and tells how many."""

    def __init__(self, into: Any, tell: Callable[[int], None] | None) -> None:
        self._into, self._tell = into, tell or (lambda _: None)

    def write(self, data: bytes) -> None:
        self._into.write(data)
        self._tell(len(data))
