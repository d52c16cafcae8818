"""Alerts: post a JSON message when a run fails, hangs or slows down, or when the disk of a node is nearly full."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from stoker.core.units import format_bytes, format_duration
from stoker.dashboard.runs import DashboardRun, RunCatalog
from stoker.dashboard.summary import RunRow, describe_row
from stoker.errors import StokerError

SILENT_S = 300.0
"""A running run without an event in this time is reported as hung."""
DROP_SHARE = 2 / 3
"""A throughput below this share of the best one is reported."""
MIN_DISK_BYTES = 5 << 30
TIMEOUT_S = 10.0


class Alert(msgspec.Struct, frozen=True):
    """The message that is posted."""

    run: str
    kind: str
    """`failed`, `hung`, `slow` or `disk`."""
    text: str
    t: float


@dataclass
class _Known:
    """What was reported of a run, and its best throughput."""

    sent: set[str] = field(default_factory=set)
    best: float = 0.0
    was_active: bool = False


class Notifier:
    """Checks runs and posts alerts, each one once until its cause is gone."""

    def __init__(self, catalog: RunCatalog, url: str, *, interval_s: float = 10.0) -> None:
        self._catalog, self._url, self.interval_s = catalog, url, interval_s
        self._known: dict[str, _Known] = {}
        self.failures = 0
        """The number of alerts that could not be delivered."""

    def check(self) -> None:
        """Check all runs once."""
        for run in self._catalog.list():
            try:
                self._check_run(run)
            except (StokerError, OSError):
                continue

    def _check_run(self, run: DashboardRun) -> None:
        if run.id not in self._known and run.status().state.is_final:
            self._known[run.id] = _Known()  # it ended before the dashboard was started
            return
        known = self._known.setdefault(run.id, _Known())
        if not known.was_active and run.status().state.is_final:
            return
        known.was_active = not run.status().state.is_final
        with run.lock:
            run.index(max_age_s=0.0)
            row = describe_row(run)
        alerts = {alert.kind + alert.text[:40]: alert for alert in self._alerts(run, row, known)}
        for key, alert in alerts.items():
            if key not in known.sent and self._post(alert):
                known.sent.add(key)
        known.sent &= set(alerts) | {key for key in known.sent if key.startswith("failed")}

    def _alerts(self, run: DashboardRun, row: RunRow, known: _Known) -> Iterator[Alert]:
        now = time.time()
        if row.state in ("failed", "lost"):
            yield Alert(row.id, "failed", row.message or f"the run is {row.state}", now)
        if row.state != "running":
            return
        if row.last_event and now - row.last_event > SILENT_S:
            yield Alert(row.id, "hung", f"no event for more than {format_duration(SILENT_S)}", now)
        if row.samples_per_s:
            known.best = max(known.best, row.samples_per_s)
            if row.samples_per_s < DROP_SHARE * known.best:
                yield Alert(row.id, "slow", f"{row.samples_per_s:,.0f} samples/s, after {known.best:,.0f}", now)
        with run.lock:
            machines = run.index().analysis.machines
            free = {slot: machines.last(slot, "cache_disk_free") for slot in machines.slots}
        for slot, left in free.items():
            if left is not None and left < MIN_DISK_BYTES:
                yield Alert(row.id, "disk", f"{slot}: cache disk nearly full, {format_bytes(left)} free", now)

    def _post(self, alert: Alert) -> bool:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, msgspec.json.encode(alert), headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                return True
        except (OSError, ValueError):
            self.failures += 1  # it is tried again at the next check
            return False
