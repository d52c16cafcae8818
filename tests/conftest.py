"""Options, session servers, and an environment in which no credentials of this machine can be found."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest

from tests.support.disks import NOT_ALLOWED
from tests.support.kubernetes import NO_KUBERNETES
from tests.support.servers import free_port, gcs_emulator, moto


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="Rewrite the files in tests/golden.")


@pytest.fixture(autouse=True)
def _hermetic(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    for key in os.environ:
        if key.upper().startswith(("KUBE", "AWS_", "GOOGLE_", "GCE_", "STOKER_", "STORAGE_")) or key.upper().endswith(
            "_PROXY"
        ):
            monkeypatch.delenv(key)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("NO_GCE_CHECK", "true")


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    with moto() as url:
        yield url


@pytest.fixture(scope="session")
def gcs_url() -> Iterator[str]:
    with gcs_emulator() as url:
        yield url


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI everything that can be installed is there, so a skipped test is one that should have run."""
    report = yield
    may_skip = any(reason in str(report.longrepr) for reason in (NOT_ALLOWED, NO_KUBERNETES))
    if report.skipped and os.environ.get("CI") and not may_skip:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report
