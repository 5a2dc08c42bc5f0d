"""Nonsense into every public method: a HashnetError or an answer, never another error, never a crash."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hashnet import BinaryIndex
from hashnet.errors import HashnetError
from hashnet.index.kinds import KINDS

SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)
DTYPES = st.sampled_from([np.uint8, np.int8, np.int64, np.uint64, np.float32, np.bool_, np.dtype("U2")])
ARRAYS = DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, SHAPES))
CODES = st.one_of(
    arrays.arrays(np.uint8, st.tuples(st.integers(0, 9), st.sampled_from([1, 4, 6, 8]))),
    ARRAYS,
    st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=3),
)
NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
    st.sampled_from([np.int32(3), np.uint64(2**63), np.float64(2)]),
)
IDS = st.one_of(
    st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=3),  # rows of different lengths
    st.lists(st.integers(-3, 60), max_size=9),
    st.lists(NUMBERS, max_size=4),
    st.sets(st.integers(0, 60), max_size=9),
    NUMBERS,
    ARRAYS,
)
WHERE = st.one_of(
    st.none(),
    IDS,
    st.dictionaries(st.sampled_from(["ids", "labels", "x", 7]), st.one_of(IDS, NUMBERS), max_size=3),
)
LIMITS = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def fresh(kind, engine="kernel"):
    codes = np.random.default_rng(0).integers(0, 256, (50, 6), dtype=np.uint8)
    return BinaryIndex.from_arrays(codes, labels=np.arange(50) % 3, kind=kind, engine=engine)


@pytest.fixture(scope="module", params=[*KINDS, "flat faiss", "ivf faiss"])
def index(request):
    return fresh(*request.param.split())


@LIMITS
@given(codes=CODES, k=NUMBERS, where=WHERE, exclude=st.one_of(st.none(), IDS))
def test_search(index, codes, k, where, exclude):
    try:
        hits = index.search(codes, k, where=where, exclude_self=exclude)
    except HashnetError:
        return
    assert hits.ids.shape == hits.distances.shape == (len(np.atleast_2d(codes)), k)
    assert ((hits.ids >= -1) & (hits.ids < 50)).all()


@LIMITS
@given(codes=CODES, radius=NUMBERS, where=WHERE, exclude=st.one_of(st.none(), IDS))
def test_search_radius(index, codes, radius, where, exclude):
    try:
        hits = index.search_radius(codes, radius, where=where, exclude_self=exclude)
    except HashnetError:
        return
    assert all((h.distances <= radius).all() for h in hits)


@LIMITS
@given(data=st.data())
def test_updates(data):
    """A handful of strange updates in a row, then the index still answers for what it says it holds."""
    index = fresh(data.draw(st.sampled_from(list(KINDS))))
    for _ in range(data.draw(st.integers(1, 6))):
        try:
            what = data.draw(st.sampled_from(["add", "remove", "compact", "codes", "contains", "tune"]))
            if what == "add":
                index.add(data.draw(CODES), data.draw(IDS), data.draw(st.one_of(st.none(), IDS)))
            elif what == "compact":
                index.compact()
            elif what == "tune":
                recall = data.draw(st.one_of(st.floats(), NUMBERS))
                index.tune(data.draw(st.one_of(st.none(), CODES)), recall=recall, k=data.draw(NUMBERS))
            else:
                getattr(index, what)(data.draw(IDS))
        except HashnetError:
            pass
    if len(index):
        hits = index.search(np.zeros((1, 6), np.uint8), len(index) + 1)
        assert sorted(hits.ids[0][:-1]) == index.ids().tolist()


OPTIONS = ("nlist", "nprobe", "seed", "nhash", "bits", "nflip", "neighbours", "ef_construction", "ef_search")


@LIMITS
@given(
    kind=st.sampled_from(list(KINDS)),
    options=st.dictionaries(st.sampled_from(OPTIONS), NUMBERS, max_size=2),
    n_classes=NUMBERS,
)
def test_options(kind, options, n_classes):
    codes = np.random.default_rng(0).integers(0, 256, (50, 6), dtype=np.uint8)
    try:
        index = BinaryIndex.from_arrays(
            codes, labels=np.arange(50) % 3, kind=kind, n_classes=n_classes, **options
        )
    except HashnetError:
        return
    assert (index.search(codes[:3], 50).ids >= 0).all()
    index.search_radius(codes[:3], 4)


@LIMITS
@given(codes=CODES, ids=st.one_of(st.none(), IDS), labels=st.one_of(st.none(), IDS), kind=st.text(max_size=4))
def test_build(codes, ids, labels, kind):
    try:
        index = BinaryIndex.from_arrays(codes, ids, labels=labels, kind=kind or "flat")
    except HashnetError:
        return
    assert len(index) == len(np.atleast_2d(codes))
