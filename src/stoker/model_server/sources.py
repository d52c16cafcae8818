"""Where a served model comes from: a SavedModel directory, or the checkpoints of a training.

A source lists the versions that exist now; the server loads the newest and looks again every few seconds. Imports
neither TensorFlow nor PyTorch until a model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from stoker.errors import InputError, MissingExtraError, NotFoundError
from stoker.model_server.model import ServedModel
from stoker.storage import Store, join_url, local_path, open_store, redacted, split_url
from stoker.trainers.checkpoint_files import BEST_NAME, find_checkpoint, is_step_name
from stoker.trainers.model_description import read_description

LOCAL_POLL_S, REMOTE_POLL_S = 2.0, 30.0
CHECKPOINT_SUFFIX = ".pt"
SAVED_MODEL_FILES = ("saved_model.pb", "saved_model.pbtxt")


class Candidate(NamedTuple):
    """A version that could be loaded; `fingerprint` changes when its files do. Higher orders are newer."""

    order: int
    name: str
    fingerprint: str


class ModelSource(Protocol):
    """The versions of one model; `poll_s` is how often to look for newer ones."""

    where: str
    poll_s: float

    def list_candidates(self) -> Sequence[Candidate]:
        """List the versions that exist, in any order."""
        ...

    def load(self, candidate: Candidate) -> ServedModel:
        """Load a version; raise StokerError if it is damaged."""
        ...


class SavedModelSource:
    """A directory with a SavedModel, or with one in each numbered subdirectory, as TensorFlow Serving reads it."""

    poll_s = LOCAL_POLL_S

    def __init__(self, directory: Path) -> None:
        self._directory, self.where = directory, str(directory)

    def list_candidates(self) -> list[Candidate]:
        """List the numbered subdirectories, or the directory itself: as the version in its name, or version 1."""
        if _is_saved_model(self._directory):
            number = int(self._directory.name) if _is_version_name(self._directory.name) else 1
            return [Candidate(number, ".", _fingerprint(self._directory))]
        return [
            Candidate(int(path.name), path.name, _fingerprint(path))
            for path in _version_directories(self._directory)
            if _is_saved_model(path)
        ]

    def load(self, candidate: Candidate) -> ServedModel:
        """Load a SavedModel with the description beside it, or that of the whole directory."""
        from stoker.model_server.saved_model import SavedModel

        path = self._directory / candidate.name
        description = read_description(path) or read_description(self._directory)
        return SavedModel(path, candidate.order, description)


class CheckpointSource:
    """One checkpoint file, or the best or newest checkpoint of a directory or bucket."""

    def __init__(self, url: str, *, which: str, device: str = "auto") -> None:
        self._which, self._device = which, device
        self._folder, self._name = split_url(url) if url.endswith(CHECKPOINT_SUFFIX) else (url, "")
        self._store: Store = open_store(self._folder)
        self.where = redacted(url)
        self.poll_s = REMOTE_POLL_S if local_path(url) is None else LOCAL_POLL_S

    def list_candidates(self) -> list[Candidate]:
        """List the one checkpoint to serve."""
        name = self._name or find_checkpoint(self._folder, self._which)
        if name is None or not name.endswith(CHECKPOINT_SUFFIX):
            return []
        try:
            meta = self._store.head(name)
        except NotFoundError:
            return []  # replaced by a newer one since it was listed
        order = int(name.removeprefix("step-").removesuffix(CHECKPOINT_SUFFIX)) if is_step_name(name) else 0
        return [Candidate(order, name, f"{meta.size} {meta.etag}")]

    def load(self, candidate: Candidate) -> ServedModel:
        """Load the checkpoint; its version is the step of its training."""
        try:
            from stoker.model_server.checkpoint_model import CheckpointModel
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "torch":
                raise
            raise MissingExtraError("torch", "torch", purpose="serving a PyTorch checkpoint") from error
        return CheckpointModel(self._folder, candidate.name, device=self._device)


def open_source(model: str, *, checkpoint: str = "best", device: str = "auto") -> ModelSource:
    """Return the source of a path or URL: a SavedModel directory, a checkpoint, or a directory of checkpoints."""
    path = local_path(model)
    if path is None:
        return CheckpointSource(model, which=checkpoint, device=device)
    path = path.expanduser().absolute()
    if path.is_file():
        if path.suffix != CHECKPOINT_SUFFIX:
            raise InputError(
                "is neither a directory nor a checkpoint of stoker (.pt)",
                where=model,
                hint="pass a SavedModel directory, a checkpoint, or the name of a run",
            )
        return CheckpointSource(str(path), which=checkpoint, device=device)
    if not path.is_dir():
        raise NotFoundError("no such file or directory", where=model)
    if _is_saved_model(path) or any(_is_saved_model(each) for each in _version_directories(path)):
        return SavedModelSource(path)
    if (path / BEST_NAME).exists() or any(is_step_name(each.name) for each in path.glob(f"*{CHECKPOINT_SUFFIX}")):
        return CheckpointSource(str(path), which=checkpoint, device=device)
    raise NotFoundError(
        "directory contains neither a SavedModel nor a PyTorch checkpoint",
        where=model,
        hint="it must have saved_model.pb, subdirectories 1, 2, … with one each, or checkpoints (best.pt, step-….pt)",
    )


def describe_candidate(source: ModelSource, candidate: Candidate) -> str:
    """Return the path or URL of a version."""
    return source.where if candidate.name in (".", Path(source.where).name) else join_url(source.where, candidate.name)


def _version_directories(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if _is_version_name(path.name) and path.is_dir()]


def _is_version_name(name: str) -> bool:
    """Return whether a name is a version number, without leading zeros."""
    return name.isascii() and name.isdecimal() and str(int(name)) == name


def _is_saved_model(directory: Path) -> bool:
    return any((directory / name).is_file() for name in SAVED_MODEL_FILES)


def _fingerprint(directory: Path) -> str:
    """Return a text that changes with the files of a SavedModel, so that an unfinished copy is loaded again later."""
    files = (path for path in directory.rglob("*") if path.is_file())
    states = sorted((str(path.relative_to(directory)), path.stat()) for path in files)
    return " ".join(f"{name}:{state.st_size}:{state.st_mtime_ns}" for name, state in states)
