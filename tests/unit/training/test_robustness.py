"""The default recipe on rows that are stored in unusual ways: its codes retrieve no worse than ITQ's.

ITQ has no settings that could be wrong, and gets the same rows. Schedules are a tenth of the default or less.
"""

from __future__ import annotations

import numpy as np
import pytest

import hashnet
from hashnet.baselines import ITQ
from hashnet.metrics import evaluate
from hashnet.training import recipe_search as search

pytestmark = pytest.mark.slow  # several trials and a training each

N_BITS, N_CLASSES, WIDTH = 16, 5, 20
Rows = tuple[np.ndarray, np.ndarray]


def drawn(n: int, seed: int, share: np.ndarray | None = None) -> Rows:
    """Overlapping clusters (n, WIDTH) in anisotropic noise, and their class ids (n,)."""
    y = np.random.default_rng([seed, 1]).choice(N_CLASSES, n, p=share)
    centres = np.random.default_rng(7).normal(size=(N_CLASSES, WIDTH))
    noise = np.random.default_rng([seed, 2]).normal(size=(n, WIDTH)) * np.linspace(2, 0.2, WIDTH)
    return (centres[y] + noise).astype(np.float32), y


def rotated(X: np.ndarray) -> np.ndarray:
    return X @ np.linalg.qr(np.random.default_rng(3).normal(size=(WIDTH, WIDTH)))[0].astype(np.float32)


def normalised(X: np.ndarray) -> np.ndarray:
    return X / np.linalg.norm(X, axis=1, keepdims=True)


def eight_bits(X: np.ndarray) -> np.ndarray:
    return np.clip(np.round(X * 16 + 128), 0, 255)


STORED = {
    "plain": lambda X: X,
    "rotated": rotated,
    "normalised": normalised,
    "tiny": lambda X: X * 1e-6,
    "huge and shifted": lambda X: X * 1e4 + 1e5,
    "8 bits": eight_bits,
}


@pytest.fixture(autouse=True)
def short_trials(monkeypatch):
    monkeypatch.setattr(search, "STEPS", 60)
    monkeypatch.setattr(search, "LONGER", 120)


def quality(method, query: Rows, database: Rows) -> float:
    one_hot = np.eye(N_CLASSES, dtype=np.uint8)
    codes = [method.encode(X) for X, _ in (query, database)]
    return evaluate(codes[0], one_hot[query[1]], codes[1], one_hot[database[1]], k=len(database[1])).map


def no_worse_than_itq(train: Rows, query: Rows, database: Rows, **settings) -> None:
    schedule = {"first_epochs": 100, "stage_epochs": 7, "stages": 4, "measure_rows": 64}
    fitted = hashnet.HashNet(N_BITS, **schedule | settings).fit(*train)
    itq = quality(ITQ(N_BITS).fit(train[0]), query, database)
    assert quality(fitted, query, database) >= itq - 0.02


@pytest.mark.parametrize("stored", STORED)
def test_however_rows_are_stored(stored):
    train, query, database = drawn(240, 0), drawn(100, 1), drawn(300, 2)
    no_worse_than_itq(*((STORED[stored](X).astype(np.float32), y) for X, y in (train, query, database)))


def test_duplicate_rows():
    (X, y), query, database = drawn(80, 0), drawn(100, 1), drawn(300, 2)
    no_worse_than_itq((np.repeat(X, 3, axis=0), np.repeat(y, 3)), query, database)


def test_few_rows():
    no_worse_than_itq(drawn(24, 0), drawn(100, 1), drawn(300, 2))


def test_few_rows_of_most_classes():
    share = np.array([0.8, 0.1, 0.05, 0.03, 0.02])
    no_worse_than_itq(drawn(240, 0, share), drawn(100, 1), drawn(300, 2))


def test_pairs_alone(tmp_path):
    """2,000 of the 28,680 pairs, as similar or not as their classes say; the labels are not seen."""
    train, query, database = drawn(240, 0), drawn(100, 1), drawn(300, 2)
    pairs = np.random.default_rng(0).integers(0, 240, size=(2000, 2))
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    lines = [f"{a},{b},{int(train[1][a] == train[1][b])}" for a, b in np.unique(np.sort(pairs), axis=0)]
    table = tmp_path / "pairs.csv"
    table.write_text("\n".join(["row_a,row_b,similar", *lines]))
    no_worse_than_itq(train, query, database, variant="hashnet", pairs=str(table))
