"""MAP of rankings by score: the asymmetric one of logits against codes.

    ScoreShard.build(codes, labels, row_ids).rank(logits, …) → Ranking      for every piece of the database
    Ranking.merge(pieces, k).relevance()                                    of the whole database

Items of equal score follow the rule of equal distances: by the seeded hash of their row ids. A piece keeps
its items in that order, so that the earlier of two equal scores is the right one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hashnet.codes import check_codes
from hashnet.errors import CodeError
from hashnet.io import as_array
from hashnet.kernels import compiled, top_scores
from hashnet.labels import LabelSets
from hashnet.metrics.shard import NOTHING, Ranking, tie_hash


@dataclass(frozen=True)
class ScoreShard:
    """Codes in the order of their tie hashes, with the classes of each as bits."""

    codes: np.ndarray  # uint8 (n, n_bits // 8)
    hashes: np.ndarray  # uint64 (n,), ascending
    classes: np.ndarray  # uint64 (n, classes / 64)

    @classmethod
    def build(
        cls, codes: np.ndarray, labels: LabelSets, row_ids: np.ndarray | None = None, seed: int = 0
    ) -> ScoreShard:
        """Of packed codes (n, n_bits // 8); row ids default to 0 … n - 1."""
        codes = check_codes(codes)
        hashes = tie_hash(np.arange(len(codes)) if row_ids is None else row_ids, seed)
        order = np.argsort(hashes)
        return cls(np.ascontiguousarray(codes[order]), hashes[order], class_bits(labels)[order])

    def rank(
        self, logits: np.ndarray, query_labels: LabelSets, k: int, threads: int | None = None
    ) -> Ranking:
        """The k best of queries with logits float32 (q, n_bits), by <logits, signs>."""
        k = min(k, len(self.codes))
        places, scores = top_scores(self.codes, logits, k, threads=threads)
        return self.ranking(places, scores, query_labels)

    def ranking(self, places: np.ndarray, scores: np.ndarray, query_labels: LabelSets) -> Ranking:
        """The Ranking of places (q, m) in this shard, -1 where unused, with their scores."""
        relevant = np.zeros(places.shape, dtype=np.uint64)
        _mark_relevant(places, self.classes, class_bits(query_labels), relevant)
        keys = (self.hashes[places] << np.uint64(1)) | relevant
        return Ranking(scores, np.where(places >= 0, keys, NOTHING))


def class_bits(labels: LabelSets) -> np.ndarray:
    """uint64 (n, n_classes / 64): bit c % 64 of word c // 64 says whether a row has class c."""
    bits = np.zeros((len(labels), -(-max(labels.n_classes, 1) // 64)), dtype=np.uint64)
    rows, classes = np.repeat(np.arange(len(labels)), labels.per_row), labels.classes.astype(np.int64)
    np.bitwise_or.at(bits, (rows, classes >> 6), np.uint64(1) << (classes & 63).astype(np.uint64))
    return bits


@compiled
def _mark_relevant(places, classes, wanted, relevant):  # type: ignore[no-untyped-def]
    """Sets relevant[q, i] to 1 where item ``places[q, i]`` shares a class with query q."""
    for q in range(places.shape[0]):
        for i in range(places.shape[1]):
            if places[q, i] >= 0:
                for w in range(classes.shape[1]):
                    if classes[places[q, i], w] & wanted[q, w]:
                        relevant[q, i] = np.uint64(1)
                        break


def check_query_logits(logits: object, n_queries: int, n_bits: int) -> np.ndarray:
    """The queries' logits as C-contiguous float32 (q, n_bits)."""
    array = as_array(logits, "query logits")
    if array.shape != (n_queries, n_bits) or array.dtype.kind not in "fiu" or not np.isfinite(array).all():
        raise CodeError(
            f"query logits must be finite numbers of shape ({n_queries}, {n_bits}), got {array.dtype} "
            f"{array.shape}"
        )
    return np.ascontiguousarray(array, dtype=np.float32)
