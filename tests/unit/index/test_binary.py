"""The public face of BinaryIndex: results, filters, exclude_self, what it says of itself, its errors."""

import threading

import numpy as np
import pytest

import hashnet
from hashnet import BinaryIndex, errors
from hashnet.index.faiss_search import why_no_gpu
from hashnet.index.kinds import KINDS
from hashnet.store import write_store


@pytest.fixture
def small(codes_of):
    codes = codes_of("clustered", 200, 48)
    ids = np.random.default_rng(1).permutation(2000)[:200]
    labels = np.random.default_rng(2).integers(0, 4, 200)
    return codes, ids, labels


@pytest.mark.parametrize("engine", ["kernel", "faiss"])
@pytest.mark.parametrize("kind", KINDS)
def test_filters_are_exact(small, slow, pairs, engine, kind):
    codes, ids, labels = small
    options = {"nlist": 5, "nprobe": 5} if kind == "ivf" else {}
    index = BinaryIndex.from_arrays(codes, ids, labels=labels, kind=kind, engine=engine, **options)
    few, many = set(ids[:5].tolist()), ids[20:180]
    cases = [
        (few | {10**9}, lambda i, label: i in few),
        (many, lambda i, label: i in many),
        ({"labels": 3}, lambda i, label: label == 3),
        ({"labels": [0, 1, 2]}, lambda i, label: label != 3),
        ({"ids": many, "labels": [1]}, lambda i, label: label == 1 and i in many),
        ([], lambda i, label: False),
    ]
    for where, passes in cases:
        items = {int(i): c for i, c, y in zip(ids, codes, labels, strict=True) if passes(i, y)}
        hits = index.search(codes[:6], 10, where=where)
        near = index.search_radius(codes[:6], 9, where=where)
        for row in range(6):
            truth = slow(codes[row], items) if items else []
            assert pairs(hits, row) == truth[:10]
            assert pairs(near[row]) == [hit for hit in truth if hit[0] <= 9]


def test_a_filtered_ivf_scans_lists_until_it_has_k_hits(codes_of):
    codes = codes_of("clustered", 600, 48)
    index = BinaryIndex.from_arrays(codes, kind="ivf", nlist=40, nprobe=1)
    allowed = np.arange(0, 600, 3)  # a third: too many to copy out, too few for one list to hold 100
    index.remove(allowed[:20])
    for k in (1, 100, 180, 300):
        ids = index.search(codes[:9], k, where=allowed).ids
        assert ((ids >= 0).sum(axis=1) == min(k, 180)).all()
        assert np.isin(ids[ids >= 0], allowed[20:]).all()
    near = index.search_radius(codes[:9], 10, where=allowed)
    assert all(np.isin(hits.ids, allowed[20:]).all() for hits in near)


@pytest.mark.parametrize("engine", ["kernel", "faiss"])
@pytest.mark.parametrize("kind", KINDS)
def test_exclude_self(codes_of, slow, pairs, engine, kind):
    codes = codes_of("duplicated", 120, 64)
    ids = np.random.default_rng(3).permutation(500)[:120]
    options = {"nlist": 5, "nprobe": 5} if kind == "ivf" else {}
    index = BinaryIndex.from_arrays(codes, ids, kind=kind, engine=engine, **options)
    own = ids[:30].copy()
    own[7] = -1  # this query is no indexed item
    for k in (3, 119, 130):
        hits = index.search(codes[:30], k, exclude_self=own)
        for row in range(30):
            items = {int(i): c for i, c in zip(ids, codes, strict=True) if i != own[row]}
            assert pairs(hits, row) == slow(codes[row], items)[:k]
    near = index.search_radius(codes[:30], 2, exclude_self=own)
    assert all(own[row] not in near[row].ids for row in range(30))
    assert all(near[row].distances[0] == 0 for row in (7,))


