"""Where the checkpoints of a run are: the directory or URL that its program reported, and the host of a path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.core import json_io
from stoker.jobs.run_folder import RunFolder
from stoker.storage import split_url

if TYPE_CHECKING:
    from stoker.telemetry.analysis import RunAnalysis


def locate_checkpoints(run: RunFolder, analysis: RunAnalysis) -> str:
    """Return where the newest checkpoint was written, as `host:directory` on another host; empty if none was."""
    newest = analysis.checkpoint
    if newest is None:
        return ""
    directory = split_url(newest.where)[0]
    host = None if "://" in directory else _read_hosts(run).get(newest.slot)
    return f"{host}:{directory}" if host else directory


def _read_hosts(run: RunFolder) -> dict[str, str]:
    """Return the host of each slot on another machine: of the plan, or as Ray has placed them."""
    plan = run.folder / "plan.json"
    hosts: dict[str, str] = json_io.parse(json_io.read_file(plan), plan).get("hosts") or {}
    places = run.folder / "places.json"
    return json_io.parse(json_io.read_file(places), places) if places.exists() else hosts
