"""Counters of one HTTP process, and the Prometheus text made of those of all of them.

Each HTTP process counts for itself and hands a copy to one place every second, so that /metrics
says the same whichever process answers it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Meter:
    """Counts requests, queries and time. ``snapshot`` is plain data that another process can add up."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str, int], int] = defaultdict(int)
        self._queries: dict[str, int] = defaultdict(int)
        self._buckets: dict[str, list[int]] = defaultdict(lambda: [0] * (len(BUCKETS_S) + 1))
        self._seconds: dict[str, float] = defaultdict(float)

    def request(self, method: str, route: str, status: int, seconds: float, queries: int) -> None:
        """Counts one request."""
        self._requests[method, route, status] += 1
        self._queries[route] += queries
        self._seconds[route] += seconds
        place = next((i for i, bound in enumerate(BUCKETS_S) if seconds <= bound), len(BUCKETS_S))
        self._buckets[route][place] += 1

    def snapshot(self) -> dict[str, Any]:
        """All counts, as plain lists and numbers."""
        return {
            "requests": [[*labels, n] for labels, n in self._requests.items()],
            "queries": dict(self._queries),
            "buckets": {route: list(counts) for route, counts in self._buckets.items()},
            "seconds": dict(self._seconds),
        }


def prometheus(snapshots: Iterable[dict[str, Any]], gauges: dict[str, tuple[str, float]]) -> bytes:
    """The text format, of the sum of the snapshots and of gauges {name: (meaning, value)}."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Families(list(snapshots), gauges))  # type: ignore[arg-type] # a collector by its method
    return generate_latest(registry)


class _Families:
    def __init__(self, snapshots: list[dict[str, Any]], gauges: dict[str, tuple[str, float]]) -> None:
        self.snapshots, self.gauges = snapshots, gauges

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        requests: dict[tuple[str, str, int], int] = defaultdict(int)
        queries: dict[str, int] = defaultdict(int)
        buckets: dict[str, list[int]] = {}
        seconds: dict[str, float] = defaultdict(float)
        for snapshot in self.snapshots:
            for method, route, status, n in snapshot["requests"]:
                requests[method, route, status] += n
            for route, n in snapshot["queries"].items():
                queries[route] += n
            for route, counts in snapshot["buckets"].items():
                buckets[route] = [
                    a + b for a, b in zip(buckets.get(route, [0] * len(counts)), counts, strict=True)
                ]
            for route, s in snapshot["seconds"].items():
                seconds[route] += s
        family = CounterMetricFamily(
            "hashnet_requests", "HTTP requests", labels=["method", "route", "status"]
        )
        for (method, route, status), n in sorted(requests.items()):
            family.add_metric([method, route, str(status)], n)
        yield family
        family = CounterMetricFamily("hashnet_queries", "Queries inside them", labels=["route"])
        for route, n in sorted(queries.items()):
            family.add_metric([route], n)
        yield family
        times = HistogramMetricFamily("hashnet_request_seconds", "Time to answer", labels=["route"])
        for route, counts in sorted(buckets.items()):
            running, pairs = 0, []
            for bound, n in zip([*map(str, BUCKETS_S), "+Inf"], counts, strict=True):
                running += n
                pairs.append((bound, running))
            times.add_metric([route], pairs, seconds[route])
        yield times
        for name, (meaning, value) in self.gauges.items():
            yield GaugeMetricFamily(name, meaning, value=value)
