"""Codes from elsewhere: the conventions and files of other libraries."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hashnet import BinaryIndex, CodeStore
from hashnet.cli.entry import main
from hashnet.errors import DataError
from hashnet.store import CodesArtefact, CodesOptions, StorePlan, import_codes

N, D = 300, 64


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)


def bits(vectors: np.ndarray) -> list[list[int]]:
    """The oracle: bit j of a row is 1 where its value is positive, first bit first."""
    rows = []
    for vector in vectors:
        text = "".join("1" if value > 0 else "0" for value in vector)
        rows.append([int(text[i : i + 8], 2) for i in range(0, len(text), 8)])
    return rows


@pytest.mark.parametrize("convention", ["packed", "ubinary", "binary", "signs", None])
def test_numpy_in_every_convention(tmp_path, vectors, convention):
    packed = np.packbits(vectors > 0, axis=1)  # as sentence-transformers does
    values = {
        "binary": (packed.astype(np.int16) - 128).astype(np.int8),
        "signs": np.where(vectors > 0, 1, -1).astype(np.int8),
    }.get(convention or "binary", packed)
    np.save(tmp_path / "codes.npy", values)
    np.save(tmp_path / "ids.npy", np.arange(N)[::-1] * 10)
    np.save(tmp_path / "labels.npy", np.arange(N) % 4)
    options = CodesOptions(
        path=str(tmp_path / "codes.npy"), ids=str(tmp_path / "ids.npy"), labels=str(tmp_path / "labels.npy"),
        convention=convention, rows_per_shard=128,
    )  # fmt: skip
    store = import_codes(options, str(tmp_path / "codes"))
    assert store.codes().tolist() == bits(vectors)[::-1]
    assert store.ids().tolist() == [10 * i for i in range(N)]
    assert store.labels().argmax(1).tolist() == [i % 4 for i in range(N)][::-1]


@pytest.mark.parametrize(
    "kind", [pa.binary(8), pa.binary(), pa.list_(pa.uint8()), pa.list_(pa.uint8(), 8), pa.list_(pa.int8())]
)
def test_parquet_columns_of_every_type(tmp_path, vectors, kind):
    rows = np.packbits(vectors > 0, axis=1)
    if pa.types.is_list(kind) and kind.value_type == pa.int8():
        rows = (rows.astype(np.int16) - 128).astype(np.int8)
    values = [row.tobytes() for row in rows] if "binary" in str(kind) else rows.tolist()
    table = pa.table(
        {
            "embedding": pa.array(values, kind),
            "number": np.arange(N) + 5,
            "url": [f"https://a.example/{i}" for i in range(N)],
            "class": [("cat", "dog")[i % 2] for i in range(N)],
            "year": 2000 + np.arange(N) % 7,
        }
    )
    for part in range(2):
        pq.write_table(table.slice(part * 150, 150), tmp_path / f"part-{part}.parquet")
    options = CodesOptions(
        path=f"{tmp_path}/part-{{0..1}}.parquet", id="number", key="url", label="class", columns=["year"]
    )
    store = import_codes(options, str(tmp_path / "codes"))
    assert store.codes().tolist() == bits(vectors)
    assert store.ids()[0] == 5
    assert store.columns == ("key", "year")
    assert store.read(["key", "year"]).to_pylist()[8] == {"key": "https://a.example/8", "year": 2001}
    assert store.labels().argmax(1).tolist() == [i % 2 for i in range(N)]
    found = BinaryIndex.build(store).search(store.codes()[:3], 1)
    assert found.distances.ravel().tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "convention"),
    [
        *((kind, name) for kind in (pa.int64(), pa.int16()) for name in ("packed", "binary", "signs")),
        (pa.uint64(), "packed"),
    ],
)
def test_integers_of_every_type_with_a_convention(tmp_path, vectors, kind, convention):
    """What Hugging Face's Dataset.from_dict makes of lists of Python integers."""
    rows = bits(vectors)
    if convention == "binary":
        rows = [[byte - 128 for byte in row] for row in rows]
    elif convention == "signs":
        rows = [[1 if value > 0 else -1 for value in vector] for vector in vectors]
    pq.write_table(pa.table({"code": pa.array(rows, pa.list_(kind))}), tmp_path / "rows.parquet")
    options = CodesOptions(path=str(tmp_path / "rows.parquet"), convention=convention)
    assert import_codes(options, str(tmp_path / "codes")).codes().tolist() == bits(vectors)


