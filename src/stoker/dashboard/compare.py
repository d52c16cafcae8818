"""Comparison of runs: differences of their job files and environments, and curves of one scalar by step or time."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np

from stoker.core import yaml_io
from stoker.dashboard.runs import DashboardRun
from stoker.dashboard.series import Numbers, to_numbers
from stoker.errors import StokerError

MAX_POINTS = 600
_ENVIRONMENT = ("python", "platform", "machine", "cores")


class Curve(msgspec.Struct, frozen=True):
    """A scalar of one run by step, seconds since its start, or samples."""

    run: str
    x: Numbers
    y: Numbers


class Difference(msgspec.Struct, frozen=True):
    """A setting that is not the same in all runs: its values in the order of the runs."""

    key: str
    values: list[str]


class Comparison(msgspec.Struct, frozen=True):
    """What differs between runs."""

    runs: list[str]
    scalars: list[str]
    curves: list[Curve]
    differences: list[Difference]


def compare(runs: list[DashboardRun], name: str, by: str) -> Comparison:
    """Return the curves of a scalar, and every setting that differs."""
    names: dict[str, None] = {}
    for run in runs:
        with run.lock:
            index = run.index()
            used = set(index.tables["scalar"].read("name").tolist())
            names |= dict.fromkeys(text for number, text in enumerate(index.names) if number in used)
    settings = [_settings(run) for run in runs]
    keys = sorted({key for one in settings for key in one})
    rows = [Difference(key, [one.get(key, "–") for one in settings]) for key in keys]
    return Comparison(
        runs=[run.id for run in runs],
        scalars=list(names),
        curves=[_curve(run, name, by) for run in runs],
        differences=[row for row in rows if len(set(row.values)) > 1],
    )


def _curve(run: DashboardRun, name: str, by: str) -> Curve:
    with run.lock:
        index = run.index()
        if name not in index.names:
            return Curve(run.id, [], [])
        table = index.tables["scalar"]
        rows = table.read("name") == index.names.index(name)
        t, step, value = (table.read(column)[rows] for column in ("t", "step", "value"))
        first = index.analysis.first_t
        starts = [mark for mark in index.marks()[0] if mark.name == "start"]
    batch = starts[-1].numbers.get("global_batch", 1.0) if starts else 1.0
    x = t - first if by == "time" else step * batch if by == "samples" else step
    order = np.argsort(x, kind="stable")
    x, value = x[order], value[order]
    if len(x) > MAX_POINTS:
        picks = np.unique(np.linspace(0, len(x) - 1, MAX_POINTS).astype(int))
        x, value = x[picks], value[picks]
    return Curve(run.id, to_numbers(x), to_numbers(value))


def _settings(run: DashboardRun) -> dict[str, str]:
    """Return the job file and the environment as flat keys with text values."""
    settings: dict[str, str] = {}
    try:
        _flatten("", yaml_io.parse(run.job_yaml(), run.folder.folder / "job.yaml")[0], settings)
    except StokerError:
        settings["job.yaml"] = "cannot be read"
    try:
        environment = json.loads((run.folder.folder / "environment.json").read_bytes())
        settings |= {f"environment.{key}": str(environment[key]) for key in _ENVIRONMENT if key in environment}
    except (OSError, ValueError, TypeError):
        pass
    return settings


def _split_flags(prefix: str, words: list[str]) -> dict[str, str]:
    """Return the flags of a command as settings of their own: `--lr 0.1` as `program.args --lr`."""
    settings: dict[str, str] = {}
    flag = prefix
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flag = f"{prefix} {name}"
            settings[flag] = value if equals else "set"
        else:
            settings[flag] = word if settings.get(flag) in (None, "set") else f"{settings[flag]} {word}"
    return settings


def _flatten(prefix: str, value: Any, into: dict[str, str]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), inner, into)
    elif (
        isinstance(value, list) and value and all(isinstance(word, str) for word in value) and value[0].startswith("-")
    ):
        into.update(_split_flags(prefix, value))
    else:
        into[prefix] = json.dumps(value, default=str) if isinstance(value, list) else str(value)
