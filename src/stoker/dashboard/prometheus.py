"""Prometheus metrics of runs, in the text format. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.dashboard.summary import RunRow

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_GAUGES = {
    "step": "Last reported training step.",
    "total_steps": "Number of training steps.",
    "loss": "Last reported loss.",
    "samples_per_s": "Last reported samples per second.",
    "val_top1": "Last reported validation accuracy, 0 to 1.",
    "eta_s": "Estimated remaining seconds.",
    "goodput": "Useful share of the elapsed time, 0 to 1.",
    "cost": "Price of all slots over the elapsed time, in the currency of the job file.",
    "attempts": "Number of attempts.",
    "slots": "Number of slots.",
    "elapsed_s": "Seconds since the start, or between start and end.",
    "last_event": "Time of the last event.",
}


def render(rows: Iterable[RunRow]) -> str:
    """Return the metrics of runs."""
    runs = list(rows)
    lines = ["# HELP stoker_run_state State of a run: 1 for the current state.", "# TYPE stoker_run_state gauge"]
    lines += [f'stoker_run_state{{{_labels(run)},state="{_escape(run.state)}"}} 1' for run in runs]
    for name, text in _GAUGES.items():
        values = [(run, getattr(run, name)) for run in runs if getattr(run, name) is not None]
        if values:
            lines += [f"# HELP stoker_run_{name} {text}", f"# TYPE stoker_run_{name} gauge"]
            lines += [f"stoker_run_{name}{{{_labels(run)}}} {value}" for run, value in values]
    return "\n".join(lines) + "\n"


def _labels(run: RunRow) -> str:
    return f'run="{_escape(run.id)}",job="{_escape(run.name)}"'


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
