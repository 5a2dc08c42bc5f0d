"""Measuring codes without labels: do the nearest items by Hamming distance include the nearest vectors?

    truth = exact_neighbours(query_vectors, [database_vectors], k=10)
    report = neighbour_report(query_codes, database_codes, truth, within=100)
    report.recall, report.recall_interval

Neighbour recall is the share of a query's k nearest vectors (Euclidean) among the first N items by Hamming
distance. Where items tie at rank N, it is the mean over every order of them, so it depends on no
tie-breaking. Distance correlation is Spearman's, of Hamming and Euclidean distance, over a sample of items.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hashnet.codes import as_words, check_codes
from hashnet.errors import CodeError, DataError, FormatError
from hashnet.io import Artefact, as_array, check_whole
from hashnet.kernels import compiled, popcount
from hashnet.metrics.bootstrap import interval

BLOCK = 4096  # vectors of the database that queries meet at once
CURVE = (10, 20, 50, 100, 200, 500, 1000)


@dataclass(frozen=True)
class NeighbourReport:
    """Recall of the ``k`` nearest vectors within the first ``within`` items, and distance correlation.

    ``recall_within`` is the recall at each of ``ranks``; ``recalls`` holds one value per query. Intervals are
    95 % bootstrap intervals over queries.
    """

    n_queries: int
    n_database: int
    n_bits: int
    k: int
    within: int
    recall: float
    recall_interval: tuple[float, float]
    ranks: tuple[int, ...]
    recall_within: tuple[float, ...]
    correlation: float | None
    correlation_interval: tuple[float, float] | None
    recalls: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "this report") -> NeighbourReport:
        """The report that ``to_dict`` made."""
        try:
            kept: dict[str, Any] = {field.name: values[field.name] for field in dataclasses.fields(cls)}
            kept = {name: tuple(v) if isinstance(v, list) else v for name, v in kept.items()}
            return cls(**kept)
        except (KeyError, TypeError) as error:
            raise FormatError(f"{where} is damaged: {error!r} is missing or wrong") from error


class NeighbourArtefact(Artefact):
    """The evaluation of a run without labels: ``neighbours.json``, and its page beside it."""

    kind, header_file = "neighbours", "neighbours.json"
    made_by = "evaluate the run with jobs/evaluate.py"

    def open(self) -> NeighbourReport:
        return NeighbourReport.from_dict(self.read(), self.header_uri)

    def write(self, report: NeighbourReport, made_from: Mapping[str, Any]) -> None:
        self.write_header(report.to_dict(), lineage=made_from)

    def files(self, values: Mapping[str, Any]) -> dict[str, str]:
        return {}

    def facts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: values[name] for name in ("n_queries", "n_database", "n_bits", "k", "within", "recall")}


class VectorSample(NamedTuple):
    """Vectors for the correlation of distances: of the queries, and of some rows of the database."""

    queries: np.ndarray  # float (q, d)
    rows: np.ndarray  # int64 (m,)
    vectors: np.ndarray  # float (m, d)


def exact_neighbours(
    queries: Any, database: Iterable[Any], k: int, skip: np.ndarray | None = None
) -> np.ndarray:
    """int64 (q, k): the rows of the k nearest vectors by Euclidean distance, nearest first.

    ``queries`` float (q, d); ``database`` yields blocks float (n_i, d), numbered one after another. ``skip``
    int64 (q,) is one row that a query must not find: itself, where queries are part of the database.
    Memory: one tile of queries x BLOCK and the best so far.
    """
    queries = np.ascontiguousarray(as_array(queries, "queries"), dtype=np.float32)
    k = check_whole("k", k, 1)
    best = np.full((len(queries), 0), np.inf, dtype=np.float32)  # squared distance less the query's norm
    rows = np.zeros((len(queries), 0), dtype=np.int64)
    first = 0
    for given in database:
        given = np.asarray(given, dtype=np.float32)
        for start in range(0, len(given), BLOCK):
            block = given[start : start + BLOCK]
            if block.shape[1] != queries.shape[1]:
                raise CodeError(f"queries have {queries.shape[1]} values, the database {block.shape[1]}")
            # |q - x|^2 = |q|^2 - 2 q·x + |x|^2, and |q|^2 is the same for every item
            near = np.einsum("ij,ij->i", block, block)[None, :] - 2 * (queries @ block.T)  # (q, block)
            places = np.arange(first, first + len(block))
            if skip is not None:
                hidden = np.flatnonzero((skip >= first) & (skip < first + len(block)))
                near[hidden, skip[hidden] - first] = np.inf
            best = np.concatenate([best, near], axis=1)
            rows = np.concatenate([rows, np.broadcast_to(places, near.shape)], axis=1)
            if best.shape[1] > k:
                chosen = np.argpartition(best, k - 1, axis=1)[:, :k]
                best = np.take_along_axis(best, chosen, axis=1)
                rows = np.take_along_axis(rows, chosen, axis=1)
            first += len(block)
    if first - (skip is not None) < k:
        raise DataError(f"the database has {first} vectors, {k} neighbours were asked for")
    order = np.lexsort((rows, best), axis=1)
    return np.take_along_axis(rows, order, axis=1)


def neighbour_report(
    query_codes: Any,
    database_codes: Any,
    truth: np.ndarray,
    within: int = 100,
    *,
    sample: VectorSample | None = None,
    skip: np.ndarray | None = None,
    seed: int = 0,
) -> NeighbourReport:
    """The report of packed codes against the true neighbours int64 (q, k) of each query.

    ``sample`` adds the correlation of distances; a thousand rows are plenty. ``skip`` int64 (q,) is one
    database row per query that does not count: the query itself.
    """
    query_codes = check_codes(as_array(query_codes, "query codes"), name="query codes")
    database_codes = check_codes(database_codes, query_codes.shape[1] * 8, "database codes")
    within = min(check_whole("within", within, 1), len(database_codes))
    if truth.shape[0] != len(query_codes) or truth.ndim != 2:
        raise CodeError(f"there are {len(query_codes)} query codes, but true neighbours {truth.shape}")
    ranks = np.array(sorted({rank for rank in (*CURVE, within) if rank <= len(database_codes)}))
    hidden = np.full(len(query_codes), -1) if skip is None else skip.astype(np.int64)
    found = _recalls(as_words(query_codes), as_words(database_codes), truth.astype(np.int64), hidden, ranks)
    recalls = found[:, int(np.searchsorted(ranks, within))]
    correlations = None
    if sample is not None:
        correlations = _correlations(query_codes, database_codes[sample.rows], sample)
    return NeighbourReport(
        n_queries=len(query_codes),
        n_database=len(database_codes),
        n_bits=query_codes.shape[1] * 8,
        k=truth.shape[1],
        within=within,
        recall=float(recalls.mean()),
        recall_interval=interval(recalls, seed),
        ranks=tuple(ranks.tolist()),
        recall_within=tuple(found.mean(axis=0).tolist()),
        correlation=None if correlations is None else float(correlations.mean()),
        correlation_interval=None if correlations is None else interval(correlations, seed),
        recalls=tuple(recalls.tolist()),
    )


@compiled
def _recalls(queries, database, truth, skip, ranks):  # type: ignore[no-untyped-def]
    """float64 (q, ranks): the expected share of the true neighbours among the first ``ranks`` items.

    Of the items at a neighbour's distance d, some may be cut off: it is inside with the probability
    (rank - items nearer than d) / items at d.
    """
    n_bits = queries.shape[1] * 64
    out = np.zeros((len(queries), len(ranks)))
    at = np.empty(len(database), dtype=np.int32)  # distances
    for i in range(len(queries)):
        counts = np.zeros(n_bits + 1, dtype=np.int64)
        for j in range(len(database)):
            distance = 0
            for w in range(queries.shape[1]):
                distance += popcount(queries[i, w] ^ database[j, w])
            at[j] = distance
            if j != skip[i]:
                counts[distance] += 1
        nearer = np.cumsum(counts) - counts
        for r in range(len(ranks)):
            for t in range(truth.shape[1]):
                d = at[truth[i, t]]
                out[i, r] += min(max((ranks[r] - nearer[d]) / counts[d], 0.0), 1.0)
            out[i, r] /= truth.shape[1]
    return out


def _correlations(query_codes: np.ndarray, codes: np.ndarray, sample: VectorSample) -> np.ndarray:
    """float64 (q,): Spearman's correlation of a query's Hamming and Euclidean distances to the sample."""
    from scipy.stats import rankdata

    words, vectors = as_words(codes), np.asarray(sample.vectors, dtype=np.float64)
    norms = (vectors**2).sum(axis=1)
    values = np.empty(len(query_codes))
    for i, code in enumerate(as_words(query_codes)):
        hamming = np.bitwise_count(words ^ code).sum(axis=1)
        squared = norms - 2 * (vectors @ np.asarray(sample.queries[i], dtype=np.float64))
        a, b = rankdata(hamming), rankdata(squared)
        a, b = a - a.mean(), b - b.mean()
        values[i] = (a @ b) / max(np.sqrt((a @ a) * (b @ b)), 1e-12)  # 0 where all distances are equal
    return values
