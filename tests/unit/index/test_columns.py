"""Keys and columns of items: stored, returned, looked up, updated; and what is refused."""

import datetime

import numpy as np
import pyarrow as pa
import pytest

from hashnet import BinaryIndex, errors
from hashnet.index import files
from hashnet.index.artefact import file_entries
from tests.support.slow_search import KINDS


def items(n, seed=0):
    """Columns of n items as Python lists: whole numbers, text with gaps, dates."""
    rng = np.random.default_rng(seed)
    return {
        "year": rng.integers(1990, 2025, n).tolist(),
        "city": [None if i % 7 == 3 else f"città {i % 5}" for i in range(n)],
        "taken": [
            datetime.date(2020, 1, 1) + datetime.timedelta(days=int(i)) for i in rng.integers(0, 900, n)
        ],
    }


@pytest.fixture(params=KINDS)
def index(request, codes_of):
    """120 items under shuffled ids, with keys and columns."""
    ids = np.random.default_rng(2).permutation(1000)[:120]
    return BinaryIndex.from_arrays(
        codes_of("clustered", 120, 32),
        ids,
        request.param,
        columns=items(120),
        keys=[f"k{i}" for i in ids],
        **KINDS[request.param],
    )


def rows_of(index, ids):
    """{id: row of its columns} by looking up one id at a time."""
    return {int(i): index.columns([i]).to_pylist()[0] for i in ids}


def test_hits_carry_columns(index, codes_of, tmp_path):
    queries = codes_of("clustered", 120, 32)[:3]
    index.save(tmp_path)
    for one in (index, BinaryIndex.load(tmp_path), BinaryIndex.load(tmp_path, mmap=False)):
        hits = one.search(queries, 150, columns=["city", "key"])
        assert hits.columns.schema.names == ["city", "key"]
        assert hits.columns.num_rows == 3 * 150
        table = hits.columns.to_pylist()
        by_id = rows_of(one, one.ids())
        for slot, i in enumerate(hits.ids.reshape(-1).tolist()):
            expected = {"city": by_id[i]["city"], "key": f"k{i}"} if i >= 0 else {"city": None, "key": None}
            assert table[slot] == expected
        assert hits.per_query()[1].columns.to_pylist() == table[150:270]
        assert one.search(queries, 3).columns is None
        logits = np.ones((2, 32))
        assert one.search(logits=logits, k=2, columns=["key"]).columns.num_rows == 4


def test_columns_follow_their_ids_through_updates(index, codes_of, tmp_path):
    """A dictionary is the truth; some rows come without some columns."""
    index.save(tmp_path)
    truth = rows_of(index, index.ids())
    original = items(120)
    order = np.random.default_rng(2).permutation(1000)[:120]
    for place, i in enumerate(order.tolist()):
        assert truth[i] == {name: values[place] for name, values in original.items()} | {"key": f"k{i}"}
    codes = codes_of("random", 12, 32)
    index.add(codes[:6], [2000, 2005, 2001, 2002, 2003, 2004], columns={"year": [1, 2, 3, 4, 5, 6]})
    for i, year in zip([2000, 2005, 2001, 2002, 2003, 2004], [1, 2, 3, 4, 5, 6], strict=True):
        truth[i] = {"year": year, "city": None, "taken": None, "key": None}
    gone = list(truth)[:110:2]
    index.remove(gone)
    index.add(
        codes[6:8], [gone[0], 3000], columns={"city": ["Rome", "Oslo"]}, keys=["new", truth[gone[1]]["key"]]
    )
    for i in gone:
        truth.pop(i)
    truth[gone[0]] = {"year": None, "city": "Rome", "taken": None, "key": "new"}
    truth[3000] = {"year": None, "city": "Oslo", "taken": None, "key": f"k{gone[1]}"}
    for one in (index, BinaryIndex.load(tmp_path)):
        assert rows_of(one, one.ids()) == truth
    assert index.compact()
    for one in (index, BinaryIndex.load(tmp_path)):
        assert rows_of(one, one.ids()) == truth
        assert one.columns([3000, 2005], ["key", "year"]).to_pylist() == [
            {"key": f"k{gone[1]}", "year": None},
            {"key": None, "year": 2},
        ]


