"""MAP by class: a query counts for every class it carries."""

from __future__ import annotations

import numpy as np

from hashnet.metrics.relevance import LabelSets


def per_class(values: np.ndarray, queries: LabelSets) -> tuple[np.ndarray, np.ndarray]:
    """Mean of a per-query value over the queries of each class, and how many those are.

    float64 and int64 (n_classes,); the mean is 0 where no query carries the class.
    """
    owner = np.repeat(np.arange(len(queries)), queries.per_row)  # the query of each label
    n_queries = np.bincount(queries.classes, minlength=queries.n_classes)
    total = np.bincount(queries.classes, weights=values[owner], minlength=queries.n_classes)
    return total / np.maximum(n_queries, 1), n_queries
