"""EvalReport: every metric of one evaluation, frozen, with a JSON round trip."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hashnet.errors import FormatError, HashnetError
from hashnet.io import Artefact, storage

# what each number of a report means, in one sentence; shown beside the numbers
DEFINITIONS = {
    "map": (
        "Mean over all queries of AP@k = (sum over ranks r <= k of precision@r * rel_r) / relevant items "
        "inside the top k. A query without a hit counts 0. Items at equal distance are ordered by a seeded "
        "hash of their row id. Comparable with the hashing papers."
    ),
    "map_retrieved_hits_only": (
        "The same AP@k, averaged only over queries with at least one hit in the top k."
    ),
    "map_relevant": (
        "Mean over all queries of the same sum / min(k, relevant items in the database); a query without a "
        "hit counts 0. Information retrieval, TREC style."
    ),
    "map_tie_aware": (
        "The 'relevant' AP@k averaged exactly over every order of items at equal distance (McSherry and "
        "Najork, 2008); it depends on no tie-breaking."
    ),
    "map_relevant_last": (
        "The 'relevant' MAP if every tie were broken against us: the lower bound over tie orders."
    ),
    "map_relevant_first": (
        "The 'relevant' MAP if every tie were broken in our favour: the upper bound over tie orders."
    ),
    "ndcg": (
        "Mean over all queries of nDCG@k with binary gains: the sum over hits of 1 / log2(rank + 1), divided "
        "by its value with min(k, relevant items in the database) hits first."
    ),
    "queries_without_hit": "Queries with no relevant item in their top k.",
    "queries_without_relevant": (
        "Queries with no relevant item in the whole database; they count 0 in MAP, precision and recall."
    ),
    "chance": "Mean fraction of the database that is relevant to a query: the precision of a random order.",
    "precision_at": "Precision at N: relevant items among the N nearest / N, mean over queries.",
    "recall_at": (
        "Recall at N: relevant items among the N nearest / relevant items in the database, mean over queries."
    ),
    "precision_within": (
        "Precision within Hamming radius r: relevant items at distance <= r / items at distance <= r, mean "
        "over queries; a query with an empty ball counts 0."
    ),
    "recall_within": (
        "Recall within Hamming radius r: relevant items at distance <= r / relevant items in the database, "
        "mean over queries."
    ),
    "empty_within": "Fraction of queries with no item at all at distance <= r.",
    "map_asymmetric": (
        "MAP@k as `map`, of items ordered by the query's logits against their signs, ties by the same hash."
    ),
    "per_class": "MAP over the queries that carry the class; a query with several labels counts for each.",
    "interval": (
        "95 % percentile bootstrap of the mean over queries (1,000 resamples, seeded): how much the choice "
        "of queries matters. It says nothing about other training seeds."
    ),
}


@dataclass(frozen=True)
class RankCurve:
    """Means over queries at each of ``ranks``: 1 … k, thinned out beyond 10,000 of them."""

    ranks: tuple[int, ...]
    precision: tuple[float, ...]
    recall: tuple[float, ...]


@dataclass(frozen=True)
class RadiusCurve:
    """Means over queries at radius 0 … n_bits; an empty ball has precision 0."""

    precision: tuple[float, ...]
    recall: tuple[float, ...]
    empty: tuple[float, ...]


@dataclass(frozen=True)
class ClassScore:
    """MAP over the queries of one class."""

    class_id: int
    n_queries: int
    map: float
    name: str | None = None


@dataclass(frozen=True, repr=False)
class EvalReport:
    """Every metric of one evaluation; ``hashnet.metrics.DEFINITIONS`` says what each one means.

    ``k`` is the rank MAP and the curves by rank stop at (never more than the database has).
    ``similar`` and ``dissimilar`` count (query, item) pairs at each distance 0 … n_bits.
    ``ap``, ``ap_relevant`` and ``ap_tie_aware`` hold one value per query.
    """

    n_queries: int
    n_database: int
    n_bits: int
    n_classes: int
    k: int
    seed: int
    map: float
    map_interval: tuple[float, float]
    map_retrieved_hits_only: float
    map_relevant: float
    map_relevant_interval: tuple[float, float]
    map_tie_aware: float
    map_tie_aware_interval: tuple[float, float]
    map_relevant_last: float
    map_relevant_first: float
    queries_without_hit: int
    queries_without_relevant: int
    chance: float
    by_rank: RankCurve
    by_radius: RadiusCurve
    per_class: tuple[ClassScore, ...]
    similar: tuple[int, ...]
    dissimilar: tuple[int, ...]
    ap: tuple[float, ...] = ()
    ap_relevant: tuple[float, ...] = ()
    ap_tie_aware: tuple[float, ...] = ()
    ndcg: float | None = None  # None in a report of an older version
    map_asymmetric: float | None = None  # None where the queries' logits were not given
    map_asymmetric_interval: tuple[float, float] | None = None
    ap_asymmetric: tuple[float, ...] = ()

    def __repr__(self) -> str:
        """The numbers that one looks at first: ``EvalReport(map=0.9767, …, n_queries=197, …)``."""
        values = {name: getattr(self, name) for name in ("map", "map_tie_aware", "map_asymmetric", "chance")}
        words = [f"{name}={value:.4f}" for name, value in values.items() if value is not None]
        sizes = [f"{name}={getattr(self, name)}" for name in ("k", "n_queries", "n_database", "n_bits")]
        return f"EvalReport({', '.join(words + sizes)})"

    def precision_at(self, n: int) -> float:
        """Precision of the N nearest; N one of ``by_rank.ranks``."""
        return self.by_rank.precision[self._place(n)]

    def recall_at(self, n: int) -> float:
        """Recall of the N nearest; N one of ``by_rank.ranks``."""
        return self.by_rank.recall[self._place(n)]

    def precision_within(self, radius: int = 2) -> float:
        """P@H<=r: precision within a Hamming radius, a query with an empty ball counting 0."""
        return self.by_radius.precision[self._radius(radius)]

    def recall_within(self, radius: int = 2) -> float:
        """Recall within a Hamming radius."""
        return self.by_radius.recall[self._radius(radius)]

    def empty_within(self, radius: int = 2) -> float:
        """The fraction of queries that have nothing at all within the radius."""
        return self.by_radius.empty[self._radius(radius)]

    def _place(self, n: int) -> int:
        ranks = self.by_rank.ranks
        place = bisect.bisect_left(ranks, n)
        if ranks[place : place + 1] != (n,):
            near = " or ".join(map(str, ranks[max(place - 1, 0) : place + 1]))
            raise HashnetError(f"there is no rank {n} in this report up to k = {self.k}; choose {near}")
        return place

    def _radius(self, radius: int) -> int:
        if not 0 <= radius <= self.n_bits:
            raise HashnetError(f"radius must lie between 0 and n_bits = {self.n_bits}, got {radius}")
        return radius

    def to_dict(self) -> dict[str, Any]:
        """What report.json holds: every value, and what each metric means."""
        values = dataclasses.asdict(self)
        more = {"precision_within_2": self.precision_within(2), "empty_within_2": self.empty_within(2)}
        header = {"kind": ReportArtefact.kind, "format_version": ReportArtefact.format_version}
        return {**header, "definitions": DEFINITIONS, **values, **more}

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "this report") -> EvalReport:
        """The report that ``to_dict`` made."""
        values = storage.check_format(values, where, ReportArtefact.kind, ReportArtefact.format_version)
        known = {field.name for field in dataclasses.fields(cls)}
        try:
            kept = {name: _frozen(value) for name, value in values.items() if name in known}
            kept["by_rank"] = RankCurve(**{n: _frozen(v) for n, v in values["by_rank"].items()})
            kept["by_radius"] = RadiusCurve(**{n: _frozen(v) for n, v in values["by_radius"].items()})
            kept["per_class"] = tuple(ClassScore(**score) for score in values["per_class"])
            return cls(**kept)
        except (KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{where} is damaged: {error}") from error

    def save(self, uri: str) -> None:
        """Writes the report as JSON."""
        storage.write_json(uri, self.to_dict())

    @classmethod
    def load(cls, uri: str) -> EvalReport:
        """Reads a report that ``save`` wrote."""
        return cls.from_dict(storage.read_json(uri), str(uri))


class ReportArtefact(Artefact):
    """The report of an evaluation as an artefact of a run: ``report.json``, and its page beside it."""

    kind, header_file = "evaluation", "report.json"
    made_by = "evaluate the run with jobs/evaluate.py"

    def open(self) -> EvalReport:
        return EvalReport.from_dict(self.read(), self.header_uri)

    def write(self, report: EvalReport, made_from: Mapping[str, Any]) -> None:
        self.write_header(report.to_dict(), lineage=made_from)

    def made_from(self) -> dict[str, Any] | None:
        """What the report at hand was made from; None where there is none."""
        if not self.exists():
            return None
        values = self.read()
        return values.get("lineage") or values.get("made_from")  # the older name

    def list_page(self) -> None:
        """Enters the page and the figures, which are drawn after the report, into the header."""
        figures = [f"figures/{name}" for name in storage.list_names(storage.join(self.uri, "figures"))]
        drawn = {name: storage.sha256_of(storage.join(self.uri, name)) for name in ("report.html", *figures)}
        values = self.read() | {"files": drawn}
        self.write_header(values, sha256=values.get("sha256"), lineage=self.made_from() or {})

    def files(self, values: Mapping[str, Any]) -> dict[str, str]:
        return dict(values.get("files") or {})

    def facts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        plain = (str, int, float, bool, type(None))
        shared = ("kind", "format_version", self.seal_name)
        return {n: value for n, value in values.items() if isinstance(value, plain) and n not in shared}


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
