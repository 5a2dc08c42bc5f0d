"""Sources of what somebody already has: lists, folders, Parquet, tars, arrays, in their real form."""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hashnet import storage
from hashnet.data import Manifest
from hashnet.data.fetch import feature_matrix, fetch_images
from hashnet.data.images import decode
from hashnet.data.sources import append_to, load_rows, make_manifest
from hashnet.errors import BadImage, ConfigError, DataError, ManifestError


def jpeg(colour: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (12, 10), (colour, 0, 255 - colour)).save(file, "JPEG")
    return file.getvalue()


def rows_of(manifest: Manifest, *columns: str) -> list[tuple]:
    table = manifest.read(columns=list(columns))
    return list(zip(*(table[name].to_pylist() for name in columns), strict=True))


# --- listfile ---------------------------------------------------------------------------------


def test_listfile_one_list_is_split_by_the_protocol(tmp_path):
    lines = [f"images/{i}.jpg {' '.join('1' if i % 4 == c else '0' for c in range(4))}" for i in range(100)]
    (tmp_path / "all.txt").write_text("\n".join(lines))
    manifest = make_manifest(
        "listfile", str(tmp_path / "m"), path=str(tmp_path / "all.txt"), n_query=10, n_train=50
    )
    assert manifest.splits == {"train": 50, "query": 10, "database": 90}
    assert manifest.n_classes == 4
    assert rows_of(manifest, "uri", "labels")[6] == (f"{tmp_path}/images/6.jpg", [2])


def three_lists(
    folder, query=("q1.jpg 1 0",), train=("a.jpg 1 0", "b.jpg 1 1"), database=("a.jpg 1 0", "c.jpg 0 1")
):
    for name, lines in (("query", query), ("train", train), ("database", database)):
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return str(folder)


def test_listfile_three_lists_are_joined_by_path(tmp_path):
    path = three_lists(tmp_path)
    manifest = make_manifest(
        "listfile", str(tmp_path / "m"), path=path, root="/data", class_names=["cat", "dog"]
    )
    assert rows_of(manifest, "uri", "labels", "splits") == [
        ("/data/a.jpg", [0], ["train", "database"]),
        ("/data/c.jpg", [1], ["database"]),
        ("/data/b.jpg", [0, 1], ["train"]),
        ("/data/q1.jpg", [0], ["query"]),
    ]
    assert manifest.class_names == ("cat", "dog")
    given = {name: f"{path}/{name}.txt" for name in ("train", "query", "database")}
    again = make_manifest("listfile", str(tmp_path / "n"), root="/data", class_names=["cat", "dog"], **given)
    assert again.sha256 == manifest.sha256


def test_listfile_without_a_database_list_searches_the_training_images(tmp_path):
    three_lists(tmp_path)
    (tmp_path / "database.txt").unlink()
    (tmp_path / "query.txt").rename(tmp_path / "test.txt")
    manifest = make_manifest("listfile", str(tmp_path / "m"), path=str(tmp_path))
    assert manifest.splits == {"train": 2, "query": 1, "database": 2}


def test_listfile_absolute_paths_and_a_foreign_prefix(tmp_path):
    (tmp_path / "all.txt").write_text("/home/author/x/a.jpg 0\nb.jpg 0\ns3://bucket/c.jpg 0\n")
    path = str(tmp_path / "all.txt")
    uris = ["/home/author/x/a.jpg", "/data/b.jpg", "s3://bucket/c.jpg"]
    plain = make_manifest("listfile", str(tmp_path / "m"), path=path, root="/data", all_in=["database"])
    assert [uri for (uri,) in rows_of(plain, "uri")] == uris
    stripped = make_manifest(
        "listfile", str(tmp_path / "n"), path=path, root="/data/", strip="/home/author/", all_in=["database"]
    )
    assert rows_of(stripped, "uri")[0] == ("/data/x/a.jpg",)


