"""`stoker demo`: the whole road on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.output import remark


def demo(
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Where to leave the results; a new folder by default."),
    ] = None,
) -> None:
    """Walk the whole road on this machine: each command is shown, then run."""
    import tempfile

    from stoker.demo import road
    from stoker.errors import ConflictError, InputError

    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="stoker-demo-"))
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConflictError("is not an empty folder", where=folder, hint="name a new one with --dir")
    for step in road(folder):
        remark(f"\n# {step.why}\n$ {step.line}")
        code = subprocess.run([sys.executable, "-m", "stoker", *step.argv], check=False).returncode
        if code != 0:
            raise InputError(f"`{step.line}` ended with exit code {code}")
    remark(f"\nEverything worked. The shards are in {folder}")