def classes_of(tmp_path, table, **options):
    pq.write_table(pa.table({"code": [b"a", b"b", b"c"], **table}), tmp_path / "rows.parquet")
    store = import_codes(
        CodesOptions(path=str(tmp_path / "rows.parquet"), label="class", **options),
        str(tmp_path / "codes"),
        overwrite=True,
    )
    assert CodesArtefact(store.uri).verify() == []
    again = CodeStore.open(store.uri)
    return again.class_names, again.labels().tolist()


def test_class_names_are_kept(tmp_path):
    names = {"class": ["cat", "ant", "cat"]}
    assert classes_of(tmp_path, names) == (("ant", "cat"), [[0, 1], [1, 0], [0, 1]])
    assert classes_of(tmp_path, names, class_names=["cat", "dog", "ant"]) == (
        ("cat", "dog", "ant"),
        [[1, 0, 0], [0, 0, 1], [1, 0, 0]],
    )
    assert classes_of(tmp_path, {"class": [1, 0, 1]}, class_names=["ant", "cat"])[0] == ("ant", "cat")
    assert classes_of(tmp_path, {"class": [1, 0, 1]})[0] is None
    with pytest.raises(DataError, match=r"2 class names came with 3 classes"):
        classes_of(tmp_path, {"class": [1, 0, 1]}, class_names=["ant", "cat"], n_classes=3)
    with pytest.raises(DataError, match=r"row 2 has class 2, but the classes are 0..1"):
        classes_of(tmp_path, {"class": [1, 0, 2]}, class_names=["ant", "cat"])


def test_class_names_of_numpy_files(tmp_path):
    np.savez(tmp_path / "e.npz", codes=np.zeros((2, 1), np.uint8), labels=[1, 0])
    options = CodesOptions(path=str(tmp_path / "e.npz"), class_names=["ant", "bee", "cat"])
    store = import_codes(options, str(tmp_path / "codes"))
    assert (store.class_names, store.n_classes) == (("ant", "bee", "cat"), 3)
    about = store.plan.to_dict()
    del about["class_names"]  # as older versions wrote it
    assert StorePlan.from_dict(about).class_names is None


def test_booleans_are_bits(tmp_path, vectors):
    np.save(tmp_path / "codes.npy", vectors > 0)
    pq.write_table(pa.table({"code": (vectors > 0).tolist()}), tmp_path / "rows.parquet")
    for name in ("codes.npy", "rows.parquet"):
        options = CodesOptions(path=str(tmp_path / name), convention="signs")
        assert import_codes(options, f"{tmp_path}/{name}-codes").codes().tolist() == bits(vectors)


def test_the_command_line(tmp_path, vectors, capsys):
    np.savez(tmp_path / "e.npz", codes=np.packbits(vectors > 0, axis=1), labels=np.arange(N) % 3)
    words = ["dataset", "codes", str(tmp_path / "e.npz"), "--out", str(tmp_path / "codes"), "--json"]
    assert main(words) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["rows"], about["n_bits"], about["n_classes"]) == (N, D, 3)
    assert CodeStore.open(about["codes"]).sha256 == about["sha256"]
    assert main(words) == 2
    assert "holds a store already" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("values", "options", "sentence"),
    [
        (np.ones((3, 8), np.int8), {}, "holds only -1, 0 and 1"),
        (np.ones((3, 8), np.float32), {}, "holds float32; codes are whole numbers 0 to 255"),
        (np.ones((3, 8), np.float32), {"convention": "packed"}, "holds float32; codes are whole numbers"),
        (np.ones((3, 8), np.int64), {}, "holds int64; .* give the convention"),
        (np.eye(8, dtype=np.int64), {"convention": "signs"}, "holds only 0 and 1, none of which is below 0"),
        (np.ones((3, 8), bool), {}, "holds bool; .* give the convention"),
        (np.array([[0], [256]]), {"convention": "packed"}, "row 1 holds 256; packed codes are 0 to 255"),
        (np.array([[-1]], np.int8), {"convention": "ubinary"}, "row 0 holds -1; ubinary codes are 0 to 255"),
        (np.array([[2**64 - 1]], np.uint64), {"convention": "packed"}, f"row 0 holds {2**64 - 1}"),
        (np.ones(3, np.uint8), {}, r"must have shape \(n, bytes\)"),
        (
            np.array([[127, 128]], np.uint8),
            {"convention": "binary"},
            "row 0 holds 128; binary .* -128 to 127",
        ),
        (
            np.ones((3, 8), np.uint8),
            {"key": "url"},
            r"key names a column, and .* is not Parquet: give a file beside it, --keys names\.txt \(one per",
        ),
        (np.ones((3, 8), np.uint8), {"id": "n"}, "id names a column, .*: give a file beside it, --ids"),
    ],
)
def test_mistakes_are_named(tmp_path, values, options, sentence):
    np.save(tmp_path / "codes.npy", values)
    with pytest.raises(DataError, match=sentence):
        import_codes(CodesOptions(path=str(tmp_path / "codes.npy"), **options), str(tmp_path / "codes"))
    assert not (tmp_path / "codes").exists()


