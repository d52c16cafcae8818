"""The page of the data: bad samples with their thumbnails, and the counters of the cache."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from stoker.jobs.run_folder import RunFolder
from stoker.jobs.topology import Slot
from stoker.load.loader import Loader
from stoker.telemetry.events import Recorder
from stoker.trainers.data_report import MAX_MARKS, DataReporter
from tests.dashboard.test_browser import PAYLOAD
from tests.support.browsers import Browser
from tests.support.dashboards import Dashboard, running_dashboard
from tests.support.http_origin import run_origin
from tests.support.loaders import encode, gradient, write_shards
from tests.support.runs import Runs
from tests.support.trees import stoker

LogRun = Callable[..., "LoggedRun"]
RUN_ID = "flowers-20260101-000000-abcd"


class LoggedRun:
    """A run whose log is written by the test."""

    def __init__(self, home: Path, **data: Any) -> None:
        self.run: RunFolder = Runs().write(home, RUN_ID, data=data)
        self.fd = os.open(self.run.log_path(Slot("worker", 0), 0), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.record = Recorder(slot="worker/0", fd=self.fd)
        self.record.mark("start", samples=100, global_batch=4, epochs=2, total_steps=50)
        self.record.scalar("epoch", 0.25, 10)

    def read_epoch(self, url: str, **options: Any) -> None:
        """Read an epoch with the loader of the trainers, and report on it as they do."""
        reporter = DataReporter(self.record)
        with Loader(url, global_batch=4, size=32, max_bad=1.0, rank=(0, 1), **options) as loader:
            for step, _ in enumerate(loader):
                reporter.report(loader, 0, step)

    def write_bad_sample(self, **fields: Any) -> None:
        """Write the mark of a bad sample that the log claims."""
        self.record.mark("bad_sample", "", **{"reason": "", "offset": 0, "length": 100, "sha256": "", **fields})


@pytest.fixture
def log_run(stoker_home: Path) -> Iterator[LogRun]:
    """Return a function that writes a run with the given section `data` of its job file."""
    runs: list[LoggedRun] = []

    def write(**data: Any) -> LoggedRun:
        runs.append(LoggedRun(stoker_home, **data))
        return runs[-1]

    yield write
    for logged in runs:
        os.close(logged.fd)


def broken_images() -> list[bytes]:
    """Eleven images, of which one ends early, and one is none."""
    whole = encode(gradient(200, 120))
    return [*[whole] * 5, whole[: len(whole) // 2], *[whole] * 4, PAYLOAD.encode() * 5]


def thumbnails(dashboard: Dashboard) -> dict[str, Any]:
    """Return the thumbnails of all bad samples by the reason that the loader gave."""
    path = f"/api/runs/{RUN_ID}"
    rows = dashboard.get(f"{path}/data").json["bad_samples"]
    return {row["reason"]: dashboard.get(f"{path}/thumbnail?sample={row['number']}").json for row in rows}


def test_bad_samples_have_thumbnails(log_run: LogRun, tmp_path: Path, browser: Browser) -> None:
    url = write_shards(tmp_path / "shards", broken_images())
    logged = log_run(train=url)
    logged.read_epoch(url)
    page = browser.page
    with running_dashboard() as dashboard:
        data = dashboard.get(f"/api/runs/{RUN_ID}/data").json
        assert (data["seen"], data["left"], data["bad"], data["cache"]) == (25, 75, 2, None)
        images = sorted(thumbnails(dashboard).values(), key=lambda found: found["image"])
        assert (images[0]["image"], images[0]["reason"]) == ("", "cannot be decoded: unknown image format")
        kind, _, encoded = images[1]["image"].partition(";base64,")
        assert kind == "data:image/jpeg"
        assert Image.open(io.BytesIO(base64.b64decode(encoded))).size == (128, 77)
        assert "truncated" in images[1]["reason"]

        browser.open(f"{dashboard.url}/#/run/{RUN_ID}/data")
        assert (browser.fact("seen"), browser.fact("left_samples"), browser.fact("bad")) == ("25", "75", "2")
        browser.wait_for(lambda: page.locator(".thumbnail img").count() == 1)
        assert page.locator(".thumbnail img").evaluate("image => image.naturalWidth") == 128
        browser.wait_for(lambda: page.locator(".thumbnail", has_text="nothing can be decoded").count() == 1)
        page.locator(".samples a").first.click()
        browser.wait_for(lambda: page.locator("select").input_value() == "worker-0.0.log")
    assert browser.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_thumbnails_are_accessible(log_run: LogRun, tmp_path: Path, chromium: Any, scheme: str) -> None:
    url = write_shards(tmp_path / "shards", broken_images())
    log_run(train=url).read_epoch(url)
    context = chromium.new_context(color_scheme=scheme, bypass_csp=True)
    context.set_default_timeout(60_000)
    try:
        browser = Browser(context.new_page())
        with running_dashboard() as dashboard:
            browser.open(f"{dashboard.url}/#/run/{RUN_ID}/data")
            browser.wait_for(lambda: browser.page.locator(".thumbnail img").count() == 1)
            assert browser.serious_violations() == []
    finally:
        context.close()


def test_exported_page_has_the_thumbnails(log_run: LogRun, tmp_path: Path, browser: Browser) -> None:
    url = write_shards(tmp_path / "shards", broken_images())
    log_run(train=url).read_epoch(url)
    path = tmp_path / "page.html"
    assert stoker("dash", RUN_ID, "--html", path) == 0
    shutil.rmtree(tmp_path / "shards")
    browser.open(f"{path.as_uri()}#/run/{RUN_ID}/data")
    browser.wait_for(lambda: browser.page.locator(".thumbnail img").count() == 1)
    assert browser.page.locator(".thumbnail img").evaluate("image => image.naturalWidth") == 128
    assert browser.errors == []


def test_thumbnails_of_remote_shards_come_from_the_cache(log_run: LogRun, tmp_path: Path) -> None:
    source = "synthetic:samples=40,classes=2,size=48x48,seed=1"
    assert stoker("data", "convert", source, tmp_path / "shards", "--shard-samples", 10) == 0
    folder, cache = tmp_path / "shards/train", tmp_path / "cache"
    truncate_last_image(folder)
    files = {f"/train/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with run_origin(files) as origin:
        url = f"{origin.url}/train"
        logged = log_run(train=url, cache={"dir": str(cache)})
        for _ in range(2):
            logged.read_epoch(url, cache=str(cache))
        requests = len(origin.get_requests) + len(origin.head_requests)
        with running_dashboard() as dashboard:
            (found,) = thumbnails(dashboard).values()
            assert found["image"].startswith("data:image/jpeg")
            totals = dashboard.get(f"/api/runs/{RUN_ID}/data").json["cache"]
            assert (totals["hits"], totals["misses"], totals["fetched_bytes"]) == (4, 0, 0)
            for path in (cache / "objects").iterdir():
                path.unlink()
            (found,) = thumbnails(dashboard).values()
            assert found == {"image": "", "reason": "the shard is neither on this machine nor in its cache"}
        assert len(origin.get_requests) + len(origin.head_requests) == requests


def truncate_last_image(folder: Path) -> None:
    """Overwrite the end of an image in a shard, and record the new digest in the manifest."""
    shard, manifest = min(folder.glob("*.tar")), folder / "manifest.json"
    before = shard.read_bytes()
    at = before.rindex(b"\xff\xd9")
    after = before[: at - 200] + bytes(202) + before[at + 2 :]
    shard.write_bytes(after)
    digests = [hashlib.sha256(data).hexdigest() for data in (before, after)]
    text = manifest.read_text()
    assert digests[0] in text
    manifest.write_text(text.replace(*digests))


@pytest.mark.parametrize(
    "fields",
    [
        {"shard": "{outside}"},
        {"shard": "{shards}/../outside.jpg"},
        {"shard": "{shards}/made-000000.tar", "offset": 2**60},
        {"shard": "{shards}/made-000000.tar", "offset": -1, "length": -1},
        {"shard": "{shards}/made-000000.tar", "length": 10**12},
        {"shard": "https://example.org/made.tar", "sha256": "../../outside.jpg"},
        {"shard": 7, "sha256": None, "offset": "x", "length": 1e300, "epoch": 1e300, "position": "Infinity"},
    ],
)
def test_log_cannot_name_other_files(log_run: LogRun, tmp_path: Path, fields: dict[str, Any]) -> None:
    """The log is whatever the program printed."""
    url = write_shards(tmp_path / "shards", broken_images())
    outside = tmp_path / "outside.jpg"
    outside.write_bytes(encode(gradient()))
    (tmp_path / "cache/objects").mkdir(parents=True)
    logged = log_run(train=url, val="https://example.org/", cache={"dir": str(tmp_path / "cache")})
    texts = {"{outside}": str(outside), "{shards}": str(tmp_path / "shards")}
    for name, path in texts.items():
        fields = {key: value.replace(name, path) if isinstance(value, str) else value for key, value in fields.items()}
    logged.write_bad_sample(**{"length": outside.stat().st_size, **fields})
    with running_dashboard() as dashboard:
        (found,) = thumbnails(dashboard).values()
        assert found["image"] == ""
        assert found["reason"]
        assert dashboard.get(f"/api/runs/{RUN_ID}/thumbnail?sample=1").code == 404


def test_marks_of_a_process_are_bounded(log_run: LogRun, tmp_path: Path) -> None:
    url = write_shards(tmp_path / "shards", [b"none"] * (MAX_MARKS + 30), shard_samples=20)
    logged = log_run(train=url)
    logged.read_epoch(url)
    lines = logged.run.log_path(Slot("worker", 0), 0).read_text().splitlines()
    marks = [line for line in lines if json.loads(line.partition(" ")[2]).get("name") == "bad_sample"]
    assert len(marks) == MAX_MARKS
    with running_dashboard() as dashboard:
        data = dashboard.get(f"/api/runs/{RUN_ID}/data").json
    assert data["bad"] == MAX_MARKS + 30
    assert len(data["bad_samples"]) == MAX_MARKS