def test_where_and_exclude_self_together(small):
    codes, ids, labels = small
    index = BinaryIndex.from_arrays(codes, ids, labels=labels)
    for where in ({"labels": int(labels[0])}, ids[:4]):
        hits = index.search(codes[:1], 3, where=where, exclude_self=ids[:1])
        assert ids[0] not in hits.ids


def test_the_third_of_the_arrays_is_the_kind(small):
    codes, ids, labels = small
    assert BinaryIndex.from_arrays(codes, ids, "multihash").kind == "multihash"
    with pytest.raises(errors.Unsupported, match=r"kind must be one of .*, got ndarray"):
        BinaryIndex.from_arrays(codes, ids, labels)


def test_built_from_a_store(tmp_path, small):
    codes, ids, labels = small
    store = write_store(
        str(tmp_path / "codes"), codes, ids, labels, rows_per_shard=64, lineage={"model_sha256": "abc"}
    )
    for source in (store, tmp_path / "codes"):
        index = hashnet.BinaryIndex.build(source)
        assert index.search(codes, 5) == BinaryIndex.from_arrays(codes, ids).search(codes, 5)
    assert index.lineage["model_sha256"] == "abc"
    assert index.lineage["codes_sha256"] == store.sha256
    assert index.n_classes == 4
    hits = index.search(codes[:3], 200, where={"labels": 2})
    assert set(hits.ids[0][hits.ids[0] >= 0]) == set(ids[labels == 2])
    assert BinaryIndex.build(store, labels=False).n_classes is None
    ivf = BinaryIndex.build(store, kind="ivf", nlist=4, nprobe=4)
    assert ivf.search(codes, 5) == index.search(codes, 5)


def test_describe_and_looking(small):
    codes, ids, labels = small
    index = BinaryIndex.from_arrays(codes, ids, labels=labels, lineage={"model_sha256": "m"})
    about = index.describe()
    assert about["kind"] == index.kind == "flat"
    assert about["n_bits"] == index.n_bits == 48
    assert about["rows"] == len(index) == 200
    assert about["engine"] == index.engine == "kernel"
    assert about["exact"] is True
    assert about["device"] == "cpu"
    assert about["lineage"] == {"model_sha256": "m"}
    assert BinaryIndex.from_arrays(codes, engine="faiss").describe()["engine"] == "faiss"
    assert BinaryIndex.from_arrays(np.zeros((3, 512), np.uint8)).engine == "kernel"  # 4,096 bits
    assert (index.ids() == np.sort(ids)).all()
    assert (index.codes(ids[:7]) == codes[:7]).all()
    assert index.contains([int(ids[0]), 10**8]).tolist() == [True, False]
    assert repr(index) == "BinaryIndex(flat, 200 x 48 bits, version 1)"


def test_one_query_as_a_row_and_no_query(small):
    codes, ids, _ = small
    index = BinaryIndex.from_arrays(codes, ids)
    assert index.search(codes[0], 3).ids.shape == (1, 3)
    assert index.search(codes[:0], 3).ids.shape == (0, 3)
    assert index.search_radius(codes[:0], 3) == []