def test_listfile_queries_in_the_database(tmp_path):
    path = three_lists(tmp_path, query=("q1.jpg 1 0", "c.jpg 0 1"))
    with pytest.raises(
        DataError, match=r"1 paths of .*query.txt are also in the database .* 'c.jpg'; a query in"
    ):
        make_manifest("listfile", str(tmp_path / "m"), path=path)
    manifest = make_manifest("listfile", str(tmp_path / "m"), path=path, overlap="drop")
    assert ("c.jpg", ["query"]) in [(uri[-5:], s) for uri, s in rows_of(manifest, "uri", "splits")]
    assert manifest.source["queries_dropped_from_database"] == 1


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (
            {"train": ("a.jpg 1 0", "b.jpg 1 1", "a.jpg 1 0")},
            r"train.txt line 3 repeats 'a.jpg' of line 1 \(1 dupl",
        ),
        (
            {"train": ("a.jpg 1 1", "b.jpg 1 1")},
            r"train.txt line 1: 'a.jpg' has other labels here than in another",
        ),
        ({"train": ("b.jpg 1 1", "a.jpg 0 1")}, r"train.txt line 2: 'a.jpg' has other labels"),
        ({"query": ("q.jpg 1 0 0",)}, "label columns, .* has 3; they must be equal"),
        ({"query": ("q.jpg 1",)}, "label columns, .* has 1; they must be equal"),
        ({"query": ("q.jpg",)}, "label columns, .* has 0; they must be equal"),
    ],
)
def test_listfile_lists_that_do_not_fit(tmp_path, lists, message):
    with pytest.raises(DataError, match=message):
        make_manifest("listfile", str(tmp_path / "m"), path=three_lists(tmp_path, **lists))
    assert not (tmp_path / "m").exists()


