"""evaluate: every metric of a set of queries against a database, from codes and labels."""

from __future__ import annotations

from typing import Any

import numpy as np

from hashnet.codes import check_codes
from hashnet.errors import CodeError, ConfigError, DataError
from hashnet.metrics.average_precision import average_precision
from hashnet.metrics.relevance import check_labels
from hashnet.metrics.report import EvalReport
from hashnet.metrics.shard import Shard
from hashnet.metrics.ties import relevance_of


def evaluate(
    query_codes: Any,
    query_labels: Any,
    database_codes: Any,
    database_labels: Any,
    k: int | None = 5000,
    *,
    database_ids: Any = None,
    seed: int = 0,
) -> EvalReport:
    """The EvalReport of queries against a database.

    Codes are packed uint8 (n, n_bits // 8), labels class ids (n,) or multi-hot (n, n_classes).
    ``k`` is the rank MAP and the curves by rank stop at (None: the whole database).
    """
    if k is not None and k < 1:
        raise ConfigError(f"k must be at least 1 (or None for the whole database), got {k}")
    query_codes = check_codes(query_codes, name="query codes")
    database_codes = check_codes(database_codes, name="database codes")
    n_bits = query_codes.shape[1] * 8
    if database_codes.shape[1] * 8 != n_bits:
        raise CodeError(f"query codes have {n_bits} bits, database codes {database_codes.shape[1] * 8}")
    for what, codes, labels in (("query", query_codes, query_labels), ("database", database_codes, database_labels)):
        if len(codes) != len(labels):
            raise CodeError(f"{len(codes)} {what} codes, but {len(labels)} {what} labels")
        if not len(codes):
            raise DataError(f"there are no {what} codes")
    queries, database = check_labels(query_labels, database_labels)
    n = len(database_codes)
    k = n if k is None else min(k, n)
    shard = Shard.build(database_codes, database, None if database_ids is None else np.asarray(database_ids), seed)
    ap, ap_relevant, hits, n_relevant = [], [], [], []
    for start in range(0, len(query_codes), 256):
        end = min(start + 256, len(query_codes))
        partial = shard.partial(query_codes[start:end], queries.rows(start, end), k)
        relevance = relevance_of(partial.keys)
        total = partial.counts[1].sum(axis=1)
        ap.append(average_precision(relevance, total, k))
        ap_relevant.append(average_precision(relevance, total, k, "relevant"))
        hits.append(relevance.any(axis=1))
        n_relevant.append(total)
    ap_, hit = np.concatenate(ap), np.concatenate(hits)
    return EvalReport(
        n_queries=len(query_codes),
        n_database=n,
        n_bits=n_bits,
        k=k,
        map=float(ap_.mean()),
        map_retrieved_hits_only=float(ap_[hit].mean()) if hit.any() else 0.0,
        map_relevant=float(np.concatenate(ap_relevant).mean()),
        queries_without_hit=int((~hit).sum()),
        chance=float(np.concatenate(n_relevant).mean() / n),
        ap=tuple(ap_.tolist()),
    )
