"""A page in a real browser: Debian's Chromium, driven by playwright."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest


class Browser:
    """A page of the browser that collects errors of scripts and of the content security policy."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, url: str) -> None:
        """Open a page, and wait until it shows its data."""
        self.page.goto("about:blank")
        self.page.goto(url)
        self.page.wait_for_selector("main[data-ready]")

    @property
    def connection(self) -> str:
        """The state of the connection, as the page shows it."""
        return str(self.page.locator("#connection").inner_text())

    def fact(self, name: str) -> str:
        """Return one of the numbers on top of the page."""
        return str(self.page.locator(f"[data-fact={name}]").inner_text())

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, while the page goes on."""
        deadline = time.monotonic() + 90
        while not condition():
            assert time.monotonic() < deadline, (self.page.locator("main").inner_text()[:500], self.errors)
            self.page.wait_for_timeout(100)

    def serious_violations(self) -> list[tuple[str, str]]:
        """Return the serious violations of accessibility rules that axe finds; the page must bypass its CSP."""
        axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
        found = axe.run(self.page).response["violations"]
        serious = [one for one in found if one["impact"] in ("serious", "critical")]
        return [(one["id"], one["nodes"][0]["html"][:200]) for one in serious]

    def chart_rows(self, title: str) -> int:
        """Return the number of rows of the table behind a chart."""
        details = self.page.locator(f'section[aria-label="{title}"] details')
        details.evaluate("node => { node.open = false; }")
        self.page.wait_for_timeout(50)
        details.evaluate("node => { node.open = true; }")
        self.page.wait_for_timeout(50)
        return int(details.locator("tbody tr").count())
