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
from stoker.kube.claims import is_shared, mounters, need_claim, release
from stoker.kube.conditions import is_ending, phase_of
from stoker.kube.ephemeral_pod import sweep, visiting
from stoker.kube.objects import ACCESS, CONTAINER, GPU, PART, Manifest, manifest, safe_container

if TYPE_CHECKING:
    from stoker.kube.client import Cluster, Done
    from stoker.kube.exec import Writer

IMAGE = "busybox:1.37"
MOUNT = "/volume"
"""Where the inspector has the volume."""
WAIT_S = 120.0
ENDING_S = 30.0
"""For a command whose output is broken to tell why."""
DEADLINES = {"ls": 3600, "cat": 12 * 3600, "get": 12 * 3600, "shell": 12 * 3600}
"""Seconds after which the cluster ends an inspector that was left behind."""


# --- What is wanted, as values


def inspector(claim: str, action: str, *, image: str = IMAGE, write: bool = False, name: str | None = None) -> Manifest:
    """Give the pod that mounts a claim; read-only, unless it is to be written to."""
    # Root reads any file by DAC_OVERRIDE alone, which also the stricter namespaces allow.
    more = ["CHOWN", "DAC_OVERRIDE", "FOWNER"] if write else ["DAC_OVERRIDE"]
    security = safe_container()
    security["capabilities"] = {**security["capabilities"], "add": more}
    container = {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", str(DEADLINES[action])],
        "workingDir": MOUNT,
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}},
        "securityContext": {**security, "readOnlyRootFilesystem": action != "shell"},
        "volumeMounts": [{"name": "volume", "mountPath": MOUNT, "readOnly": not write}],
    }
    spec = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": DEADLINES[action],
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsUser": 0, "runAsGroup": 0, "seccompProfile": {"type": "RuntimeDefault"}},
        # A disk may be in reach of the GPU nodes only.
        "tolerations": [{"key": GPU, "operator": "Exists"}],
        "containers": [container],
        "volumes": [{"name": "volume", "persistentVolumeClaim": {"claimName": claim}}],
    }
    return manifest("v1", "Pod", name or pod_name(claim), {PART: "inspector"}, spec=spec)


def pod_name(claim: str) -> str:
    """Name an inspector; no two have the same."""
    return f"inspect-{claim[:40].rstrip('-.')}-{secrets.token_hex(3)}"


def inside(path: str) -> str:
    """Give a path of the volume as the inspector sees it; none leads out of the volume by its own words."""
    if "\0" in path:
        raise InputError("a path has no zero byte in it")
    return posixpath.normpath(f"{MOUNT}/{posixpath.normpath(f'/{path}').lstrip('/')}")


def check_free(claim: Manifest, pods: Sequence[Manifest], *, write: bool) -> None:
    """Refuse to look into a claim that the inspector would take from somebody, or that nothing is in yet."""
    name, phase = claim["metadata"]["name"], phase_of(claim)
    if is_ending(claim):
        raise ConflictError(f"volume {name} is being deleted")
    if holders := [] if is_shared(claim) else mounters(pods, name):
        raise ConflictError(
            f"volume {name} can be mounted only once at a time, and {holders[0]} has it", hint=release(holders)
        )
    if phase == "Lost":
        raise NotFoundError(f"volume {name} has lost its PersistentVolume {claim['spec'].get('volumeName')}")
    if phase != "Bound" and not write:
        hint = "the first job that mounts it gets it bound; `stoker volume list` tells"
        raise ConflictError(f"volume {name} is not bound yet, so there is nothing in it", hint=hint)
    if write and set(claim["spec"].get("accessModes") or ()) == {ACCESS["rox"]}:
        raise InputError(f"volume {name} can only be read (rox)", hint="leave --write away")


# --- The pod's life


@contextmanager
def inspecting(
    cluster: Cluster,
    name: str,
    action: str,
    *,
    image: str = IMAGE,
    write: bool = False,
    wait_s: float = WAIT_S,
    tell: Callable[[str], object],
) -> Iterator[Inspection]:
    """Give a running inspector of a claim for the while; it is gone afterwards, whatever happened."""
    claim, pods = need_claim(cluster, name), cluster.every("Pod")
    sweep((one for one in pods if (one["metadata"].get("labels") or {}).get(PART) == "inspector"), cluster)
    check_free(claim, pods, write=write)
    pod = inspector(name, action, image=image, write=write)
    with visiting(cluster, pod, wait_s=wait_s, tell=tell) as running:
        yield Inspection(cluster, name, running)


# --- What can be done with it


