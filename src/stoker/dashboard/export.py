"""One run as a self-contained page: the scripts, the style and the answers of the API in one file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from stoker.dashboard import routes
from stoker.dashboard.bad_samples import list_bad_samples
from stoker.dashboard.runs import DashboardRun, RunCatalog
from stoker.dashboard.series import METRICS
from stoker.errors import UnavailableError

STATIC = Path(__file__).with_name("static")
LOG_LINES = 2000
BINS = 600
THUMBNAILS = 24
_IMPORT = re.compile(r"^import (?:[^;]*? from )?\"\./(?P<name>[\w-]+\.js)\";$", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=async function|function|const|let|class)", re.MULTILINE)


def write_page(run: DashboardRun, path: Path) -> None:
    """Write the page of a run."""
    text = render_page(run)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnavailableError(f"cannot write the page: {(error.strerror or '').lower()}", where=path) from error


def render_page(run: DashboardRun) -> str:
    """Return the page of a run as HTML."""
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    data = msgspec.json.encode(collect_answers(run)).decode().replace("<", "\\u003c")
    scripts = f'<script type="application/json" id="embedded">{data}</script>\n'
    scripts += f'<script type="module">\n{bundle_scripts("main.js")}</script>'
    page = page.replace('<link rel="stylesheet" href="/static/style.css">', f"<style>{style}</style>")
    return page.replace('<script type="module" src="/static/main.js"></script>', scripts)


def bundle_scripts(entry: str) -> str:
    """Return a module and all that it imports as one script; names at the top level are unique among the modules."""
    ordered: list[str] = []
    sources: dict[str, str] = {}

    def visit(name: str) -> None:
        if name in sources:
            return
        sources[name] = (STATIC / name).read_text(encoding="utf-8")
        for match in _IMPORT.finditer(sources[name]):
            visit(match["name"])
        ordered.append(name)

    visit(entry)
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", sources[name])) for name in ordered)


def collect_answers(run: DashboardRun) -> dict[str, Any]:
    """Return the answers of the API that the page needs, by path and query."""
    catalog = RunCatalog([run.folder.folder])
    base = f"/api/runs/{run.id}"
    with run.lock:
        scalars = run.index().names
        has_gpu = run.index().tables["gpu"].rows > 0
    metrics = [name for name in METRICS if has_gpu or not name.startswith("gpu.")]
    wanted: list[tuple[str, dict[str, Any]]] = [
        ("/api/runs", {}), (base, {}), (f"{base}/ranks", {}), (f"{base}/slots", {}), (f"{base}/data", {}),
        (f"{base}/logs", {}), (f"{base}/steps", {"bins": BINS}),
        (f"{base}/scalars", {"bins": BINS, "names": ",".join(scalars[:20])}), (f"{base}/lines", {"limit": LOG_LINES}),
        ("/api/compare", {"runs": run.id}),
        *((f"{base}/thumbnail", {"sample": row.number}) for row in list_bad_samples(run)[:THUMBNAILS]),
        *((f"{base}/heat", {"metric": name, "bins": 240}) for name in metrics),
    ]  # fmt: skip
    return {_key(path, query): _answer(catalog, run, path, query) for path, query in wanted}


def _key(path: str, query: dict[str, Any]) -> str:
    chosen = next((name for name in ("metric", "sample") if name in query), None)
    return f"{path}?{chosen}={query[chosen]}" if chosen else path


def _answer(catalog: RunCatalog, run: DashboardRun, path: str, query: dict[str, Any]) -> Any:
    template = path.replace(f"/api/runs/{run.id}", "/api/runs/{run}")
    routes_by_path: Sequence[routes.ApiRoute] = routes.API
    route = next(one for one in routes_by_path if one.path == template)
    return route.handle(catalog, run, msgspec.convert(query, route.query))
