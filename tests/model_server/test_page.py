"""The page in a real browser: an image is classified, a bad one is explained, and nothing violates its policy."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.model_server.test_http_api import COLORS
from tests.support.model_servers import ListedModels, NumpyModel, model_server

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_image_is_classified(browser: Any, scheme: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "blue.png", tmp_path / "bad.png"
    out = io.BytesIO()
    Image.new("RGB", (60, 40), (30, 10, 250)).save(out, "PNG")
    good.write_bytes(out.getvalue())
    bad.write_bytes(out.getvalue()[:70])
    with model_server(ListedModels(NumpyModel(7, COLORS)), name="rgb") as (server, _):
        page = browser.new_page(color_scheme=scheme)
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(server.url)
        sync_api.expect(page.locator("h1")).to_have_text("rgb")
        sync_api.expect(page.locator("#facts")).to_contain_text("3 classes")
        page.set_input_files("#file", good)
        sync_api.expect(page.locator("#classes .name")).to_have_text(["blue", "red", "green"])
        sync_api.expect(page.locator("#preview")).to_be_visible()
        assert problems == []
        is_dark = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(value => value < 60)"
        assert page.evaluate(is_dark) is (scheme == "dark")
        page.set_input_files("#file", bad)
        sync_api.expect(page.locator("#message")).to_contain_text("bad image")
        sync_api.expect(page.locator("#classes li")).to_have_count(0)
        page.close()
