"""t-SNE of the codes of ten classes."""

from __future__ import annotations

import numpy as np

from hashnet.codes import unpack_codes

CLASSES, ROWS = 10, 1000


def pick_rows(labels: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows int64 (m,) and their class (m,): of the ten most frequent classes, equally many of each.

    ``labels`` multi-hot (n, n_classes). Rows with several labels are left out: they have no one colour.
    """
    single = labels.sum(axis=1, dtype=np.int64) == 1
    classes = np.where(single, labels.argmax(axis=1), -1)
    sizes = np.bincount(classes[single], minlength=labels.shape[1])
    chosen = np.sort(np.argsort(-sizes, kind="stable")[: min(CLASSES, int((sizes > 0).sum()))])
    rng = np.random.default_rng(seed)
    each = ROWS // max(len(chosen), 1)
    rows = [rng.permutation(np.flatnonzero(classes == c))[:each] for c in chosen]
    picked = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    return picked, classes[picked]


def project(codes: np.ndarray, seed: int = 0) -> np.ndarray:
    """float (n, 2): t-SNE of the signs, whose squared distance is four times the Hamming distance."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    signs = unpack_codes(codes).astype(np.float32)
    # equal codes start at equal places and would stay on one point
    signs += np.random.default_rng(seed).normal(0, 1e-3, signs.shape).astype(np.float32)
    perplexity = min(30.0, (len(signs) - 1) / 3)
    with threadpool_limits(1):  # OpenMP threads that wait for each other on a busy machine take minutes
        return TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(signs)
