"""Routes of the dashboard's API as data: path, query and answer, for the server and the OpenAPI document."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from stoker.dashboard import (
    bad_samples,
    compare,
    data_state,
    log_pages,
    prometheus,
    ranks,
    series,
    stacks,
    stream,
    summary,
)
from stoker.dashboard.runs import DashboardRun, RunCatalog
from stoker.errors import InputError
from stoker.telemetry.run_index import ReportingProcess

MAX_BINS = 2000
_Time = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
_Bins = Annotated[int, msgspec.Meta(ge=1, le=MAX_BINS)]
_Name = Annotated[str, msgspec.Meta(max_length=256)]


class NoQuery(msgspec.Struct):
    """No parameters."""


class RangeQuery(msgspec.Struct):
    """A range of time in seconds since the epoch, the whole run by default, and the number of points."""

    since: _Time | None = None
    until: _Time | None = None
    bins: _Bins = 600


class ScalarQuery(RangeQuery):
    """Scalars by name, separated by commas; all by default."""

    names: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class HeatQuery(RangeQuery):
    """A metric of all slots."""

    metric: _Name = "cpu_pct"
    rows: Annotated[int, msgspec.Meta(ge=1, le=2000)] = 1000


class SlotQuery(msgspec.Struct):
    """How many slots are wanted."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=ranks.MAX_ROWS)] = ranks.MAX_ROWS


class LogQuery(msgspec.Struct):
    """Lines of logs: names of logs separated by commas, and for each where to begin."""

    logs: Annotated[str, msgspec.Meta(max_length=200_000)] = ""
    offsets: Annotated[str, msgspec.Meta(max_length=200_000)] = ""
    search: _Name = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=5000)] = 500
    tail: bool = True


class ThumbnailQuery(msgspec.Struct):
    """The number of a bad sample."""

    sample: Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class CompareQuery(msgspec.Struct):
    """Run IDs separated by commas, a scalar, and what to compare it by."""

    runs: Annotated[str, msgspec.Meta(max_length=2048)]
    name: _Name = "loss"
    by: Literal["step", "samples", "time"] = "step"


class CsvQuery(msgspec.Struct):
    """The table to export."""

    table: Literal["scalar", "span", "profile", "gpu"] = "scalar"


class RunList(msgspec.Struct):
    """All runs, newest first, and the cluster whose runs are followed, if any."""

    runs: list[summary.RunRow]
    target: str = ""


class Scalars(msgspec.Struct):
    """Series of scalars by name."""

    scalars: dict[str, dict[str, list[float | None]]]


class Steps(msgspec.Struct):
    """The time of a step by part, and the time of a sample by stage of the loader."""

    parts: dict[str, list[float | None]]
    stages: dict[str, list[float | None]]


class Heat(msgspec.Struct, kw_only=True):
    """A metric by slot and time: bytes (base64) of rows of `bins`, from `low` at 0 to `high` at 254; 255 is no data."""

    metric: str
    title: str
    unit: str
    is_low_bad: bool
    since: float
    until: float
    bins: int
    rows: list[str]
    total_rows: int
    low: float
    high: float
    cells: str
    bands: dict[str, list[float | None]]


class Ranks(msgspec.Struct):
    """The ranks of the newest attempt."""

    ranks: list[ranks.RankRow]


class Slots(msgspec.Struct):
    """The slots of a run, the worst first."""

    slots: list[ranks.SlotRow]


class Logs(msgspec.Struct):
    """The logs of a run."""

    logs: list[log_pages.LogEntry]


class Text(NamedTuple):
    """An answer that is not JSON."""

    content: str
    content_type: str
    filename: str = ""


class ApiRoute(NamedTuple):
    """One route: `{run}` in its path is the ID of a run."""

    path: str
    summary: str
    query: type[Any]
    answer: type[Any] | str
    """The type of the answer, or a content type."""
    handle: Callable[[RunCatalog, DashboardRun | None, Any], Any]
    method: Literal["GET", "POST"] = "GET"


def list_runs(catalog: RunCatalog, _: DashboardRun | None, __: NoQuery) -> RunList:
    """List all runs."""
    return RunList(_rows(catalog), catalog.target)


def _rows(catalog: RunCatalog) -> list[summary.RunRow]:
    rows = []
    for run in catalog.list():
        try:
            rows.append(summary.describe_row(run))
        except (OSError, InputError):
            continue  # it is being deleted
    return rows


def _window(run: DashboardRun, query: RangeQuery) -> series.Window:
    analysis = run.index().analysis
    since = analysis.first_t if query.since is None else query.since
    until = analysis.last_t if query.until is None else query.until
    return series.Window(since, max(until, since + 1e-3), query.bins)


