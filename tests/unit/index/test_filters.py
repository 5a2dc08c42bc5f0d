"""where="…": the grammar against pandas and by hand, on every kind of index against a loop; its mistakes."""

import datetime
import math
import operator
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hashnet import BinaryIndex, errors
from hashnet.codes import unpack_codes
from hashnet.index.expressions import parse_condition, with_class_ids
from hashnet.index.filters import _unpacked
from tests.support.slow_search import KINDS

OPTIONS = KINDS | {"ivf": {"nlist": 6, "nprobe": 1}}  # which has to widen its search
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
        ("labels = 'cat'", "labels = 1"),
        ("'cat' != `labels`", "1 != `labels`"),
        (
            "labels not in ('cat', 2, \"a'b, (c)\") and city in ('cat')",
            "labels not in (1, 2, 0) and city in ('cat')",
        ),
        ("city = 'labels' or 'cat' = city", "city = 'labels' or 'cat' = city"),
        ("not (labels in ('3') or labels = 3)", "not (labels in (2) or labels = 3)"),
        ("'cat' = labels = 'cat' = labels", "1 = labels = 1 = labels"),  # which the grammar refuses
        ("labels", "labels"),
        ("labels in ('cat'", "labels in (1"),
    ],
)
def test_names_of_classes_become_ids(text, expected):
    assert with_class_ids(text, ["a'b, (c)", "cat", "3", "cat"]) == expected
    assert with_class_ids(text, None) == text


def test_a_name_that_no_class_has():
    with pytest.raises(
        errors.IndexMismatch, match=r"at position 9: there is no label 'cta'; did you mean 'cat'"
    ):
        with_class_ids("labels = 'cta'", ["dog", "cat"])


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
        ("year > 2019.5", [1, 3, 4]),
        ("year = 99999999999999999999999", []),
        ("year < 1e9999999999999999999999", [0, 1, 3, 4, 5]),
        ("not year < " + "9" * 5000, []),
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
        ("YEAR = 1", 0, "there is no column 'YEAR'; did you mean 'year'?"),
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


# Columns with missing values and values at the edges of their types; and what these are to Python.
EDGES = {
    "small": ([-128, -3, None, 0, 2, 127], pa.int8()),
    "large": ([-(2**63), 2**60 - 1, 2**60, 2**60 + 1, None, 2**63 - 1], pa.int64()),
    "positive": ([0, 1, 2**60, None, 2**64 - 2, 2**64 - 1], pa.uint64()),
    "price": (["-99999.99", "-0.01", None, "0.25", "2.50", "99999.99"], pa.decimal128(7, 2)),
    "wide": (["1", "0.01", "0.02", None, "2.5", "9" * 36 + ".99"], pa.decimal128(38, 2)),
    "round": (["-100", None, "0", "100", "200", "99900"], pa.decimal128(3, -2)),
    "real": ([-1.5, 0.25, 2.0**60, None, math.inf, -math.inf], pa.float64()),
    "flag": ([True, False, None, True, False, None], pa.bool_()),
    "day": ([datetime.date(2020, 1, 1 + i) if i != 2 else None for i in range(6)], pa.date32()),
    "name": (["", "x", None, "é", "y'", "X"], pa.string()),
}
EXACTLY = {
    column: [None if v is None else Decimal(v) if pa.types.is_decimal(kind) else v for v in values]
    for column, (values, kind) in EDGES.items()
}
EDGE_TABLE = pa.table({name: pa.array(EXACTLY[name], kind) for name, (_, kind) in EDGES.items()})
NUMBERS = st.one_of(
    st.decimals(-130, 130, places=3).map(str),
    st.sampled_from([-(2**63), 2**60, 2**60 + 1, 2**64 - 1]).flatmap(
        lambda n: st.sampled_from([f"{n}", f"{n - 1}", f"{n + 1}", f"{n}.5", f"{n}.0"])
    ),
    st.sampled_from(
        ["2.5e0", "0.0100", "1e30", "-1e30", "100000", "99999.995", "150", "1e-40", "9" * 36 + ".99"]
    ),
)
LITERALS = {
    **dict.fromkeys(["small", "large", "positive", "price", "wide", "round"], NUMBERS),
    "real": st.sampled_from(["-1.5", "0.25", "1152921504606846976", "1152921504606847000", "0", "1e300"]),
    "flag": st.sampled_from(["true", "false"]),
    "day": st.integers(1, 7).map(lambda day: f"'2020-01-0{day}'"),
    "name": st.sampled_from(["''", "'x'", "'y'''", "'z'", "'é'"]),
}
SIGNS = {
    "=": operator.eq, "!=": operator.ne,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def value_of(literal, column):
    if column == "flag":
        return literal == "true"
    if column == "day":
        return datetime.date.fromisoformat(literal[1:-1])
    if column == "real":
        return float(literal)
    return literal[1:-1].replace("''", "'") if column == "name" else Fraction(literal)


def edge_atom(column):
    signs = ["=", "!="] if column == "flag" else list(SIGNS)
    compared = st.tuples(st.sampled_from(["first", "last"]), st.sampled_from(signs), LITERALS[column])
    among = st.tuples(st.sampled_from(["in", "not in"]), st.lists(LITERALS[column], min_size=1, max_size=4))
    missing = st.tuples(st.sampled_from(["is null", "is not null"]))
    return st.one_of(compared, among, missing).map(lambda atom: (column, *atom))


EDGE_TREES = st.recursive(
    st.sampled_from(list(EDGES)).flatmap(edge_atom),
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner), st.tuples(st.sampled_from(["and", "or"]), inner, inner)
    ),
    max_leaves=6,
)


