"""Names to implementations, imported on first use, so that a heavy package costs only who asks for it."""

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
class Plug:
    """A target that needs a package behind an extra: `Plug("mod:attr", extra="k8s", package="lightkube")`."""

    target: str
    extra: str
    package: str


class Registry(Generic[T]):
    """Find an implementation by name: in the table, else by an entry point of the group `stoker.<kind>`."""

    def __init__(self, kind: str, table: Mapping[str, str | Plug]) -> None:
        self.kind = kind
        self._table = table
        self._group = f"stoker.{kind}"

    def names(self) -> tuple[str, ...]:
        """List every name that `get` knows, third parties' too; imports none of them."""
        return tuple(sorted({*self._table, *(entry.name for entry in self._entries())}))

    def get(self, name: str) -> T:
        """Import the implementation called `name`."""
        plug = self._table.get(name)
        if plug is None:
            return self._third_party(name)
        target = plug if isinstance(plug, str) else plug.target
        try:
            module, _, attribute = target.partition(":")
            built_in: T = getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            if isinstance(plug, Plug) and _lacks(error, plug.package):
                purpose = f"the {self.kind} {name!r}"
                raise MissingExtraError(plug.package, plug.extra, purpose=purpose) from error
            raise
        return built_in

    def _entries(self) -> EntryPoints:
        from importlib.metadata import entry_points  # takes long to import, and built-ins do without

        return entry_points(group=self._group)

    def _third_party(self, name: str) -> T:
        for entry in self._entries():
            if entry.name == name:
                found: T = entry.load()
                return found
        names = self.names()
        known = f"known: {', '.join(names)}"
        close = get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? {known}" if close else known
        raise InputError(f"unknown {self.kind} {name!r}", hint=hint)


def _lacks(error: ModuleNotFoundError, package: str) -> bool:
    """Whether the package itself is missing, or a parent of it; a missing submodule is another trouble."""
    return error.name is not None and f"{package}.".startswith(f"{error.name}.")
