"""Counters of the model server, as Prometheus reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class ServerMetrics:
    """Requests by endpoint and status, their latency, and batches; used in the thread of the event loop only."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._latency = [0] * (len(LATENCY_BUCKETS_S) + 1)
        self._seconds = 0.0
        self.batches = self.batched_requests = self.batched_rows = 0
        self.in_flight = 0

    def add_request(self, endpoint: str, status: int, seconds: float) -> None:
        """Count a finished request."""
        self._requests[endpoint, status] += 1
        self._seconds += seconds
        at = next((at for at, limit in enumerate(LATENCY_BUCKETS_S) if seconds <= limit), len(LATENCY_BUCKETS_S))
        self._latency[at] += 1

    def add_batch(self, requests: int, rows: int) -> None:
        """Count a batch that the model has run; the thread of the model calls this."""
        self.batches += 1
        self.batched_requests += requests
        self.batched_rows += rows

    def render(self, versions: Sequence[int]) -> str:
        """Return all metrics in the text format of Prometheus."""
        lines = ["# TYPE stoker_model_requests_total counter"]
        for (endpoint, status), count in sorted(self._requests.items()):
            lines.append(f'stoker_model_requests_total{{endpoint="{endpoint}",code="{status}"}} {count}')
        lines.append("# TYPE stoker_model_request_seconds histogram")
        total = 0
        for limit, count in zip((*LATENCY_BUCKETS_S, "+Inf"), self._latency, strict=True):
            total += count
            lines.append(f'stoker_model_request_seconds_bucket{{le="{limit}"}} {total}')
        lines += [
            f"stoker_model_request_seconds_sum {self._seconds:.6f}",
            f"stoker_model_request_seconds_count {total}",
        ]
        for name, kind, value in (
            ("requests_in_flight", "gauge", self.in_flight),
            ("batches_total", "counter", self.batches),
            ("batched_requests_total", "counter", self.batched_requests),
            ("batched_rows_total", "counter", self.batched_rows),
        ):
            lines += [f"# TYPE stoker_model_{name} {kind}", f"stoker_model_{name} {value}"]
        lines.append("# TYPE stoker_model_version_loaded gauge")
        lines += [f'stoker_model_version_loaded{{version="{number}"}} 1' for number in versions]
        return "\n".join(lines) + "\n"
