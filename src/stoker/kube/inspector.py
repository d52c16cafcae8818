"""Inspect a volume: run `ls`, `stat`, `cat` and `tar` in an ephemeral pod that mounts the claim.

The pod is always deleted afterwards; if this process is killed, activeDeadlineSeconds terminates it.
"""

from __future__ import annotations

import os
import posixpath
import secrets
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import (
    AccessDeniedError,
    ConflictError,
    InputError,
    NotFoundError,
    ObjectChangedError,
    StokerError,
    UnavailableError,
    VerificationError,
)
from stoker.kube.claims import find_mounting_pods, get_claim, get_release_hint, is_shared
from stoker.kube.conditions import get_phase, is_terminating
from stoker.kube.ephemeral_pod import delete_finished, ephemeral_pod
from stoker.kube.local_copy import CopyResult, extract_tar, move_into_place, remove_path, resolve_local_target
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
MOUNT_PATH = "/volume"
START_TIMEOUT_S = 120.0
EXIT_TIMEOUT_S = 30.0
"""How long to wait for the exit code of `tar` after its output was broken."""
DEADLINES_S = {"ls": 3600, "cat": 12 * 3600, "get": 12 * 3600, "shell": 12 * 3600}
"""activeDeadlineSeconds of the pod, by action."""


# --- The pod


def build_inspector_pod(
    claim: str, action: str, *, image: str = IMAGE, write: bool = False, name: str | None = None
) -> Manifest:
    """Build a pod that mounts a claim, read-only unless `write`."""
    # DAC_OVERRIDE lets root read any file, and the baseline pod security level allows it.
    capabilities = ["CHOWN", "DAC_OVERRIDE", "FOWNER"] if write else ["DAC_OVERRIDE"]
    security = restricted_security_context()
    security["capabilities"] = {**security["capabilities"], "add": capabilities}
    container = {
        "name": MAIN_CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", str(DEADLINES_S[action])],
        "workingDir": MOUNT_PATH,
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}},
        "securityContext": {**security, "readOnlyRootFilesystem": action != "shell"},
        "volumeMounts": [{"name": "volume", "mountPath": MOUNT_PATH, "readOnly": not write}],
    }
    spec = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": DEADLINES_S[action],
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsUser": 0, "runAsGroup": 0, "seccompProfile": {"type": "RuntimeDefault"}},
        # A disk may be attachable to GPU nodes only.
        "tolerations": [{"key": GPU_RESOURCE, "operator": "Exists"}],
        "containers": [container],
        "volumes": [{"name": "volume", "persistentVolumeClaim": {"claimName": claim}}],
    }
    return build_object("v1", "Pod", name or generate_pod_name(claim), {PART_LABEL: "inspector"}, spec=spec)


def generate_pod_name(claim: str) -> str:
    """Return a unique pod name."""
    return f"inspect-{claim[:40].rstrip('-.')}-{secrets.token_hex(3)}"


def volume_path(path: str) -> str:
    """Return a path of the volume as the pod sees it; `..` cannot leave the volume."""
    if "\0" in path:
        raise InputError("a path cannot contain a null byte")
    return posixpath.normpath(f"{MOUNT_PATH}/{posixpath.normpath(f'/{path}').lstrip('/')}")


def check_inspectable(claim: Manifest, pods: Sequence[Manifest], *, write: bool) -> None:
    """Raise if a claim cannot be mounted without disturbing another pod, or has no volume yet."""
    name, phase = claim["metadata"]["name"], get_phase(claim)
    if is_terminating(claim):
        raise ConflictError(f"volume {name} is being deleted")
    if holders := [] if is_shared(claim) else find_mounting_pods(pods, name):
        raise ConflictError(
            f"volume {name} can be mounted on only one node, and {holders[0]} is using it",
            hint=get_release_hint(holders),
        )
    if phase == "Lost":
        volume = claim["spec"].get("volumeName")
        raise NotFoundError(f"volume {name} is lost: its PersistentVolume {volume} was deleted")
    if phase != "Bound" and not write:
        hint = "the first job that mounts it binds it; check with: stoker volume list"
        raise ConflictError(f"volume {name} is not bound yet, so it is empty", hint=hint)
    if write and set(claim["spec"].get("accessModes") or ()) == {ACCESS_MODES["rox"]}:
        raise InputError(f"volume {name} is read-only (rox)", hint="omit --write")


@contextmanager
def open_inspector(
    client: KubeClient,
    name: str,
    action: str,
    *,
    image: str = IMAGE,
    write: bool = False,
    wait_s: float = START_TIMEOUT_S,
    report: Callable[[str], object],
) -> Iterator[Inspection]:
    """Run an inspector pod for a claim and yield an Inspection; delete the pod on exit."""
    claim, pods = get_claim(client, name), client.list_objects("Pod")
    inspectors = (pod for pod in pods if (pod["metadata"].get("labels") or {}).get(PART_LABEL) == "inspector")
    delete_finished(inspectors, client)
    check_inspectable(claim, pods, write=write)
    pod = build_inspector_pod(name, action, image=image, write=write)
    with ephemeral_pod(client, pod, wait_s=wait_s, report=report) as pod_name:
        yield Inspection(client, name, pod_name)


# --- Commands in the pod