def read_scalars(_: RunCatalog, run: DashboardRun | None, query: ScalarQuery) -> Scalars:
    """Return scalars by time."""
    assert run is not None
    with run.lock:
        window, index = _window(run, query), run.index()
        names = [name for name in query.names.split(",") if name] or index.names[:20]
        return Scalars({name: series.scalar_series(index, name, window) for name in names[:20]})


def read_steps(_: RunCatalog, run: DashboardRun | None, query: RangeQuery) -> Steps:
    """Return the time of a step by time."""
    assert run is not None
    with run.lock:
        return Steps(*series.step_series(run.index(), _window(run, query)))


def read_heat(_: RunCatalog, run: DashboardRun | None, query: HeatQuery) -> Heat:
    """Return a heat map of all slots, the worst first."""
    assert run is not None
    metric = series.METRICS.get(query.metric)
    if metric is None:
        raise InputError(f"unknown metric {query.metric!r}", hint=f"metrics: {', '.join(series.METRICS)}")
    with run.lock:
        index, window = run.index(), _window(run, query)
        found = series.matrix(index, query.metric, window)
        interval = index.analysis.machines.overall_mean("interval_s") or 0.0
    found = found._replace(values=series.fill_short_gaps(found.values, interval, window.bin_s))
    order = series.worst_first(found, metric)[: query.rows]
    cells, low, high = series.quantize(found.values[order], metric.unit)
    return Heat(
        metric=query.metric, title=metric.title, unit=metric.unit, is_low_bad=metric.is_low_bad, since=window.since,
        until=window.until, bins=window.bins, rows=[found.rows[row] for row in order], total_rows=len(found.rows),
        low=low, high=high, cells=base64.b64encode(cells).decode(), bands=series.bands(found),
    )  # fmt: skip


def read_slots(_: RunCatalog, run: DashboardRun | None, query: SlotQuery) -> Slots:
    """Return the slots of a run, the worst first."""
    assert run is not None
    return Slots(ranks.list_slots(run, query.limit))


def read_log_page(_: RunCatalog, run: DashboardRun | None, query: LogQuery) -> log_pages.LogPage:
    """Return lines of logs."""
    assert run is not None
    names = [name for name in query.logs.split(",") if name]
    offsets = [text for text in query.offsets.split(",") if text]
    if offsets and (len(offsets) != len(names) or not all(text.isascii() and text.isdecimal() for text in offsets)):
        raise InputError("`offsets` needs one number for each of `logs`")
    begin = {name: min(int(text[:18]), 2**62) for name, text in zip(names, offsets, strict=False)}
    return log_pages.read_page(run, names, begin, limit=query.limit, search=query.search, tail=query.tail)


def read_thumbnail(_: RunCatalog, run: DashboardRun | None, query: ThumbnailQuery) -> bad_samples.SampleImage:
    """Return the thumbnail of a bad sample."""
    assert run is not None
    return bad_samples.read_thumbnail(run, query.sample)


def read_comparison(catalog: RunCatalog, _: DashboardRun | None, query: CompareQuery) -> compare.Comparison:
    """Compare runs."""
    ids = list(dict.fromkeys(name for name in query.runs.split(",") if name))
    if not 1 <= len(ids) <= 12:
        raise InputError("compare 1 to 12 runs")
    return compare.compare([catalog.find(run_id) for run_id in ids], query.name, query.by)


def export_csv(_: RunCatalog, run: DashboardRun | None, query: CsvQuery) -> Text:
    """Export a table of the index as CSV."""
    assert run is not None
    out = io.StringIO()
    writer = csv.writer(out)
    with run.lock:
        index = run.index()
        table = index.tables[query.table]
        labels: dict[str, list[str]] = {"slot": index.slots, "name": index.names}
        processes: list[ReportingProcess] = index.processes
        heads = [
            head for name in table.columns for head in (("slot", "rank", "attempt") if name == "process" else (name,))
        ]
        writer.writerow(heads)
        columns = [table.read(name).tolist() for name in table.columns]
        for row in zip(*columns, strict=True):
            cells: list[Any] = []
            for name, value in zip(table.columns, row, strict=True):
                if name == "process":
                    cells += [_safe(processes[value].slot), processes[value].rank, processes[value].attempt]
                elif name in labels:
                    cells.append(_safe(labels[name][value]))
                else:
                    cells.append("" if value != value else value)
            writer.writerow(cells)
    return Text(out.getvalue(), "text/csv; charset=utf-8", f"{run.id}-{query.table}.csv")


