"""tune: nprobe by a wished recall, stored with the index."""

import numpy as np
import pytest

from hashnet import BinaryIndex, errors


@pytest.fixture
def index(codes_of):
    return BinaryIndex.from_arrays(codes_of("clustered", 3000, 64), kind="ivf", nlist=40)


def recall(index, queries, k, nprobe=None):
    """The definition by loops: results no farther than the true k-th, over all places."""
    codes = index.codes(index.ids())
    distances = index.search(queries, k).distances
    found = 0
    for row, query in enumerate(queries):
        far = sorted(int.from_bytes((query ^ code).tobytes(), "big").bit_count() for code in codes)
        found += sum(0 <= d <= far[k - 1] for d in distances[row])
    return found / (len(queries) * k)


def test_reaches_the_wish_with_the_fewest_lists(index, codes_of, tmp_path):
    queries = codes_of("clustered", 3000, 64, seed=0)[:25]
    queries = queries ^ np.packbits(np.random.default_rng(1).random((25, 64)) < 0.1, axis=1)
    index.save(tmp_path)
    reader, before = BinaryIndex.load(tmp_path), index.search_radius(queries, 20)
    tuned = index.tune(queries, recall=0.9, k=5)
    assert tuned["recall"] >= 0.9
    assert recall(index, queries, 5) == pytest.approx(tuned["recall"], abs=1e-6)
    again = BinaryIndex.load(tmp_path)
    assert again.version == index.version == 2
    assert again.describe()["options"]["nprobe"] == tuned["nprobe"]
    assert again.describe()["tuned"] == tuned
    assert again.search(queries, 5) == index.search(queries, 5)
    assert again.search_radius(queries, 5) == index.search_radius(queries, 5)
    assert reader.search_radius(queries, 20) == before  # as long as it has not looked
    assert reader.refresh()
    wider = index.search_radius(queries, 20)
    assert reader.search_radius(queries, 20) == wider
    assert sum(map(len, wider)) > sum(map(len, before)), "tuned to more lists, a radius finds more"
    if tuned["nprobe"] > 1:  # one list fewer is not enough
        fewer = BinaryIndex.from_arrays(
            index.codes(index.ids()), kind="ivf", nlist=40, nprobe=tuned["nprobe"] - 1
        )
        assert recall(fewer, queries, 5) < 0.9
    index.remove(np.arange(100))
    index.compact()
    assert index.describe()["options"]["nprobe"] == tuned["nprobe"]


def test_full_recall_and_drawn_queries(index):
    assert index.tune(recall=1.0, k=3)["recall"] == 1.0
    easy = index.tune(recall=0.01)
    assert easy["nprobe"] == 1
    assert easy["queries"] == 256


def test_a_wish_of_numpy_is_stored(index, tmp_path):
    index.save(tmp_path)
    index.tune(recall=np.float32(0.5))
    assert BinaryIndex.load(tmp_path).describe()["tuned"]["wished"] == 0.5


def test_mistakes(index, codes_of):
    for recall in ("0.9", None, True, float("nan")):
        with pytest.raises(errors.IndexMismatch, match="recall must lie above 0"):
            index.tune(recall=recall)
    with pytest.raises(errors.Unsupported, match="too large for one response"):
        index.tune(k=10**30)
    with pytest.raises(errors.IndexMismatch, match=r"above 0 and at most at 1, got 1\.2"):
        index.tune(recall=1.2)
    with pytest.raises(errors.IndexMismatch, match="at least one query, got 0"):
        index.tune(codes_of("random", 1, 64)[:0])
    with pytest.raises(errors.IndexMismatch, match="has 64 bits, the query has 32"):
        index.tune(codes_of("random", 1, 32))
    with pytest.raises(
        errors.Unsupported,
        match="only an ivf index, or one with features, can be tuned; this one is flat",
    ):
        BinaryIndex.from_arrays(codes_of("random", 9, 64)).tune()