def edge_text(tree):
    if tree[0] == "not":
        return f"not ({edge_text(tree[1])})"
    if tree[0] in ("and", "or"):
        return f"({edge_text(tree[1])}) {tree[0]} ({edge_text(tree[2])})"
    column, how = tree[:2]
    if how == "first":
        return f"{tree[3]} {tree[2]} {column}"
    if how == "last":
        return f"{column} {tree[2]} {tree[3]}"
    return f"{column} {how}" + (f" ({', '.join(tree[2])})" if len(tree) > 2 else "")


def truth(tree, row):
    """True, False or None (unknown) by Python's numbers and the truth tables of SQL."""
    if tree[0] == "not":
        inner = truth(tree[1], row)
        return None if inner is None else not inner
    if tree[0] in ("and", "or"):
        both = [truth(tree[1], row), truth(tree[2], row)]
        decides = tree[0] == "or"
        return decides if decides in both else None if None in both else not decides
    column, how = tree[:2]
    value = EXACTLY[column][row]
    if how in ("is null", "is not null"):
        return (value is None) == (how == "is null")
    if value is None:
        return None
    if how in ("in", "not in"):
        return (value in [value_of(literal, column) for literal in tree[2]]) == (how == "in")
    sides = [value, value_of(tree[3], column)]
    return SIGNS[tree[2]](*(sides if how == "last" else sides[::-1]))


@settings(max_examples=300, deadline=None)
@given(tree=EDGE_TREES)
def test_every_type_equals_a_loop(tree):
    """Exactly: also beyond float64's digits, beyond the type, between two of its values."""
    assert rows(edge_text(tree), EDGE_TABLE) == [row for row in range(6) if truth(tree, row)]


def test_a_float32_column_is_compared_as_pandas_does():
    frame = pd.DataFrame({"f": np.array([0.1, 0.2, 0.3, 16777216.0], np.float32)})
    table = pa.Table.from_pandas(frame, preserve_index=False)
    for sign, compare in SIGNS.items():
        for value in ("0.1", "0.3", "16777217", "1e9", "99999999999999999999"):
            assert (
                rows(f"f {sign} {value}", table) == np.flatnonzero(compare(frame["f"], float(value))).tolist()
            )
    assert rows("f in (0.1, 16777216)", table) == [0, 3]


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
        **OPTIONS[request.param],
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
        (pc.field("YEAR") > 3, "names a column 'YEAR'; did you mean 'year'"),
        (pc.field("year") > "x", "does not fit the columns"),
        (pc.field("labels") == 3, r'give \{"labels": \[3, 5\], "condition": expression\}'),
        (pc.divide(pc.field("year"), 0) == 1, "fails on the items of this index: divide by zero"),
        (
            pc.field("city").cast(pa.int64()) == 1,
            "fails on the items of this index: Failed to parse string: 'c",
        ),
        (pc.list_element(pc.make_struct(pc.field("year")), 3) == 1, "does not fit the columns"),
        (pc.field("year", "month") == 1, "does not fit the columns"),
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


def test_columns_from_files_are_where_arrow_wants_them(codes_of, tmp_path, capfd):
    """Arrow warns on stderr about buffers at odd addresses; in the change log they lie anywhere."""
    codes = codes_of("random", 90, 32)
    columns = pa.table(
        {
            "year": range(90),
            "price": pa.array([Decimal(i) / 4 for i in range(90)], pa.decimal128(38, 2)),
            "city": [f"c{i}" for i in range(90)],
        }
    )
    index = BinaryIndex.from_arrays(codes[:60], columns=columns[:60])
    index.save(tmp_path)
    for start, stop in ((60, 61), (61, 64), (64, 90)):
        index.add(codes[start:stop], columns=columns[start:stop])
    found = BinaryIndex.load(tmp_path).search(codes[:1], 90, where="price >= 14.25 and year < 88").ids[0]
    assert sorted(found[found >= 0].tolist()) == list(range(57, 88))  # 57 / 4 = 14.25
    assert capfd.readouterr().err == ""


def test_booleans_of_any_chunks_are_unpacked():
    bits = np.random.default_rng(0).random(100) < 0.5
    whole = pa.array(bits)
    column = pa.chunked_array([whole[3:20], whole[0:0], whole[21:29], pa.array([], pa.bool_()), whole[64:]])
    assert _unpacked(column).tolist() == [int(bit) for bit in column.to_pylist()]
    assert _unpacked(pa.chunked_array([], pa.bool_())).tolist() == []
