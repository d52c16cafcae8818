"""Report of a run for a bug report: one archive with its files, events and a summary, with secrets redacted."""

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

from stoker.core import json_io
from stoker.core.spec import to_json
from stoker.core.yaml_io import to_yaml
from stoker.errors import NotFoundError, SpecError, UnavailableError, redact_urls
from stoker.jobs.run_folder import RunFolder, is_secret_name
from stoker.jobs.spec import parse_job, to_plain
from stoker.telemetry.reader import read_events

MIN_SECRET_LENGTH = 6
"""Shorter values occur in text by chance."""
EXCLUDED = ("checkpoints", "index", "tensorboard", "lock")


def write_report(run: RunFolder, path: Path, summary: str, environ: Mapping[str, str] | None = None) -> None:
    """Write the archive: every file of the run except checkpoints, its events as JSON lines, and a summary."""
    secrets = _secret_values(run, os.environ if environ is None else environ)
    if not path.parent.is_dir():
        raise NotFoundError(f"cannot write the report: directory {path.parent} does not exist", where=path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with tarfile.open(temporary, "w:gz") as archive:
            for file in _files(run):
                _add(archive, f"{run.id}/{file.relative_to(run.folder)}", _redacted_parts(file, secrets))
            _add(archive, f"{run.id}/summary.txt", [_redact(summary, secrets)])
            _add(archive, f"{run.id}/events.jsonl", (_redact(line, secrets) for line in _events(run)))
        temporary.chmod(0o600)
        temporary.replace(path)
    except OSError as error:
        if error.filename != str(temporary):
            raise
        reason = (error.strerror or "").lower()
        raise UnavailableError(f"cannot write the report: {reason}", where=path) from error
    finally:
        temporary.unlink(missing_ok=True)


def _files(run: RunFolder) -> Iterator[Path]:
    for path in sorted(run.folder.rglob("*")):
        name = path.relative_to(run.folder)
        if path.is_file() and name.parts[0] not in EXCLUDED and not path.name.startswith("."):
            yield path


def _events(run: RunFolder) -> Iterator[str]:
    return (f"{msgspec.json.encode(event).decode()}\n" for event in read_events(run.logs))


def _redacted_parts(path: Path, secrets: list[str]) -> Iterable[str]:
    """Return the text of a file with secrets redacted: in settings by key name, elsewhere line by line."""
    if path.suffix in (".yaml", ".json"):
        return [_redact(_redact_settings(path.read_text(errors="replace"), path.suffix), secrets)]
    return _redacted_lines(path, secrets)


def _redacted_lines(path: Path, secrets: list[str]) -> Iterator[str]:
    with path.open(errors="replace", newline="\n") as file:
        for line in file:
            yield _redact(line, secrets)


def _redact_settings(text: str, suffix: str) -> str:
    """Redact values in settings whose key or flag looks like that of a secret."""
    if suffix == ".yaml":
        return to_yaml(_mask_secrets(to_plain(parse_job(text, "job.yaml"))))
    try:
        return to_json(_mask_secrets(json_io.parse(text, None))).decode()
    except SpecError:  # truncated, on a full disk
        return ""


def _mask_secrets(data: Any) -> Any:
    """Mask every value whose key, or preceding flag, looks like that of a secret."""
    if isinstance(data, dict):
        return {
            name: "…" if isinstance(value, str) and is_secret_name(str(name)) else _mask_secrets(value)
            for name, value in data.items()
        }
    if isinstance(data, list):
        return [_mask_argument(previous, value) for previous, value in zip(["", *data], data, strict=False)]
    return data


def _mask_argument(previous: Any, value: Any) -> Any:
    if not isinstance(value, str):
        return _mask_secrets(value)
    flag, equals, _ = value.partition("=")
    if flag.startswith("-") and equals and is_secret_name(flag):
        return f"{flag}=…"
    is_flag = isinstance(previous, str) and previous.startswith("-") and "=" not in previous
    return "…" if is_flag and is_secret_name(previous) else value


def _secret_values(run: RunFolder, environ: Mapping[str, str]) -> list[str]:
    """Return the values of secret variables of this environment and of the job, longest first."""
    job = run.job
    variables = {**environ, **job.env}
    values = {value for name, value in variables.items() if is_secret_name(name) or name in job.secret_env}
    return sorted((value for value in values if len(value) >= MIN_SECRET_LENGTH), key=len, reverse=True)


def _redact(text: str, secrets: list[str]) -> str:
    for value in secrets:
        text = text.replace(value, "…").replace(json.dumps(value)[1:-1], "…")
    return "\n".join(redact_urls(line) for line in text.split("\n"))


def _add(archive: tarfile.TarFile, name: str, parts: Iterable[str]) -> None:
    with TemporaryFile() as file:
        for part in parts:
            file.write(part.encode(errors="replace"))
        info = tarfile.TarInfo(name)
        info.size, info.mtime, info.mode = file.tell(), int(time.time()), 0o644
        file.seek(0)
        archive.addfile(info, file)
