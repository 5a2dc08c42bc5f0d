"""Evaluate a run on a Ray cluster: queries encoded, counted against every code shard, summed up."""

from cluster.evaluate.job import EvaluateConfig, evaluate_run

__all__ = ["EvaluateConfig", "evaluate_run"]
