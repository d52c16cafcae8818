"""Checkpoints in a folder or a bucket: whole or absent, checked by their digest, written while training goes on.

A checkpoint is what `torch.save` writes, and behind it the sha256 of that: a file cut short, or with a flipped bit, is
known as damaged, and the one before it is taken. Only rank 0 comes here; the others get what it read by broadcast.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch

from stoker.errors import ConflictError, InputError, StokerError, VerificationError
from stoker.storage import Store, join, local_path, open_store, open_writable, redacted, split
from stoker.storage.local import is_temporary, translate_os_errors

VERSION = 1
BEST_NAME = "best.pt"
LOCK_NAME = ".lock"
_NAME = re.compile(r"step-(\d{10})\.pt")
_MAGIC = b"stoker-sha256:"
_TRAILER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size

Checkpoint = dict[str, Any]
log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one training: the newest `keep` of them, and the best."""

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
        self._last_failed = False  # the last one that is known of

    def load_newest(self) -> tuple[str, Checkpoint] | None:
        """Read the newest checkpoint that is whole, and tell of each one that is not; None where there are none."""
        names = self._names()
        for name in reversed(names):
            try:
                return name, decode_checkpoint(self._store.get(name), where=join(self.url, name))
            except VerificationError as error:
                log.warning("%s; going back to the one before it", error)
                self._on_damaged(name, error.what)
        if names:
            raise InputError(
                f"all {len(names)} checkpoints here are damaged",
                where=self.url,
                hint="give another --checkpoint-dir to begin anew, or bring back a copy of one of them",
            )
        return None

    def load_best(self) -> tuple[str, Checkpoint] | None:
        """Read the best checkpoint, where one was validated."""
        if all(entry.name != BEST_NAME for entry in self._store.list(BEST_NAME)):
            return None
        return BEST_NAME, decode_checkpoint(self._store.get(BEST_NAME), where=join(self.url, BEST_NAME))

    @property
    def is_writing(self) -> bool:
        """Whether one is still being written."""
        return self._write_future is not None and not self._write_future.done()

    def save(self, state: Checkpoint, step: int, *, best: bool = False) -> None:
        """Copy the state, and write it in the background.

        If the one before it failed, that is a warning, and if the one before that did too, it is raised.
        """
        before = self._last_failed
        try:
            self.wait()
        except (StokerError, OSError) as error:
            if before:
                raise
            log.warning("a checkpoint was not written: %s; the next one is tried", error)
        copy = {"stoker": VERSION, **_copy_to_cpu(state)}
        self._write_future = self._pool.submit(self._write, copy, step, best)

    def wait(self) -> None:
        """Wait until nothing is being written; raise what went wrong."""
        writing, self._write_future = self._write_future, None
        if writing is not None:
            self._last_failed = True
            writing.result()
            self._last_failed = False

    def close(self) -> None:
        """Wait for the writer, and let others write here."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()
            if self._lock is not None:
                self._lock.close()

    def _write(self, state: Checkpoint, step: int, best: bool) -> None:
        started = time.monotonic()
        if best:  # first: a kill between the two repeats the validation, and writes both again
            self._put(BEST_NAME, state)
        name = f"step-{step:010d}.pt"
        self._put(name, state)
        self._on_written(join(self.url, name), step, time.monotonic() - started)
        # What stands above this step was damaged, or was taken back with it.
        names = self._names()
        older = [one for one in names if one <= name]
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

    def _names(self) -> list[str]:
        return sorted(entry.name for entry in self._store.list("step-") if _NAME.fullmatch(entry.name))


def decode_checkpoint(data: bytes, *, where: str) -> Checkpoint:
    """Make a state of the bytes of a checkpoint of ours; refuse damaged ones. Nothing in it is executed."""
    body, trailer = data[:-_TRAILER_BYTES], data[-_TRAILER_BYTES:]
    if trailer[: len(_MAGIC)] != _MAGIC:
        raise VerificationError("this checkpoint is damaged: its end is missing", where=where)
    if trailer[len(_MAGIC) :] != hashlib.sha256(body).digest():
        raise VerificationError("this checkpoint is damaged: its sha256 is another", where=where)
    state: Checkpoint = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    if state.get("stoker") != VERSION:
        raise InputError(f"a checkpoint of version {state.get('stoker')!r}, and this reads {VERSION}", where=where)
    return state


class Weights(NamedTuple):
    """The weights of a model, and their average where a checkpoint has one."""

    model: dict[str, torch.Tensor]
    ema: dict[str, torch.Tensor] | None = None


def read_weights(url: str) -> Weights:
    """Read the weights of a model: a checkpoint of ours, or what torch.save made of a state_dict, alone or named."""
    folder, name = split(url)
    path = local_path(folder)
    data = open_store(folder if path is None else str(path.expanduser())).get(name)
    if data[-_TRAILER_BYTES:][: len(_MAGIC)] == _MAGIC:
        state = decode_checkpoint(data, where=redacted(url))
        return Weights(state["model"], state.get("ema"))
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(f"no weights that can be loaded safely: {_first_line(error)}", where=redacted(url)) from error
    for name in ("model", "state_dict"):
        found = found[name] if isinstance(found, dict) and isinstance(found.get(name), dict) else found
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise InputError("holds no state_dict of a model", where=redacted(url))
    return Weights({name.removeprefix("module.").removeprefix("_orig_mod."): value for name, value in found.items()})


def load_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor], *, where: str) -> None:
    """Put weights into a model; tell by name what does not fit."""
    own = model.state_dict()
    odd = [
        *(f"{name} is missing" for name in own if name not in weights),
        *(f"{name} is not in the model" for name in weights if name not in own),
        *(
            f"{name} is {_shape(weights[name])} and not {_shape(tensor)}"
            for name, tensor in own.items()
            if name in weights and weights[name].shape != tensor.shape
        ),
    ]
    if odd:
        more = f", and {len(odd) - 5} more" if len(odd) > 5 else ""
        raise InputError(f"these weights do not fit the model: {', '.join(odd[:5])}{more}", where=where)
    model.load_state_dict(weights)


def _shape(tensor: torch.Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


class _HashingWriter(io.RawIOBase):
    """Passes on what is written, and digests it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.sha256 = file, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return self._file.write(data)


def _write_file(state: Checkpoint, path: Path) -> None:
    """Write a checkpoint that is on the disk when this returns."""
    with translate_os_errors(path), path.open("xb") as file:
        hashing = _HashingWriter(file)
        try:
            torch.save(state, cast(IO[bytes], hashing))
        except RuntimeError as error:  # torch hides what the system said in one of these
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
        file.write(_MAGIC + hashing.sha256.digest())
        file.flush()
        os.fsync(file.fileno())


def _fsync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copy_to_cpu(value: Any) -> Any:
    """Copy a state into memory of its own, off the device: training may go on."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy_to_cpu(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copy_to_cpu, value))
    return value


def _lock_directory(folder: Path, patience_s: float) -> IO[str] | None:
    """Hold the folder for this training alone; one that is just ending may take a moment to let go."""
    with translate_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_NAME).open("a+")
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(0.1)
                continue
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise ConflictError(
                f"{holder} writes checkpoints here",
                where=folder,
                hint="wait for its end, stop it, or give another --checkpoint-dir",
            ) from None
        except OSError as error:
            log.warning("%s: cannot be locked (%s); nothing keeps two trainings from writing here", folder, error)
            break
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}")
    file.flush()
    for left in folder.iterdir():
        if is_temporary(left.name):  # of a training that was killed while it wrote
            left.unlink(missing_ok=True)
    return file
