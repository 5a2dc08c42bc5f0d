"""Every kind x ranking x filter x rescoring against loops over the items; tune; what is refused."""

import itertools

import numpy as np
import pytest

from hashnet import BinaryIndex, errors
from hashnet.codes import pack_signs
from hashnet.store import CodesArtefact, FeatureStore, write_features, write_store
from tests.support.slow_search import FILTERS, KINDS, SlowItems, whole

N_BITS, WIDTH, N = 32, 10, 220


@pytest.fixture(params=KINDS)
def grown(request):
    """An index with vectors, additions, replacements and removed rows; and the same as SlowItems."""
    rng = np.random.default_rng(3)
    ids, codes = rng.permutation(900)[:N], rng.integers(0, 256, (N, N_BITS // 8), dtype=np.uint8)
    vectors, years = whole(N, WIDTH, 4), rng.integers(2015, 2025, N)
    # a walk as broad as the graph meets every item: hnsw is exact, too
    options = {"ef_search": N} if request.param == "hnsw" else KINDS[request.param]
    index = BinaryIndex.from_arrays(
        codes[:150],
        ids[:150],
        request.param,
        features=vectors[:150],
        columns={"year": years[:150]},
        **options,
    )
    index.add(codes[150:], ids[150:], features=vectors[150:], columns={"year": years[150:]})
    vectors[:3] = whole(3, WIDTH, 9)
    index.upsert(codes[:3], ids[:3], features=vectors[:3], columns={"year": years[:3]})
    slow = SlowItems(ids, codes, vectors, years)
    index.remove(ids[40:60])
    slow.remove(ids[40:60])
    return index, slow


@pytest.mark.parametrize("asymmetric", [False, True], ids=["hamming", "asymmetric"])
@pytest.mark.parametrize("rescore", [None, "cosine", "inner_product"])
@pytest.mark.parametrize("name", FILTERS)
def test_every_combination_against_loops(grown, asymmetric, rescore, name):
    index, slow = grown
    where, passing = FILTERS[name]
    logits, queries = whole(3, N_BITS, 11), whole(3, WIDTH, 12)
    own = np.array([next(iter(slow.code)), -1, -1])
    given = {"logits": logits} if asymmetric else {"codes": pack_signs(logits)}
    for k, oversample, exclude in itertools.product((1, 7), (1, 3, 2.5), (None, own)):
        options = {"rescore": "features", "features": queries, "metric": rescore, "oversample": oversample}
        hits = index.search(**given, k=k, where=where, exclude_self=exclude, **(options if rescore else {}))
        for row in range(3):
            expected = slow.search(
                logits[row], queries[row], k, asymmetric=asymmetric, passes=passing(slow), rescore=rescore,
                oversample=oversample, without=-1 if exclude is None else int(own[row]),
            )  # fmt: skip
            found = hits.ids[row][hits.ids[row] >= 0].tolist()
            code = pack_signs(logits[row][None])[0]
            assert found == expected
            assert [slow.distance(code, i) for i in found] == hits.distances[row][: len(found)].tolist()
            if rescore:
                scores = [slow.similarity(queries[row], i, rescore) for i in found]
                assert np.allclose(hits.scores[row][: len(found)], scores, atol=1e-6)
                assert (hits.scores[row][len(found) :] == -np.inf).all()


@pytest.mark.parametrize("dtype", ["float16", "int8", "float32"])
def test_what_is_saved_is_what_is_rescored(tmp_path, dtype):
    rng = np.random.default_rng(0)
    vectors, queries = rng.normal(size=(80, WIDTH)), rng.normal(size=(4, WIDTH))
    codes = rng.integers(0, 256, (80, 4), dtype=np.uint8)
    index = BinaryIndex.from_arrays(codes[:50], features=vectors[:50], features_dtype=dtype)
    index.save(tmp_path)
    for start in range(50, 80, 6):  # layers are merged on the way
        index.add(codes[start : start + 6], features=vectors[start : start + 6])
    again = BinaryIndex.load(tmp_path)
    assert again.describe()["features"] == {"width": 10, "dtype": dtype, "store": None, "layers": 2}
    hits = again.search(codes[:4], k=5, rescore="features", features=queries, oversample=80)
    assert hits == index.search(codes[:4], k=5, rescore="features", features=queries, oversample=80)
    error = {"float16": 5e-3, "int8": 2e-2, "float32": 1e-6}[dtype]
    assert np.abs(again.features(np.arange(80)) - vectors).max() < error
    again.compact()
    assert again.search(codes[:4], k=5, rescore="features", features=queries, oversample=80) == hits


@pytest.fixture
def stores(tmp_path):
    """Codes and vectors of the same 300 rows, in shards of 64."""
    rng = np.random.default_rng(5)
    vectors = rng.normal(size=(300, 24)).astype(np.float32)
    ids = rng.permutation(5000)[:300]
    codes = write_store(f"{tmp_path}/codes", pack_signs(vectors[:, :16]), ids=ids, rows_per_shard=64)
    features = write_features(f"{tmp_path}/features", vectors[np.argsort(ids)], codes)
    return codes, features, dict(zip(ids.tolist(), vectors, strict=True))


def test_a_store_is_referred_to_and_found_again(stores, tmp_path):
    codes, features, vectors = stores
    index = BinaryIndex.build(codes)
    index.attach_features(features)
    (tmp_path / "index").mkdir()
    index.save(tmp_path / "index")
    index.add(pack_signs(np.ones((1, 16))), [9000], features=np.ones((1, 24)))
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("index", "features"):
        (tmp_path / name).rename(moved / name)
    index = BinaryIndex.load(moved / "index")
    query = np.random.default_rng(1).normal(size=(1, 24)).astype(np.float32)
    vectors[9000] = np.ones(24, np.float32)
    hits = index.search(pack_signs(query[:, :16]), k=9, rescore="features", features=query, oversample=40)
    cosine = {i: float(v @ query[0] / np.linalg.norm(v) / np.linalg.norm(query)) for i, v in vectors.items()}
    assert set(hits.ids[0].tolist()) == set(sorted(cosine, key=cosine.get)[-9:])
    assert np.allclose(hits.scores[0], [cosine[i] for i in hits.ids[0].tolist()], atol=1e-3)


def test_tune_finds_the_smallest_oversample(stores, tmp_path):
    codes, features, vectors = stores
    index = BinaryIndex.build(codes)
    index.attach_features(features)
    index.save(tmp_path / "index")
    rng = np.random.default_rng(2)
    queries = rng.normal(size=(40, 24)).astype(np.float32)
    ids, matrix = np.array(list(vectors)), np.stack(list(vectors.values()))
    cosine = queries @ (matrix / np.linalg.norm(matrix, axis=1, keepdims=True)).T
    truth = [set(ids[np.argsort(-row)[:10]].tolist()) for row in cosine]

    def recall(oversample):
        hits = index.search(
            pack_signs(queries[:, :16]), k=10, rescore="features", features=queries, oversample=oversample
        )
        return np.mean([len(truth[row] & set(hits.ids[row].tolist())) / 10 for row in range(40)])

    tuned = index.tune(pack_signs(queries[:, :16]), features=queries, recall=0.9)
    assert recall(tuned["oversample"]) >= 0.9 > recall(tuned["oversample"] - 1)
    assert tuned["rescored_recall"] == pytest.approx(recall(tuned["oversample"]), abs=0.003)  # float16
    reader = BinaryIndex.load(tmp_path / "index")
    options = {"k": 10, "rescore": "features", "features": queries}
    assert reader.search(pack_signs(queries[:, :16]), **options) == index.search(
        pack_signs(queries[:, :16]), **options, oversample=tuned["oversample"]
    )
    assert index.tune(recall=1.0)["rescored_recall"] == 1.0  # without queries: items that skip themselves


def test_damaged_vectors_are_not_used(stores, tmp_path):
    codes, features, _ = stores
    index = BinaryIndex.build(codes)
    index.attach_features(features)
    index.save(tmp_path / "index")
    path = tmp_path / "features" / features.shards[1].file
    data = bytearray(path.read_bytes())
    place = FeatureStore.open(f"{tmp_path}/features").vectors()._files[1].start
    data[place + 5] ^= 1  # of the first row of the second shard
    path.write_bytes(data)
    query = np.ones((1, 24), np.float32)
    index = BinaryIndex.load(tmp_path / "index")
    damaged = int(codes.ids()[64])
    with pytest.raises(errors.FormatError, match=f"the vector of id {damaged} is damaged"):
        index.search(pack_signs(query[:, :16]), k=300, rescore="features", features=query)
    sound = [i for i in codes.ids().tolist() if i != damaged]
    options = {"k": 10, "rescore": "features", "features": query, "where": sound}
    assert (
        index.search(pack_signs(query[:, :16]), **options).ids >= 0
    ).all()  # other rows are read all the same
    assert any("is damaged" in sentence for sentence in CodesArtefact(features.uri, "features").verify())


def test_what_cannot_be_rescored_is_refused_with_the_fix(stores, tmp_path):
    codes, features, _ = stores
    plain = BinaryIndex.build(codes)
    query, code = np.ones((1, 24), np.float32), np.zeros((1, 2), np.uint8)
    with pytest.raises(
        errors.Unsupported, match="no vectors to rescore by; encode with output=codes,features"
    ):
        plain.search(code, rescore="features", features=query)
    with pytest.raises(errors.Unsupported, match="built without features"):
        plain.add(code, features=query)
    index = BinaryIndex.build(codes)
    index.attach_features(features)
    refused = [
        ({"rescore": "features"}, "needs the queries' own vectors: give features="),
        ({"features": query}, 'features= are for rescore="features"'),
        ({"rescore": "vectors", "features": query}, 'rescore must be "features" or None'),
        ({"rescore": "features", "features": query[:, :5]}, "features have 5 values, those stored 24"),
        ({"rescore": "features", "features": np.ones((2, 24))}, "1 codes came with 2 rows of features"),
        ({"rescore": "features", "features": query * np.nan}, "row 0 of features holds NaN"),
        ({"rescore": "features", "features": query, "metric": "l2"}, "metric must be one of cosine, inner"),
        ({"rescore": "features", "features": query, "oversample": 0.5}, "oversample must be a number >= 1"),
        ({"oversample": 2}, "oversample= is for search"),
    ]
    for options, sentence in refused:
        with pytest.raises((errors.IndexMismatch, errors.CodeError), match=sentence):
            index.search(code, **options)
    with pytest.raises(errors.IndexMismatch, match="every item of this index has a vector of 24 values"):
        index.add(code)
    with pytest.raises(errors.IndexMismatch, match="features_dtype must be one of"):
        BinaryIndex.from_arrays(code, features=query, features_dtype="int4")
    with pytest.raises(errors.DataError, match="does not fit into float16"):
        BinaryIndex.from_arrays(code, features=query * 1e9)


def test_vectors_of_another_model_or_other_rows_are_refused(stores, tmp_path):
    codes, features, _ = stores
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(300, 24))
    mine = write_store(f"{tmp_path}/mine", codes.codes(), lineage={"model_sha256": "a" * 64})
    other = write_features(f"{tmp_path}/other", vectors, mine, lineage={"model_sha256": "b" * 64})
    with pytest.raises(errors.LineageMismatch, match="vectors of another model than the index"):
        BinaryIndex.build(mine).attach_features(other)
    with pytest.raises(errors.LineageMismatch, match="vectors of other rows, or another order of them"):
        BinaryIndex.build(mine).attach_features(features)
    with pytest.raises(errors.CodeError, match="300 codes came with 299 rows of features"):
        write_features(f"{tmp_path}/few", vectors[1:], codes)
    index = BinaryIndex.build(codes)
    index.attach_features(features)
    index.save(tmp_path / "index")
    write_features(f"{tmp_path}/features", vectors, codes, overwrite=True)
    with pytest.raises(
        errors.LineageMismatch, match="holds other vectors than those this index was built with"
    ):
        BinaryIndex.load(tmp_path / "index").search(
            codes.codes()[:1], rescore="features", features=vectors[:1]
        )
    grown = BinaryIndex.build(codes)
    grown.add(codes.codes()[:1], [99_999])
    with pytest.raises(errors.IndexMismatch, match="1 of the 301 items have no vector, id 99999"):
        grown.attach_features(FeatureStore.open(f"{tmp_path}/features"))
