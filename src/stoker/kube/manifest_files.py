"""Read YAML and JSON manifest files, as `kubectl apply -f` takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.errors import InputError, NotFoundError


def load_documents(path: Path) -> list[Any]:
    """Return the documents of a YAML or JSON file without checking their shape; skip empty ones."""
    from stoker.core import json_io, yaml_io

    try:
        return yaml_io.parse_documents(json_io.read_file(path), path)
    except FileNotFoundError as error:
        raise NotFoundError("no such file or directory", where=path) from error
    except OSError as error:
        raise InputError(f"cannot read file: {(error.strerror or '').lower()}", where=path) from error
