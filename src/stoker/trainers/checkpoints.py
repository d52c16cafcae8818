"""Checkpoints in a directory or bucket: written atomically in the background, verified by their digest.

A checkpoint is the output of `torch.save` followed by its sha256. Truncated files and flipped bits are detected, and
the previous checkpoint is used. Only rank 0 reads and writes checkpoints; the other ranks receive them by broadcast.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch

from stoker.errors import ConflictError, InputError, StokerError, VerificationError
from stoker.storage import Store, join_url, local_path, open_store, open_writable, redacted, split_url
from stoker.storage.local import is_temporary, translate_os_errors
from stoker.trainers.checkpoint_files import BEST_NAME, has_best, list_step_names, step_name

VERSION = 1
LOCK_NAME = ".lock"
MAX_CHECKPOINT_BYTES = 64 << 30
_MAGIC = b"stoker-sha256:"
_TRAILER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size

Checkpoint = dict[str, Any]
CheckpointMeta = dict[str, Any]
"""The part of a checkpoint that is neither weights nor optimizer state: its key `meta`."""
log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one training: the newest `keep`, and the best."""

    def __init__(
        self,
        url: str,
        *,
        keep: int = 3,
        on_written: Callable[[str, int, float], None] = lambda *_: None,
        on_damaged: Callable[[str, str], None] = lambda *_: None,
        write: bool = True,
        lock_timeout_s: float = 10.0,
    ) -> None:
        path = local_path(url)
        url = url if path is None else str(path.expanduser())
        self.url = redacted(url)
        self._directory = None if path is None else Path(url)
        self._store: Store = open_writable(url) if write else open_store(url)
        self._keep, self._on_written, self._on_damaged = max(1, keep), on_written, on_damaged
        self._lock = _lock_directory(self._directory, lock_timeout_s) if write and self._directory else None
        self._pool = ThreadPoolExecutor(1, "stoker-checkpoint")
        self._write_future: Future[None] | None = None
        self._last_failed = False  # the last write whose result is known

    def load_newest(self) -> tuple[str, Checkpoint] | None:
        """Read the newest intact checkpoint, and report damaged ones; None if there are no checkpoints."""
        names = list_step_names(self._store)
        for name in reversed(names):
            try:
                return name, self._read(name)
            except VerificationError as error:
                log.warning("%s; using the previous one", error)
                self._on_damaged(name, error.what)
        if names:
            raise InputError(
                f"all {len(names)} checkpoints are corrupt",
                where=self.url,
                hint="restore one from a backup, or set another --checkpoint-dir to start over",
            )
        return None

    def load_best(self) -> tuple[str, Checkpoint] | None:
        """Read the checkpoint with the best validation; None if there is none."""
        if not has_best(self._store):
            return None
        return BEST_NAME, self._read(BEST_NAME)

    def load(self, name: str) -> tuple[str, Checkpoint]:
        """Read the checkpoint with this name; raise NotFoundError if there is none."""
        return name, self._read(name)

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._write_future is not None and not self._write_future.done()

    def save(self, state: Checkpoint, step: int, *, best: bool = False) -> None:
        """Copy the state and write it in the background.

        Log a warning if the last write failed; raise the error if the one before that failed too.
        """
        failed_before = self._last_failed
        try:
            self.wait()
        except (StokerError, OSError) as error:
            if failed_before:
                raise
            log.warning("checkpoint was not written: %s; continuing with the next one", error)
        copy = {"stoker": VERSION, **_copy_to_cpu(state)}
        self._write_future = self._pool.submit(self._write, copy, step, best)

    def wait(self) -> None:
        """Wait for the current write; raise its error."""
        future, self._write_future = self._write_future, None
        if future is not None:
            self._last_failed = True
            future.result()
            self._last_failed = False

    def close(self) -> None:
        """Wait for the current write and unlock the directory."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()
            if self._lock is not None:
                self._lock.close()

    def _write(self, state: Checkpoint, step: int, best: bool) -> None:
        started = time.monotonic()
        if best:  # first: after a kill between the two, the validation is repeated and both are written again
            self._put(BEST_NAME, state)
        name = step_name(step)
        self._put(name, state)
        self._on_written(join_url(self.url, name), step, time.monotonic() - started)
        # Checkpoints of later steps are damaged, or from before a fallback to an older checkpoint.
        names = list_step_names(self._store)
        older = [other for other in names if other <= name]
        for old in [*older[: -self._keep], *names[len(older) :]]:
            self._store.delete(old)

    def _put(self, name: str, state: Checkpoint) -> None:
        if self._directory is None:
            with tempfile.TemporaryDirectory(prefix="stoker-checkpoint-") as folder:
                path = Path(folder, name)
                _write_file(state, path)
                self._store.put(name, path)
            return
        path = self._directory / f".{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        try:
            _write_file(state, path)
            self._store.put(name, path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        _fsync_directory(self._directory)

    def _read(self, name: str) -> Checkpoint:
        data = self._store.get(name, max_bytes=MAX_CHECKPOINT_BYTES)
        return decode_checkpoint(data, where=join_url(self.url, name))


def decode_checkpoint(data: bytes, *, where: str) -> Checkpoint:
    """Decode a checkpoint; raise VerificationError if it is damaged. No code in it is executed."""
    body, trailer = data[:-_TRAILER_BYTES], data[-_TRAILER_BYTES:]
    if trailer[: len(_MAGIC)] != _MAGIC:
        raise VerificationError("checkpoint is corrupt: truncated", where=where)
    if trailer[len(_MAGIC) :] != hashlib.sha256(body).digest():
        raise VerificationError("checkpoint is corrupt: sha256 does not match", where=where)
    state: Checkpoint = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    if state.get("stoker") != VERSION:
        raise InputError(f"checkpoint has version {state.get('stoker')!r}, expected {VERSION}", where=where)
    return state


class Weights(NamedTuple):
    """The weights of a model, and their moving average if the checkpoint has one."""

    model: dict[str, torch.Tensor]
    ema: dict[str, torch.Tensor] | None = None


def read_weights(url: str) -> Weights:
    """Read weights from a checkpoint of stoker, or from a state_dict saved by torch.save, plain or in a dict."""
    folder, name = split_url(url)
    path = local_path(folder)
    data = open_store(folder if path is None else str(path.expanduser())).get(name)
    if data[-_TRAILER_BYTES:][: len(_MAGIC)] == _MAGIC:
        state = decode_checkpoint(data, where=redacted(url))
        return Weights(state["model"], state.get("ema"))
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(
            f"cannot be loaded with weights_only=True: {_first_line(error)}", where=redacted(url)
        ) from error
    for key in ("model", "state_dict"):
        loaded = loaded[key] if isinstance(loaded, dict) and isinstance(loaded.get(key), dict) else loaded
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise InputError("contains no state_dict of a model", where=redacted(url))
    return Weights({name.removeprefix("module.").removeprefix("_orig_mod."): value for name, value in loaded.items()})


def load_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor], *, where: str) -> None:
    """Load weights into a model; raise InputError naming the parameters that do not match."""
    own = model.state_dict()
    mismatches = [
        *(f"{name} is missing" for name in own if name not in weights),
        *(f"{name} is not in the model" for name in weights if name not in own),
        *(
            f"{name} has shape {_shape(weights[name])}, expected {_shape(tensor)}"
            for name, tensor in own.items()
            if name in weights and weights[name].shape != tensor.shape
        ),
    ]
    if mismatches:
        more = f", and {len(mismatches) - 5} more" if len(mismatches) > 5 else ""
        raise InputError(f"weights do not match the model: {', '.join(mismatches[:5])}{more}", where=where)
    model.load_state_dict(weights)


def _shape(tensor: torch.Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "scalar"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


class _HashingWriter(io.RawIOBase):
    """A writable file that computes the sha256 of what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.sha256 = file, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return self._file.write(data)


