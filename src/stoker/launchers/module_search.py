"""Find a Python module as `python -m` would, without importing anything."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path


def explain_missing_module(name: str, folders: Sequence[str]) -> str | None:
    """Return why `python -m name` would find no module in the folders or among the installed packages.

    Return None if it would find one, and if only importing the packages around it could tell.
    """
    importlib.invalidate_caches()
    top, *rest = name.split(".")
    try:
        spec = _find_top(top, folders)
        for part in rest:
            if spec is None or _may_extend_its_path(spec):
                break
            if spec.submodule_search_locations is None:
                return f"no module named {name!r}: {spec.name!r} is not a package"
            spec = _find_submodule(spec, part)
    except (KeyError, ValueError):  # a namespace package below another package, or a module without a spec
        return None
    if spec is None:
        return f"no module named {name!r} in {folders[0]} or among the installed packages"
    if spec.submodule_search_locations is not None and not _may_extend_its_path(spec):
        has_main = _find_submodule(spec, "__main__") is not None
        return None if has_main else f"{name!r} is a package without __main__.py; name one of its modules"
    return None


def _find_top(name: str, folders: Sequence[str]) -> ModuleSpec | None:
    """Find a top-level module; a folder without `__init__.py` counts only if there is no module anywhere."""
    found = PathFinder.find_spec(name, folders)
    if found is not None and found.origin is not None:
        return found
    return find_spec(name) or found


def _find_submodule(package: ModuleSpec, name: str) -> ModuleSpec | None:
    return PathFinder.find_spec(f"{package.name}.{name}", list(package.submodule_search_locations or ()))


def _may_extend_its_path(spec: ModuleSpec) -> bool:
    """Return whether a package sets its own search path when it is imported."""
    if spec.submodule_search_locations is None or not spec.origin or not spec.origin.endswith(".py"):
        return False
    try:
        return b"__path__" in Path(spec.origin).read_bytes()
    except OSError:  # in a zip file, or not readable: only importing could tell
        return True
