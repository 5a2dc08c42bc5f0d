"""Parquet files of somebody else: pictures, features, and labels in any usual form."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hashnet.data.columns import feature_matrix
from hashnet.data.fetch import fetch_images
from hashnet.data.sources import make_manifest
from hashnet.errors import BadImage, DataError
from hashnet.io import storage
from tests.support.source_files import jpeg, rows_of


def picture_struct(n: int, start: int = 0) -> pa.Array:
    data = pa.array([jpeg(start + i) for i in range(n)], pa.binary())
    return pa.StructArray.from_arrays(
        [data, pa.array([f"{start + i}.jpg" for i in range(n)])], ["bytes", "path"]
    )


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("struct", [False, True])
def test_parquet_pictures(tmp_path, struct, inline):
    (tmp_path / "data").mkdir()
    for i in range(3):
        image = picture_struct(20, 20 * i)
        table = pa.table(
            {"image": image if struct else image.field("bytes"), "label": [j % 4 for j in range(20)]}
        )
        pq.write_table(table, tmp_path / "data" / f"part-{i}.parquet", row_group_size=7)
    manifest = make_manifest(
        "parquet", str(tmp_path / "m"), path=str(tmp_path / "data"), inline=inline, n_query=5, n_train=40
    )
    assert len(manifest) == 60
    assert manifest.inline == inline
    assert manifest.n_classes == 4
    assert fetch_images(manifest.read()) == [jpeg(i) for i in range(60)]
    assert [c for (c,) in rows_of(manifest, "labels")][:5] == [[0], [1], [2], [3], [0]]
    database = manifest.row_ids("database")
    assert fetch_images(manifest.read("database")) == [jpeg(i) for i in database]


def test_parquet_struct_with_paths_only(tmp_path):
    (tmp_path / "a.jpg").write_bytes(jpeg(1))
    paths = pa.array(["a.jpg", str(tmp_path / "a.jpg")])
    image = pa.StructArray.from_arrays([pa.nulls(2, pa.binary()), paths], ["bytes", "path"])
    pq.write_table(pa.table({"image": image}), tmp_path / "x.parquet")
    manifest = make_manifest("parquet", str(tmp_path / "m"), path=str(tmp_path / "x.parquet"))
    assert fetch_images(manifest.read()) == [jpeg(1), jpeg(1)]
    assert manifest.splits == {"database": 2}


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("inline", [False, True])
def test_parquet_struct_with_bytes_in_some_rows_and_a_path_in_others(tmp_path, inline, statistics):
    for i in (1, 2):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg(i))
    data = pa.array([jpeg(0), None, None, jpeg(3), None], pa.binary())
    paths = pa.array(["elsewhere.jpg", "1.jpg", "2.jpg", None, None])
    image = pa.StructArray.from_arrays([data, paths], ["bytes", "path"])
    pq.write_table(
        pa.table({"image": image}), tmp_path / "x.parquet", write_statistics=statistics, row_group_size=3
    )
    path = str(tmp_path / "x.parquet")
    manifest = make_manifest("parquet", str(tmp_path / "m"), path=path, inline=inline)
    *pictures, nothing = fetch_images(manifest.read())
    assert pictures == [jpeg(i) for i in range(4)]
    assert isinstance(nothing, BadImage)


def test_parquet_files_are_opened_once_for_each_purpose(tmp_path, monkeypatch):
    """For the schema, for labels and ids together, and for the pictures."""
    for i in range(2):
        table = pa.table({"image": [b"x"] * 3, "label": [0, 1, 2], "id": [f"{i}-{j}" for j in range(3)]})
        pq.write_table(table, tmp_path / f"{i}.parquet")
    opened, open_input = [], storage.open_input
    monkeypatch.setattr(storage, "open_input", lambda uri: opened.append(str(uri)) or open_input(uri))
    path = f"{tmp_path}/{{0..1}}.parquet"
    manifest = make_manifest("parquet", str(tmp_path / "m"), path=path, id="id", all_in=["database"])
    assert len(manifest) == 6
    assert [opened.count(f"{tmp_path}/{i}.parquet") for i in range(2)] == [3, 3]


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float32()), pa.list_(pa.float64(), 6), pa.large_list(pa.float16())]
)
def test_parquet_features(tmp_path, kind):
    matrix = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float16)
    values = pa.array([list(row) for row in matrix], kind)
    table = pa.table(
        {"id": [f"item{i}" for i in range(50)], "vector": values, "tags": [["x", "y"], ["y"]] * 25}
    )
    pq.write_table(table, tmp_path / "f.parquet", row_group_size=20)
    manifest = make_manifest(
        "parquet",
        str(tmp_path / "m"),
        path=str(tmp_path / "f.parquet"),
        id="id",
        label="tags",
        n_query=5,
        n_train=20,
    )
    assert (manifest.modality, manifest.n_features, manifest.class_names) == ("features", 6, ("x", "y"))
    np.testing.assert_array_equal(feature_matrix(manifest.read()), matrix.astype(np.float32))
    assert rows_of(manifest, "uri", "labels")[:2] == [("item0", [0, 1]), ("item1", [1])]


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float32(), 2)])
def test_parquet_features_after_an_empty_file(tmp_path, kind):
    for i, rows in enumerate(([], [[1.0, 2.0], [3.0, 4.0]])):
        pq.write_table(pa.table({"f": pa.array(rows, kind)}), tmp_path / f"{i}.parquet")
    manifest = make_manifest("parquet", str(tmp_path / "m"), path=f"{tmp_path}/*.parquet")
    assert manifest.n_features == 2
    assert feature_matrix(manifest.read()).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    with pytest.raises(DataError, match=r"holds no numbers|found no image or feature"):
        make_manifest("parquet", str(tmp_path / "n"), path=str(tmp_path / "0.parquet"))


@pytest.mark.parametrize(
    ("column", "options", "expected", "n_classes"),
    [
        (pa.array([2, 0, -1, None]), {}, [[2], [0], None, None], 3),
        (pa.array([[0, 2], [], [1], None]), {"n_classes": 5}, [[0, 2], [], [1], []], 5),
        (pa.array([[3, 3], [2, 0, 2], [None, 1], [None]]), {}, [[3], [0, 2], [1], []], 4),
        (pa.array([["b", "a", "b"], None, [None, "a"], []]), {}, [[0, 1], [], [0], []], 2),
        (pa.array([[1, 1], [2, 0], None, [0, None]], pa.list_(pa.int64(), 2)), {}, [[1], [0, 2], [], [0]], 3),
        (pa.array(["b", "a", None, "b"]), {}, [[1], [0], None, [1]], 2),
        (pa.array(["b", "a", "a", "b"]).dictionary_encode(), {}, [[1], [0], [0], [1]], 2),
        (
            pa.array([[0, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1]]),
            {"multi_hot": True},
            [[1], [0, 1], [], [2]],
            3,
        ),
    ],
)
def test_parquet_label_columns(tmp_path, column, options, expected, n_classes):
    pq.write_table(pa.table({"image": [b"x"] * 4, "label": column}), tmp_path / "x.parquet")
    path = str(tmp_path / "x.parquet")
    manifest = make_manifest("parquet", str(tmp_path / "m"), path=path, all_in=["database"], **options)
    assert [c for (c,) in rows_of(manifest, "labels")] == expected
    assert manifest.n_classes == n_classes


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (
            {"id": [1, 2, 1], "image": [b"x"] * 3},
            {"id": "id"},
            "rows 0 and 2 both have id '1' .1 duplicated ids",
        ),
        (
            {"a": [b"x"], "b": [b"y"]},
            {},
            "which column of .* Pictures could be a, b, features none; give image=",
        ),
        ({"image": [b"x"]}, {"label": "klass"}, "has no column 'klass'; it has image"),
        ({"image": [b"x"]}, {"feature": "vec"}, "has no column 'vec'; it has image"),
        (
            {"f": [[1.0, 2.0], [1.0]]},
            {},
            "row 1 has 1 values, the first has 2; all feature vectors must have",
        ),
        ({"id": ["a", None], "image": [b"x"] * 2}, {"id": "id"}, "row 1 has no id; give every row one"),
        ({"f": [[1.0, 2.0], None]}, {}, "row 1 has no feature vector"),
        ({"f": pa.array([[], None], pa.list_(pa.float32()))}, {}, "column 'f' of .* holds no numbers"),
        ({"f": [[1.0, 2.0], [float("nan"), 1.0]]}, {}, "row 1 holds NaN or an infinite value"),
        (
            {"image": [b"x"] * 2, "label": [[0, 1], [0, 2]]},
            {"multi_hot": True},
            "must hold only 0 and 1; row 1",
        ),
        (
            {"image": [b"x"] * 2, "label": [[0, 1], [0]]},
            {"multi_hot": True},
            "row 1 has 1 labels, row 0 has 2",
        ),
        (
            {"image": [b"x"], "label": ["cat"]},
            {"class_names": ["dog"]},
            "class 'cat', which is not among the class",
        ),
        ({"image": [b"x"], "label": [0.5]}, {}, "column 'label' is double; labels are class ids"),
        ({"image": [b"x"], "label": [1 << 40]}, {}, "holds class 1099511627776; number classes from 0"),
        ({"image": [b"x"], "label": [[1 << 40]]}, {}, "holds class 1099511627776; number classes from 0"),
        (
            {"image": [b"x"] * 2, "label": [0, 9]},
            {"n_classes": 3},
            r"row 1 has class 9, but the classes are 0..2",
        ),
    ],
)
def test_parquet_mistakes(tmp_path, columns, options, message):
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=message):
        make_manifest(
            "parquet",
            str(tmp_path / "m"),
            path=str(tmp_path / "x.parquet"),
            **{"all_in": ["database"]} | options,
        )
    assert not (tmp_path / "m").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["x.parquet"]


def test_parquet_files_must_fit_together(tmp_path):
    pq.write_table(pa.table({"image": [b"x"]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"picture": [b"x"]}), tmp_path / "1.parquet")
    with pytest.raises(DataError, match="has other columns than"):
        make_manifest("parquet", str(tmp_path / "m"), path=f"{tmp_path}/{{0..1}}.parquet")
    with pytest.raises(DataError, match=r"there is no .parquet file at"):
        make_manifest("parquet", str(tmp_path / "m"), path=f"{tmp_path}/*.pq")
    (tmp_path / "2.parquet").write_text("no")
    with pytest.raises(DataError, match="is not Parquet"):
        make_manifest("parquet", str(tmp_path / "m"), path=f"{tmp_path}/2.parquet")
