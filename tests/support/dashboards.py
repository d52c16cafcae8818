"""A dashboard that runs in a thread of the test, with a real server on a free port."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from stoker.dashboard.runs import RunCatalog
from stoker.dashboard.security import Access
from stoker.dashboard.server import DashboardServer, create_app
from stoker.launchers.followed_runs import FollowedRuns
from tests.support.waiting import wait_until


class Answer(NamedTuple):
    """The status, headers and body of a response."""

    code: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Dashboard:
    """A dashboard that is running."""

    def __init__(self, port: int, catalog: RunCatalog, access: Access) -> None:
        self.port, self.catalog, self.access = port, catalog, access
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, headers=dict(headers or {}))
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, names, response.read())
        finally:
            connection.close()


@contextmanager
def running_dashboard(
    folders: list[Path] | None = None,
    token: str | None = None,
    port: int = 0,
    followed: FollowedRuns | None = None,
) -> Iterator[Dashboard]:
    """Start a dashboard on a loopback port, a free one by default, and stop it at the end."""
    catalog, access = RunCatalog(folders or [], followed), Access(token, is_loopback=True)
    listener = socket.create_server(("127.0.0.1", port))
    server = DashboardServer(create_app(catalog, access))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield Dashboard(listener.getsockname()[1], catalog, access)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