def _write_file(state: Checkpoint, path: Path) -> None:
    """Write a checkpoint and its digest, and sync it to disk."""
    with translate_os_errors(path), path.open("xb") as file:
        hashing = _HashingWriter(file)
        try:
            torch.save(state, cast(IO[bytes], hashing))
        except RuntimeError as error:  # torch wraps errors of the operating system
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
        file.write(_MAGIC + hashing.sha256.digest())
        file.flush()
        os.fsync(file.fileno())


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copy_to_cpu(value: Any) -> Any:
    """Copy a state to new CPU memory, so that training can continue."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy_to_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copy_to_cpu, value))
    return value


def _lock_directory(directory: Path, timeout_s: float) -> IO[str] | None:
    """Lock the directory for this training; wait for one that is just exiting to unlock it."""
    with translate_os_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / LOCK_NAME).open("a+")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise ConflictError(
                f"{holder} is writing checkpoints here",
                where=directory,
                hint="wait until it exits, stop it, or set another --checkpoint-dir",
            ) from None
        except OSError as error:
            log.warning(
                "%s: cannot lock the directory (%s); make sure that no other training run writes here", directory, error
            )
            break
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}")
    file.flush()
    for path in directory.iterdir():
        if is_temporary(path.name):  # left by a training that was killed while writing
            path.unlink(missing_ok=True)
    return file
