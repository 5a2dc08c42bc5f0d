"""Precision and recall within a Hamming radius, from counts per distance alone."""

from __future__ import annotations

import numpy as np


def within_radius(all_items: np.ndarray, relevant: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Precision and recall float64, and emptiness bool, (q, n_bits + 1) each: column r is radius r.

    Precision of a ball = relevant items in it / items in it, 0 for an empty ball. Recall = relevant
    items in it / relevant items in the database, 0 where the database has none.
    """
    items, hits = np.cumsum(all_items, axis=1), np.cumsum(relevant, axis=1)
    return hits / np.maximum(items, 1), hits / np.maximum(hits[:, -1:], 1), items == 0
