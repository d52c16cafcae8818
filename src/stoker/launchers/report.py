"""All that is known of a run in one archive, without secrets: to send to whoever can help."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from stoker.errors import without_secrets
from stoker.jobs.runs import Run, looks_secret
from stoker.telemetry.events import Event
from stoker.telemetry.reader import read_run

SHORTEST_SECRET = 8
"""Shorter values stand in texts by chance."""
LEFT_OUT = ("checkpoints", "tensorboard", "lock")


def write_report(run: Run, path: Path, summary: str, environ: Mapping[str, str] | None = None) -> None:
    """Write the archive: every file of the run but checkpoints, its events as JSON lines, and a summary."""
    hidden = _secrets(run, os.environ if environ is None else environ)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with tarfile.open(temporary, "w:gz") as archive:
            for name, text in [*_files(run), ("summary.txt", summary), ("events.jsonl", _events(run))]:
                _add(archive, f"{run.id}/{name}", _clean(text, hidden))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _files(run: Run) -> Iterator[tuple[str, str]]:
    for path in sorted(run.folder.rglob("*")):
        name = path.relative_to(run.folder)
        if path.is_file() and name.parts[0] not in LEFT_OUT and not path.name.startswith("."):
            yield str(name), path.read_text(errors="replace")


def _events(run: Run) -> str:
    return "".join(f"{to_line(event)}\n" for event in read_run(run.logs).events)


def to_line(event: Event) -> str:
    """Write an event as one line of JSON."""
    import msgspec

    return msgspec.json.encode(event).decode()


def _secrets(run: Run, environ: Mapping[str, str]) -> list[str]:
    """List values that must not leave: of variables that look like secrets, here and in the job."""
    job = run.job
    named = {**environ, **job.env}
    values = {value for name, value in named.items() if looks_secret(name) or name in job.secret_env}
    return sorted((value for value in values if len(value) >= SHORTEST_SECRET), key=len, reverse=True)


def _clean(text: str, hidden: list[str]) -> str:
    for value in hidden:
        text = text.replace(value, "…")
    return "\n".join(without_secrets(line) for line in text.split("\n"))


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode(errors="replace")
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = len(data), int(time.time()), 0o644
    archive.addfile(info, io.BytesIO(data))
