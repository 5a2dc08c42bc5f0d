"""Pairs from vectors alone: rows that are near each other are similar, rows far apart are not.

Mutual neighbours (each among the k nearest of the other) are similar. A random pair is dissimilar unless one
is among the FAR * k nearest of the other; whatever lies between is unknown and not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hashnet.data.columns import feature_matrix
from hashnet.data.pairs import PairTable
from hashnet.errors import DataError
from hashnet.io import as_array, check_whole

if TYPE_CHECKING:
    from hashnet.data.manifest import Manifest

FAR = 10
NEIGHBOURS = "neighbours"  # the word that stands for such a table where a path is expected


def neighbour_pairs(
    vectors: Any, row_ids: Any = None, k: int = 10, far_per_row: int = 20, seed: int = 0
) -> PairTable:
    """The pairs table of vectors float (n, d) whose rows have ids int64 (n,), by default 0 … n - 1.

    Nearness is Euclidean. Each row gets its mutual neighbours among the ``k`` nearest, and ``far_per_row``
    random rows as dissimilar ones. Memory: the FAR * k nearest of every row, never n x n.
    """
    from hashnet.metrics import exact_neighbours  # numba, which a reader of manifests does not need

    vectors = np.ascontiguousarray(as_array(vectors, "vectors"), dtype=np.float32)
    n = len(vectors)
    row_ids = np.arange(n) if row_ids is None else as_array(row_ids, "row_ids").astype(np.int64)
    k, far_per_row = check_whole("k", k, 1), check_whole("far_per_row", far_per_row, 1)
    if n <= k + 1:
        raise DataError(f"there are {n} vectors; {k} neighbours of each need at least {k + 2}")
    own = np.arange(n)
    near = exact_neighbours(vectors, [vectors], min(FAR * k, n - 1), skip=own)  # (n, FAR * k)
    a, b = np.repeat(own, k), near[:, :k].ravel()
    listed = np.sort(a * n + b)  # directed pairs as one number
    mutual = (a < b) & _among(b * n + a, listed)
    rng = np.random.default_rng(seed)
    far_a, far_b = np.repeat(own, far_per_row), rng.integers(0, n, n * far_per_row)
    known = np.sort((own[:, None] * n + near).ravel())
    far = (far_a != far_b) & ~_among(far_a * n + far_b, known) & ~_among(far_b * n + far_a, known)
    rows = [np.concatenate([one[mutual], other[far]]) for one, other in ((a, far_a), (b, far_b))]
    similar = np.arange(len(rows[0])) < mutual.sum()
    return PairTable.from_arrays(row_ids[rows[0]], row_ids[rows[1]], similar, name="neighbours")


def neighbours_of_manifest(
    manifest: Manifest, split: str = "train", k: int = 10, seed: int = 0
) -> tuple[PairTable, Mapping[str, Any]]:
    """The pairs of a manifest's vectors, and the lineage to save them with."""
    if manifest.modality != "features":
        raise DataError(
            f"{manifest.uri} holds pictures, and neighbours are those of vectors; encode them with "
            "jobs/encode_db.py output=features and make a manifest of the features"
        )
    table = manifest.read(split, ["row_id", "feature"])
    pairs = neighbour_pairs(feature_matrix(table), table["row_id"].to_numpy(), k, seed=seed)
    lineage = {
        "made_by": NEIGHBOURS,
        "manifest_sha256": manifest.sha256,
        "split": split,
        "k": k,
        "seed": seed,
    }
    return pairs, lineage


def _among(values: np.ndarray, listed: np.ndarray) -> np.ndarray:
    """bool: which values are among ``listed``, which is sorted."""
    place = np.minimum(np.searchsorted(listed, values), len(listed) - 1)
    return listed[place] == values
