"""Options, shared fixtures, and an environment without credentials of this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from stoker.testing import make_shards
from tests.support.disks import NOT_ALLOWED
from tests.support.kubernetes import NO_KUBERNETES
from tests.support.servers import free_port, gcs_emulator, moto

# A busy machine is no reason to fail.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_configure() -> None:
    """Handle SIGINT even where it is inherited as ignored, as in a background job: tests send it, also to children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture
def stoker_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of run folders, set as STOKER_HOME; it does not exist yet."""
    home = tmp_path / "stoker"
    monkeypatch.setenv("STOKER_HOME", str(home))
    return home


@pytest.fixture
def workspace(tmp_path: Path, stoker_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with STOKER_HOME in `stoker` and with `work`, which is the current directory."""
    assert stoker_home.parent == tmp_path
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


@pytest.fixture(scope="session")
def training_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with shard sets `train` (300 samples, 5 classes) and `val` (20 samples) of 40 x 32 pixels."""
    return make_shards(tmp_path_factory.mktemp("shards"), samples=300, val=20, classes=5, size=(40, 32))


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
    """Fail skipped tests in CI, where everything that can be installed is installed."""
    report = yield
    is_allowed = any(reason in str(report.longrepr) for reason in (NOT_ALLOWED, NO_KUBERNETES))
    if report.skipped and os.environ.get("CI") and not is_allowed:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report
