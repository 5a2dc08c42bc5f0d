"""Pairs from vectors: mutual neighbours against a loop, and what is left unknown."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from hashnet.cli.entry import main
from hashnet.data import Manifest, PairTable, make_manifest, neighbour_pairs
from hashnet.errors import DataError


def ranks_of(vectors) -> np.ndarray:
    """(n, n): the rank of each row among the neighbours of each, by plain sorting; -1 for itself."""
    ranks = np.full((len(vectors), len(vectors)), -1)
    for i, vector in enumerate(vectors.astype(np.float64)):
        far = ((vectors - vector) ** 2).sum(axis=1)
        order = [j for j in np.argsort(far, kind="stable") if j != i]
        ranks[i, order] = np.arange(len(order))
    return ranks


@pytest.mark.parametrize("k", [1, 3, 8])
def test_similar_are_mutual_and_dissimilar_are_far(k):
    vectors = np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32)
    ids = np.arange(200) * 3 + 7
    pairs = neighbour_pairs(vectors, ids, k=k, far_per_row=5)
    ranks = ranks_of(vectors)
    mutual = {
        (int(ids[i]), int(ids[j])) for i in range(200) for j in range(i) if max(ranks[i, j], ranks[j, i]) < k
    }
    listed = list(zip(pairs.row_a.tolist(), pairs.row_b.tolist(), pairs.similar.tolist(), strict=True))
    assert {(b, a) for a, b, similar in listed if similar} == mutual
    far = [((a - 7) // 3, (b - 7) // 3) for a, b, similar in listed if not similar]
    assert 200 < len(far) <= 1000
    assert all(min(ranks[a, b], ranks[b, a]) >= min(10 * k, 199) for a, b in far)


def test_the_same_seed_gives_the_same_pairs():
    vectors = np.random.default_rng(0).normal(size=(60, 4))
    one, same, other = (neighbour_pairs(vectors, k=2, seed=seed) for seed in (1, 1, 2))
    assert one.row_b.tolist() == same.row_b.tolist() != other.row_b.tolist()


def test_too_few_rows_are_told():
    with pytest.raises(DataError, match="5 vectors; 10 neighbours of each need at least 12"):
        neighbour_pairs(np.zeros((5, 2)))


def test_the_command_writes_a_table_with_its_lineage(tmp_path, capsys):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "vectors.npy", rng.normal(size=(300, 8)).astype(np.float32))
    manifest = make_manifest(
        "npy", str(tmp_path / "m"), path=str(tmp_path / "vectors.npy"), n_query=20, n_train=200
    )
    out = str(tmp_path / "pairs.parquet")
    assert main(["dataset", "neighbours", manifest.uri, "--out", out, "-k", "4"]) == 0
    assert "similar and" in capsys.readouterr().out
    pairs = PairTable.open(out, Manifest.open(manifest.uri))  # every row is a training row
    assert 50 < pairs.counts().n_similar < 400
    lineage = json.loads(pq.read_schema(out).metadata[b"hashnet"])
    assert lineage["manifest_sha256"] == manifest.sha256
    assert lineage["k"] == 4
