"""Retrieval metrics with stated definitions, from mergeable per-query counts.

report = evaluate(query_codes, query_labels, database_codes, database_labels, k=5000)
report.map, report.map_tie_aware, report.precision_within(2)
hashnet.report.figures.precision_recall({"48 bits": report})
paired_difference(report_a.ap, report_b.ap)      # is a better than b on the same queries?
"""

from hashnet.metrics.bootstrap import Difference, paired_difference
from hashnet.metrics.definitions import DEFINITIONS
from hashnet.metrics.evaluation import evaluate
from hashnet.metrics.report import EvalReport

__all__ = ["DEFINITIONS", "Difference", "EvalReport", "evaluate", "paired_difference"]