@pytest.mark.parametrize("suffix", ["txt", "npy", "npz"])
def test_keys_of_arrays(tmp_path, suffix, capsys):
    keys = ["ä.jpg", " b c.jpg", "7"]
    if suffix == "txt":
        (tmp_path / "keys.txt").write_bytes("ä.jpg\r\n b c.jpg\r\n7\r\n".encode())
    elif suffix == "npy":
        np.save(tmp_path / "keys.npy", np.array(keys))
    codes = tmp_path / f"codes.{'npz' if suffix == 'npz' else 'npy'}"
    arrays = {"codes": np.arange(24, dtype=np.uint8).reshape(3, 8), "keys": np.array(keys)}
    if suffix == "npz":
        np.savez(codes, **arrays)
    else:
        np.save(codes, arrays["codes"])
    given = [] if suffix == "npz" else ["--keys", str(tmp_path / f"keys.{suffix}")]
    out = str(tmp_path / "codes")
    assert main(["dataset", "codes", str(codes), *given, "--out", out]) == 0
    assert CodeStore.open(out).read(["key"])["key"].to_pylist() == keys
    assert BinaryIndex.build(CodeStore.open(out)).ids_of("7").tolist() == [2]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("a\nb\n", r"keys.txt holds 2 keys for codes of shape \(3, 8\); give one per code"),
        ("a\nb\na\n", "both have id 'a'"),
        ("a\n\n\n", "both have id ''"),
        (None, "keys.txt does not exist"),
    ],
)
def test_keys_that_cannot_be_used(tmp_path, content, sentence):
    np.save(tmp_path / "codes.npy", np.ones((3, 8), np.uint8))
    if content is not None:
        (tmp_path / "keys.txt").write_text(content)
    options = CodesOptions(path=str(tmp_path / "codes.npy"), keys=str(tmp_path / "keys.txt"))
    with pytest.raises(DataError, match=sentence):
        import_codes(options, str(tmp_path / "codes"))
    pq.write_table(pa.table({"code": pa.array([b"a"])}), tmp_path / "codes.parquet")
    options = CodesOptions(path=str(tmp_path / "codes.parquet"), keys="keys.txt")
    with pytest.raises(DataError, match=r"keys goes with \.npy codes; .* with --key"):
        import_codes(options, str(tmp_path / "codes"))


def test_mistakes_in_parquet_are_named(tmp_path):
    path = tmp_path / "rows.parquet"

    def refused(columns, **options):
        pq.write_table(pa.table(columns), path)
        with pytest.raises(DataError) as caught:
            import_codes(CodesOptions(path=str(path), **options), str(tmp_path / "codes"))
        return str(caught.value)

    assert "has no column code or codes or embedding" in refused({"x": [1]})
    assert "codes of 1 and of 2 values" in refused({"code": pa.array([[1], [1, 2]], pa.list_(pa.uint8()))})
    assert "row 1 has no code" in refused({"code": pa.array([b"a", None])})
    for kind in (pa.list_(pa.uint8()), pa.list_(pa.uint8(), 2), pa.list_(pa.bool_())):
        column = pa.array([[1, 0], [0, 1], [1, None]], pa.list_(pa.int8())).cast(kind)
        assert "the code of row 2 holds a null" in refused({"code": column}, convention="signs")
    assert "has no column 'url'" in refused({"code": pa.array([b"a"])}, key="url")
    assert "both have id 'k'" in refused({"code": pa.array([b"a", b"b"]), "url": ["k", "k"]}, key="url")
