"""The definitions once more, as plain loops over Python numbers; no code is shared with the library."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

MASK = 2**52 - 1


def slow_hash(row_id: int, seed: int) -> int:
    """The tie order: two turns of add, xor-shift and multiply on 52 bits."""
    x = row_id & (2**64 - 1)
    x = (x ^ (x >> 52)) & MASK
    for turn in range(2):
        x = (x + (seed * 2 + turn + 1) * 0x9E3779B97F4A7) & MASK
        x = ((x ^ (x >> 27)) * 0x9E6C63D0876A9) & MASK
        x = ((x ^ (x >> 24)) * 0xD1B54A32D192D) & MASK
        x ^= x >> 26
    return x


def slow_distance(a, b) -> int:
    return sum(bin(int(x) ^ int(y)).count("1") for x, y in zip(a, b, strict=True))


def slow_ap(ranking: list[bool], n_relevant: int, k: int) -> tuple[float, float, int]:
    """AP with the retrieved and with the relevant denominator, and the hits in the top k."""
    total, hits = 0.0, 0
    for rank, relevant in enumerate(ranking[:k], start=1):
        if relevant:
            hits += 1
            total += hits / rank
    below = min(k, n_relevant)
    return (total / hits if hits else 0.0), (total / below if below else 0.0), hits


def slow_ndcg(ranking: list[bool], n_relevant: int, k: int) -> float:
    """The discounts of the hits in the top k over those of the best order."""
    gain = sum(1 / math.log2(rank + 1) for rank, relevant in enumerate(ranking[:k], start=1) if relevant)
    best = sum(1 / math.log2(rank + 1) for rank in range(1, min(k, n_relevant) + 1))
    return gain / best if best else 0.0


def slow_tie_aware(items: list[tuple[int, bool]], k: int) -> float:
    """The mean over tie orders, term by term: a place among n tied items, r relevant, hits with r / n."""
    total, before, hits_before = 0.0, 0, 0
    for distance in sorted({distance for distance, _ in items}):
        group = [relevant for other, relevant in items if other == distance]
        n, r = len(group), sum(group)
        for i in range(1, n + 1):
            if before + i <= k:
                expected = hits_before + 1 + ((i - 1) * (r - 1) / (n - 1) if n > 1 else 0)
                total += r / n * expected / (before + i)
        before, hits_before = before + n, hits_before + r
    below = min(k, hits_before)
    return total / below if below else 0.0


def slow_sets(labels) -> list[set[int]]:
    labels = np.asarray(labels)
    if labels.ndim == 1:
        return [{int(c)} for c in labels]
    return [{c for c in range(labels.shape[1]) if row[c]} for row in labels]


def slow_evaluate(query_codes, query_labels, codes, labels, k, ids=None, seed=0) -> SimpleNamespace:
    """Every metric of the report, query by query, item by item."""
    n, n_bits = len(codes), len(codes[0]) * 8
    k = min(k, n)
    ids = range(n) if ids is None else [int(i) for i in ids]
    query_sets, sets = slow_sets(query_labels), slow_sets(labels)
    hashes = [slow_hash(i, seed) for i in ids]
    ap, ap_relevant, ndcg, hits, fractions = [], [], [], [], []
    tie_aware, first, last = [], [], []
    precision, recall = [0.0] * k, [0.0] * k
    ball = {name: [0.0] * (n_bits + 1) for name in ("precision", "recall", "empty")}
    similar, dissimilar = [0] * (n_bits + 1), [0] * (n_bits + 1)
    for code, wanted in zip(query_codes, query_sets, strict=True):
        items = [
            (slow_distance(code, other), tie, bool(wanted & own))
            for other, tie, own in zip(codes, hashes, sets, strict=True)
        ]
        items.sort(key=lambda item: item[:2])
        ranking = [relevant for _, _, relevant in items]
        n_relevant = sum(ranking)
        values = slow_ap(ranking, n_relevant, k)
        ap.append(values[0])
        ap_relevant.append(values[1])
        ndcg.append(slow_ndcg(ranking, n_relevant, k))
        tied = [(distance, relevant) for distance, _, relevant in items]
        tie_aware.append(slow_tie_aware(tied, k))
        for order, sign in ((first, -1), (last, 1)):  # the best and the worst order of tied items
            ordered = sorted(tied, key=lambda item, sign=sign: (item[0], sign * item[1]))
            order.append(slow_ap([relevant for _, relevant in ordered], n_relevant, k)[1])
        hits.append(values[2])
        fractions.append(n_relevant / n)
        for top in range(1, k + 1):
            found = sum(ranking[:top])
            precision[top - 1] += found / top / len(query_codes)
            recall[top - 1] += (found / n_relevant if n_relevant else 0) / len(query_codes)
        for radius in range(n_bits + 1):
            inside = [relevant for distance, _, relevant in items if distance <= radius]
            ball["precision"][radius] += (sum(inside) / len(inside) if inside else 0) / len(query_codes)
            ball["recall"][radius] += (sum(inside) / n_relevant if n_relevant else 0) / len(query_codes)
            ball["empty"][radius] += (not inside) / len(query_codes)
        for distance, _, relevant in items:
            (similar if relevant else dissimilar)[distance] += 1
    with_hit = [value for value, found in zip(ap, hits, strict=True) if found]
    classes = {}
    for value, wanted in zip(ap, query_sets, strict=True):
        for c in wanted:
            classes.setdefault(c, []).append(value)
    return SimpleNamespace(
        ap=ap,
        ap_relevant=ap_relevant,
        map=sum(ap) / len(ap),
        map_retrieved_hits_only=sum(with_hit) / len(with_hit) if with_hit else 0.0,
        map_relevant=sum(ap_relevant) / len(ap),
        map_tie_aware=sum(tie_aware) / len(ap),
        ndcg=sum(ndcg) / len(ap),
        map_relevant_first=sum(first) / len(ap),
        map_relevant_last=sum(last) / len(ap),
        queries_without_hit=hits.count(0),
        queries_without_relevant=fractions.count(0),
        chance=sum(fractions) / len(fractions),
        precision=precision,
        recall=recall,
        ball=ball,
        similar=similar,
        dissimilar=dissimilar,
        per_class={c: (len(values), sum(values) / len(values)) for c, values in classes.items()},
    )


def tie_orders(groups: list[list[bool]]):
    """Every ranking that respects the groups of tied items."""
    for choice in itertools.product(*(list(itertools.permutations(group)) for group in groups)):
        yield [relevant for group in choice for relevant in group]


@pytest.fixture(scope="session")
def slow() -> SimpleNamespace:
    return SimpleNamespace(
        evaluate=slow_evaluate, ap=slow_ap, tie_aware=slow_tie_aware, hash=slow_hash, tie_orders=tie_orders
    )


@pytest.fixture(scope="session")
def make():
    """Makes (query codes, query labels, codes, labels) of one kind: ``make("tied", n_bits=24, …)``."""

    def case(kind: str, n_bits: int = 24, q: int = 5, n: int = 60, seed: int = 0):
        rng = np.random.default_rng(seed)
        codes = rng.integers(0, 256, (n, n_bits // 8), dtype=np.uint8)
        queries = rng.integers(0, 256, (q, n_bits // 8), dtype=np.uint8)
        query_labels, labels = rng.integers(0, 4, q), rng.integers(0, 4, n)
        if kind == "multi":
            query_labels = (rng.random((q, 70)) < 0.04).astype(np.uint8)
            query_labels[:, 66] = 1
            labels = (rng.random((n, 70)) < 0.05).astype(bool)
        elif kind == "tied":  # two distances for everything
            codes[:] = np.where(rng.random((n, 1)) < 0.5, codes[:1], codes[1:2])
        elif kind == "class-sorted":
            labels = np.sort(labels)
            codes[:] = codes[0]
        elif kind == "one distance":
            codes[:] = 255
            queries[:] = 0  # every bit differs: distance n_bits
        elif kind == "equal codes":
            codes[:] = queries[0]
            queries[:] = queries[0]
        elif kind == "nothing relevant":
            labels[:] = 7
        elif kind == "all relevant":
            labels[:] = query_labels[:] = 2
        return queries, query_labels, codes, labels

    return case