def test_keys_find_remove_and_replace(index, codes_of):
    ids = index.ids()
    keys = [f"k{i}" for i in ids[[5, 0, 77]]]
    assert index.ids_of(keys).tolist() == ids[[5, 0, 77]].tolist()
    assert index.ids_of(keys[0]).tolist() == [ids[5]]
    index.remove(keys=keys[:1])
    assert not index.contains([ids[5]])[0]
    with pytest.raises(errors.UnknownId, match=rf"no key '{keys[0]}' \(1 of 2 keys are unknown\)"):
        index.remove(keys=keys[:2])
    assert index.contains([ids[0]])[0]
    version, codes = index.version, codes_of("random", 3, 32, seed=9)
    given = index.upsert(codes, keys=[keys[0], keys[1], "fresh"], columns={"year": [1, 2, 3]})
    assert index.version == version + 1
    assert given[1] == ids[0]
    assert index.ids_of([keys[0], keys[1], "fresh"]).tolist() == given.tolist()
    assert (index.codes(given) == codes).all()
    assert index.columns(given, ["year", "city"]).to_pylist() == [
        {"year": y, "city": None} for y in (1, 2, 3)
    ]
    index.upsert(codes[:1], ids=[int(ids[3])], keys=["by id"])
    assert index.ids_of("by id").tolist() == [ids[3]]
    assert len(index) == 121


def test_an_emptied_index_keeps_its_columns(index, codes_of, tmp_path):
    index.save(tmp_path)
    index.remove(index.ids())
    again = BinaryIndex.load(tmp_path)
    again.add(codes_of("random", 1, 32), [4], columns={"year": [7]}, keys=["a"])
    assert again.columns([4]).to_pylist() == [{"year": 7, "city": None, "taken": None, "key": "a"}]
    assert again.describe()["columns"] == {
        "year": "int64",
        "city": "large_string",
        "taken": "date32[day]",
        "key": "large_string",
    }


def test_columns_of_a_code_store(codes_of, tmp_path):
    """Whatever columns a store has beside its own are carried into the index, shard by shard."""
    from hashnet.store import write_store

    codes, ids = codes_of("random", 90, 32), np.arange(90) * 3
    columns = pa.table({"year": ids + 2000, "key": [f"u{i}" for i in ids]})
    store = write_store(str(tmp_path / "codes"), codes, ids, rows_per_shard=40, columns=columns)
    index = BinaryIndex.build(store)
    assert index.columns([3, 267], ["year", "key"]).to_pylist() == [
        {"year": 2003, "key": "u3"},
        {"year": 2267, "key": "u267"},
    ]
    assert index.search(codes[:2], 2, where="year < 2030").ids.max() < 30


def test_a_damaged_or_missing_file_is_refused(index, tmp_path):
    index.save(tmp_path)
    (file,) = tmp_path.glob("columns-*.arrow")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(errors.FormatError, match=r"columns-.*is damaged: its sha256"):
        BinaryIndex.load(tmp_path)
    file.write_bytes(b"ARROW1 but not really")
    with pytest.raises(errors.FormatError, match="does not hold columns of an index"):
        BinaryIndex.load(tmp_path, verify=False)
    file.unlink()
    with pytest.raises(errors.HashnetError):
        BinaryIndex.load(tmp_path)