@dataclass(frozen=True, slots=True)
class Inspection:
    """An inspector that runs: what is in a volume."""

    cluster: Cluster
    claim: str
    pod: str

    def ls(self, path: str) -> bytes:
        """List a folder, or a file, as `ls` does."""
        return self._run(["ls", "-la", "--", inside(path)], path).out

    def cat(self, path: str, into: Writer) -> None:
        """Write a file's bytes somewhere, as they come."""
        self._need_regular(path, self.stat(path)[0])
        self._run(["cat", "--", inside(path)], path, into)

    def get(self, path: str, to: Path, *, force: bool = False, tell: Callable[[int], None] | None = None) -> Copied:
        """Copy a file or a folder here; it appears whole or not at all."""
        kind, size = self.stat(path)
        target = destination(to, path, self.claim, force=force)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.part")
        try:
            if kind == "directory":
                copied = self._get_folder(path, beside, tell)
            else:
                self._need_regular(path, kind)
                copied = self._get_file(path, beside, size, tell)
            put(beside, target, force=force)
        finally:
            discard(beside)
        return Copied(target, copied.files, copied.size, copied.left_out)

    def stat(self, path: str) -> tuple[str, int]:
        """Tell what lies at a path (`regular file`, `directory`) and how large it is; links are followed."""
        said = self._run(["stat", "-L", "-c", "%F:%s", "--", inside(path)], path).out
        kind, _, size = said.decode(errors="replace").strip().rpartition(":")
        return kind, int(size)

    def _need_regular(self, path: str, kind: str) -> None:
        if not kind.startswith("regular"):
            is_folder = kind == "directory"
            hint = "ls lists it, get copies it" if is_folder else None
            raise InputError(f"{path!r} is {'a folder' if is_folder else f'a {kind}'}", where=self._where, hint=hint)

    def _get_file(self, path: str, to: Path, size: int, tell: Callable[[int], None] | None) -> Copied:
        with to.open("xb") as file:
            self._run(["cat", "--", inside(path)], path, _Counted(file, tell))
            file.flush()
            os.fsync(file.fileno())
            got = file.tell()
        if got != size:
            what = f"{path!r} had {size:,} bytes, and {got:,} came: it is being written to"
            raise ChangedError(what, where=self._where, hint="try again when nothing writes to it")
        return Copied(to, 1, size, ())

    def _get_folder(self, path: str, to: Path, tell: Callable[[int], None] | None) -> Copied:
        """Unpack an archive while it arrives: a thread reads from the cluster into a pipe."""
        to.mkdir()
        reading, writing = os.pipe()
        failures: list[BaseException] = []

        def send() -> None:
            try:
                with os.fdopen(writing, "wb") as pipe:
                    self._run(["tar", "-c", "-f", "-", "-C", inside(path), "."], path, _Counted(pipe, tell))
            except BaseException as error:  # told by the one who waits
                failures.append(error)

        sender = threading.Thread(target=send, name="volume get", daemon=True)
        sender.start()
        # Not waited for after a Ctrl-C: the command may be silent, and ends with its pod.
        try:
            with os.fdopen(reading, "rb") as pipe:
                copied = unpack(pipe, to)
                while pipe.read(2**16):  # the blocks that fill up an archive
                    pass
        except tarfile.TarError as error:
            sender.join(ENDING_S)
            raise _first(failures) or DataFaultError(f"the archive of {path!r} is broken: {error}") from error
        sender.join()
        if failure := _first(failures):
            raise failure
        return copied

    def _run(self, argv: Sequence[str], path: str, into: Writer | None = None) -> Done:
        done = self.cluster.run_in(self.pod, argv, container=CONTAINER, into=into)
        if done.code != 0:
            raise refusal(argv[0], done.code, done.err.decode(errors="replace"), path, self._where)
        return done

    @property
    def _where(self) -> str:
        return f"volume {self.claim}"


def refusal(program: str, code: int, said: str, path: str, where: str) -> StokerError:
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
class Copied:
    """What `get` brought."""

    path: Path
    files: int
    size: int
    left_out: tuple[str, ...] = field(default=())
    """Members that would lie, or lead, outside of the folder, or that are no files."""


def destination(to: Path, path: str, claim: str, *, force: bool = False) -> Path:
    """Say where a copy goes, as `cp` does: into a folder that is there, under its own name. Nothing else is there."""
    name = posixpath.basename(inside(path)) if inside(path) != MOUNT else claim
    target = to / name if to.is_dir() else to
    if os.path.lexists(target) and not force:
        raise ConflictError("is there already", where=target, hint="name another place, or give --force")
    return target


def unpack(stream: BinaryIO, to: Path) -> Copied:
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
    return Copied(to, files, size, tuple(left_out))


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


def put(made: Path, target: Path, *, force: bool) -> None:
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
    discard(old)


def discard(path: Path) -> None:
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
