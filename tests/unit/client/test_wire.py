"""Arrow streams between client and server: round trips, and strangers' bytes."""

from __future__ import annotations

import contextlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hashnet.client import wire
from hashnet.client.wire import Queries
from hashnet.errors import RequestRejected
from hashnet.results import SearchResult

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    "queries",
    [
        Queries("codes", RNG.integers(0, 256, (5, 6), dtype=np.uint8)),
        Queries("features", RNG.normal(size=(4, 3)).astype(np.float32)),
        Queries("ids", np.array([5, -3, 2**62])),
        Queries("images", [b"abc", b"", b"\0\xff"]),
    ],
    ids=lambda queries: queries.kind,
)
def test_queries_come_back(queries: Queries) -> None:
    back = wire.read_queries(wire.read_table(wire.write_queries(queries)))
    assert back.kind == queries.kind
    np.testing.assert_array_equal(np.asarray(back.values), np.asarray(queries.values))


def test_hits_come_back() -> None:
    hits = SearchResult(np.array([[3, -1], [5, 6]]), np.array([[0, -1], [1, 2]], dtype=np.int32))
    back = wire.read_hits(wire.write_hits(hits, 7))
    assert back == hits
    assert back.version == 7
    ragged = [SearchResult(np.arange(n), np.arange(n, dtype=np.int32)) for n in (0, 3, 1)]
    back = wire.read_hits(wire.write_hits(ragged, 8))
    assert back == ragged
    assert {hit.version for hit in back} == {8}
    assert [hit.ids.dtype for hit in back] == [np.int64] * 3


def test_pictures_are_cut_by_bytes_and_the_rest_by_rows() -> None:
    pictures = Queries("images", [b"x" * 10] * 5)
    assert [len(part) for part in pictures.parts(rows=3)] == [3, 2]
    assert [len(part) for part in pictures.parts(rows=9, max_bytes=25)] == [2, 2, 1]
    assert [len(part) for part in pictures.parts(rows=9, max_bytes=1)] == [1] * 5
    many = Queries("images", [b"x"] * 150)
    assert [len(part) for part in many.parts(rows=1024)] == [64, 64, 22]  # answered in time on a CPU, too
    assert [len(part) for part in Queries("ids", np.arange(5)).parts(rows=2)] == [2, 2, 1]


def stream(table: pa.Table, **options: object) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def file(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


CODE = pa.array([b"12345678"], pa.binary(8))
BAD = {
    "empty": b"",
    "text": b"hello",
    "file format": file(pa.table({"code": CODE})),
    "compressed": stream(pa.table({"image": [b"\0" * 1_000_000]}), compression="zstd"),
    "dictionary": stream(pa.table({"image": pa.array([b"a", b"a"]).dictionary_encode()})),
    "no column of ours": stream(pa.table({"x": [1]})),
    "two kinds": stream(pa.table({"code": CODE, "image": [b"x"]})),
    "a strange column beside": stream(pa.table({"code": CODE, "x": [1]})),
    "codes of any length": stream(pa.table({"code": [b"a", b"bc"]})),
    "codes of no length": stream(pa.table({"code": pa.array([b""], pa.binary(0))})),
    "codes as text": stream(pa.table({"code": ["a"]})),
    "nulls": stream(pa.table({"code": pa.array([None], pa.binary(8))})),
    "ragged features": stream(pa.table({"feature": [[1.0], [1.0, 2.0]]})),
    "features with nulls": stream(pa.table({"feature": [[1.0, None]]})),
    "empty features": stream(pa.table({"feature": pa.array([[]], pa.list_(pa.float32()))})),
    "whole numbers as features": stream(pa.table({"feature": [[1, 2]]})),
    "ids beyond int64": stream(pa.table({"id": pa.array([2**64 - 1], pa.uint64())})),
    "ids as floats": stream(pa.table({"id": [1.5]})),
    "truncated": stream(pa.table({"code": CODE}))[:-30],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_streams_are_refused_with_a_sentence(name: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        wire.read_queries(wire.read_table(BAD[name]))
    assert caught.value.code == "bad_arrow"
    assert caught.value.status == 400
    assert len(str(caught.value)) > 20


GOOD = wire.write_queries(Queries("codes", np.arange(40, dtype=np.uint8).reshape(5, 8)))


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes_are_read_or_refused_but_never_crash(changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for place, value in changes:
        data[place] = value
    with contextlib.suppress(RequestRejected):  # anything else, a crash above all, fails
        assert wire.read_queries(wire.read_table(bytes(data))).values.nbytes <= len(GOOD)
