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

from stoker.errors import ConflictError, DataFaultError, InputError, StokerError
from stoker.storage import Store, join, local_path, open_store, open_writable, shown, split
from stoker.storage.local import explained, is_temporary

VERSION = 1
BEST = "best.pt"
LOCK = ".lock"
_NAME = re.compile(r"step-(\d{10})\.pt")
_MAGIC = b"stoker-sha256:"
_TRAILER = len(_MAGIC) + hashlib.sha256().digest_size

State = dict[str, Any]
log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one training: the newest `keep` of them, and the best."""

    def __init__(
        self,
        url: str,
        *,
        keep: int = 3,
        written: Callable[[str, int, float], None] = lambda *_: None,
        damaged: Callable[[str, str], None] = lambda *_: None,
        write: bool = True,
        patience_s: float = 10.0,
    ) -> None:
        path = local_path(url)
        url = url if path is None else str(path.expanduser())
        self.url = shown(url)
        self._folder = None if path is None else Path(url)
        self._store: Store = open_writable(url) if write else open_store(url)
        self._keep, self._written, self._damaged = max(1, keep), written, damaged
        self._lock = _locked(self._folder, patience_s) if write and self._folder else None
        self._pool = ThreadPoolExecutor(1, "stoker-checkpoint")
        self._writing: Future[None] | None = None
        self._failed = False  # the last one that is known of

    def newest(self) -> tuple[str, State] | None:
        """Read the newest checkpoint that is whole, and tell of each one that is not; None where there are none."""
        names = self._names()
        for name in reversed(names):
            try:
                return name, unpack(self._store.get(name), where=join(self.url, name))
            except DataFaultError as error:
                log.warning("%s; going back to the one before it", error)
                self._damaged(name, error.what)
        if names:
            raise InputError(
                f"all {len(names)} checkpoints here are damaged",
                where=self.url,
                hint="give another --checkpoint-dir to begin anew, or bring back a copy of one of them",
            )
        return None

    def best(self) -> tuple[str, State] | None:
        """Read the best checkpoint, where one was validated."""
        if all(entry.name != BEST for entry in self._store.list(BEST)):
            return None
        return BEST, unpack(self._store.get(BEST), where=join(self.url, BEST))

    @property
    def busy(self) -> bool:
        """Whether one is still being written."""
        return self._writing is not None and not self._writing.done()

    def save(self, state: State, step: int, *, best: bool = False) -> None:
        """Copy the state, and write it in the background.

        If the one before it failed, that is a warning, and if the one before that did too, it is raised.
        """
        before = self._failed
        try:
            self.wait()
        except (StokerError, OSError) as error:
            if before:
                raise
            log.warning("a checkpoint was not written: %s; the next one is tried", error)
        copy = {"stoker": VERSION, **_copied(state)}
        self._writing = self._pool.submit(self._write, copy, step, best)

    def wait(self) -> None:
        """Wait until nothing is being written; raise what went wrong."""
        writing, self._writing = self._writing, None
        if writing is not None:
            self._failed = True
            writing.result()
            self._failed = False

    def close(self) -> None:
        """Wait for the writer, and let others write here."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()
            if self._lock is not None:
                self._lock.close()

    def _write(self, state: State, step: int, best: bool) -> None:
        started = time.monotonic()
        if best:  # first: a kill between the two repeats the validation, and writes both again
            self._put(BEST, state)
        name = f"step-{step:010d}.pt"
        self._put(name, state)
        self._written(join(self.url, name), step, time.monotonic() - started)
        # What stands above this step was damaged, or was taken back with it.
        names = self._names()
        older = [one for one in names if one <= name]
        for old in [*older[: -self._keep], *names[len(older) :]]:
            self._store.delete(old)

    def _put(self, name: str, state: State) -> None:
        if self._folder is None:
            with tempfile.TemporaryDirectory(prefix="stoker-checkpoint-") as folder:
                path = Path(folder, name)
                _pack(state, path)
                self._store.put(name, path)
            return
        path = self._folder / f".{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        try:
            _pack(state, path)
            self._store.put(name, path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        _sync_folder(self._folder)

    def _names(self) -> list[str]:
        return sorted(entry.name for entry in self._store.list("step-") if _NAME.fullmatch(entry.name))


def unpack(data: bytes, *, where: str) -> State:
    """Make a state of the bytes of a checkpoint of ours; refuse damaged ones. Nothing in it is executed."""
    body, trailer = data[:-_TRAILER], data[-_TRAILER:]
    if trailer[: len(_MAGIC)] != _MAGIC:
        raise DataFaultError("this checkpoint is damaged: its end is missing", where=where)
    if trailer[len(_MAGIC) :] != hashlib.sha256(body).digest():
        raise DataFaultError("this checkpoint is damaged: its sha256 is another", where=where)
    state: State = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    if state.get("stoker") != VERSION:
        raise InputError(f"a checkpoint of version {state.get('stoker')!r}, and this reads {VERSION}", where=where)
    return state


class Weights(NamedTuple):
    """The weights of a model, and their average where a checkpoint has one."""

    model: dict[str, torch.Tensor]
    averaged: dict[str, torch.Tensor] | None = None


def read_weights(url: str) -> Weights:
    """Read the weights of a model: a checkpoint of ours, or what torch.save made of a state_dict, alone or named."""
    folder, name = split(url)
    path = local_path(folder)
    data = open_store(folder if path is None else str(path.expanduser())).get(name)
    if data[-_TRAILER:][: len(_MAGIC)] == _MAGIC:
        state = unpack(data, where=shown(url))
        return Weights(state["model"], state.get("ema"))
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(f"no weights that can be loaded safely: {_first_line(error)}", where=shown(url)) from error
    for name in ("model", "state_dict"):
        found = found[name] if isinstance(found, dict) and isinstance(found.get(name), dict) else found
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise InputError("holds no state_dict of a model", where=shown(url))
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


class _Hashing(io.RawIOBase):
    """Passes on what is written, and digests it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.sha256 = file, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return self._file.write(data)


def _pack(state: State, path: Path) -> None:
    """Write a checkpoint that is on the disk when this returns."""
    with explained(path), path.open("xb") as file:
        hashing = _Hashing(file)
        try:
            torch.save(state, cast(IO[bytes], hashing))
        except RuntimeError as error:  # torch hides what the system said in one of these
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
        file.write(_MAGIC + hashing.sha256.digest())
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copied(value: Any) -> Any:
    """Copy a state into memory of its own, off the device: training may go on."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copied, value))
    return value


def _locked(folder: Path, patience_s: float) -> IO[str] | None:
    """Hold the folder for this training alone; one that is just ending may take a moment to let go."""
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
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