@dataclass(frozen=True, slots=True)
class Inspection:
    """A running inspector pod: the content of a volume."""

    client: KubeClient
    claim: str
    pod: str

    def ls(self, path: str) -> bytes:
        """List a folder or a file, as `ls -la` does."""
        return self._run(["ls", "-la", "--", volume_path(path)], path).stdout

    def cat(self, path: str, output: Writer) -> None:
        """Write the content of a file to `output` as it arrives."""
        self._check_regular(path, self.stat(path)[0])
        self._run(["cat", "--", volume_path(path)], path, output)

    def get(
        self, path: str, to: Path, *, force: bool = False, on_bytes: Callable[[int], None] | None = None
    ) -> CopyResult:
        """Copy a file or a folder to this machine atomically."""
        kind, size = self.stat(path)
        target = resolve_destination(to, path, self.claim, force=force)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.part")
        try:
            if kind == "directory":
                copied = self._get_folder(path, partial, on_bytes)
            else:
                self._check_regular(path, kind)
                copied = self._get_file(path, partial, size, on_bytes)
            move_into_place(partial, target, force=force)
        finally:
            remove_path(partial)
        return CopyResult(target, copied.files, copied.size, copied.skipped)

    def stat(self, path: str) -> tuple[str, int]:
        """Return the type (`regular file`, `directory`) and the size of a path; follow links."""
        output = self._run(["stat", "-L", "-c", "%F:%s", "--", volume_path(path)], path).stdout
        kind, _, size = output.decode(errors="replace").strip().rpartition(":")
        return kind, int(size)

    def _check_regular(self, path: str, kind: str) -> None:
        if kind == "directory":
            raise _to_folder_error(path, self._where)
        if not kind.startswith("regular"):
            raise InputError(f"{path!r} is a {kind}", where=self._where)

    def _get_file(self, path: str, to: Path, size: int, on_bytes: Callable[[int], None] | None) -> CopyResult:
        with to.open("xb") as file:
            self._run(["cat", "--", volume_path(path)], path, _CountingWriter(file, on_bytes))
            file.flush()
            os.fsync(file.fileno())
            received = file.tell()
        if received != size:
            what = f"{path!r} changed while it was copied: expected {size:,} bytes, received {received:,}"
            raise ObjectChangedError(what, where=self._where, hint="try again when nothing writes to it")
        return CopyResult(to, 1, size, ())

    def _get_folder(self, path: str, to: Path, on_bytes: Callable[[int], None] | None) -> CopyResult:
        """Extract an archive while it arrives: a thread writes it from the cluster into a pipe."""
        to.mkdir()
        reading, writing = os.pipe()
        failures: list[BaseException] = []

        def receive() -> None:
            try:
                with os.fdopen(writing, "wb") as pipe:
                    argv = ["tar", "-c", "-f", "-", "-C", volume_path(path), "."]
                    self._run(argv, path, _CountingWriter(pipe, on_bytes))
            except BaseException as error:  # raised below, in the waiting thread
                failures.append(error)

        receiver = threading.Thread(target=receive, name="volume get", daemon=True)
        receiver.start()
        # Not joined after Ctrl-C: the command may be silent, and exits with its pod.
        try:
            with os.fdopen(reading, "rb") as pipe:
                copied = extract_tar(pipe, to)
                while pipe.read(2**16):  # the padding at the end of the archive
                    pass
        except tarfile.TarError as error:
            receiver.join(EXIT_TIMEOUT_S)
            raise _first_failure(failures) or VerificationError(
                f"the archive of {path!r} is corrupt: {error}"
            ) from error
        receiver.join()
        if failure := _first_failure(failures):
            raise failure
        return copied

    def _run(self, argv: Sequence[str], path: str, output: Writer | None = None) -> ExecResult:
        result = self.client.exec_in_pod(self.pod, argv, container=MAIN_CONTAINER, output=output)
        if result.exit_code != 0:
            raise to_path_error(argv[0], result.exit_code, result.stderr.decode(errors="replace"), path, self._where)
        return result

    @property
    def _where(self) -> str:
        return f"volume {self.claim}"


def resolve_destination(to: Path, path: str, claim: str, *, force: bool = False) -> Path:
    """Return where a copy of a path goes; a copy of the whole volume is named after the claim."""
    inside = volume_path(path)
    return resolve_local_target(to, posixpath.basename(inside) if inside != MOUNT_PATH else claim, force=force)


def to_path_error(program: str, code: int, stderr: str, path: str, where: str) -> StokerError:
    """Return the error for a program that failed on a path."""
    message = " ".join(stderr.split())
    if "No such file or directory" in message:
        return NotFoundError(f"{path!r}: no such file or directory", where=where)
    if "Is a directory" in message:
        return _to_folder_error(path, where)
    if "Not a directory" in message:
        return InputError(f"a parent of {path!r} is not a directory", where=where)
    if "Permission denied" in message or "Operation not permitted" in message:
        return AccessDeniedError(f"{path!r}: permission denied, even for root", where=where)
    return UnavailableError(f"{program} failed with exit code {code}: {message[:300]}", where=where)


def _to_folder_error(path: str, where: str) -> InputError:
    return InputError(f"{path!r} is a directory", where=where, hint="list it with ls, or copy it with get")


def _first_failure(failures: Sequence[BaseException]) -> BaseException | None:
    """Return the first failure that is not a broken pipe, which only shows that the other side failed."""
    return next((failure for failure in failures if not isinstance(failure, BrokenPipeError)), None)


class _CountingWriter:
    """Writer that reports the number of bytes it has passed on to another writer."""

    def __init__(self, output: Any, on_bytes: Callable[[int], None] | None) -> None:
        self._output, self._on_bytes = output, on_bytes or (lambda _: None)

    def write(self, data: bytes) -> None:
        self._output.write(data)
        self._on_bytes(len(data))
