"""Codes of every sort, and the slow truth of a search: plain loops over Python integers and items."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hashnet.codes import pack_signs, unpack_codes
from hashnet.index import KINDS as REGISTERED
from hashnet.results import SearchResult

# options with which the kinds of index find everything among a few hundred items, but for hnsw by distance
SMALL = {"ivf": {"nlist": 5, "nprobe": 5}}
KINDS: dict[str, dict[str, int]] = {kind: SMALL.get(kind, {}) for kind in REGISTERED}


def draw(sort: str, n: int, n_bits: int, seed: int = 0) -> np.ndarray:
    """uint8 (n, n_bits // 8): random, clustered, duplicated or all-equal codes."""
    rng = np.random.default_rng(seed)
    random = rng.integers(0, 256, (n, n_bits // 8), dtype=np.uint8)
    if sort == "random":
        return random
    if sort == "equal":
        return np.repeat(random[:1], n, axis=0)
    if sort == "duplicated":
        return random[rng.integers(0, max(1, n // 9), n)]
    centres = random[: max(1, n // 20)]
    noise = np.packbits(rng.random((n, n_bits)) < 0.1, axis=1)
    return centres[rng.integers(0, len(centres), n)] ^ noise


def slow_distances(query: np.ndarray, codes: np.ndarray) -> list[int]:
    """Hamming distances by counting the ones of Python integers."""
    wanted = int.from_bytes(query.tobytes(), "big")
    return [(wanted ^ int.from_bytes(code.tobytes(), "big")).bit_count() for code in codes]


def slow_search(query: np.ndarray, items: dict[int, np.ndarray]) -> list[tuple[int, int]]:
    """Every item as (distance, id), in the order a search must give."""
    ids = list(items)
    return sorted(zip(slow_distances(query, np.stack(list(items.values()))), ids, strict=True))


def pairs_of(hits: SearchResult, row: int | None = None) -> list[tuple[int, int]]:
    """(distance, id) of one query's used slots."""
    ids, distances = (hits.ids, hits.distances) if row is None else (hits.ids[row], hits.distances[row])
    return [(int(d), int(i)) for i, d in zip(ids, distances, strict=True) if i >= 0]


def whole(n: int, width: int, seed: int) -> np.ndarray:
    """Small multiples of 1/8: their products and sums are exact, in float16 and in every order."""
    return (np.random.default_rng(seed).integers(-40, 40, (n, width)) / 8).astype(np.float32)


class SlowItems:
    """The items of an index as dictionaries, searched by loops."""

    def __init__(self, ids: Any, codes: Any, vectors: Any, years: Any) -> None:
        self.code, self.vector, self.year = (
            {int(i): row for i, row in zip(ids, rows, strict=True)} for rows in (codes, vectors, years)
        )

    def remove(self, ids: Any) -> None:
        for i, of_items in itertools.product(ids, (self.code, self.vector, self.year)):
            del of_items[int(i)]

    def distance(self, code: np.ndarray, i: int) -> int:
        return sum(
            a != b
            for a, b in zip(unpack_codes(code[None])[0], unpack_codes(self.code[i][None])[0], strict=True)
        )

    def score(self, logits: np.ndarray, i: int) -> float:
        return sum(
            float(z) * int(s) for z, s in zip(logits, unpack_codes(self.code[i][None])[0], strict=True)
        )

    def similarity(self, query: np.ndarray, i: int, metric: str) -> float:
        dot, vector = (
            sum(float(a) * float(b) for a, b in zip(query, self.vector[i], strict=True)),
            self.vector[i],
        )
        if metric == "inner_product":
            return dot
        norms = math.sqrt(sum(float(a) ** 2 for a in query)) * math.sqrt(sum(float(b) ** 2 for b in vector))
        return dot / norms if norms else 0.0

    def search(
        self,
        logits: np.ndarray,
        query: np.ndarray,
        k: int,
        *,
        asymmetric: bool,
        passes: Callable[[int], bool],
        rescore: str | None,
        oversample: float,
        without: int = -1,
    ) -> list[int]:
        """Ids by distance or score; ``rescore`` is the metric of the vectors, None to leave them out."""
        code, ids = pack_signs(logits[None])[0], [i for i in self.code if passes(i)]
        if asymmetric:
            order = sorted(ids, key=lambda i: (-self.score(logits, i), i))
        else:
            order = sorted(ids, key=lambda i: (self.distance(code, i), i))
        order = [i for i in order if i != without]
        if rescore:
            order = order[: math.ceil(k * oversample)]
            order = sorted(order, key=lambda i: (-self.similarity(query, i, rescore), i))
        return order[:k]


# conditions, and what passes them
FILTERS: dict[str, tuple[str | None, Callable[[SlowItems], Callable[[int], bool]]]] = {
    "all": (None, lambda slow: lambda i: True),
    "many": ("year >= 2017", lambda slow: lambda i: slow.year[i] >= 2017),
    "few": ("year = 2016 and id < 300", lambda slow: lambda i: slow.year[i] == 2016 and i < 300),
    "none": ("year > 3000", lambda slow: lambda i: False),
}


@pytest.fixture(scope="session")
def codes_of() -> Callable[..., np.ndarray]:
    return draw


@pytest.fixture(scope="session")
def slow() -> Callable[..., list[tuple[int, int]]]:
    return slow_search


@pytest.fixture(scope="session")
def pairs() -> Callable[..., list[tuple[int, int]]]:
    return pairs_of
