"""Checkpoints in a directory or bucket: written atomically in the background, verified by their digest.

A checkpoint is a file in the format of its framework, followed by its sha256. Truncated files and flipped bits are
detected, and the previous checkpoint is used. Only rank 0 reads and writes checkpoints; the other ranks receive them by
broadcast.
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
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from stoker.errors import ConflictError, InputError, StokerError, VerificationError
from stoker.storage import Store, join_url, local_path, open_store, open_writable, redacted
from stoker.storage.local import is_temporary, translate_os_errors
from stoker.trainers.checkpoint_files import find_best, list_step_names, step_name

VERSION = 1
LOCK_NAME = ".lock"
MAX_CHECKPOINT_BYTES = 64 << 30
_MAGIC = b"stoker-sha256:"
_TRAILER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size

Checkpoint = dict[str, Any]
CheckpointMeta = dict[str, Any]
"""The part of a checkpoint that is neither weights nor optimizer state: its key `meta`."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """How checkpoints of one framework are encoded; `copy` copies a state, so that training can continue."""

    suffix: str
    write: Callable[[Checkpoint, IO[bytes]], None]
    read: Callable[[bytes], Checkpoint]
    copy: Callable[[Checkpoint], Checkpoint]


class CheckpointStore:
    """The checkpoints of one training: the newest `keep`, and the best."""

    def __init__(
        self,
        url: str,
        checkpoint_format: CheckpointFormat,
        *,
        keep: int = 3,
        on_written: Callable[[str, int, float], None] = lambda *_: None,
        on_damaged: Callable[[str, str], None] = lambda *_: None,
        write: bool = True,
        lock_timeout_s: float = 10.0,
    ) -> None:
        path = local_path(url)
        url = url if path is None else str(path.expanduser())
        self.url, self._format = redacted(url), checkpoint_format
        self._directory = None if path is None else Path(url)
        self._store: Store = open_writable(url) if write else open_store(url)
        self._keep, self._on_written, self._on_damaged = max(1, keep), on_written, on_damaged
        self._lock = _lock_directory(self._directory, lock_timeout_s) if write and self._directory else None
        self._pool = ThreadPoolExecutor(1, "stoker-checkpoint")
        self._write_future: Future[None] | None = None
        self._last_failed = False  # the last write whose result is known

    def load_newest(self) -> tuple[str, Checkpoint] | None:
        """Read the newest intact checkpoint, and report damaged ones; None if there are no checkpoints."""
        names = list_step_names(self._store, self._format.suffix)
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

    def newest_name(self) -> str | None:
        """Return the name of the newest checkpoint, without reading it; None if there are no checkpoints."""
        return next(reversed(list_step_names(self._store, self._format.suffix)), None)

    def load_best(self) -> tuple[str, Checkpoint] | None:
        """Read the checkpoint with the best validation; None if there is none."""
        name = find_best(self._store, self._format.suffix)
        return None if name is None else (name, self._read(name))

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
        copy = {"stoker": VERSION, **self._format.copy(state)}
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
            self._put(f"best{self._format.suffix}", state)
        name = step_name(step, self._format.suffix)
        self._put(name, state)
        self._on_written(join_url(self.url, name), step, time.monotonic() - started)
        # Checkpoints of later steps are damaged, or from before a fallback to an older checkpoint.
        names = list_step_names(self._store, self._format.suffix)
        older = [other for other in names if other <= name]
        for old in [*older[: -self._keep], *names[len(older) :]]:
            self._store.delete(old)

    def _put(self, name: str, state: Checkpoint) -> None:
        if self._directory is None:
            with tempfile.TemporaryDirectory(prefix="stoker-checkpoint-") as folder:
                path = Path(folder, name)
                _write_file(self._format, state, path)
                self._store.put(name, path)
            return
        path = self._directory / f".{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        try:
            _write_file(self._format, state, path)
            self._store.put(name, path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        _fsync_directory(self._directory)

    def _read(self, name: str) -> Checkpoint:
        data = self._store.get(name, max_bytes=MAX_CHECKPOINT_BYTES)
        return read_checkpoint(data, self._format, where=join_url(self.url, name))


def read_checkpoint(data: bytes, checkpoint_format: CheckpointFormat, *, where: str) -> Checkpoint:
    """Decode a checkpoint; raise VerificationError if it is damaged. No code in it is executed."""
    body, trailer = data[:-_TRAILER_BYTES], data[-_TRAILER_BYTES:]
    if trailer[: len(_MAGIC)] != _MAGIC:
        raise VerificationError("checkpoint is corrupt: truncated", where=where)
    if trailer[len(_MAGIC) :] != hashlib.sha256(body).digest():
        raise VerificationError("checkpoint is corrupt: sha256 does not match", where=where)
    state = checkpoint_format.read(body)
    if state.get("stoker") != VERSION:
        raise InputError(f"checkpoint has version {state.get('stoker')!r}, expected {VERSION}", where=where)
    return state


def has_digest(data: bytes) -> bool:
    """Return whether a file ends like a checkpoint of stoker."""
    return data[-_TRAILER_BYTES:][: len(_MAGIC)] == _MAGIC


def find_mismatches(expected: Mapping[str, Any], weights: Mapping[str, Any]) -> str:
    """Return how weights differ from those of a model in names and shapes, in one sentence; empty if they match."""
    mismatches = [
        *(f"{name} is missing" for name in expected if name not in weights),
        *(f"{name} is not in the model" for name in weights if name not in expected),
        *(
            f"{name} has shape {_shape(weights[name])}, expected {_shape(array)}"
            for name, array in expected.items()
            if name in weights and tuple(weights[name].shape) != tuple(array.shape)
        ),
    ]
    more = f", and {len(mismatches) - 5} more" if len(mismatches) > 5 else ""
    return f"weights do not match the model: {', '.join(mismatches[:5])}{more}" if mismatches else ""


def _shape(array: Any) -> str:
    return "×".join(map(str, array.shape)) or "scalar"


class _HashingWriter(io.RawIOBase):
    """A writable file that computes the sha256 of what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.sha256 = file, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return self._file.write(data)


def _write_file(checkpoint_format: CheckpointFormat, state: Checkpoint, path: Path) -> None:
    """Write a checkpoint and its digest, and sync it to disk."""
    with translate_os_errors(path), path.open("xb") as file:
        hashing = _HashingWriter(file)
        try:
            checkpoint_format.write(state, cast(IO[bytes], hashing))
        except RuntimeError as error:  # torch wraps errors of the operating system
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
        file.write(_MAGIC + hashing.sha256.digest())
        file.flush()
        os.fsync(file.fileno())


def _fsync_directory(directory: Path) -> None:
    with translate_os_errors(directory):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
    try:
        _claim_directory(directory, file)
    except BaseException:
        file.close()
        raise
    return file


def _claim_directory(directory: Path, file: IO[str]) -> None:
    """Remove what a training that was killed while writing has left, and write into the lock who holds it."""
    with translate_os_errors(directory):
        for path in directory.iterdir():
            if is_temporary(path.name):
                path.unlink(missing_ok=True)
        file.truncate(0)
        # Not buffered: if the disk is full, closing the file would try to write it again.
        os.write(file.fileno(), f"process {os.getpid()} on {os.uname().nodename}".encode())
