"""Fixtures: codes of every sort, and the slow truth of a search, plain loops over Python integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hashnet.results import SearchResult


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


@pytest.fixture(scope="session")
def codes_of() -> Callable[..., np.ndarray]:
    return draw


@pytest.fixture(scope="session")
def slow() -> Callable[..., list[tuple[int, int]]]:
    return slow_search


@pytest.fixture(scope="session")
def pairs() -> Callable[..., list[tuple[int, int]]]:
    return pairs_of
