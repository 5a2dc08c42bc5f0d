"""Our counters, gauges and histograms, by name, through Ray to Prometheus.

    metrics.count("images", 32, status="ok", run="demo", stage="encode")
    metrics.observe("forward_seconds", 0.12, run="demo", stage="encode")
    metrics.gauge("images_per_second", 410.0, run="demo", stage="encode")
    with metrics.timed("decode_seconds", run="demo", stage="encode"): ...

Works in drivers, tasks and actors; does nothing where Ray is not connected, and costs a few
microseconds where it is: call it once a batch or a step, not once a row. Ray exports each under
``ray_`` + its full name (``ray_hashnet_images_total``). Every metric is in METRICS; docs and
dashboard are checked against it. ``run`` is the run folder's name (``run_name(uri)``).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from hashnet.io import storage

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
FAST_SECONDS = (0.0003, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class Metric:
    """What one metric is: its kind, its meaning, its tags beside ``run``, and its bucket bounds."""

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
    if n > 0 and _connected():
        _instrument(name, "counter").inc(n, _tags(name, tags))


def gauge(name: str, value: float, **tags: Any) -> None:
    """Sets a gauge."""
    if _connected():
        _instrument(name, "gauge").set(value, _tags(name, tags))


def observe(name: str, value: float, **tags: Any) -> None:
    """Adds one observation to a histogram."""
    if _connected():
        _instrument(name, "histogram").observe(value, _tags(name, tags))


@contextmanager
def timed(name: str, **tags: Any) -> Iterator[None]:
    """Observes how long the block took, in seconds; nothing when it raises."""
    started = time.perf_counter()
    yield
    observe(name, time.perf_counter() - started, **tags)


def run_name(uri: str) -> str:
    """What metrics and logs call a run: the name of its folder."""
    return storage.name_of(uri)


def _connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


@cache
def _instrument(name: str, kind: str) -> Any:
    from ray.util import metrics

    about = METRICS[name]
    if about.kind != kind:
        raise TypeError(f"{name} is a {about.kind}, not a {kind}")
    full, tags = about.full_name(name), ("run", *about.tags)
    if kind == "histogram":
        return metrics.Histogram(full, about.meaning, boundaries=list(about.bounds), tag_keys=tags)
    return {"counter": metrics.Counter, "gauge": metrics.Gauge}[kind](full, about.meaning, tag_keys=tags)


def _tags(name: str, given: dict[str, Any]) -> dict[str, str]:
    """All tags of a metric as text; one that was not given is empty, an unknown one is a mistake."""
    known = ("run", *METRICS[name].tags)
    unknown = set(given) - set(known)
    if unknown:
        raise TypeError(f"{name} has the tags {', '.join(known)}, not {', '.join(sorted(unknown))}")
    return {tag: str(given.get(tag, "")) for tag in known}
