"""Methods x code lengths x seeds on one data set, each cell a Ray task, resumable cell by cell."""

from cluster.compare.compare_config import CompareConfig
from cluster.compare.job import compare
from cluster.compare.runner import CellResources, CellRunner

__all__ = ["CellResources", "CellRunner", "CompareConfig", "compare"]
