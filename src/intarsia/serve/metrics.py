"""What Prometheus reads: requests, times, batches, the queue."""

from __future__ import annotations

import os
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHARED = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's own: where several workers add up their figures


class Metrics:
    """The figures of one server process; with several workers, of all of them."""

    def __init__(self, in_flight: Callable[[], float], fallen_back: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        several = SHARED in os.environ
        own = CollectorRegistry() if several else self._registry
        self.requests = Counter("intarsia_requests_total", "answers by HTTP status", ["status"], registry=own)
        self.split = Counter(
            "intarsia_split_batches_total", "batches that failed and ran apart", registry=own
        )
        self.gone = Counter(
            "intarsia_gone_clients_total", "clients that left before their answer", registry=own
        )
        self._seconds = Histogram(
            "intarsia_request_seconds", "from the request to its answer", registry=own, buckets=_SECONDS
        )
        self._waited = Histogram("intarsia_queue_seconds", "in the queue", registry=own, buckets=_SECONDS)
        self._ran = Histogram("intarsia_call_seconds", "calls of the module", registry=own, buckets=_SECONDS)
        self._rows = Histogram("intarsia_batch_rows", "rows in a call", registry=own, buckets=_ROWS)
        in_flight_now = Gauge(
            "intarsia_in_flight", "requests taken and not answered", registry=own, multiprocess_mode="livesum"
        )
        segments = Gauge(
            "intarsia_fallen_back", "segments whose engine failed", registry=own, multiprocess_mode="livemax"
        )
        if several:
            MultiProcessCollector(self._registry)  # type: ignore[no-untyped-call]
        self._gauges = ((in_flight_now, in_flight), (segments, fallen_back))

    def answered(self, status: int, seconds: float) -> None:
        self.requests.labels(str(status)).inc()
        self._seconds.observe(seconds)

    def waited(self, seconds: float) -> None:
        self._waited.observe(seconds)

    def ran(self, rows: int, seconds: float) -> None:
        self._rows.observe(rows)
        self._ran.observe(seconds)

    def text(self) -> bytes:
        """All figures in Prometheus's text format."""
        for gauge, read in self._gauges:
            gauge.set(read())
        return generate_latest(self._registry)
