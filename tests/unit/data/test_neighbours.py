"""Pairs from vectors: mutual neighbours against a loop, and what is left unknown."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from hashnet.cli.entry import main
from hashnet.data import Manifest, PairTable, lists_neighbours, make_manifest, neighbour_pairs
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
    pairs = neighbour_pairs(vectors, ids, k=k)
    ranks = ranks_of(vectors)
    wanted = {
        (int(ids[j]), int(ids[i])): max(ranks[i, j], ranks[j, i]) < k
        for i in range(200)
        for j in range(i)
        if min(ranks[i, j], ranks[j, i]) < 2 * k
    }
    listed = list(zip(pairs.row_a.tolist(), pairs.row_b.tolist(), strict=True))
    assert listed == sorted(wanted)  # whatever else there is, is far and therefore dissimilar
    assert pairs.similar.tolist() == [wanted[pair] for pair in listed]
    assert (pairs.uncertain == ~pairs.similar).all()
    counts = pairs.counts()
    assert counts.n_similar == sum(wanted.values())
    assert counts.n_dissimilar == 200 * 199 // 2 - len(wanted)


def test_a_radius_makes_neighbours_of_one_side_similar():
    vectors = np.array([[0.0], [1.0], [1.8], [10.0], [30.0]])
    plain, wide = neighbour_pairs(vectors, k=1), neighbour_pairs(vectors, k=1, radius=8.5)
    similar = [np.stack([p.row_a, p.row_b], 1)[p.similar].tolist() for p in (plain, wide)]
    assert similar == [[[1, 2]], [[0, 1], [1, 2], [2, 3]]]  # 4 is 20 away from its nearest


def test_a_table_keeps_what_is_neither_similar_nor_dissimilar(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(60, 4))
    pairs = neighbour_pairs(vectors, k=2)
    uri = str(tmp_path / "pairs.parquet")
    pairs.save(uri, {"k": 2})
    again = PairTable.open(uri)
    assert lists_neighbours(uri)
    assert again.n_rows == 60
    for name in ("row_a", "row_b", "similar", "uncertain"):
        assert (getattr(again, name) == getattr(pairs, name)).all()
    few = again.among(np.arange(10, 40))
    assert few.n_rows == 30
    assert 0 < len(few) < len(pairs)
    assert few.row_a.min() >= 10
    assert few.row_b.max() < 40
    PairTable.from_arrays([0], [1], [True]).save(uri)
    assert not lists_neighbours(uri)
    assert not lists_neighbours(str(tmp_path / "none.parquet"))


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