def mistakes(index, codes, ids):
    """(call, exception, part of the sentence) of what people get wrong."""
    wide = np.zeros((2, 8), np.uint8)
    return [
        (lambda: index.search(wide, 3), errors.IndexMismatch, "has 48 bits, the query has 64; encode"),
        (lambda: index.search(codes.astype(int), 3), errors.CodeError, "must be packed uint8, got int64"),
        (lambda: index.search(codes[None], 3), errors.CodeError, "shape"),
        (lambda: index.search("cat.jpg", 3), errors.CodeError, "packed uint8"),
        (
            lambda: index.search(codes, 0),
            errors.IndexMismatch,
            "k must be a whole .* 1, got 0",
        ),
        (
            lambda: index.search(codes, 2.5),
            errors.IndexMismatch,
            "k must be a whole .* got 2.5",
        ),
        (lambda: index.search(codes[:0], 10**30), errors.Unsupported, "too large for one response"),
        (
            lambda: index.search([[1], [2, 3]], 3),
            errors.CodeError,
            "codes are not an array",
        ),
        (lambda: index.search(codes, 3, where=[[1], [2, 3]]), errors.CodeError, "rows differ in length"),
        (lambda: index.search(codes, 3, where={1: 2, "a": 3}), errors.IndexMismatch, "condition, got 1, a"),
        (lambda: index.remove([[1], [2, 3]]), errors.CodeError, "ids are not an array"),
        (
            lambda: index.add(codes[:2], [5000, 5001], [[1], [0, 2]]),
            errors.CodeError,
            "labels are not an array",
        ),
        (
            lambda: BinaryIndex.from_arrays(codes, ids, labels=[0] * 200, n_classes="x"),
            errors.IndexMismatch,
            "'x'",
        ),
        (lambda: BinaryIndex.from_arrays(codes, kind=["flat"]), errors.Unsupported, "kind must be one of"),
        (lambda: index.search(codes, 10**9), errors.Unsupported, "too large for one response"),
        (
            lambda: index.search_radius(codes, -1),
            errors.IndexMismatch,
            "radius must be a whole number",
        ),
        (
            lambda: index.search(codes, 3, where={"label": 1}),
            errors.IndexMismatch,
            "ids, labels and condition, got label",
        ),
        (lambda: index.search(codes, 3, where={"labels": 9}), errors.IndexMismatch, "label 9.*4 classes"),
        (lambda: index.search(codes, 3, where=["a"]), errors.IndexMismatch, "ids of where= must be whole"),
        (lambda: index.search(codes, 3, where=[2**63]), errors.IndexMismatch, f"int64, got {2**63}"),
        (lambda: index.search(codes, 3, where={"labels": 2**63}), errors.IndexMismatch, "labels of where="),
        (lambda: index.remove([2**63]), errors.IndexMismatch, f"ids must fit into int64, got {2**63}"),
        (lambda: index.search(codes, 3, exclude_self=True), errors.IndexMismatch, "exclude_self=ids"),
        (lambda: index.search(codes[:1], 3, exclude_self=[99999]), errors.UnknownId, "no id 99999"),
        (lambda: index.search(codes, 3, exclude_self=[1]), errors.IndexMismatch, "200 codes came with 1 ids"),
        (lambda: index.add(wide, [1, 2]), errors.IndexMismatch, "has 48 bits, the new codes have 64"),
        (lambda: index.add(codes[:1], ids[:1]), errors.IndexMismatch, f"id {ids[0]} is in the index already"),
        (lambda: index.add(codes[:2], [5000, 5000]), errors.IndexMismatch, "id 5000 is given 2 times"),
        (lambda: index.add(codes[:2], [5000]), errors.IndexMismatch, "2 codes came with 1 ids"),
        (lambda: index.add(codes[:1], [-4]), errors.IndexMismatch, "must be >= 0"),
        (lambda: index.add(codes[:1], [0.5]), errors.IndexMismatch, "whole numbers"),
        (lambda: index.add(codes[:1], [2**64 - 1]), errors.IndexMismatch, "fit into int64"),
        (lambda: index.add(codes[:1], [5000], labels=[7]), errors.CodeError, "class 7"),
        (lambda: index.add(codes[:3], labels=[0, 3, -1]), errors.CodeError, "got -1 in row 2"),
        (
            lambda: BinaryIndex.from_arrays(codes, labels=[0.5] * 200),
            errors.CodeError,
            "whole numbers, got float",
        ),
        (lambda: index.add(codes[:1], [5000], labels=[1, 1]), errors.CodeError, "1 codes came with 2 labels"),
        (lambda: index.remove([123456]), errors.UnknownId, r"no id 123456 \(1 of 1 ids are unknown"),
        (lambda: index.remove([int(ids[0]), 123456]), errors.UnknownId, "1 of 2 ids are unknown"),
        (lambda: index.codes([123456]), errors.UnknownId, "no id 123456"),
        (lambda: index.tune(), errors.Unsupported, "can be tuned; this one is flat"),
        (lambda: BinaryIndex.from_arrays(codes, [1] * 200), errors.IndexMismatch, "id 1 is given twice"),
        (lambda: BinaryIndex.from_arrays(codes, ids[:9]), errors.IndexMismatch, "200 codes came with 9 ids"),
        (lambda: BinaryIndex.from_arrays(codes[:0]), errors.DataError, "0 rows"),
        (lambda: BinaryIndex.from_arrays(codes, engine="gpu"), errors.Unsupported, "auto, faiss, kernel"),
        (lambda: BinaryIndex.from_arrays(codes, device="tpu"), errors.Unsupported, "cpu or cuda"),
    ]


