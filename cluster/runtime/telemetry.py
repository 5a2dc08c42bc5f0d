"""Counters, gauges and histograms that Ray exports to Prometheus.

    telemetry.count("images", 32, status="ok", run="demo", stage="encode")
    telemetry.observe("forward_seconds", 0.12, run="demo", stage="encode")
    telemetry.gauge("images_per_second", 410.0, run="demo", stage="encode")
    with telemetry.timed("decode_seconds", run="demo", stage="encode"): ...

Works in drivers, tasks and actors, and does nothing in a process without Ray. A call costs a few
microseconds: make one per batch or step, not one per row. Ray exports each metric as ``ray_`` + its full
name (``ray_hashnet_images_total``). METRICS lists them all; tests compare the guide and the dashboard with
it. ``run`` is the name of the run folder (``run_name(uri)``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from cluster.runtime import ray_internals
from hashnet.io import storage

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
FAST_SECONDS = (0.0003, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class Metric:
    """The kind of a metric, its meaning, its tags besides ``run``, and the bounds of its buckets."""

    kind: str  # counter | gauge | histogram
    meaning: str
    tags: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    def full_name(self, name: str) -> str:
        return f"hashnet_{name}_total" if self.kind == "counter" else f"hashnet_{name}"


METRICS = {
    # encoding and evaluation
    "images": Metric(
        "counter", "rows handled, by status: ok or the reason they are bad", ("stage", "status")
    ),
    "decode_seconds": Metric("histogram", "fetch and decode of one batch", ("stage",), SECONDS),
    "forward_seconds": Metric("histogram", "the model on one batch", ("stage",), SECONDS),
    "commit_seconds": Metric("histogram", "writing one shard and its record", ("stage",), SECONDS),
    "images_per_second": Metric(
        "gauge", "encode: since the start; train: since the last step reported", ("stage",)
    ),
    "shards_done": Metric(
        "gauge", "shards committed, earlier runs' included (evaluate: ranges of queries)", ("stage",)
    ),
    "shards_total": Metric("gauge", "shards of the plan (evaluate: ranges of queries)", ("stage",)),
    # training
    "train_steps": Metric("counter", "optimiser steps"),
    "train_J": Metric("gauge", "loss on relaxed codes, last step reported"),
    "train_L": Metric("gauge", "loss on binary codes, last step reported"),
    "train_beta": Metric("gauge", "the continuation scale"),
    "train_learning_rate": Metric("gauge", "learning rate of the hash layer"),
    "train_quantisation": Metric("gauge", "mean of 1 - |g| over a batch: 0 is binary"),
    "train_distinct_codes": Metric("gauge", "different codes in a batch"),
    "train_bit_balance": Metric("gauge", "share of equal bits of the least balanced bit: 1 is a dead bit"),
    "train_bit_entropy": Metric("gauge", "mean entropy of a bit in bits: 1 is balanced"),
    # serving
    "requests": Metric("counter", "HTTP requests, by route and status", ("method", "route", "status")),
    "request_seconds": Metric("histogram", "time to respond to one HTTP request", ("route",), SECONDS),
    "search_seconds": Metric("histogram", "one batch through the index", ("kind",), FAST_SECONDS),
    "search_queries": Metric("counter", "queries answered, by status", ("kind", "status")),
    "index_version": Metric("gauge", "version of the index being served"),
    "index_size": Metric("gauge", "codes in the index being served"),
}


def count(name: str, n: float = 1, **tags: Any) -> None:
    """Adds ``n`` to a counter; 0 adds nothing."""
    if n > 0 and ray_internals.connected():
        _instrument(name, "counter").inc(n, _tags(name, tags))


def gauge(name: str, value: float, **tags: Any) -> None:
    """Sets a gauge."""
    if ray_internals.connected():
        _instrument(name, "gauge").set(value, _tags(name, tags))


def observe(name: str, value: float, **tags: Any) -> None:
    """Adds one observation to a histogram."""
    if ray_internals.connected():
        _instrument(name, "histogram").observe(value, _tags(name, tags))


@contextmanager
def timed(name: str, **tags: Any) -> Iterator[None]:
    """Observes how many seconds the block took; nothing if it raises."""
    started = time.perf_counter()
    yield
    observe(name, time.perf_counter() - started, **tags)


def run_name(uri: str) -> str:
    """The name of a run in metrics and logs: that of its folder."""
    return storage.name_of(uri)


@cache
def _instrument(name: str, kind: str) -> Any:
    from ray.util import metrics

    metric = METRICS[name]
    if metric.kind != kind:
        raise TypeError(f"{name} is a {metric.kind}, not a {kind}")
    full, tags = metric.full_name(name), ("run", *metric.tags)
    if kind == "histogram":
        return metrics.Histogram(full, metric.meaning, boundaries=list(metric.bounds), tag_keys=tags)
    return {"counter": metrics.Counter, "gauge": metrics.Gauge}[kind](full, metric.meaning, tag_keys=tags)


def _tags(name: str, given: dict[str, Any]) -> dict[str, str]:
    """All tags of a metric as text; a missing one is empty, an unknown one is a TypeError."""
    known = ("run", *METRICS[name].tags)
    unknown = set(given) - set(known)
    if unknown:
        raise TypeError(f"{name} has the tags {', '.join(known)}, not {', '.join(sorted(unknown))}")
    return {tag: str(given.get(tag, "")) for tag in known}
