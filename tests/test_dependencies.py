"""Every package that is imported is declared, and every declared package is pinned for development."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions

from tests.support.paths import ROOT

OWN = {"stoker", "stoker_native"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(requirements: Iterable[str]) -> set[str]:
    names = (re.match(r"[\w.-]+", requirement) for requirement in requirements)
    return {normalize(match[0]) for match in names if match} - {"stoker"}


RUNTIME = distributions(
    [*PROJECT["dependencies"], *(text for extra, texts in EXTRAS.items() if extra != "dev" for text in texts)]
)


def imported_modules(node: ast.AST) -> Iterator[str]:
    """Yield the modules that code imports, also by `import_module("name")`; type checkers' imports are skipped."""
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), level=0):
            yield module
        case ast.Call(func=ast.Name(id="import_module"), args=[ast.Constant(value=str(module))]):
            yield module
        case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module))]):
            yield module
    for child in ast.iter_child_nodes(node):
        yield from imported_modules(child)


def find_distributions(module: str, known: dict[str, list[str]]) -> set[str]:
    """Return the distributions that may provide a module; those of `google.auth` start with google-auth."""
    top, *rest = module.split(".")
    names = {normalize(name) for name in known.get(top, [top])}
    return {name for name in names if name == f"{top}-{rest[0]}"} or names if rest else names


def test_every_imported_package_is_declared() -> None:
    known = dict(packages_distributions())
    undeclared = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for module in imported_modules(ast.parse(path.read_text())):
            top = module.partition(".")[0]
            if top in sys.stdlib_module_names or top in OWN:
                continue
            if not find_distributions(module, known) & RUNTIME:
                undeclared[module] = str(path)
    assert undeclared == {}


def test_all_has_every_extra() -> None:
    (requirement,) = EXTRAS["all"]
    assert set(re.findall(r"[\w-]+", requirement)) == {"stoker", *EXTRAS} - {"all", "dev"}


def test_every_declared_package_is_pinned() -> None:
    pins = {normalize(line.partition("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines() if line}
    assert (RUNTIME | distributions(EXTRAS["dev"])) - pins == set()
