"""search(logits=…): every kind, filter and state of an index against a loop over its items."""

import numpy as np
import pytest

from hashnet import BinaryIndex, errors
from hashnet.codes import pack_signs, unpack_codes
from hashnet.index import search
from tests.support.slow_search import KINDS

N_BITS = 48


def whole_logits(n, seed=0):
    """Multiples of 1/64, whose sums are exact in every order."""
    return (np.random.default_rng(seed).integers(-300, 300, (n, N_BITS)) / 64).astype(np.float32)


def scored(query, items):
    """[(score, id, distance)] of a dictionary id → code, best first, ties by id."""
    code = pack_signs(query[None])[0]
    found = []
    for i, item in items.items():
        score = sum(float(z) * int(s) for z, s in zip(query, unpack_codes(item[None])[0], strict=True))
        found.append((score, i, int(np.bitwise_count(code ^ item).sum())))
    return sorted(found, key=lambda hit: (-hit[0], hit[1]))


def hits_of(result, row):
    used = result.ids[row] >= 0
    columns = (result.scores[row][used], result.ids[row][used], result.distances[row][used])
    return [(float(s), int(i), int(d)) for s, i, d in zip(*columns, strict=True)]


@pytest.fixture(params=KINDS)
def grown(request, codes_of):
    """An index with a main segment, additions and removed rows; and its items as a dictionary."""
    codes, ids = codes_of("clustered", 260, N_BITS), np.random.default_rng(1).permutation(3000)[:260]
    labels = np.arange(260) % 4
    # a walk as broad as the graph meets every item: hnsw is exact, too
    options = {"ef_search": 260} if request.param == "hnsw" else KINDS[request.param]
    index = BinaryIndex.from_arrays(codes[:200], ids[:200], request.param, labels=labels[:200], **options)
    index.add(codes[200:250], ids[200:250], labels[200:250])
    index.add(codes[250:], ids[250:], labels[250:])
    gone = [*range(0, 60, 3), 210, 255]
    index.remove(ids[gone])
    kept = np.setdiff1d(np.arange(260), gone)
    return index, {int(ids[i]): codes[i] for i in kept}, {int(ids[i]): int(labels[i]) for i in kept}


def filters(items, labels):
    """(where, the items it lets through)."""
    some, many = list(items)[:9], list(items)[20:]
    return [
        (None, items),
        (some, {i: items[i] for i in some}),
        (many, {i: items[i] for i in many}),
        ({"labels": [1, 2]}, {i: items[i] for i in items if labels[i] in (1, 2)}),
        ({"ids": many, "labels": 3}, {i: items[i] for i in many if labels[i] == 3}),
        ([], {}),
    ]


def test_the_best_of_all_items(grown):
    index, items, labels = grown
    logits = whole_logits(4)
    for where, passed in filters(items, labels):
        for k in (1, 12, 300):
            hits = index.search(logits=logits, k=k, where=where)
            assert hits.scores.dtype == np.float32
            assert hits.ids.shape == hits.distances.shape == hits.scores.shape == (4, k)
            for row in range(4):
                assert hits_of(hits, row) == scored(logits[row], passed)[:k]
            assert (hits.scores[hits.ids < 0] == -np.inf).all()


def test_re_ranking_takes_the_best_of_the_nearest(grown, slow):
    """The k best by score among the k x oversample nearest by (distance, id), over all segments."""
    index, items, labels = grown
    logits = whole_logits(4)
    for where, passed in filters(items, labels):
        for k, oversample in ((1, 1), (5, 4), (8, 2.5), (300, 3)):
            hits = index.search(logits=logits, k=k, where=where, oversample=oversample)
            for row in range(4):
                near = (
                    slow(pack_signs(logits[row][None])[0], passed)[: int(np.ceil(k * oversample))]
                    if passed
                    else []
                )
                expected = scored(logits[row], {i: items[i] for _, i in near})[:k]
                assert hits_of(hits, row) == expected


def test_large_approximate_indexes_are_re_ranked(grown, monkeypatch):
    index, *_ = grown
    whole = index.search(logits=whole_logits(3), k=5)
    monkeypatch.setattr(search, "SCANNED_ROWS", 10)
    by_size = index.search(logits=whole_logits(3), k=5)
    assert by_size == (
        whole if index.describe()["exact"] else index.search(logits=whole_logits(3), k=5, oversample=10)
    )


def test_without_the_query_itself(grown):
    index, items, _ = grown
    own = np.array([list(items)[5], -1])
    logits = unpack_codes(np.stack([items[int(own[0])]] * 2)) * np.float32(0.5)
    for oversample in (None, 300):
        hits = index.search(logits=logits, k=6, exclude_self=own, oversample=oversample)
        others = {i: code for i, code in items.items() if i != own[0]}
        assert hits_of(hits, 0) == scored(logits[0], others)[:6]
        assert hits_of(hits, 1) == scored(logits[1], items)[:6]


def test_saved_and_loaded(grown, tmp_path):
    index, *_ = grown
    index.save(tmp_path)
    logits = np.random.default_rng(0).normal(size=(5, N_BITS))
    assert BinaryIndex.load(tmp_path).search(logits=logits, k=9) == index.search(logits=logits, k=9)


def test_per_query_and_equality(grown):
    index, *_ = grown
    hits = index.search(logits=whole_logits(2), k=400)
    one = hits.per_query()[1]
    assert one.scores.tolist() == hits.scores[1][hits.ids[1] >= 0].tolist()
    plain = index.search(pack_signs(whole_logits(2)), k=400)
    assert plain.scores is None
    assert plain != hits


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"logits": np.zeros((2, 64))}, "has 48 bits, the logits have 64 columns; give one logit per bit"),
        ({"logits": np.full((2, 48), np.nan)}, "row 0 of the logits holds NaN or infinity"),
        ({"logits": [["a"] * 48]}, "must be numbers of shape"),
        ({}, "codes or logits, one of them"),
        ({"logits": np.zeros((1, 48)), "codes": np.zeros((1, 6), np.uint8)}, "codes or logits, one of them"),
        ({"logits": np.zeros((1, 48)), "oversample": 0.5}, "oversample must be a number >= 1, got 0.5"),
        ({"logits": np.zeros((1, 48)), "oversample": "4"}, "oversample must be a number >= 1, got '4'"),
        ({"codes": np.zeros((1, 6), np.uint8), "oversample": 4}, "oversample= is for search"),
    ],
)
def test_mistakes(codes_of, arguments, sentence):
    index = BinaryIndex.from_arrays(codes_of("random", 30, N_BITS))
    with pytest.raises(errors.IndexMismatch, match=sentence):
        index.search(**arguments)
