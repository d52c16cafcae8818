"""All that is known of a run in one archive, without secrets: to send to whoever can help."""

from __future__ import annotations

import json
import os
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import msgspec

from stoker.core.spec import to_json, to_yaml
from stoker.errors import without_secrets
from stoker.jobs.run_folder import Run, looks_secret
from stoker.jobs.spec import parse_job, plain
from stoker.telemetry.reader import read_events

SHORTEST_SECRET = 6
"""Shorter values stand in texts by chance."""
LEFT_OUT = ("checkpoints", "tensorboard", "lock")


def write_report(run: Run, path: Path, summary: str, environ: Mapping[str, str] | None = None) -> None:
    """Write the archive: every file of the run but checkpoints, its events as JSON lines, and a summary."""
    hidden = _secrets(run, os.environ if environ is None else environ)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with tarfile.open(temporary, "w:gz") as archive:
            for file in _files(run):
                _add(archive, f"{run.id}/{file.relative_to(run.folder)}", _cleaned(file, hidden))
            _add(archive, f"{run.id}/summary.txt", [_clean(summary, hidden)])
            _add(archive, f"{run.id}/events.jsonl", (_clean(line, hidden) for line in _events(run)))
        temporary.chmod(0o600)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _files(run: Run) -> Iterator[Path]:
    for path in sorted(run.folder.rglob("*")):
        name = path.relative_to(run.folder)
        if path.is_file() and name.parts[0] not in LEFT_OUT and not path.name.startswith("."):
            yield path


def _events(run: Run) -> Iterator[str]:
    return (f"{msgspec.json.encode(event).decode()}\n" for event in read_events(run.logs))


def _cleaned(path: Path, hidden: list[str]) -> Iterable[str]:
    """Give a file without secrets: settings by the names of their keys, other text line by line."""
    if path.suffix in (".yaml", ".json"):
        return [_clean(_without(path.read_text(errors="replace"), path.suffix), hidden)]
    return _lines(path, hidden)


def _lines(path: Path, hidden: list[str]) -> Iterator[str]:
    with path.open(errors="replace", newline="\n") as file:
        for line in file:
            yield _clean(line, hidden)


def _without(text: str, kind: str) -> str:
    """Take the values of variables that look like secrets out of settings."""
    if kind == ".yaml":
        return to_yaml(_masked(plain(parse_job(text, "job.yaml"))))
    try:
        return to_json(_masked(msgspec.json.decode(text))).decode()
    except msgspec.DecodeError:  # torn, on a full disk
        return ""


def _masked(data: Any) -> Any:
    """Mask what stands under a name, or behind a flag, that looks like a secret's."""
    if isinstance(data, dict):
        return {
            name: "…" if isinstance(value, str) and looks_secret(str(name)) else _masked(value)
            for name, value in data.items()
        }
    if isinstance(data, list):
        return [_masked_word(before, word) for before, word in zip(["", *data], data, strict=False)]
    return data


def _masked_word(before: Any, word: Any) -> Any:
    if not isinstance(word, str):
        return _masked(word)
    flag, equals, _ = word.partition("=")
    if flag.startswith("-") and equals and looks_secret(flag):
        return f"{flag}=…"
    is_behind = isinstance(before, str) and before.startswith("-") and "=" not in before and looks_secret(before)
    return "…" if is_behind else word


def _secrets(run: Run, environ: Mapping[str, str]) -> list[str]:
    """List values that must not leave: of variables that look like secrets, here and in the job."""
    job = run.job
    named = {**environ, **job.env}
    values = {value for name, value in named.items() if looks_secret(name) or name in job.secret_env}
    return sorted((value for value in values if len(value) >= SHORTEST_SECRET), key=len, reverse=True)


def _clean(text: str, hidden: list[str]) -> str:
    for value in hidden:
        text = text.replace(value, "…").replace(json.dumps(value)[1:-1], "…")
    return "\n".join(without_secrets(line) for line in text.split("\n"))


def _add(archive: tarfile.TarFile, name: str, parts: Iterable[str]) -> None:
    with TemporaryFile() as file:
        for part in parts:
            file.write(part.encode(errors="replace"))
        info = tarfile.TarInfo(name)
        info.size, info.mtime, info.mode = file.tell(), int(time.time()), 0o644
        file.seek(0)
        archive.addfile(info, file)