def test_listfile_other_mistakes(tmp_path):
    path = three_lists(tmp_path)
    with pytest.raises(DataError, match="class_names has 3 names, the lists have 2 classes"):
        make_manifest("listfile", str(tmp_path / "m"), path=path, class_names=["a", "b", "c"])
    with pytest.raises(DataError, match="not both"):
        make_manifest("listfile", str(tmp_path / "m"), path=path, train=f"{path}/train.txt")
    with pytest.raises(DataError, match="which list"):
        make_manifest("listfile", str(tmp_path / "m"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"must hold query.txt \(or test.txt\) and train.txt or database.txt"):
        make_manifest("listfile", str(tmp_path / "m"), path=str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="listfile has no option 'rooot'; did you mean 'root'"):
        make_manifest("listfile", str(tmp_path / "m"), path=path, rooot="x")
    with pytest.raises(DataError, match="there is no data source 'listfil'; did you mean 'listfile'"):
        make_manifest("listfil", str(tmp_path / "m"), path=path)


# --- imagefolder ------------------------------------------------------------------------------


def folders(root, *names: str) -> str:
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(jpeg(i))
    return str(root)


def test_imagefolder_classes(tmp_path):
    names = [
        f"{c}/{i}.{ending}" for c in ("dog", "cat") for i, ending in enumerate(("jpg", "PNG", "JPEG", "webp"))
    ]
    path = folders(tmp_path / "pets", *names, "cat/notes.txt", "cat/.hidden.jpg", "cat/deep/er.jpg")
    manifest = make_manifest("imagefolder", str(tmp_path / "m"), path=path, n_query=2, n_train=6)
    assert manifest.class_names == ("cat", "dog")
    assert len(manifest) == 9
    assert [c for (c,) in rows_of(manifest, "labels")] == [[0]] * 5 + [[1]] * 4
    assert not any(isinstance(picture, BadImage) for picture in fetch_images(manifest.read()))
    only = make_manifest("imagefolder", str(tmp_path / "n"), path=path, classes=["dog"], n_query=1, n_train=3)
    assert only.class_names == ("dog",)
    with pytest.raises(
        DataError, match=r"1 of 2 classes are not in .*, the first is 'dgo'; did you mean 'dog'"
    ):
        make_manifest("imagefolder", str(tmp_path / "o"), path=path, classes=["cat", "dgo"])


def test_imagefolder_with_split_folders_and_flat(tmp_path):
    path = folders(tmp_path / "a", "train/cat/1.jpg", "train/cat/2.jpg", "train/dog/1.jpg", "val/dog/2.jpg")
    manifest = make_manifest("imagefolder", str(tmp_path / "m"), path=path)
    assert rows_of(manifest, "labels", "splits") == [
        ([0], ["train", "database"]),
        ([0], ["train", "database"]),
        ([1], ["train", "database"]),
        ([1], ["query"]),
    ]
    flat = make_manifest("imagefolder", str(tmp_path / "n"), path=folders(tmp_path / "b", "2.jpg", "1.jpg"))
    assert flat.n_classes is None
    assert flat.splits == {"database": 2}
    folders(tmp_path / "b", "cat/1.jpg")
    with pytest.raises(DataError, match=r"1.jpg lies in no class folder; move it, or say layout=flat"):
        make_manifest("imagefolder", str(tmp_path / "o"), path=str(tmp_path / "b"), layout="classes")
    with pytest.raises(DataError, match="is no split folder"):
        make_manifest("imagefolder", str(tmp_path / "o"), path=str(tmp_path / "b"), layout="splits")
    with pytest.raises(DataError, match="is not a folder"):
        make_manifest("imagefolder", str(tmp_path / "o"), path=str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="there is no picture below"):
        make_manifest("imagefolder", str(tmp_path / "o"), path=str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("names", "stray"),
    [
        (("cat/1.jpg", "dog/1.jpg", "preview.jpg"), "preview.jpg"),
        (("train/cat/1.jpg", "val/2.jpg"), "val/2.jpg"),
        (("train/cat/1.jpg", "val/dog/2.jpg", "preview.jpg"), "preview.jpg"),
    ],
)
def test_imagefolder_a_stray_picture_does_not_take_the_labels_of_all(tmp_path, names, stray):
    path = folders(tmp_path / "a", *names)
    with pytest.raises(DataError, match=f"/{stray} lies in no class folder"):
        make_manifest("imagefolder", str(tmp_path / "m"), path=path)


# --- parquet ----------------------------------------------------------------------------------


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
            "which column of .* Pictures could be a, b, features none; say image=",
        ),
        ({"image": [b"x"]}, {"label": "klass"}, "has no column 'klass'; it has image"),
        ({"image": [b"x"]}, {"feature": "vec"}, "has no column 'vec'; it has image"),
        (
            {"f": [[1.0, 2.0], [1.0]]},
            {},
            "row 1 has 1 values, the first has 2; all feature vectors must be of one",
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


# --- webdataset -------------------------------------------------------------------------------


def tar_of(path, members: list[tuple[str, bytes]], mode: str = "w", kind: int = tarfile.USTAR_FORMAT) -> None:
    with tarfile.open(path, mode, format=kind) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_webdataset_cls_and_json(tmp_path, kind):
    for shard in range(3):
        members = []
        for i in range(10):
            key = (
                f"dir/{shard}-{i:03d}" if kind == tarfile.USTAR_FORMAT else f"{'long' * 40}/{shard}-{i:03d}-é"
            )
            about = json.dumps({"labels": [i % 3, 3]}).encode() if shard else b"1"
            members += [(f"{key}.jpg", jpeg(10 * shard + i)), (f"{key}.{'json' if shard else 'cls'}", about)]
        tar_of(tmp_path / f"shard-{shard:04d}.tar", members, kind=kind)
    path = f"{tmp_path}/shard-{{0000..0002}}.tar"
    manifest = make_manifest("webdataset", str(tmp_path / "m"), path=path, n_query=3, n_train=20)
    assert fetch_images(manifest.read()) == [jpeg(i) for i in range(30)]
    labels = [c for (c,) in rows_of(manifest, "labels")]
    assert labels[:2] == [[1], [1]]
    assert labels[10:12] == [[0, 3], [1, 3]]
    assert manifest.n_classes == 4
    folder = make_manifest("webdataset", str(tmp_path / "n"), path=str(tmp_path), n_query=3, n_train=20)
    assert folder.sha256 == manifest.sha256


def test_webdataset_names_and_samples_without_a_picture(tmp_path):
    members = [
        ("a.cls", b"dog"),
        ("a.jpg", jpeg(1)),
        ("b.txt", b"no picture"),
        ("c.seg.png", b"png"),
        ("c.cls", b"cat\n"),
    ]
    tar_of(tmp_path / "x.tar", members)
    manifest = make_manifest(
        "webdataset", str(tmp_path / "m"), path=str(tmp_path / "x.tar"), all_in=["database"]
    )
    assert manifest.class_names == ("cat", "dog")
    assert [c for (c,) in rows_of(manifest, "labels")] == [[1], [0]]


def test_webdataset_names_of_several_words_and_what_macos_adds(tmp_path):
    members = [
        ("d/a.jpg", jpeg(1)),
        ("d/._a.jpg", b"no picture"),
        ("d/a.cls", b"golden retriever\ntabby cat\n"),
        ("d/b.jpg", jpeg(2)),
        ("d/b.cls", "²".encode()),  # a digit to str.isdigit, no number to int
    ]
    tar_of(tmp_path / "x.tar", members)
    path = str(tmp_path / "x.tar")
    manifest = make_manifest("webdataset", str(tmp_path / "m"), path=path, all_in=["database"])
    assert manifest.class_names == ("golden retriever", "tabby cat", "²")
    assert [c for (c,) in rows_of(manifest, "labels")] == [[0, 1], [2]]
    assert fetch_images(manifest.read()) == [jpeg(1), jpeg(2)]


def test_webdataset_several_class_ids_a_line(tmp_path):
    tar_of(
        tmp_path / "x.tar", [("a.jpg", jpeg(1)), ("a.cls", b"3 1\n0\n"), ("b.jpg", jpeg(2)), ("b.cls", b"-1")]
    )
    path = str(tmp_path / "x.tar")
    manifest = make_manifest("webdataset", str(tmp_path / "m"), path=path, all_in=["database"])
    assert [c for (c,) in rows_of(manifest, "labels")] == [[0, 1, 3], []]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("caf\udce9.jpg", b"1")], "the name of .* in .*x.tar is no UTF-8; rename the file"),
        ([("a.jpg", b"1"), ("a.cls", b"9999999999")], "x.tar: a.cls holds class 9999999999; number classes"),
        ([("a.jpg", b"1"), ("a.json", b"[1000000]")], "x.tar: a.json holds class 1000000; number classes"),
    ],
)
def test_webdataset_names_and_classes_that_cannot_be(tmp_path, members, message):
    tar_of(tmp_path / "x.tar", members)
    with pytest.raises(DataError, match=message):
        make_manifest("webdataset", str(tmp_path / "m"), path=str(tmp_path / "x.tar"), all_in=["database"])


