"""`stoker demo`: convert, serve, cache and train on this machine, with one killed rank."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.output import print_message


def demo(
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Dataset with class folders in train/ and val/. Defaults to handwritten digits.",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Output directory. Defaults to a new temporary directory."),
    ] = None,
) -> None:
    """Run the whole workflow on this machine in about a minute.

    Converts a dataset, serves and caches it, trains on two ranks, kills one of them and resumes. Each command is
    printed before it runs.
    """
    import tempfile
    import time

    from stoker.core.units import format_duration
    from stoker.demo.digits import import_loader, write_digits
    from stoker.demo.run import run_demo
    from stoker.demo.steps import Demo
    from stoker.errors import ConflictError, NotFoundError
    from stoker.launchers.plan import find_free_ports

    started_at = time.monotonic()
    if data is not None and not ((data / "train").is_dir() and (data / "val").is_dir()):
        raise NotFoundError(
            "no train/ and val/ directories found", where=data, hint="create both, with one folder of images per class"
        )
    if data is None:
        import_loader()  # raises an error if it cannot be imported, before a directory is created
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="stoker-demo-"))
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConflictError("directory is not empty", where=folder, hint="pass a new directory with --dir")
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if data is None:
        train, val = write_digits(folder / "digits")
        print_message(f"# wrote {train + val:,} handwritten digits as JPEG files to {folder}/digits")
    serve_port, cache_port = find_free_ports(2)
    plan = Demo(
        dataset="digits" if data is None else str(data.absolute()),
        transform="digits-train" if data is None else "small-train",
        serve_port=serve_port,
        cache_port=cache_port,
    )
    run_demo(plan, folder, print_message)
    took = format_duration(round(time.monotonic() - started_at))
    print_message(f"\nThe demo succeeded in {took}. Try next:")
    for line in plan.next_commands(folder):
        print_message(f"  {line}")
