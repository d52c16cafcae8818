"""Files of objects, as `kubectl apply -f` takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.errors import InputError, NotFoundError


def load_documents(path: Path) -> list[Any]:
    """Read the documents of a YAML or JSON file, of whichever shape they are; empty ones are left out."""
    import yaml

    try:
        return [one for one in yaml.safe_load_all(path.read_text()) if one is not None]
    except FileNotFoundError as error:
        raise NotFoundError("there is no such file", where=path) from error
    except OSError as error:
        raise InputError(f"cannot be read: {(error.strerror or '').lower()}", where=path) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"is no YAML: {' '.join(str(error).split())}", where=path) from error
