"""Measuring codes without labels: do the nearest items by Hamming distance include the nearest vectors?

    truth = exact_neighbours(query_vectors, [database_vectors], k=10)
    report = neighbour_report(query_codes, database_codes, truth, within=100)
    report.recall, report.recall_interval

Neighbour recall is the share of a query's k nearest vectors (Euclidean) among the first N items by Hamming
distance, or by asymmetric score (the query's logits against the items' signs). Where items tie at rank N, it
is the mean over every order of them, so it depends on no tie-breaking. It is also what the first k hits
recall after the first N were rescored with the vectors, which puts the true neighbours among them first.
Distance correlation is Spearman's, of Hamming and Euclidean distance, over a sample of items.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hashnet.codes import as_words, check_codes, unpack_codes
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
    95 % bootstrap intervals over queries. ``asymmetric_within`` is the recall at each of ``ranks`` by
    asymmetric score, None where there were no logits.
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
    asymmetric_within: tuple[float, ...] | None = None
    asymmetric_interval: tuple[float, float] | None = None  # at ``within``

    @property
    def asymmetric(self) -> float | None:
        """Recall within the first ``within`` items by asymmetric score."""
        found = self.asymmetric_within
        return None if found is None else found[self.ranks.index(self.within)]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "this report") -> NeighbourReport:
        """The report that ``to_dict`` made."""
        try:
            kept: dict[str, Any] = {
                f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values
            }
            kept |= {name: tuple(value) for name, value in kept.items() if isinstance(value, list)}
            return cls(**kept)
        except TypeError as error:
            raise FormatError(f"{where} is damaged: {error}") from error


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
        raise DataError(f"the database has {first} vectors, but {k} neighbours were requested")
    order = np.lexsort((rows, best), axis=1)
    return np.take_along_axis(rows, order, axis=1)


def neighbour_report(
    query_codes: Any,
    database_codes: Any,
    truth: np.ndarray,
    within: int = 100,
    *,
    logits: Any = None,
    sample: VectorSample | None = None,
    seed: int = 0,
) -> NeighbourReport:
    """The report of packed codes against the true neighbours int64 (q, k) of each query.

    ``logits`` float (q, n_bits) of the queries add the asymmetric ranking. ``sample`` adds the correlation of
    distances; a thousand rows are plenty.
    """
    query_codes = check_codes(as_array(query_codes, "query codes"), name="query codes")
    n_bits = query_codes.shape[1] * 8
    database_codes = check_codes(database_codes, n_bits, "database codes")
    within = min(check_whole("within", within, 1), len(database_codes))
    if truth.shape[0] != len(query_codes) or truth.ndim != 2:
        raise CodeError(f"there are {len(query_codes)} query codes, but true neighbours {truth.shape}")
    truth = truth.astype(np.int64)
    ranks = _ranks(within, len(database_codes))
    found = _recalls(as_words(query_codes), as_words(database_codes), truth, ranks)
    more: dict[str, Any] = {}
    if logits is not None:
        logits = np.ascontiguousarray(as_array(logits, "logits"), dtype=np.float32)
        scored = _asymmetric_recalls(logits, database_codes, truth, ranks)
        more["asymmetric_within"] = tuple(scored.mean(axis=0).tolist())
        more["asymmetric_interval"] = interval(scored[:, int(np.searchsorted(ranks, within))], seed)
    if sample is not None:
        correlations = _correlations(query_codes, database_codes[sample.rows], sample)
        more["correlation"] = float(correlations.mean())
        more["correlation_interval"] = interval(correlations, seed)
    report = _report(found, ranks, within, len(database_codes), n_bits, truth.shape[1], seed)
    return dataclasses.replace(report, **more)


def ranked_report(
    found: np.ndarray, truth: np.ndarray, n_database: int, n_bits: int, within: int = 100, seed: int = 0
) -> NeighbourReport:
    """The report of any ranking: ``found`` int64 (q, N) are the rows that it puts first, the best first."""
    within = min(within, found.shape[1])
    ranks = _ranks(within, found.shape[1])
    hit = (found[:, :, None] == truth[:, None, :]).any(axis=2)  # (q, N)
    recalls = np.cumsum(hit, axis=1)[:, ranks - 1] / truth.shape[1]
    return _report(recalls, ranks, within, n_database, n_bits, truth.shape[1], seed)


def _ranks(within: int, n_items: int) -> np.ndarray:
    """The ranks of the curve, ``within`` among them, int64 ascending."""
    return np.array(sorted({rank for rank in (*CURVE, within) if rank <= n_items}))


def _report(
    found: np.ndarray, ranks: np.ndarray, within: int, n_database: int, n_bits: int, k: int, seed: int
) -> NeighbourReport:
    """A report without correlation, from the recall (q, ranks) of every query at every rank."""
    recalls = found[:, int(np.searchsorted(ranks, within))]
    return NeighbourReport(
        n_queries=len(found),
        n_database=n_database,
        n_bits=n_bits,
        k=k,
        within=within,
        recall=float(recalls.mean()),
        recall_interval=interval(recalls, seed),
        ranks=tuple(ranks.tolist()),
        recall_within=tuple(found.mean(axis=0).tolist()),
        correlation=None,
        correlation_interval=None,
        recalls=tuple(recalls.tolist()),
    )


def _asymmetric_recalls(
    logits: np.ndarray, codes: np.ndarray, truth: np.ndarray, ranks: np.ndarray
) -> np.ndarray:
    """float64 (q, ranks), as ``_recalls``, by the score <logits, signs>, the greatest first.

    Blocks of the database are scored twice: for the scores of the true neighbours, then to count what is
    ahead of them. So a score is always compared with one that was computed in the same way.
    """
    own = np.zeros(truth.shape, dtype=np.float32)  # scores of the true neighbours
    ahead, equal = np.zeros(truth.shape, dtype=np.int64), np.zeros(truth.shape, dtype=np.int64)
    for count in (False, True):
        for first in range(0, len(codes), BLOCK):
            signs = unpack_codes(codes[first : first + BLOCK]).astype(np.float32)
            scores = logits @ signs.T  # (q, block)
            if not count:
                query, place = np.nonzero((truth >= first) & (truth < first + len(signs)))
                own[query, place] = scores[query, truth[query, place] - first]
                continue
            for t in range(truth.shape[1]):
                ahead[:, t] += (scores > own[:, t, None]).sum(axis=1)
                equal[:, t] += (scores == own[:, t, None]).sum(axis=1)
    inside = (ranks[None, None, :] - ahead[:, :, None]) / equal[:, :, None]  # (q, k, ranks)
    return inside.clip(0, 1).mean(axis=1)


@compiled
def _recalls(queries, database, truth, ranks):  # type: ignore[no-untyped-def]
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
