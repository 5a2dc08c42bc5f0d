"""Retrieval metrics with stated definitions, from mergeable per-query counts."""

from hashnet.metrics.evaluation import evaluate
from hashnet.metrics.report import EvalReport

__all__ = ["EvalReport", "evaluate"]
