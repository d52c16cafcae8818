"""`stoker dash`: show runs on a web page."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.output import print_message

if TYPE_CHECKING:
    import socket

    from stoker.dashboard.runs import RunCatalog


def dash(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Runs to show: IDs, job names or run folders. Defaults to all runs."),
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 uses a free port.")] = 8300,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; other than loopback requires --token-file.")
    ] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the default browser.")] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the token that clients must send.", show_default=False),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write one run as a self-contained page to FILE, and exit. Defaults to the newest run."
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="Follow the runs of a cluster, also those that others started: k8s://context/namespace or ray://host.",
        ),
    ] = None,
    notify: Annotated[
        str | None, typer.Option(metavar="URL", help="Post a JSON message to URL if a run fails, hangs or slows down.")
    ] = None,
) -> None:
    """Show runs on a web page, live.

    Reads only run folders; with --on, the logs of the cluster's runs are copied to run folders first, and nothing is
    changed in the cluster. Runs until you press Ctrl-C or it receives SIGTERM.
    """
    from stoker.errors import InputError, MissingExtraError

    if notify is not None and not notify.startswith(("http://", "https://")):
        raise InputError("--notify must be an http:// or https:// URL")
    if html is not None and on is not None:
        raise InputError(
            "--html cannot be combined with --on", hint="open the page, or write it on the machine of the run"
        )
    if html is not None and len(runs or []) > 1:
        raise InputError("--html writes one run, got several", hint="name one run, and repeat the command for others")
    catalog = _open_catalog(runs or []) if on is None else _follow_cluster(on, runs or [])
    if html is not None:
        _write_page(catalog, html)
        return
    try:
        from stoker.dashboard import server
        from stoker.dashboard.notify import Notifier
        from stoker.dashboard.security import Access
    except ImportError as error:
        raise MissingExtraError("starlette", "web", purpose="stoker dash") from error
    from stoker.serve.auth import read_token
    from stoker.serve.loopback import is_loopback

    if token_file is None and not is_loopback(host):
        raise InputError(f"--host {host} requires --token-file", hint="create one with: openssl rand -hex 24 > token")
    access = Access(read_token(token_file) if token_file else None, is_loopback=is_loopback(host))
    listener = _listen(host, port)
    name = f"[{host}]" if ":" in host else host
    url = f"http://{name}:{listener.getsockname()[1]}/"
    link = f"{url}login?key={access.link_key}" if access.link_key else url
    print_message(f"Dashboard: {link}" + (" (this link works once)" if access.link_key else ""))
    if open_browser:
        typer.launch(link)
    with suppress(KeyboardInterrupt):
        server.serve(server.create_app(catalog, access, Notifier(catalog, notify) if notify else None), listener)


def _open_catalog(names: list[str]) -> RunCatalog:
    """Return the runs that are named; a name may also be the path of a run folder."""
    from stoker.dashboard.runs import RunCatalog
    from stoker.jobs.run_folder import match_runs

    folders: list[Path] = []
    for name in names:
        path = Path(name)
        if "/" in name and (path / "logs").is_dir():
            folders.append(path.absolute())
        else:
            folders += [run.folder for run in match_runs(name)]
    return RunCatalog(list(dict.fromkeys(folders)))


def _follow_cluster(target: str, names: list[str]) -> RunCatalog:
    """Begin to follow the runs of a cluster, and return them."""
    from stoker.dashboard.runs import RunCatalog
    from stoker.launchers.followed_runs import FollowedRuns, open_cluster_runs

    followed = FollowedRuns(open_cluster_runs(target), names)
    followed.start()
    return RunCatalog(followed=followed)


def _write_page(catalog: RunCatalog, path: Path) -> None:
    from stoker.dashboard.export import write_page
    from stoker.errors import NotFoundError

    runs = catalog.list()
    if not runs:
        raise NotFoundError("no runs found", hint="start one with: stoker job run")
    write_page(runs[0], path)
    print_message(f"Wrote the page of run {runs[0].id}")
    typer.echo(path)


def _listen(host: str, port: int) -> socket.socket:
    import socket

    from stoker.serve.embedded import listen_error

    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise listen_error(host, port, error) from error
