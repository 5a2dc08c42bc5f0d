"""EvalReport: what ``evaluate`` returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EvalReport:
    """Every metric of one evaluation."""

    n_queries: int
    n_database: int
    n_bits: int
    k: int
    map: float
    map_retrieved_hits_only: float
    map_relevant: float
    queries_without_hit: int
    chance: float
    ap: tuple[float, ...]
