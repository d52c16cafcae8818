"""The loaded versions of a model: load newer ones as they appear, and let requests finish on the old ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from stoker.errors import NotFoundError, StokerError
from stoker.model_server.batching import Batcher
from stoker.model_server.images import ImageDecoder
from stoker.model_server.model import ServedModel, warm_up
from stoker.model_server.signatures import Tensors
from stoker.model_server.sources import Candidate, ModelSource, describe_candidate

log = logging.getLogger(__name__)

BatchCallback = Callable[[int, int], None]
"""Called with the requests and rows of each batch."""


class LoadedVersion:
    """One loaded version, with the queue of its requests."""

    def __init__(self, candidate: Candidate, model: ServedModel, max_batch: int, on_batch: BatchCallback) -> None:
        self.candidate, self.model = candidate, model
        self._batcher = Batcher(model, max_rows=max_batch, on_batch=on_batch)
        self.decoder = None if model.description is None else ImageDecoder(model.description.image)
        self._users, self._unused = 0, asyncio.Event()

    @property
    def number(self) -> int:
        """The version number."""
        return self.model.version

    async def predict(self, signature: str, inputs: Tensors) -> Tensors:
        """Run a function of the model, batched with other requests."""
        return await self._batcher.submit(signature, inputs)

    @contextmanager
    def lease(self) -> Iterator[LoadedVersion]:
        """Keep the version loaded while a request uses it, even if a newer one is served meanwhile."""
        self._users += 1
        try:
            yield self
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def close(self) -> None:
        """Wait for the requests of this version."""
        while self._users:
            self._unused.clear()
            await self._unused.wait()
        await self._batcher.drain()


class VersionChange(NamedTuple):
    """What to load, and the names of the loaded versions to unload after that."""

    load: list[Candidate]
    unload: list[str]


def plan_change(found: Sequence[Candidate], loaded: Mapping[str, str], keep: int) -> VersionChange:
    """Compare the newest `keep` versions that exist with the loaded ones: fingerprints by name."""
    wanted = sorted(found)[-keep:]
    if not wanted:  # a directory that is being replaced: serve what is loaded
        return VersionChange([], [])
    names = {candidate.name for candidate in wanted}
    load = [candidate for candidate in wanted if loaded.get(candidate.name) != candidate.fingerprint]
    return VersionChange(load, [name for name in loaded if name not in names])


@dataclass(frozen=True, slots=True)
class FailedVersion:
    """A version that could not be loaded; it is tried again when its files change."""

    candidate: Candidate
    reason: str


class ModelVersions:
    """The versions of a model that are being served."""

    def __init__(
        self, source: ModelSource, *, keep: int = 1, max_batch: int = 32, on_batch: BatchCallback = lambda *_: None
    ) -> None:
        self._source, self._keep, self._max_batch, self._on_batch = source, keep, max_batch, on_batch
        self._loaded: dict[str, LoadedVersion] = {}
        self._failed: dict[str, FailedVersion] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._last_error = ""

    @property
    def loaded(self) -> list[LoadedVersion]:
        """The loaded versions, the newest last."""
        return sorted(self._loaded.values(), key=lambda version: version.number)

    @property
    def failed(self) -> list[FailedVersion]:
        """The versions that could not be loaded."""
        return list(self._failed.values())

    def load_first(self) -> LoadedVersion:
        """Load the newest versions before the server starts; raise if none can be loaded."""
        found = self._source.list_candidates()
        if not found:
            raise NotFoundError("no model to serve", where=self._source.where)
        errors: list[StokerError] = []
        for candidate in sorted(found, reverse=True):
            if len(self._loaded) == self._keep:
                break
            try:
                self._loaded[candidate.name] = self._load(candidate)
            except StokerError as error:
                errors.append(error)
                if len(errors) < len(found):
                    self._record_failure(candidate, error)
        if not self._loaded:
            raise errors[0]
        return self.loaded[-1]

    def get(self, number: int | None = None) -> LoadedVersion:
        """Return a loaded version, by default the newest; raise NotFoundError if it is not served."""
        versions = [version for version in self.loaded if number in (None, version.number)]
        if not versions:
            served = ", ".join(str(version.number) for version in self.loaded)
            raise NotFoundError(f"version {number} is not served", hint=f"available: {served or 'none'}")
        return versions[-1]

    async def refresh(self) -> bool:
        """Load versions that appeared, then unload those that are no longer the newest; return whether any changed."""
        found = await asyncio.to_thread(self._source.list_candidates)
        fingerprints = {name: version.candidate.fingerprint for name, version in self._loaded.items()}
        change = plan_change(found, fingerprints, self._keep)
        existing = {candidate.name for candidate in found}
        self._failed = {name: failed for name, failed in self._failed.items() if name in existing}
        broken = {name: failed.candidate.fingerprint for name, failed in self._failed.items()}
        wanted = [candidate for candidate in change.load if broken.get(candidate.name) != candidate.fingerprint]
        for candidate in wanted:
            try:
                version = await asyncio.to_thread(self._load, candidate)
            except Exception as error:
                self._record_failure(candidate, error)
                continue
            self._failed.pop(candidate.name, None)
            self._replace(candidate.name, version)
            log.info("serving version %d: %s", version.number, describe_candidate(self._source, candidate))
        # Keep the old versions while no newer one could be loaded.
        is_complete = all(candidate.name in self._loaded for candidate in change.load)
        for name in change.unload if is_complete else ():
            self._replace(name, None)
        return bool(wanted or (change.unload and is_complete))

    async def watch(self, poll_s: float) -> None:
        """Look for newer versions until cancelled."""
        while True:
            await asyncio.sleep(poll_s)
            try:
                await self.refresh()
                self._last_error = ""
            except Exception as error:
                if str(error) != self._last_error:
                    self._last_error = str(error)
                    log.warning("cannot look for newer versions: %s", error)

    async def close(self) -> None:
        """Wait for all requests."""
        for name in list(self._loaded):
            self._replace(name, None)
        await asyncio.gather(*self._closing)

    def _load(self, candidate: Candidate) -> LoadedVersion:
        model = self._source.load(candidate)
        warm_up(model)
        return LoadedVersion(candidate, model, self._max_batch, self._on_batch)

    def _record_failure(self, candidate: Candidate, error: Exception) -> None:
        reason = str(error).partition("\n")[0] or type(error).__name__
        self._failed[candidate.name] = FailedVersion(candidate, reason)
        log.warning("cannot load %s: %s", describe_candidate(self._source, candidate), reason)

    def _replace(self, name: str, version: LoadedVersion | None) -> None:
        """Serve a version instead of the previous one of that name, whose requests finish in the background."""
        previous = self._loaded.pop(name, None)
        if version is not None:
            self._loaded[name] = version
        if previous is not None:
            task = asyncio.get_running_loop().create_task(previous.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
