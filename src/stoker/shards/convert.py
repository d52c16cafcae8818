"""Convert a dataset to shards: scan it, plan the shards, write them (`stoker data convert`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import InputError
from stoker.shards.catalog import Catalog
from stoker.shards.destination import Destination
from stoker.shards.formats import FORMATS
from stoker.shards.images import PILLOW_VERSION
from stoker.shards.index import MAX_LABEL
from stoker.shards.pack import ConversionProgress, ConversionResult, pack_shards
from stoker.shards.plan import ConversionOptions, ConversionPlan, plan_conversion
from stoker.shards.sources import Source, detect_source, open_source
from stoker.storage import local_path, open_writable


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A scanned dataset and its conversion plan; nothing is written yet."""

    plan: ConversionPlan
    source: Source
    catalogs: dict[str, Catalog]
    scratch: Path

    def check(self, dest: str) -> None:
        """Raise the error that `run` would raise for this destination."""
        Destination(open_writable(dest), self.scratch).check(self.plan)

    def run(
        self,
        dest: str,
        *,
        jobs: int,
        restart: bool = False,
        progress: Callable[[ConversionProgress], None] = lambda _: None,
    ) -> ConversionResult:
        """Write the shards and manifests of the plan."""
        return pack_shards(
            self.plan,
            self.source,
            self.catalogs,
            open_writable(dest),
            scratch=self.scratch,
            jobs=jobs,
            restart=restart,
            progress=progress,
        )


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
        catalogs = {}
        for split in source.splits:
            catalogs[split] = Catalog.write(
                catalog_folder, split, source.scan(split), check_key=shard_format.check_key, progress=progress
            )
            stack.callback(catalogs[split].close)
        classes = source.classes
        _check_labels(where, len(classes), catalogs)
        plan = plan_conversion(
            name=source.name,
            source=kind,
            recipe=_encoding_recipe(source, options),
            classes=classes,
            catalogs=catalogs,
            options=options,
            shard_format=shard_format,
        )
        yield Conversion(plan=plan, source=source, catalogs=catalogs, scratch=scratch)


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
