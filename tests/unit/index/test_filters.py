"""where="…": the grammar against pandas and by hand, on every kind of index against a loop; its mistakes."""

import datetime
import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hashnet import BinaryIndex, errors
from hashnet.codes import unpack_codes
from hashnet.index.expressions import parse_condition
from hashnet.index.filters import _unpacked

KINDS = {"flat": {}, "ivf": {"nlist": 6, "nprobe": 1}, "multihash": {}, "hnsw": {}}
TABLE = pa.table(
    {
        "year": pa.array([2019, 2020, None, 2021, 2020, 1999], pa.int32()),
        "city": pa.array(["Rome", "Oslo", "Rome", None, "L'Aquila", 'a "b"']),
        "price": pa.array([1.5, -2.0, 3.0, None, 0.0, math.nan]),
        "sold": pa.array([True, False, None, True, False, True]),
        "when": pa.array([datetime.date(2020, 1, d) for d in range(1, 6)] + [None]),
        "two words": pa.array(range(6), pa.uint8()),
    }
)


def rows(text, table=TABLE):
    condition = parse_condition(text, table.schema, None)
    numbered = table.append_column("row", pa.array(range(table.num_rows)))
    return numbered.filter(condition.expression)["row"].to_pylist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("year >= 2020", [1, 3, 4]),
        ("2020 <= year", [1, 3, 4]),
        ("year = 2020 and city == 'Oslo'", [1]),
        ("year < 2000 or sold and not city in ('Rome')", [5]),
        ("not (year = 2020)", [0, 3, 5]),
        ("NOT NOT year = 2020", [1, 4]),
        ("year <> 2020", [0, 3, 5]),
        ("year is null", [2]),
        ("year is not null and city is null", [3]),
        ("city in ('Rome', 'Oslo')", [0, 1, 2]),
        ("city not in ('Rome', 'Oslo')", [4, 5]),
        ("not city in ('Rome', 'Oslo')", [4, 5]),
        ("city = 'L''Aquila'", [4]),
        ('city = "L\'Aquila"', [4]),
        ("city = 'a \"b\"'", [5]),
        ("city > 'N'", [0, 1, 2, 5]),
        ("price <= 0", [1, 4]),
        ("price > -2.5e0 and price < .5", [1, 4]),
        ("sold", [0, 3, 5]),
        ("not sold", [1, 4]),
        ("sold = false", [1, 4]),
        ("when >= '2020-01-03'", [2, 3, 4]),
        ("when in ('2020-01-01', '2020-01-05')", [0, 4]),
        ("`two words` > 3", [4, 5]),
        ("`two words` in (2, 300, 2.5, -1)", [2]),
        ("year in (2019.5)", []),
        ("(((year = 1999)))", [5]),
        ("year=1999or year=2019", [0, 5]),
    ],
)
def test_by_hand(text, expected):
    assert rows(text) == expected


@pytest.mark.parametrize(
    ("text", "position", "sentence"),
    [
        ("", 0, "expected the name of a column, got the end"),
        ("year >=", 7, "expected a value, got the end"),
        ("year >= and city = 'x'", 8, "expected a value, got and"),
        ("yaer = 1", 0, "there is no column 'yaer'; did you mean 'year'?"),
        ("year = 'x'", 7, "column 'year' holds int32"),
        ("city = 3", 7, "column 'city' holds"),
        ("sold = 1", 7, "column 'sold' holds bool"),
        ("sold > true", 0, "booleans, which have no order"),
        ("when = 'yesterday'", 7, "not a value of column 'when', which holds date32"),
        ("year = 99999999999999999999999", 7, "not a value of column 'year', which holds int32"),
        ("year = 2020 2021", 12, "expected and, or, or the end, got 2021"),
        ("(year = 2020", 12, "expected '\\)', got the end"),
        ("year in 3", 8, "expected '\\(', got 3"),
        ("year in ()", 9, "expected a value, got \\)"),
        ("year = Rome", 7, "write text in quotes, 'Rome'"),
        ("year = null", 7, "write 'is null'"),
        ("city = 'Rome", 7, "a text without its closing quote"),
        ("year; drop", 4, "cannot read ';'"),
        ("__import__('os')", 0, "there is no column '__import__'"),
        ("year", 4, "expected a comparison, got the end"),
        ("year not 3", 9, "expected 'in', got 3"),
        ("not", 3, "expected the name of a column"),
        ("(" * 500 + "sold", 100, "more than 100 conditions inside each other"),
        ("labels = 3", 0, None),
    ],
)
def test_mistakes_name_their_position(text, position, sentence):
    if sentence is None:
        with pytest.raises(errors.Unsupported, match="without labels"):
            parse_condition(text, TABLE.schema, None)
        return
    with pytest.raises(errors.IndexMismatch, match=rf"where= at position {position}: .*{sentence}"):
        parse_condition(text, TABLE.schema, None)


