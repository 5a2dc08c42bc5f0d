"""Evaluates a run on a Ray cluster: MAP, precision and recall, and the report."""

from cluster.evaluate.job import EvaluateConfig, evaluate_run

__all__ = ["EvaluateConfig", "evaluate_run"]
