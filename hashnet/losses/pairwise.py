"""HashNet's weighted pairwise cross-entropy (Eqs. 1-4), and where the similarity of pairs comes from.

    P(s_ij = 1 | g) = sigmoid(alpha <g_i, g_j>)                                     (Eq. 3)
    J = sum w_ij ( log(1 + exp(alpha <g_i, g_j>)) - alpha s_ij <g_i, g_j> ) / sum w_ij   (Eq. 4)
    w_ij = c_ij |S| / |S1| for similar pairs, |S| / |S0| for dissimilar ones           (Eq. 2)

g is tanh(beta z) for J and sgn(z) for L. Three choices the paper leaves open or gets wrong:
c_ij as printed is 0 for every dissimilar pair, which would remove them, so c_ij is the Jaccard
similarity for similar pairs and 1 for dissimilar ones; with c_ij, similar pairs weigh
|S| / (sum of c_ij over S1), else a small c_ij undoes the balance; and the sum is divided by the sum
of weights, so that ln 2 = 0.693 always means that nothing has been learnt.

``threshold`` t, not in the paper, makes it sigmoid(alpha <g_i, g_j> - t). With t = 0 a dissimilar pair is
told apart only by a negative product, which few pairs of many classes can have at once: the mean product of
C vectors of one length is at least -1 / (C - 1) of its square. Codes then spend their bits on few, coarse
groups. With t > 0 dissimilar codes may be orthogonal.

Which pairs of a batch are similar follows from labels, or from a table of pairs alone. A loss holds one of
these for its whole training set and looks up the rows of a batch in it: positions 0..n-1 in that set.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch.nn import functional

from hashnet.errors import ConfigError, DataError
from hashnet.labels import PAIR_WEIGHTS, PairCounts, as_multi_hot, check_pairs, count_pairs
from hashnet.models import relax

if TYPE_CHECKING:
    from hashnet.training import TrainConfig


SAMPLE_ROWS = 4096  # 16 M pairs: their mean is good to a thousandth


class BatchPairs(NamedTuple):
    """The pairs of a batch of n rows, all (n, n): similar bool, known bool, jaccard float or None.

    ``known`` is false for a row with itself and for pairs of unknown similarity.
    """

    similar: torch.Tensor
    known: torch.Tensor
    jaccard: torch.Tensor | None


class LabelSimilarity:
    """Similar means: at least one shared label. ``labels`` are multi-hot (n, n_classes) or ids (n,)."""

    def __init__(self, labels: Any, device: torch.device | str = "cpu") -> None:
        multi_hot = as_multi_hot(labels)
        self.counts = count_pairs(multi_hot)
        self.labels = torch.from_numpy(np.ascontiguousarray(multi_hot)).to(device)

    def mean_jaccard(self, power: float) -> float:
        """The mean of Jaccard ** power over similar pairs, from a seeded sample of the rows."""
        rows = np.random.default_rng(0).permutation(len(self.labels))[:SAMPLE_ROWS]
        found = self.pairs(torch.from_numpy(np.sort(rows)).to(self.labels.device), jaccard=True)
        assert found.jaccard is not None
        return float(found.jaccard[found.similar & found.known].pow(power).mean())

    def pairs(self, rows: torch.Tensor, jaccard: bool = False) -> BatchPairs:
        y = self.labels[rows].float()  # (n, n_classes)
        shared = y @ y.T  # counts, exact in float32
        known = rows[:, None] != rows[None, :]
        if not jaccard:
            return BatchPairs(shared > 0, known, None)
        size = y.sum(dim=1)
        union = size[:, None] + size[None, :] - shared
        return BatchPairs(shared > 0, known, shared / union.clamp(min=1))


class TableSimilarity:
    """Similarity from listed pairs alone; a pair that is not listed carries no loss.

    ``a``, ``b`` are positions (m,) of the two rows, ``similar`` bool (m,); the order inside a pair does
    not matter. ``n_rows`` is the size of the training set. With ``uncertain`` bool (m,) it is those pairs
    that carry no loss, and whatever is not listed is dissimilar.
    """

    def __init__(
        self,
        a: Any,
        b: Any,
        similar: Any,
        n_rows: int,
        device: torch.device | str = "cpu",
        uncertain: Any = None,
    ) -> None:
        first, second = np.asarray(a, dtype=np.int64), np.asarray(b, dtype=np.int64)
        similar = np.asarray(similar, dtype=bool)
        if not len(first) == len(second) == len(similar):
            raise DataError(f"pairs of unequal length: {len(first)}, {len(second)} and {len(similar)}")
        keys = np.minimum(first, second) * n_rows + np.maximum(first, second)
        keys, where = np.unique(keys[first != second], return_index=True)
        similar = similar[first != second][where]
        n_pairs = len(keys)
        self.uncertain: torch.Tensor | None = None
        if uncertain is not None:
            uncertain = np.asarray(uncertain, dtype=bool)[first != second][where]
            n_pairs = n_rows * (n_rows - 1) // 2 - int(uncertain.sum())
            self.uncertain = torch.from_numpy(uncertain).to(device)
        self.counts = PairCounts(n_pairs, int(similar.sum()), float(similar.sum()))
        self.n_rows = n_rows
        self.keys = torch.from_numpy(keys).to(device)  # sorted, so that a lookup is a binary search
        self.similar = torch.from_numpy(similar).to(device)

    def pairs(self, rows: torch.Tensor, jaccard: bool = False) -> BatchPairs:
        if jaccard:
            raise DataError("a table of pairs has no label sets: continuous similarity needs labels")
        low, high = torch.minimum(rows[:, None], rows), torch.maximum(rows[:, None], rows)
        keys = low * self.n_rows + high  # (n, n)
        found = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        listed = self.keys[found] == keys
        known = listed
        if self.uncertain is not None:
            known = (rows[:, None] != rows) & ~(listed & self.uncertain[found])
        return BatchPairs(self.similar[found] & listed, known, None)


class Similarity(Protocol):
    """What a pairwise loss needs to know: see ``LabelSimilarity`` and ``TableSimilarity``."""

    counts: PairCounts

    def pairs(self, rows: torch.Tensor, jaccard: bool = False) -> BatchPairs: ...


def pair_cross_entropy(
    codes: torch.Tensor, similar: torch.Tensor, alpha: float, threshold: float = 0.0
) -> torch.Tensor:
    """-log P(s_ij | codes) for every pair, (n, n); softplus keeps it finite for any codes."""
    inner = alpha * (codes @ codes.T)  # (n, n)
    if threshold:
        inner = inner - threshold
    return functional.softplus(inner) - similar.to(inner.dtype) * inner


def class_weights(counts: PairCounts, continuous: bool = False) -> tuple[float, float]:
    """(similar, dissimilar): |S| / |S1| (|S| / sum of c_ij over S1 when continuous) and |S| / |S0|."""
    similar = counts.jaccard_sum if continuous else counts.n_similar
    return counts.n_pairs / similar, counts.n_pairs / counts.n_dissimilar


class PairwiseLoss:
    """Callable: the loss of a batch, as ``sum(w l) / sum(w)``.

    ``weights``: ``global`` (|S1| and |S0| of the whole training set), ``batch`` or ``none`` (w = 1).
    ``continuous`` turns c_ij on (HashNet+C): Jaccard ** ``power``. ``alpha`` defaults to 10 / n_bits.
    ``threshold`` 0 is the paper's loss. ``guessing`` is the mean loss of relaxed codes of 0, ln 2 without a
    threshold.
    """

    def __init__(
        self,
        similarity: Similarity,
        n_bits: int,
        *,
        alpha: float | None = None,
        weights: str = "global",
        continuous: bool = False,
        power: float = 1.0,
        threshold: float = 0.0,
    ) -> None:
        if weights not in PAIR_WEIGHTS:
            raise ConfigError(f"weights must be one of {', '.join(PAIR_WEIGHTS)}, got {weights!r}")
        counts = check_pairs(similarity.counts)
        self.similarity, self.weights, self.continuous, self.power = similarity, weights, continuous, power
        if continuous and power != 1 and isinstance(similarity, LabelSimilarity):
            counts = dataclasses.replace(
                counts, jaccard_sum=counts.n_similar * similarity.mean_jaccard(power)
            )
        self.alpha, self.threshold = 10 / n_bits if alpha is None else alpha, threshold
        similar_share = counts.n_similar / counts.n_pairs if weights == "none" else 0.5  # of the weights
        self.guessing: float | None = math.log1p(math.exp(-threshold)) + similar_share * threshold
        self.class_weights = class_weights(counts, continuous) if weights == "global" else (1.0, 1.0)
        self._last: tuple[torch.Tensor, torch.Tensor, BatchPairs, torch.Tensor] | None = None

    def __call__(
        self, logits: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, beta: float
    ) -> torch.Tensor:
        """Scalar loss of tanh(beta logits), or of the signs with ``beta=inf``.

        logits (n, n_bits); rows (n,) int64 positions in the training set; valid (n,) bool, false for
        padding. A batch without a single known pair has loss 0.
        """
        pairs, weight = self._known(rows, valid, logits.dtype)
        losses = pair_cross_entropy(relax(logits, beta), pairs.similar, self.alpha, self.threshold)
        return (weight * losses).sum() / weight.sum().clamp(min=torch.finfo(weight.dtype).tiny)

    @classmethod
    def from_config(cls, config: TrainConfig, similarity: Similarity) -> Self:
        return cls(
            similarity,
            config.n_bits,
            alpha=config.alpha_value,
            weights=config.pair_weights,
            continuous=config.continuous_on,
            power=config.method.jaccard_power,
            threshold=config.threshold_value,
        )

    def _known(
        self, rows: torch.Tensor, valid: torch.Tensor, dtype: torch.dtype
    ) -> tuple[BatchPairs, torch.Tensor]:
        """Pairs and weights of a batch, computed once for its J and its L."""
        if self._last is not None and self._last[0] is rows and self._last[1] is valid:
            return self._last[2], self._last[3]
        pairs = self.similarity.pairs(rows, self.continuous)
        weight = self._weights(pairs, valid, dtype)
        self._last = rows, valid, pairs, weight
        return pairs, weight

    def _weights(self, pairs: BatchPairs, valid: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """w_ij (n, n), 0 for pairs that do not count."""
        counted = pairs.known if valid.all() else pairs.known & valid[:, None] & valid[None, :]
        w_similar, w_dissimilar = (torch.tensor(w, dtype=dtype) for w in self.class_weights)
        if pairs.jaccard is not None:
            jaccard = pairs.jaccard.to(dtype)
            w_similar = w_similar * (jaccard if self.power == 1 else jaccard**self.power)
        weight = torch.where(pairs.similar, w_similar, w_dissimilar) * counted
        if self.weights != "batch":
            return weight
        similar = weight * pairs.similar
        return counted.sum() * (_shares(similar) + _shares(weight - similar))


def _shares(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` divided by its sum; all zeros where the batch has no pair of the kind."""
    total = weight.sum()
    return weight / torch.where(total > 0, total, torch.ones_like(total))