def _safe(text: str) -> str:
    """Return a cell that a spreadsheet does not take for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t") else text


def _of_run(function: Callable[[DashboardRun], Any]) -> Callable[[RunCatalog, DashboardRun | None, Any], Any]:
    def handle(_: RunCatalog, run: DashboardRun | None, __: Any) -> Any:
        assert run is not None
        return function(run)

    return handle


def _list_logs(run: DashboardRun) -> Logs:
    return Logs(log_pages.list_logs(run))


CSV = "text/csv"
API = (
    ApiRoute("/api/runs", "List all runs", NoQuery, RunList, list_runs),
    ApiRoute("/api/compare", "Compare runs", CompareQuery, compare.Comparison, read_comparison),
    ApiRoute("/api/runs/{run}", "Describe a run", NoQuery, summary.RunDetail, _of_run(summary.describe_detail)),
    ApiRoute("/api/runs/{run}/scalars", "Scalars by time", ScalarQuery, Scalars, read_scalars),
    ApiRoute("/api/runs/{run}/steps", "Step time by part", RangeQuery, Steps, read_steps),
    ApiRoute("/api/runs/{run}/heat", "Heat map of all slots", HeatQuery, Heat, read_heat),
    ApiRoute("/api/runs/{run}/ranks", "Ranks", NoQuery, Ranks, _of_run(lambda run: Ranks(ranks.list_ranks(run)))),
    ApiRoute("/api/runs/{run}/slots", "Slots", SlotQuery, Slots, read_slots),
    ApiRoute("/api/runs/{run}/data", "Data", NoQuery, data_state.DataState, _of_run(data_state.describe_data)),
    ApiRoute(
        "/api/runs/{run}/thumbnail", "Thumbnail of a bad sample", ThumbnailQuery, bad_samples.SampleImage,
        read_thumbnail,
    ),
    ApiRoute("/api/runs/{run}/logs", "List the logs", NoQuery, Logs, _of_run(_list_logs)),
    ApiRoute("/api/runs/{run}/lines", "Lines of logs", LogQuery, log_pages.LogPage, read_log_page),
    ApiRoute("/api/runs/{run}/export.csv", "Export a table", CsvQuery, CSV, export_csv),
    ApiRoute(
        "/api/runs/{run}/stacks", "Request the stacks of all ranks", NoQuery, stacks.Stacks,
        _of_run(stacks.read_stacks), "POST",
    ),
    ApiRoute(
        "/metrics", "Metrics of all runs for Prometheus", NoQuery, prometheus.CONTENT_TYPE,
        lambda catalog, _, __: Text(prometheus.render(_rows(catalog)), prometheus.CONTENT_TYPE),
    ),
)  # fmt: skip
STREAM_PATH = "/api/runs/{run}/stream"


class ErrorAnswer(msgspec.Struct):
    """Why a request failed."""

    error: str


_FAILED: dict[str, Any] = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}}


def openapi(version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the API."""
    types = [ErrorAnswer, stream.Update, *(route.answer for route in API if not isinstance(route.answer, str))]
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for route in API:
        is_text = isinstance(route.answer, str)
        content = {str(route.answer).partition(";")[0] if is_text else "application/json": _content(route.answer)}
        operation = _operation(route.path, route.summary, route.query, content)
        if route.method == "POST":
            for code, why in (("403", "request from another site"), ("409", "not possible now")):
                operation["responses"][code] = {"description": why, **_FAILED}
        paths[route.path] = {route.method.lower(): operation}
    events = {"text/event-stream": {"schema": {"type": "string"}}}
    paths[STREAM_PATH] = {"get": _operation(STREAM_PATH, "Live updates (server-sent events)", NoQuery, events)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Stoker dashboard", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _content(answer: type[Any] | str) -> dict[str, Any]:
    if isinstance(answer, str):
        return {"schema": {"type": "string"}}
    return {"schema": {"$ref": f"#/components/schemas/{answer.__name__}"}}


def _operation(path: str, text: str, query: type[Any], content: dict[str, Any]) -> dict[str, Any]:
    _, named = msgspec.json.schema_components([query])
    fields = named.get(query.__name__, {})
    parameters = [
        {"name": name, "in": "query", "required": name in fields.get("required", ()), "schema": field}
        for name, field in fields.get("properties", {}).items()
    ]
    if "{run}" in path:
        pattern = {"type": "string", "minLength": 1, "maxLength": 128}
        parameters.insert(0, {"name": "run", "in": "path", "required": True, "schema": pattern})
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    for code, why in (("400", "invalid query"), ("401", "token required"), ("404", "not found"), ("421", "wrong host")):
        responses[code] = {"description": why, **_FAILED}
    return {"summary": text, "parameters": parameters, "responses": responses}
