"""Read YAML and JSON manifest files, as `kubectl apply -f` takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.errors import InputError, NotFoundError


def load_documents(path: Path) -> list[Any]:
    """Return the documents of a YAML or JSON file without checking their shape; skip empty ones."""
    import yaml

    try:
        return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]
    except FileNotFoundError as error:
        raise NotFoundError("no such file or directory", where=path) from error
    except OSError as error:
        raise InputError(f"cannot read file: {(error.strerror or '').lower()}", where=path) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"invalid YAML: {' '.join(str(error).split())}", where=path) from error
