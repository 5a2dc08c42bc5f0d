"""Retrieval metrics with stated definitions, from mergeable per-query counts.

report = evaluate(query_codes, query_labels, database_codes, database_labels, k=5000)
report.map, report.map_tie_aware, report.precision_within(2)
hashnet.reports.figures.precision_recall({"48 bits": report})
paired_difference(report_a.ap, report_b.ap)      # is a better than b on the same queries?
"""

from hashnet.metrics.bootstrap import Difference, paired_difference
from hashnet.metrics.definitions import DEFINITIONS
from hashnet.metrics.evaluation import build_shard, check_k, evaluate, summarise
from hashnet.metrics.measures import QueryMeasures, block_size, from_bytes, join, measure, to_bytes
from hashnet.metrics.relevance import LabelSets, from_lists, refuse_unlabelled
from hashnet.metrics.report import EvalReport, RadiusCurve, RankCurve, ReportArtefact
from hashnet.metrics.shard import Partial, merge
from hashnet.metrics.ties import tie_hash
from hashnet.metrics.validation import validation_k, validation_map

__all__ = [
    "DEFINITIONS",
    "Difference",
    "EvalReport",
    "LabelSets",
    "Partial",
    "QueryMeasures",
    "RadiusCurve",
    "RankCurve",
    "ReportArtefact",
    "block_size",
    "build_shard",
    "check_k",
    "evaluate",
    "from_bytes",
    "from_lists",
    "join",
    "measure",
    "merge",
    "paired_difference",
    "refuse_unlabelled",
    "summarise",
    "tie_hash",
    "to_bytes",
    "validation_k",
    "validation_map",
]