def test_long_conditions_are_balanced():
    assert rows(" or ".join(["year = 1"] * 3000 + ["year = 1999"])) == [5]
    with pytest.raises(errors.IndexMismatch, match="at most 100000 are read"):
        rows("year = 1" + " " * 100_000)


ATOMS = st.one_of(
    st.tuples(
        st.sampled_from(["a", "b"]), st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), st.integers(-3, 3)
    ),
    st.tuples(st.just("s"), st.sampled_from(["==", "!=", "<", ">="]), st.sampled_from(["", "x", "y'", "é"])),
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.sampled_from(["in", "not in"]),
        st.lists(st.integers(-3, 3), min_size=1),
    ),
)
TREES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner),
        st.tuples(inner, st.sampled_from(["and", "or"]), inner),
    ),
    max_leaves=8,
)


def as_text(tree):
    if tree[0] == "not":
        return f"not ({as_text(tree[1])})"
    if tree[1] in ("and", "or"):
        return f"({as_text(tree[0])}) {tree[1]} ({as_text(tree[2])})"
    name, sign, value = tree
    if isinstance(value, list):
        return f"{name} {sign} ({', '.join(map(str, value))})"
    return f"{name} {sign} " + (
        "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)
    )


def by_pandas(tree, frame):
    """bool Series by pandas operators on columns without missing values."""
    if tree[0] == "not":
        return ~by_pandas(tree[1], frame)
    if tree[1] in ("and", "or"):
        a, b = by_pandas(tree[0], frame), by_pandas(tree[2], frame)
        return a & b if tree[1] == "and" else a | b
    column, sign, value = frame[tree[0]], tree[1], tree[2]
    if isinstance(value, list):
        return column.isin(value) if sign == "in" else ~column.isin(value)
    signs = {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}
    return getattr(column, signs[sign])(value)


@settings(max_examples=150, deadline=None)
@given(tree=TREES, seed=st.integers(0, 5))
def test_equal_to_pandas(tree, seed):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "a": rng.integers(-3, 4, 40),
            "b": rng.integers(-3, 4, 40) / 2,
            "s": rng.choice(["", "x", "y'", "é", "z"], 40),
        }
    )
    table = pa.Table.from_pandas(frame, preserve_index=False)
    assert rows(as_text(tree), table) == np.flatnonzero(by_pandas(tree, frame)).tolist()


@pytest.fixture(params=KINDS)
def grown(request, codes_of):
    """An index with additions and removed rows; and its items: id → (code, label, year, city)."""
    codes, ids = codes_of("clustered", 300, 48), np.random.default_rng(1).permutation(4000)[:300]
    labels, years = np.arange(300) % 4, np.random.default_rng(3).integers(2000, 2025, 300)
    cities = [None if i % 11 == 0 else f"c{i % 6}" for i in range(300)]
    columns = pa.table({"year": years, "city": cities})
    first = slice(0, 240)
    index = BinaryIndex.from_arrays(
        codes[first],
        ids[first],
        request.param,
        labels=labels[first],
        columns=columns[first],
        **KINDS[request.param],
    )
    index.add(codes[240:], ids[240:], labels[240:], columns=columns[240:])
    gone = np.arange(0, 90, 4)
    index.remove(ids[gone])
    kept = [i for i in range(300) if i not in gone]
    return index, {int(ids[i]): (codes[i], labels[i], int(years[i]), cities[i]) for i in kept}


CASES = [
    ("year >= 2020", lambda i, label, year, city: year >= 2020),
    ("city = 'c3'", lambda i, label, year, city: city == "c3"),
    ("year >= 2003 and city != 'c1'", lambda i, label, year, city: year >= 2003 and city not in ("c1", None)),
    ("labels in (1, 3) and not year < 2010", lambda i, label, year, city: label in (1, 3) and year >= 2010),
    ("labels = 0 or city is null", lambda i, label, year, city: label == 0 or city is None),
    ("labels != 2", lambda i, label, year, city: label != 2),
    ("id < 2000 and year = 2011", lambda i, label, year, city: i < 2000 and year == 2011),
    (pc.field("year") >= 2020, lambda i, label, year, city: year >= 2020),
    (pc.field("city").isin(["c0", "c5"]), lambda i, label, year, city: city in ("c0", "c5")),
    (
        {"labels": [1], "condition": "year > 2012"},
        lambda i, label, year, city: label == 1 and year > 2012,
    ),
    ("year > 3000", lambda i, label, year, city: False),
]