def test_mistakes_get_a_sentence_and_change_nothing(small):
    codes, ids, labels = small
    index = BinaryIndex.from_arrays(codes, ids, labels=labels)
    for call, kind, sentence in mistakes(index, codes, ids):
        with pytest.raises(kind, match=sentence):
            call()
    assert index.version == 1
    assert len(index) == 200
    without = BinaryIndex.from_arrays(codes)
    with pytest.raises(errors.Unsupported, match="without labels"):
        without.search(codes, 3, where={"labels": 0})
    with pytest.raises(errors.Unsupported, match="without labels"):
        without.add(codes[:1], labels=[0])


def test_the_largest_ids_there_are(codes_of, slow, pairs):
    """Ids of 62 bits and more, where a distance no longer fits beside an id in one integer."""
    codes, ids = codes_of("duplicated", 90, 64), 2**63 - 1 - np.arange(90) * 3
    items = dict(zip(ids.tolist(), codes, strict=True))
    for kind in KINDS:
        for engine in ("kernel", "faiss"):
            options = {"nlist": 4, "nprobe": 4} if kind == "ivf" else {}
            index = BinaryIndex.from_arrays(codes, ids, kind=kind, engine=engine, **options)
            hits = index.search(codes[:9], 25)
            assert [pairs(hits, row) for row in range(9)] == [slow(q, items)[:25] for q in codes[:9]]
            with pytest.raises(errors.IndexMismatch, match="ids must fit into int64"):
                index.add(codes[:1])  # there is no id after the largest


def test_an_emptied_index(small):
    codes, ids, _ = small
    index = BinaryIndex.from_arrays(codes, ids)
    index.remove(ids)
    for call in (lambda: index.search(codes, 1), lambda: index.search_radius(codes, 1)):
        with pytest.raises(errors.IndexMismatch, match="empty: every item was removed; add codes"):
            call()
    assert not index.compact(), "nothing is left of it already"
    assert len(index) == 0
    index.add(codes[:3], [4, 5, 6])
    assert index.search(codes[:1], 2).ids[0, 0] == 4


def test_searches_while_another_thread_updates(codes_of):
    """Every answer belongs to one version: id i is in version v exactly when i < 100 + v."""
    codes = np.repeat(codes_of("random", 1, 64), 400, axis=0)
    index = BinaryIndex.from_arrays(codes[:101])
    wrong = []

    def ask():
        while len(index) < 400:
            hits = index.search(codes[:1], 500)
            found = hits.ids[0][hits.ids[0] >= 0]
            if found.tolist() != list(range(100 + hits.version)):
                wrong.append(hits.version)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(101, 400):
        index.add(codes[:1], [i])
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_a_gpu_the_cpu_answers_and_says_so(small, caplog):
    codes, ids, _ = small
    if why_no_gpu(BinaryIndex.from_arrays(codes)._state) is None:
        pytest.skip("there is a GPU here")
    index = BinaryIndex.from_arrays(codes, ids, device="cuda")
    assert "searching on the CPU" in caplog.text
    assert index.describe()["device"] == "cpu"
    assert index.search(codes, 3) == BinaryIndex.from_arrays(codes, ids).search(codes, 3)
    BinaryIndex.from_arrays(codes, ids, kind="hnsw", device="cuda")
    assert "hnsw index has no GPU form" in caplog.text
