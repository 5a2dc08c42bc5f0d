"""Retrieval metrics with stated definitions, from mergeable per-query counts.

report = evaluate(query_codes, query_labels, database_codes, database_labels, k=5000)
report.map, report.map_tie_aware, report.precision_within(2)
hashnet.reports.figures.precision_recall({"48 bits": report})
paired_difference(report_a.ap, report_b.ap)      # is a better than b on the same queries?
"""

from typing import TYPE_CHECKING

from hashnet.io import lazy_names

if TYPE_CHECKING:
    from hashnet.metrics.bootstrap import Difference, paired_difference
    from hashnet.metrics.evaluation import (
        build_report,
        build_shard,
        evaluate,
        rank_limit,
        refuse_unlabelled,
        validation_k,
        validation_map,
    )
    from hashnet.metrics.measures import QueryMeasures, query_block_size
    from hashnet.metrics.neighbours import (
        NeighbourArtefact,
        NeighbourReport,
        VectorSample,
        exact_neighbours,
        neighbour_report,
        ranked_report,
    )
    from hashnet.metrics.report import DEFINITIONS, EvalReport, RadiusCurve, RankCurve, ReportArtefact
    from hashnet.metrics.shard import QueryCounts, Ranking, ScoreShard, tie_hash
    from hashnet.metrics.trec import write_trec

__all__, __getattr__ = lazy_names(__name__)
