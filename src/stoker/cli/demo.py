"""`stoker demo`: the whole road on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.output import remark


def demo(
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Class folders below train/ and val/; else handwritten digits.", show_default=False
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Where to leave the results; a new folder by default."),
    ] = None,
) -> None:
    """Walk the whole road: convert, serve, cache, train on two ranks, kill one of them, and see it resume.

    Each command is shown, then run.
    """
    import tempfile
    import time

    from stoker.core.units import format_duration
    from stoker.demo.digits import write_digits
    from stoker.demo.run import walk
    from stoker.demo.steps import Road
    from stoker.errors import ConflictError, NotFoundError
    from stoker.launchers.plan import free_ports

    began = time.monotonic()
    if data is not None and not ((data / "train").is_dir() and (data / "val").is_dir()):
        raise NotFoundError("has no train/ and val/", where=data, hint="put class folders of images into both")
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="stoker-demo-"))
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConflictError("is not an empty folder", where=folder, hint="name a new one with --dir")
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if data is None:
        train, val = write_digits(folder / "digits")
        remark(f"# {train + val:,} real handwritten digits as JPEG files, in {folder}/digits")
    serve_port, cache_port = free_ports(2)
    road = Road(
        dataset="digits" if data is None else str(data.absolute()),
        transform="digits-train" if data is None else "small-train",
        serve_port=serve_port,
        cache_port=cache_port,
    )
    walk(road, folder, remark)
    remark(f"\nEverything worked, in {format_duration(round(time.monotonic() - began))}. To try next:")
    for line in road.next(folder):
        remark(f"  {line}")