def test_webdataset_mistakes(tmp_path):
    tar_of(tmp_path / "x.tar", [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.jpg", b"3")])
    with pytest.raises(DataError, match="rows 0 and 2 both have id 'a'"):
        make_manifest("webdataset", str(tmp_path / "m"), path=str(tmp_path / "x.tar"))
    tar_of(tmp_path / "y.tar.gz", [("a.jpg", b"1")], mode="w:gz")
    with pytest.raises(DataError, match=r"is not a plain tar .* unpack .gz first"):
        make_manifest("webdataset", str(tmp_path / "m"), path=str(tmp_path / "y.tar.gz"))
    tar_of(tmp_path / "z.tar", [("a.jpg", b"1"), ("a.json", b"{")])
    with pytest.raises(DataError, match=r"z.tar: a.json is not JSON"):
        make_manifest("webdataset", str(tmp_path / "m"), path=str(tmp_path / "z.tar"))


def test_webdataset_reads_what_synthetic_writes(tmp_path):
    drawn = make_manifest(
        "synthetic", str(tmp_path / "s.parquet"), n_images=50, store="tar", labels_per_image=3, side=16
    )
    read = make_manifest("webdataset", str(tmp_path / "m"), path=str(tmp_path / "s-images"), n_classes=10)
    assert rows_of(read, "uri", "labels") == rows_of(drawn, "uri", "labels")


# --- npy --------------------------------------------------------------------------------------


def test_npy_features_with_labels(tmp_path):
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(200, 5))
    np.save(tmp_path / "f.npy", matrix)
    np.save(tmp_path / "l.npy", np.arange(200) % 7)
    path, labels = str(tmp_path / "f.npy"), str(tmp_path / "l.npy")
    manifest = make_manifest("npy", str(tmp_path / "m"), path=path, labels=labels, n_query=10, n_train=50)
    assert (manifest.modality, manifest.n_features, manifest.n_classes) == ("features", 5, 7)
    np.testing.assert_array_equal(feature_matrix(manifest.read()), matrix.astype(np.float32))
    np.testing.assert_array_equal(manifest.labels().argmax(1), np.arange(200) % 7)
    plain = make_manifest("npy", str(tmp_path / "n"), path=path, scale=0.5)
    assert plain.splits == {"database": 200}
    np.testing.assert_array_equal(feature_matrix(plain.read()), matrix.astype(np.float32) * np.float32(0.5))


def test_npz_with_splits_joined_by_id(tmp_path):
    rng = np.random.default_rng(0)
    everything = rng.integers(0, 256, (30, 4), dtype=np.uint8)
    labels = rng.integers(0, 2, (30, 3), dtype=np.uint8)
    parts = {"query": [0, 1], "database": list(range(5, 20)), "train": [5, 6, 20, 21]}
    arrays = {"scale": np.float32(0.25)}
    for name, rows in parts.items():
        arrays |= {
            f"{name}_features": everything[rows],
            f"{name}_labels": labels[rows],
            f"{name}_ids": np.array(rows) + 100,
        }
    np.savez(tmp_path / "f.npz", **arrays)
    manifest = make_manifest("npy", str(tmp_path / "m"), path=str(tmp_path / "f.npz"))
    assert manifest.splits == {"train": 4, "query": 2, "database": 15}
    by_id = dict(zip((u for (u,) in rows_of(manifest, "uri")), feature_matrix(manifest.read()), strict=True))
    assert set(by_id) == {str(i + 100) for rows in parts.values() for i in rows}
    for uri, vector in by_id.items():
        np.testing.assert_array_equal(vector, everything[int(uri) - 100] * np.float32(0.25))
    splits = dict(rows_of(manifest, "uri", "splits"))
    assert splits["105"] == ["train", "database"]
    assert splits["120"] == ["train"]
    np.testing.assert_array_equal(manifest.labels("query"), labels[[0, 1]])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"features": np.zeros((3, 2)), "labels": np.zeros(2, int)},
            "has 3 rows, its labels have 2; they must be",
        ),
        ({"features": np.zeros((3, 2)), "ids": np.array([1, 2, 1])}, "rows 0 and 2 both have id '1'"),
        ({"features": np.zeros(3)}, r"must be numbers of shape \(n, d\), got float64 \(3,\)"),
        ({"x": np.zeros((3, 2))}, "has neither 'features' nor 'train_features'.*; it has x"),
        ({"features": np.array([[1.0], [np.nan]])}, "row 1 holds NaN"),
        ({"features": np.zeros((3, 2)), "labels": 1}, r"must be an array \(n,\) or \(n, n_classes\)"),
        ({"features": np.zeros((3, 2)), "labels": [0, 1, 10**6]}, "class 1000000; number classes from 0"),
        (
            {"features": np.zeros((3, 2)), "scale": [1.0, 2.0, 3.0]},
            "scale of .* has 3 numbers; give one, or 2",
        ),
        (
            {
                "train_features": np.zeros((2, 2)),
                "train_labels": [0, 0],
                "query_features": np.zeros((1, 2)),
            },
            "has labels, but no query_labels; give those of every split, or none",
        ),
        (
            {"features": np.zeros((2, 2)), "labels": np.array([[0, 1], [0, 3]])},
            "must hold only 0 and 1; row 1",
        ),
        (
            {"features": np.zeros((2, 2)), "labels": np.array([0.5, 1.0])},
            "must be whole numbers, got float64",
        ),
        (
            {"train_features": np.zeros((2, 2)), "query_features": np.zeros((2, 3))},
            "has 3 features, another array has 2",
        ),
        (
            {
                "database_features": np.zeros((2, 2)),
                "database_ids": [1, 2],
                "query_features": np.zeros((1, 2)),
                "query_ids": [2],
            },
            "1 ids are query and database",
        ),
    ],
)
def test_npy_mistakes(tmp_path, arrays, message):
    np.savez(tmp_path / "f.npz", **arrays)
    with pytest.raises(DataError, match=message):
        make_manifest("npy", str(tmp_path / "m"), path=str(tmp_path / "f.npz"), all_in=["database"])
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("option", ["labels", "ids"])
def test_npz_refuses_arrays_beside_it(tmp_path, option):
    np.savez(tmp_path / "f.npz", features=np.zeros((2, 2)))
    np.save(tmp_path / "x.npy", np.arange(2))
    with pytest.raises(DataError, match=f"--{option} goes with an .npy; put them into .* as '{option}'"):
        make_manifest(
            "npy", str(tmp_path / "m"), path=f"{tmp_path}/f.npz", **{option: str(tmp_path / "x.npy")}
        )


