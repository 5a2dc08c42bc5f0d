"""Methods x code lengths x seeds on one data set, each cell a Ray task, resumable cell by cell."""

from cluster.compare.job import CompareConfig, compare

__all__ = ["CompareConfig", "compare"]
