"""Tables of pairs: given, or made from neighbours."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hashnet.cli.entry import main
from hashnet.data import Manifest, PairTable, lists_neighbours, make_manifest, neighbour_pairs
from hashnet.data.splits import DATABASE, TRAIN
from hashnet.data.writer import rows_of_uris, write_manifest
from hashnet.errors import CodeError, DataError

PAIRS = st.dictionaries(
    st.tuples(st.integers(0, 12), st.integers(0, 12)).filter(lambda p: p[0] < p[1]), st.booleans(), min_size=1
)


def table_of(pairs: dict[tuple[int, int], bool], seed: int = 0) -> PairTable:
    """The pairs in random order and orientation, some of them twice."""
    rng = np.random.default_rng(seed)
    listed = [(a, b, s) if rng.random() < 0.5 else (b, a, s) for (a, b), s in pairs.items()]
    listed += listed[::3]
    rng.shuffle(listed)
    a, b, s = zip(*listed, strict=True)
    return PairTable.from_arrays(a, b, [bool(x) for x in s])


@given(PAIRS, st.integers(0, 3))
def test_each_pair_once_in_order(pairs, seed):
    table = table_of(pairs, seed)
    assert list(zip(table.row_a.tolist(), table.row_b.tolist(), strict=True)) == sorted(pairs)
    assert table.similar.tolist() == [pairs[pair] for pair in sorted(pairs)]
    assert table.counts().n_pairs == len(pairs)
    assert table.counts().n_similar == sum(pairs.values())


@pytest.mark.parametrize(
    ("a", "b", "similar", "message"),
    [
        ([0, 4], [1, 4], [1, 1], r"pairs row 1: \(4, 4\) pairs a row with itself"),
        ([0, 1], [1, 99], [1, 1], r"pairs row 1: \(1, 99\) names a row that is not among the given rows"),
        (
            [0, 2, 1],
            [1, 3, 0],
            [1, 1, 0],
            r"rows 0 and 2 contradict each other: pair \(0, 1\) is similar in one",
        ),
        ([0], [1, 2], [1], "1 row_a, 2 row_b and 1 similar"),
        ([], [], [], "lists no pair"),
    ],
)
def test_mistakes_are_named(a, b, similar, message):
    with pytest.raises(DataError, match=message):
        PairTable.from_arrays(a, b, similar, rows=np.arange(10))


@pytest.fixture
def manifest(tmp_path):
    flags = np.array([TRAIN | DATABASE] * 6 + [DATABASE] * 4, dtype=np.uint8)
    return write_manifest(str(tmp_path / "m"), rows_of_uris(pa.array([str(i) for i in range(10)])), flags)


def test_files_are_checked_against_the_manifest(tmp_path, manifest):
    csv = tmp_path / "pairs.csv"
    csv.write_text("row_a,row_b,similar\n0,1,1\n2,5,0\n")
    table = PairTable.open(str(csv), manifest)
    assert table.similar.tolist() == [True, False]
    table.save(str(tmp_path / "pairs.parquet"))
    again = PairTable.open(str(tmp_path / "pairs.parquet"), manifest)
    np.testing.assert_array_equal(again.row_b, table.row_b)
    words = pa.table({"row_a": [0, 2], "row_b": [1, 5], "similar": ["1", "0"]})
    pq.write_table(words, tmp_path / "words.parquet")
    assert PairTable.open(str(tmp_path / "words.parquet"), manifest).similar.tolist() == [True, False]
    csv.write_text("row_a,row_b,similar\n0,1,1\n2,7,0\n")
    with pytest.raises(
        DataError, match=r"pairs.csv row 1: \(2, 7\) names a row that is not among the train rows of"
    ):
        PairTable.open(str(csv), manifest)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"row_a": [0], "row_b": [1]}, "has no column 'similar'; a pairs table has row_a, row_b, similar"),
        ({"row_a": [0, 1], "row_b": [1, 2], "similar": [1, 2]}, "row 1: similar is 2; it must be 0 or 1"),
        (
            {"row_a": ["x"], "row_b": ["y"], "similar": [1]},
            "row_a must hold row ids .whole numbers., not string",
        ),
        ({"row_a": [0, None], "row_b": [1, 2], "similar": [1, 0]}, "row 1: row_a is missing"),
        ({"row_a": [0], "row_b": [1], "similar": [0.5]}, "similar is 0.5; it must be 0 or 1"),
    ],
)
def test_columns_are_checked(tmp_path, columns, message):
    path = str(tmp_path / "p.parquet")
    pq.write_table(pa.table(columns), path)
    with pytest.raises(DataError, match=message):
        PairTable.open(path)


def test_what_is_no_table_is_refused(tmp_path):
    (tmp_path / "p.parquet").write_text("no")
    with pytest.raises(DataError, match="is neither Parquet nor CSV"):
        PairTable.open(str(tmp_path / "p.parquet"))
    with pytest.raises(DataError, match="cannot read the pairs"):
        PairTable.open(str(tmp_path / "none.parquet"))


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


def test_row_ids_that_do_not_fit_are_refused():
    for ids, told in (
        (np.arange(2**63, 2**63 + 30, dtype=np.uint64), "fit into int64"),
        (np.ones(30), "whole"),
    ):
        with pytest.raises(CodeError, match=f"row_ids must (be )?{told}"):
            neighbour_pairs(np.zeros((30, 2)), row_ids=ids)


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