def test_npz_in_capitals(tmp_path):
    np.savez(tmp_path / "f.npz", features=np.zeros((2, 2)), scale=np.ones(2))
    (tmp_path / "f.npz").rename(tmp_path / "F.NPZ")
    assert len(make_manifest("npy", str(tmp_path / "m"), path=str(tmp_path / "F.NPZ"))) == 2


def test_npy_never_unpickles(tmp_path):
    np.save(tmp_path / "f.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="without pickle"):
        make_manifest("npy", str(tmp_path / "m"), path=str(tmp_path / "f.npy"))
    with pytest.raises(DataError, match="does not exist"):
        make_manifest("npy", str(tmp_path / "m"), path=str(tmp_path / "g.npy"))


# --- all of them ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("imagefolder", {"path": "pets"}),
        ("imagefolder", {"path": "pets", "layout": "flat"}),
        ("webdataset", {"path": "x.tar"}),
        ("parquet", {"path": "x.parquet", "id": "id"}),
        ("npy", {"path": "f.npy", "ids": "ids.npy"}),
        ("coco", {"path": "c.json", "images": "pets"}),
    ],
)
def test_names_and_uris_of_all_rows_may_be_more_than_2_gib(tmp_path, monkeypatch, name, options):
    monkeypatch.chdir(tmp_path)
    folders(tmp_path / "pets", "cat/1.jpg", "dog/2.jpg")
    tar_of(tmp_path / "x.tar", [("a.jpg", b"1")])
    pq.write_table(pa.table({"id": ["a"], "f": [[1.0]]}), "x.parquet")
    np.save("f.npy", np.zeros((2, 2)))
    np.save("ids.npy", np.arange(2))
    coco = {
        "images": [{"id": 1, "file_name": "1.jpg"}],
        "annotations": [{"image_id": 1, "category_id": 1}],
        "categories": [{"id": 1, "name": "cat"}],
    }
    (tmp_path / "c.json").write_text(json.dumps(coco))
    rows = load_rows(name, defaults=False, **options)[0]
    uris = rows.payload(0, rows.n)["uri"]
    assert rows.names.type == uris.type == pa.large_string()
    (tmp_path / "all.txt").write_text("\n".join(rows.names.to_pylist()))
    manifest = make_manifest(name, str(tmp_path / "m"), split_files=["database=all.txt"], **options)
    assert manifest.count("database") == rows.n
    assert manifest.read()["uri"].to_pylist() == uris.to_pylist()


