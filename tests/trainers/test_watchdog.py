"""Bounded waits: a process that makes no progress reports one sentence and exits."""

from __future__ import annotations

import pytest

from stoker.trainers.watchdog import EXIT_CODE, Watchdog
from tests.support.waiting import wait_until


def test_deadline_around_others_is_kept() -> None:
    """A short wait that ends in time inside a longer one does not cancel the longer one."""
    reports: list[str] = []
    codes: list[int] = []
    watchdog = Watchdog(reports.append, end=codes.append)
    with watchdog.bound(0.01, "outer"):
        with watchdog.bound(100, "inner"):
            pass
        wait_until(lambda: codes)
    assert (reports, codes) == (["outer"], [EXIT_CODE])


def test_wait_that_ends_by_an_error_is_not_reported_later() -> None:
    reports: list[str] = []
    watchdog = Watchdog(reports.append, end=lambda _: None)
    with pytest.raises(ValueError, match="bad"), watchdog.bound(0.01, "late"):
        raise ValueError("bad")
    with watchdog.bound(0.01, "next"):
        wait_until(lambda: reports)
    assert reports == ["next"]
