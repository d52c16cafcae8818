"""SIGHUP during the lifetime of an ephemeral pod: an interrupt, unless the command runs under nohup."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from stoker.kube.ephemeral_pod import sighup_as_keyboard_interrupt


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    previous = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, previous)


def test_sighup_interrupts() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with pytest.raises(KeyboardInterrupt), sighup_as_keyboard_interrupt():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_sighup_stays_ignored_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with sighup_as_keyboard_interrupt():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