# --- append -----------------------------------------------------------------------------------


def test_append_a_source(tmp_path):
    first = folders(tmp_path / "a", *(f"{c}/{i}.jpg" for c in ("cat", "dog", "eel") for i in range(4)))
    manifest = make_manifest("imagefolder", str(tmp_path / "m"), path=first, n_query=2, n_train=9)
    more = folders(tmp_path / "b", "eel/9.jpg", "cat/9.jpg")  # its own numbering would be cat 0, eel 1
    longer = append_to(manifest, "imagefolder", path=more)
    assert rows_of(longer, "labels", "splits")[12:] == [([0], ["database"]), ([2], ["database"])]
    assert longer.source["appended"][0]["name"] == "imagefolder"
    queries = append_to(longer, "imagefolder", path=more, all_in=["query"])
    assert queries.splits["query"] == 4
    unknown = folders(tmp_path / "c", "fox/1.jpg")
    with pytest.raises(DataError, match="classes are not in the manifest, the first is 'fox'"):
        append_to(queries, "imagefolder", path=unknown)
    with pytest.raises(ManifestError, match="holds image, the new rows are features"):
        append_to(queries, "digits", modality="features")
    assert Manifest.open(manifest.uri).sha256 == queries.sha256


def test_pictures_of_a_manifest_decode(tmp_path):
    manifest = make_manifest("digits", str(tmp_path / "m"))
    assert manifest.splits == {"train": 1000, "query": 197, "database": 1600}
    pictures = fetch_images(manifest.read(stop=3))
    from sklearn.datasets import load_digits

    for picture, truth in zip(pictures, load_digits().images, strict=False):
        np.testing.assert_array_equal(decode(picture)[..., 0], np.round(truth * 255 / 16))
    features = make_manifest("digits", str(tmp_path / "f"), modality="features")
    np.testing.assert_array_equal(feature_matrix(features.read()), load_digits().data.astype(np.float32) / 16)
    np.testing.assert_array_equal(features.labels("query"), manifest.labels("query"))