def test_old_files_go_with_their_version(index, codes_of, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LOG_BYTES", 0)  # every version is written whole
    index.save(tmp_path)
    for i in range(4):
        index.add(codes_of("random", 1, 32), [5000 + i], keys=[f"n{i}"])
    named = {entry["file"] for entry in file_entries({"segments": [s.record for s in index._state.segments]})}
    kept = {path.name for path in tmp_path.glob("columns-*")}
    assert {name for name in named if name.startswith("columns-")} <= kept
    assert len(kept) <= 6


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (
            lambda i, c: i.add(c, [900_000], keys=["k1"] * 2),
            errors.IndexMismatch,
            "1 codes came with 2 values of 'key'",
        ),
        (lambda i, c: i.add(np.repeat(c, 2, 0), keys=["a", "a"]), errors.IdTaken, "key 'a' is given 2 times"),
        (
            lambda i, c: i.add(c, keys=[i.columns(i.ids()[:1])["key"][0].as_py()]),
            errors.IdTaken,
            "is in the index already .1 of 1 are.; upsert",
        ),
        (lambda i, c: i.add(c, keys=[5]), errors.IndexMismatch, "keys must be text"),
        (
            lambda i, c: i.add(c, columns={"key": [5]}),
            errors.IndexMismatch,
            "'key' names items and",
        ),
        (
            lambda i, c: i.add(c, columns={"yaer": [1]}),
            errors.IndexMismatch,
            "no column 'yaer'; did you mean 'year'",
        ),
        (
            lambda i, c: i.add(c, columns={"year": ["x"]}),
            errors.IndexMismatch,
            "'year' holds int64, the new items have",
        ),
        (lambda i, c: i.add(c, columns={"id": [1]}), errors.IndexMismatch, "cannot be called 'id'"),
        (lambda i, c: i.add(c, columns=[1, 2]), errors.IndexMismatch, "columns= must be an Arrow table"),
        (lambda i, c: i.search(c, 1, columns=["town"]), errors.IndexMismatch, "no column 'town'; there are"),
        (
            lambda i, c: i.search(c, 1, columns="year"),
            errors.IndexMismatch,
            "must be a list of names, got 'year'",
        ),
        (lambda i, c: i.columns([10**9]), errors.UnknownId, "no id 1000000000"),
        (lambda i, c: i.upsert(c), errors.IndexMismatch, "upsert needs ids or keys"),
        (lambda i, c: i.remove(), errors.IndexMismatch, "remove needs ids or keys"),
    ],
)
def test_mistakes_change_nothing(index, codes_of, call, error, sentence):
    with pytest.raises(error, match=sentence):
        call(index, codes_of("random", 1, 32))
    assert index.version == 1


def test_without_columns(codes_of):
    index = BinaryIndex.from_arrays(codes_of("random", 9, 32))
    for call in (
        lambda: index.add(codes_of("random", 1, 32), keys=["a"]),
        lambda: index.columns([1]),
        lambda: index.ids_of(["a"]),
    ):
        with pytest.raises(errors.Unsupported, match=r"without columns and keys|have no keys"):
            call()
    with pytest.raises(errors.IdTaken, match="key 'x' is given 2 times"):
        BinaryIndex.from_arrays(codes_of("random", 2, 32), keys=["x", "x"])


def test_an_index_is_given_further_columns(codes_of, tmp_path):
    """Null in the items there are, however it is written; followed by readers, carried over by a merge."""
    codes = codes_of("random", 20, 32)
    BinaryIndex.from_arrays(codes).save(tmp_path / "index")
    index, reader = BinaryIndex.load(tmp_path / "index"), BinaryIndex.load(tmp_path / "index")
    assert index.add_columns({"uri": pa.string()})
    assert not index.add_columns({"uri": pa.string()})
    index.add(codes[:1], [100], columns={"uri": ["a.jpg"]})
    index.add_columns({"key": pa.string(), "year": pa.int64()})
    index.upsert(codes[:1], [3], columns={"uri": ["b.jpg"], "year": [1999]}, keys=["b"])
    expected = [
        {"uri": None, "key": None, "year": None},
        {"uri": "b.jpg", "key": "b", "year": 1999},
        {"uri": "a.jpg", "key": None, "year": None},
    ]
    assert reader.refresh()
    compacted = BinaryIndex.load(tmp_path / "index")
    compacted.compact()
    for one in (index, reader, BinaryIndex.load(tmp_path / "index")):
        assert one.columns([0, 3, 100]).to_pylist() == expected
    assert index.search(codes[:1], 1, where="year = 1999").ids.tolist() == [[3]]
    rebuilt = BinaryIndex.from_arrays(codes)
    rebuilt.merge_updates(index)
    assert rebuilt.columns([0, 3, 100]).to_pylist() == expected
    with pytest.raises(errors.IndexMismatch, match="cannot be called 'id'"):
        index.add_columns({"id": pa.string()})