@pytest.mark.parametrize("ranking", ["hamming", "radius", "asymmetric"])
def test_every_kind_and_ranking_equals_a_loop(grown, slow, pairs, ranking):
    """ivf widens until it has k hits, which need not be the nearest: their number and fitness are exact."""
    index, items = grown
    rng = np.random.default_rng(5)
    queries = np.stack([items[i][0] for i in list(items)[:3]])
    logits = unpack_codes(queries) * (rng.integers(1, 90, (3, 48)) / 64).astype(np.float32)
    for where, passes in CASES:
        passed = {i: values[0] for i, values in items.items() if passes(i, *values[1:])}
        for k in (1, 10, 400):
            if ranking == "asymmetric":
                hits = index.search(logits=logits, k=k, where=where)
                for row in range(3):
                    signs = {i: unpack_codes(code[None])[0] for i, code in passed.items()}
                    scored = sorted((-float((logits[row] * s).sum()), i) for i, s in signs.items())
                    found = hits.ids[row][hits.ids[row] >= 0].tolist()
                    assert found == [i for _, i in scored[:k]]
            elif ranking == "hamming":
                hits = index.search(queries, k, where=where)
                for row in range(3):
                    truth = slow(queries[row], passed)[:k] if passed else []
                    if index.kind == "ivf" and len(passed) > 15:
                        assert {i for _, i in pairs(hits, row)} <= set(passed)
                        assert len(pairs(hits, row)) == len(truth)
                    else:
                        assert pairs(hits, row) == truth
            elif index.kind != "ivf":
                near = index.search_radius(queries, 12, where=where)
                for row in range(3):
                    truth = slow(queries[row], passed) if passed else []
                    assert pairs(near[row]) == [hit for hit in truth if hit[0] <= 12]


def test_mistakes_of_expressions(grown):
    index, items = grown
    query = next(iter(items.values()))[0][None]
    for where, sentence in (
        (pc.field("yaer") > 3, "names a column 'yaer'; did you mean 'year'"),
        (pc.field("year") > "x", "does not fit the columns"),
        ({"condition": 5}, "a condition is text or a pyarrow.compute expression, got int"),
        ("labels = 9", "there is no label 9: the index has 4 classes"),
        ("labels > 1", "labels are compared with"),
        ("labels = 'x'", "labels are class ids"),
    ):
        for search in (index.search, index.search_radius):
            with pytest.raises(errors.IndexMismatch, match=sentence):
                search(query, 3, where=where)


def test_ids_filter_an_index_without_columns(codes_of):
    index = BinaryIndex.from_arrays(codes_of("random", 30, 32), np.arange(30) + 5)
    assert sorted(index.search(codes_of("random", 1, 32), 9, where="id in (7, 9) or id = 34").ids[0][:3]) == [
        7,
        9,
        34,
    ]
    with pytest.raises(errors.IndexMismatch, match="there is no column 'year'; there are id"):
        index.search(codes_of("random", 1, 32), 1, where="year = 3")


def test_a_condition_asked_again_follows_updates(codes_of):
    """Selections are kept per segment: more conditions than are kept, and rows that come and go."""
    codes = codes_of("random", 60, 32)
    index = BinaryIndex.from_arrays(codes[:50], columns={"n": range(50)})
    for turn in range(3):
        for bound in range(12):
            found = index.search(codes[:1], 60, where=f"n < {bound}").ids[0]
            assert sorted(found[found >= 0].tolist()) == [i for i in range(bound) if i >= turn]
        index.remove([turn])
    index.add(codes[50:51], [77], columns={"n": [1]})
    assert 77 in index.search(codes[:1], 60, where="n < 3").ids


def test_booleans_of_any_chunks_are_unpacked():
    bits = np.random.default_rng(0).random(100) < 0.5
    whole = pa.array(bits)
    column = pa.chunked_array([whole[3:20], whole[0:0], whole[21:29], pa.array([], pa.bool_()), whole[64:]])
    assert _unpacked(column).tolist() == [int(bit) for bit in column.to_pylist()]
    assert _unpacked(pa.chunked_array([], pa.bool_())).tolist() == []
