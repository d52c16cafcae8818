"""Convert a dataset to shards: scan it, plan the shards, write them (`stoker data convert`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from msgspec import UNSET

from stoker.errors import InputError
from stoker.shards.catalog import Catalog
from stoker.shards.destination import Destination
from stoker.shards.formats import FORMATS
from stoker.shards.images import PILLOW_VERSION
from stoker.shards.index import MAX_LABEL
from stoker.shards.options import ConversionOptions
from stoker.shards.pack import ConversionProgress, ConversionResult, pack_shards
from stoker.shards.plan import ConversionPlan, plan_conversion, plan_with_fixed_size
from stoker.shards.sources import Source, detect_source, open_source
from stoker.shards.val_split import check_can_split, split_catalogs
from stoker.storage import local_path, open_writable


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A scanned dataset and its conversion plan; nothing is written yet.

    `earlier_plan` is the one by the earlier default shard size, for destinations that were written with it.
    """

    plan: ConversionPlan
    earlier_plan: ConversionPlan | None
    source: Source
    catalogs: dict[str, Catalog]
    scratch: Path

    def check(self, dest: str) -> ConversionPlan:
        """Return the plan that `run` would carry out for this destination; raise the error that it would raise."""
        destination = Destination(open_writable(dest), self.scratch)
        plan = self._plan_for(destination)
        destination.check(plan)
        return plan

    def run(
        self,
        dest: str,
        *,
        jobs: int,
        restart: bool = False,
        progress: Callable[[ConversionProgress], None] = lambda _: None,
    ) -> ConversionResult:
        """Write the shards and manifests of the plan; `restart` discards an unfinished conversion first."""
        destination = Destination(open_writable(dest), self.scratch)
        if restart:
            with destination.locked():
                destination.discard_unfinished()
        plan = self._plan_for(destination)
        return pack_shards(plan, self.source, self.catalogs, destination, jobs=jobs, progress=progress)

    def _plan_for(self, destination: Destination) -> ConversionPlan:
        earlier = self.earlier_plan
        return earlier if earlier is not None and destination.has_plan(earlier.digest) else self.plan


@contextmanager
def prepare_conversion(
    where: str,
    options: ConversionOptions,
    *,
    scratch: Path,
    kind: str = "auto",
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[Conversion]:
    """Open a dataset, scan it and plan its shards; `progress` is called with the number of new samples."""
    options.check()
    shard_format = FORMATS.get(options.format)
    kind = detect_source(where) if kind == "auto" else kind
    unpacked, catalog_folder = scratch / "unpacked", scratch / "catalogs"
    unpacked.mkdir()
    catalog_folder.mkdir()
    with ExitStack() as stack:
        source = open_source(where, kind, scratch=unpacked)
        stack.callback(source.close)
        if options.val_fraction is not UNSET:
            check_can_split(source, where)
        catalogs = {}
        for split in source.splits:
            catalogs[split] = Catalog.write(
                catalog_folder, split, source.scan(split), check_key=shard_format.check_key, progress=progress
            )
            stack.callback(catalogs[split].close)
        if options.val_fraction is not UNSET:
            (divided := catalog_folder / "divided").mkdir()
            catalogs = split_catalogs(catalogs, divided, options.val_fraction, options.seed)
            for split in ("train", "val"):
                stack.callback(catalogs[split].close)
        _check_labels(where, len(source.classes), catalogs)
        plan = plan_conversion(
            name=source.name,
            source=kind,
            recipe=_encoding_recipe(source, options),
            classes=source.classes,
            catalogs=catalogs,
            options=options,
            shard_format=shard_format,
        )
        earlier_plan = plan_with_fixed_size(plan, catalogs, shard_format)
        yield Conversion(plan=plan, earlier_plan=earlier_plan, source=source, catalogs=catalogs, scratch=scratch)


def _encoding_recipe(source: Source, options: ConversionOptions) -> str:
    return source.recipe if options.max_side is None else f"{source.recipe}; JPEG by Pillow {PILLOW_VERSION}"


def check_outside_source(where: str, dest: str) -> None:
    """Raise InputError for a destination inside the source: the next scan would read it as data."""
    source, target = (_resolve_local(url) for url in (where, dest))
    if source is not None and target is not None and source.is_dir() and target.is_relative_to(source):
        raise InputError(
            "the destination is inside the source", where=dest, hint="choose a destination outside the source"
        )


def _resolve_local(url: str) -> Path | None:
    path = local_path(url)
    return None if path is None else path.resolve()


def _check_labels(where: str, classes: int, catalogs: dict[str, Catalog]) -> None:
    for split, catalog in catalogs.items():
        low, high = catalog.label_range()
        last = classes - 1 if classes else MAX_LABEL
        if low < 0 or high > last:
            raise InputError(
                f"labels of split {split!r} range from {low} to {high}, but must be between 0 and {last}", where=where
            )
