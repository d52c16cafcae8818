"""Lazy registry of implementations by name: each is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Generic, TypeVar

from stoker.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OptionalTarget:
    """A target that needs an extra: `OptionalTarget("mod:attr", extra="k8s", package="lightkube")`."""

    target: str
    extra: str
    package: str


class Registry(Generic[T]):
    """Implementations by name: built-in ones from a table, others from the entry point group `stoker.<kind>`."""

    def __init__(self, kind: str, table: Mapping[str, str | OptionalTarget], *, option: str = "") -> None:
        self.kind = kind
        self._option = option  # the command-line option that selects an implementation
        self._table = table
        self._group = f"stoker.{kind}"

    def names(self) -> tuple[str, ...]:
        """List all names, including those of entry points, without importing anything."""
        return tuple(sorted({*self._table, *(entry.name for entry in self._entry_points())}))

    def __contains__(self, name: str) -> bool:
        """Whether there is an implementation of this name; entry points are searched only if it is not built in."""
        return name in self._table or name in self.names()

    def get(self, name: str) -> T:
        """Import and return the implementation called `name`."""
        entry = self._table.get(name)
        if entry is None:
            return self._load_entry_point(name)
        target = entry if isinstance(entry, str) else entry.target
        try:
            module, _, attribute = target.partition(":")
            implementation: T = getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            if isinstance(entry, OptionalTarget) and _is_missing(error, entry.package):
                purpose = f"the {self.kind} {name!r}"
                raise MissingExtraError(entry.package, entry.extra, purpose=purpose) from error
            raise
        return implementation

    def _entry_points(self) -> EntryPoints:
        from importlib.metadata import entry_points  # slow to import, and not needed for built-in targets

        return entry_points(group=self._group)

    def _load_entry_point(self, name: str) -> T:
        for entry in self._entry_points():
            if entry.name == name:
                implementation: T = entry.load()
                return implementation
        names = self.names()
        known = f"{self._option} must be one of {', '.join(names)}" if self._option else f"known: {', '.join(names)}"
        close = get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? {known}" if close else known
        raise InputError(f"unknown {self.kind} {name!r}", hint=hint)


def _is_missing(error: ModuleNotFoundError, package: str) -> bool:
    """Return whether the package itself or a parent of it is missing, rather than one of its submodules."""
    return error.name is not None and f"{package}.".startswith(f"{error.name}.")
