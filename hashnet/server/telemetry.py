"""Counters of one HTTP process, which GET /metrics shows in the Prometheus text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hashnet.server.messages import IndexInfo

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Telemetry:
    """Requests, queries and response times by route, and the served index."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "hashnet_requests", "HTTP requests", ["method", "route", "status"], registry=registry
        )
        self._queries = Counter("hashnet_queries", "Queries inside them", ["route"], registry=registry)
        self._seconds = Histogram(
            "hashnet_request_seconds", "Time to respond", ["route"], buckets=SECONDS, registry=registry
        )
        self._version = Gauge("hashnet_index_version", "Version of the index being served", registry=registry)
        self._size = Gauge("hashnet_index_size", "Codes in the index being served", registry=registry)

    def request(self, method: str, route: str, status: int, seconds: float, queries: int) -> None:
        """Counts one request that carried ``queries`` queries."""
        self._requests.labels(method, route, status).inc()
        self._queries.labels(route).inc(queries)
        self._seconds.labels(route).observe(seconds)

    def text(self, index: IndexInfo) -> bytes:
        """All metrics in the Prometheus text format."""
        self._version.set(index.version)
        self._size.set(index.size)
        return generate_latest(self._registry)
