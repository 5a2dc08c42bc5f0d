"""evaluate: every metric of queries against a database; validation_map: the number settings are ranked by.

>>> import numpy as np
>>> codes = np.array([[0b00000000], [0b00000001], [0b11111111]], dtype=np.uint8)
>>> report = evaluate(codes[:1], [7], codes, [7, 3, 7], k=3)
>>> round(report.map, 4), report.queries_without_hit   # hit, miss, hit: (1/1 + 2/3) / 2
(0.8333, 0)
>>> report
EvalReport(map=0.8333, map_tie_aware=0.8333, chance=0.6667, k=3, n_queries=1, n_database=3, n_bits=8)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hashnet.codes import check_codes
from hashnet.errors import CodeError, ConfigError, DataError
from hashnet.io import as_array, check_ids, check_whole
from hashnet.labels import LabelSets
from hashnet.metrics.bootstrap import interval
from hashnet.metrics.measures import QueryMeasures, curve_ranks, mean_by_class, query_block_size
from hashnet.metrics.report import ClassScore, EvalReport, RadiusCurve, RankCurve
from hashnet.metrics.shard import ScoreShard, Shard, check_query_logits


def evaluate(
    query_codes: Any,
    query_labels: Any,
    database_codes: Any,
    database_labels: Any,
    k: int | None = 5000,
    *,
    query_logits: Any = None,
    database_ids: Any = None,
    class_names: Sequence[str] | None = None,
    seed: int = 0,
    threads: int | None = None,
    device: str = "auto",
) -> EvalReport:
    """The EvalReport of queries against a database.

    Codes are packed uint8 (n, n_bits // 8). Labels are class ids (n,) or multi-hot (n, n_classes);
    an item is relevant to a query when they share a label. ``k`` is the rank at which MAP and the
    curves by rank stop (None: the whole database). ``database_ids`` int64 (n,), the row ids whose
    hash with ``seed`` breaks ties, default to 0 … n - 1. ``device`` "cuda" counts on the GPU with
    torch, "cpu" and "auto" with the kernel on ``threads`` cores: a GPU has to sort what the kernel counts.

    ``query_logits`` float (q, n_bits) add MAP of the asymmetric ranking.

    Memory: the database as bits, its labels, and a block of queries; never queries x database.
    """
    query_codes, database_codes, k = check_inputs(
        query_codes, query_labels, database_codes, database_labels, k
    )
    queries, database = check_labels(query_labels, database_labels)
    seed = check_whole("seed", seed, 0)
    if class_names is not None and len(class_names) < queries.n_classes:
        raise CodeError(
            f"there are {len(class_names)} class names for {queries.n_classes} classes; "
            "give one name per class"
        )
    ids = ids_or_places(database_ids, len(database_codes), "database ids")
    shard = build_shard(database_codes, database, ids, seed, device)
    blocks = []
    step = query_block_size(k)
    scored = None
    if query_logits is not None:
        query_logits = check_query_logits(query_logits, len(query_codes), query_codes.shape[1] * 8)
        scored = ScoreShard.build(database_codes, database, ids, seed)
    for first in range(0, len(query_codes), step):
        last = min(first + step, len(query_codes))
        labels = queries.rows(first, last)
        counts = shard.count(query_codes[first:last], labels, k, threads)
        if scored is not None:
            counts = replace(counts, ranking=scored.rank(query_logits[first:last], labels, k, threads))
        blocks.append(QueryMeasures.from_counts(counts, k))
    return build_report(QueryMeasures.concatenate(blocks), queries, len(database_codes), k, seed, class_names)


def build_shard(codes: np.ndarray, labels: LabelSets, ids: np.ndarray | None, seed: int, device: str) -> Any:
    """The piece of the database on the requested device: a Shard, or a TorchShard on the GPU."""
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, got {device!r}")
    if device == "cuda":
        from hashnet.metrics.torch_shard import TorchShard, has_cuda

        if not has_cuda():
            raise ConfigError("device is cuda, but torch finds no GPU; use device=auto or device=cpu")
        return TorchShard.build(codes, labels, ids, seed, "cuda")
    return Shard.build(codes, labels, ids, seed)


def build_report(
    measures: QueryMeasures,
    queries: LabelSets,
    n_database: int,
    k: int,
    seed: int = 0,
    class_names: Sequence[str] | None = None,
) -> EvalReport:
    """The report of all queries' measures."""
    q, n_bits = len(measures.ap), len(measures.all_items) - 1
    hit = measures.n_hits > 0
    ranks = curve_ranks(k)
    class_map, class_queries = mean_by_class(measures.ap, queries)
    dissimilar = measures.all_items - measures.relevant_items
    by_score = measures.ap_asymmetric
    has_scores = bool(q) and not np.isnan(by_score).any()
    return EvalReport(
        n_queries=q,
        n_database=n_database,
        n_bits=n_bits,
        n_classes=queries.n_classes,
        k=k,
        seed=seed,
        map=_mean(measures.ap),
        map_interval=interval(measures.ap, seed),
        map_retrieved_hits_only=_mean(measures.ap[hit]),
        map_relevant=_mean(measures.ap_relevant),
        map_relevant_interval=interval(measures.ap_relevant, seed),
        map_tie_aware=_mean(measures.ap_tie_aware),
        map_tie_aware_interval=interval(measures.ap_tie_aware, seed),
        map_relevant_last=_mean(measures.ap_relevant_last),
        map_relevant_first=_mean(measures.ap_relevant_first),
        queries_without_hit=int((~hit).sum()),
        queries_without_relevant=int((measures.n_relevant == 0).sum()),
        chance=float(measures.n_relevant.sum() / (q * n_database)),
        by_rank=RankCurve(
            _tuple(ranks), _tuple(measures.rank_hits / (ranks * q)), _tuple(measures.rank_recall / q)
        ),
        by_radius=RadiusCurve(
            _tuple(measures.radius_precision / q),
            _tuple(measures.radius_recall / q),
            _tuple(measures.radius_empty / q),
        ),
        per_class=tuple(
            ClassScore(
                int(c),
                int(class_queries[c]),
                float(class_map[c]),
                class_names[int(c)] if class_names else None,
            )
            for c in np.flatnonzero(class_queries)
        ),
        similar=_tuple(measures.relevant_items),
        dissimilar=_tuple(dissimilar),
        ap=_tuple(measures.ap),
        ap_relevant=_tuple(measures.ap_relevant),
        ap_tie_aware=_tuple(measures.ap_tie_aware),
        ndcg=_mean(measures.ndcg),
        map_asymmetric=_mean(by_score) if has_scores else None,
        map_asymmetric_interval=interval(by_score, seed) if has_scores else None,
        ap_asymmetric=_tuple(by_score) if has_scores else (),
    )


def check_inputs(
    query_codes: Any, query_labels: Any, database_codes: Any, database_labels: Any, k: int | None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Query codes, database codes and k as ``evaluate`` counts with them."""
    query_codes = check_codes(as_array(query_codes, "query codes"), name="query codes")
    database_codes = check_codes(as_array(database_codes, "database codes"), name="database codes")
    bits = query_codes.shape[1] * 8, database_codes.shape[1] * 8
    if bits[0] != bits[1]:
        raise CodeError(
            f"query codes have {bits[0]} bits, database codes {bits[1]}; encode both with the same model"
        )
    for what, codes, labels in (
        ("query", query_codes, query_labels),
        ("database", database_codes, database_labels),
    ):
        if labels is None:
            raise DataError(f"there are no {what} labels, and relevance needs them")
        if not len(codes):
            raise DataError(f"there are no {what} codes")
        n_labels = len(np.atleast_1d(as_array(labels, f"{what} labels")))
        if len(codes) != n_labels:
            raise CodeError(f"there are {len(codes)} {what} codes, but {n_labels} rows of {what} labels")
    return query_codes, database_codes, rank_limit(k, len(database_codes))


def rank_limit(k: int | None, n_database: int) -> int:
    """The rank to stop at: k, the whole database for None, and never more than the database has."""
    if k is None:
        return n_database
    return min(check_whole("k", k, 1), n_database)


def ids_or_places(ids: Any, n: int, name: str) -> np.ndarray:
    """``ids`` as int64 (n,); 0 … n - 1 for None."""
    return np.arange(n) if ids is None else check_ids(ids, name, n=n)


def check_labels(query_labels: Any, database_labels: Any) -> tuple[LabelSets, LabelSets]:
    """Both label sets over the same classes; a query without a label is refused."""
    given = [as_array(query_labels, "query labels"), as_array(database_labels, "database labels")]
    widths = [labels.shape[1] for labels in given if labels.ndim == 2]
    if len(set(widths)) > 1:
        raise CodeError(
            f"query labels have {widths[0]} classes, database labels {widths[1]}; "
            "give both over the same list of classes"
        )
    width = widths[0] if widths else None  # class ids say no width
    queries = LabelSets.of(given[0], width, "query labels")
    database = LabelSets.of(given[1], width, "database labels")
    refuse_unlabelled(queries)
    n_classes = max(queries.n_classes, database.n_classes)
    return replace(queries, n_classes=n_classes), replace(database, n_classes=n_classes)


def refuse_unlabelled(queries: LabelSets) -> None:
    """Raises DataError when a query has no label: nothing could be relevant to it."""
    empty = queries.per_row == 0
    if empty.any():
        raise DataError(
            f"{int(empty.sum())} queries have no label (the first is row {int(empty.argmax())}), "
            "so nothing can be relevant to them; leave them out"
        )


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0


def _tuple(values: np.ndarray) -> tuple[Any, ...]:
    return tuple(values.tolist())


MIN_VALIDATION_K = 100


def validation_k(n_held: int) -> int:
    """The depth of validation MAP: a quarter of the rows searched (half of ``n_held``), at least 100.

    It follows from the held-out rows alone, so that every job ranks settings by the same number.

    >>> validation_k(1920), validation_k(50)
    (240, 100)
    """
    return max(MIN_VALIDATION_K, n_held // 8)


def validation_map(codes: np.ndarray, labels: np.ndarray) -> float | None:
    """MAP@validation_k of held-out rows, each half of them searching the other; the mean of both directions.

    ``codes`` uint8 (n, n_bits / 8), ``labels`` multi-hot (n, n_classes). The rows that are searched were not
    trained on either, as most of a database is not: settings that fit the training rows too well gain
    nothing. Rows without a label are left out, as nothing is relevant to them. None for fewer than two rows.
    """
    labelled = labels.any(axis=1)
    codes, labels = codes[labelled], labels[labelled]
    if len(codes) < 2:
        return None
    one, other = (codes[::2], labels[::2]), (codes[1::2], labels[1::2])
    k = validation_k(len(codes))
    return float((evaluate(*one, *other, k).map + evaluate(*other, *one, k).map) / 2)
