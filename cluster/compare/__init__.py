"""Methods x code lengths x seeds on one data set, each cell a Ray task, resumable cell by cell."""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from cluster.compare.compare_config import CompareConfig
    from cluster.compare.job import compare
    from cluster.compare.runner import CellResources, CellRunner

__all__, __getattr__ = lazy_names(__name__)
