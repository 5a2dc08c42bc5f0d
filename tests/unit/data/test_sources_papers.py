"""The paper's data sets, CIFAR-10 and drawn pictures, on small files in the published layouts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hashnet.data.fetch import fetch_images
from hashnet.data.images import decode
from hashnet.data.sources import make_manifest, synthetic
from hashnet.errors import BadImage, DataError
from tests.support.source_files import rows_of

# --- imagenet100 ------------------------------------------------------------------------------


def ilsvrc(root, n_classes: int = 6, n_train: int = 5, n_val: int = 2, flat_val: bool = False) -> str:
    lines = ["ImageId,PredictionString"]
    number = 0
    for c in range(n_classes):
        synset = f"n{c:08d}"
        (root / "train" / synset).mkdir(parents=True)
        for i in range(n_train):
            (root / "train" / synset / f"{synset}_{i}.JPEG").touch()
        for _ in range(n_val):
            number += 1
            folder = root / "val" if flat_val else root / "val" / synset
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"ILSVRC2012_val_{number:08d}.JPEG").touch()
            lines.append(f"ILSVRC2012_val_{number:08d},{synset} 1 2 3 4 {synset} 5 6 7 8")
    (root / "LOC_val_solution.csv").write_text("\n".join(lines))
    return str(root)


@pytest.mark.parametrize("flat", [False, True])
def test_imagenet_protocol(tmp_path, flat):
    path = ilsvrc(tmp_path / "i", flat_val=flat)
    options = {"val_labels": f"{path}/LOC_val_solution.csv"} if flat else {}
    manifest = make_manifest(
        "imagenet100", str(tmp_path / "m"), path=path, n_classes=3, train_per_class=4, **options
    )
    assert manifest.splits == {"train": 12, "query": 6, "database": 15}
    assert manifest.n_classes == 3
    for uri, labels, splits in rows_of(manifest, "uri", "labels", "splits"):
        assert ("query" in splits) == ("/val/" in uri)
        if "/train/" in uri:
            assert uri.split("/")[-2] == manifest.class_names[labels[0]]
            assert "database" in splits


def test_imagenet_classes_by_list_seed_and_mistake(tmp_path):
    path = ilsvrc(tmp_path / "ILSVRC" / "Data" / "CLS-LOC")
    root = str(tmp_path)
    (tmp_path / "classes.txt").write_text("\ufeffn00000004 some fish\nn00000001\n")
    options = {"path": root, "train_per_class": 2}
    named = make_manifest("imagenet100", str(tmp_path / "a"), classes=[f"{tmp_path}/classes.txt"], **options)
    assert named.class_names == ("n00000001", "n00000004")
    chosen = [
        make_manifest(
            "imagenet100", str(tmp_path / f"s{i}{seed}"), n_classes=3, seed=seed, **options
        ).class_names
        for i, seed in enumerate((1, 1, 2))
    ]
    assert chosen[0] == chosen[1]
    assert chosen[0] != chosen[2]
    with pytest.raises(DataError, match=r"1 of 2 classes are not in .*train, the first is 'n99999999'"):
        make_manifest("imagenet100", str(tmp_path / "b"), classes=["n00000001", "n99999999"], **options)
    with pytest.raises(DataError, match="has 6 classes, the protocol needs 100"):
        make_manifest("imagenet100", str(tmp_path / "b"), path=path)
    with pytest.raises(DataError, match="class 0 has only 5 images to draw 100 training images from"):
        make_manifest("imagenet100", str(tmp_path / "b"), path=path, n_classes=3)
    with pytest.raises(DataError, match="has no train/ and val/"):
        make_manifest("imagenet100", str(tmp_path / "b"), path=str(tmp_path / "s01"), n_classes=3)
    assert not (tmp_path / "b").exists()


def test_imagenet_flat_validation_needs_labels(tmp_path):
    path = ilsvrc(tmp_path / "i", flat_val=True)
    with pytest.raises(DataError, match="is flat: give val_labels"):
        make_manifest("imagenet100", str(tmp_path / "m"), path=path, n_classes=3)
    (tmp_path / "few.txt").write_text("ILSVRC2012_val_00000001.JPEG n00000000\n")
    with pytest.raises(DataError, match=r"few.txt does not name ILSVRC2012_val_00000002.JPEG \(11 such"):
        make_manifest(
            "imagenet100", str(tmp_path / "m"), path=path, n_classes=3, val_labels=f"{tmp_path}/few.txt"
        )


# --- nuswide ----------------------------------------------------------------------------------


def nus(root, n: int = 60, concepts: tuple[str, ...] = ("sky", "dog", "sea")) -> np.ndarray:
    for folder in ("ConceptsList", "ImageList", "Groundtruth/AllLabels", "Flickr"):
        (root / folder).mkdir(parents=True)
    labels = np.random.default_rng(0).integers(0, 2, (n, len(concepts)))
    labels[:, 0] = 0  # a concept without any image must not count as the most frequent
    labels[:7] = 0  # images without any label
    (root / "ConceptsList" / "Concepts81.txt").write_text("\n".join(concepts) + "\n")
    (root / "ImageList" / "Imagelist.txt").write_text("".join(f"actor\\{i:04d}.jpg\r\n" for i in range(n)))
    for c, name in enumerate(concepts):
        text = "".join(f"{value}\n" for value in labels[:, c])
        (root / "Groundtruth" / "AllLabels" / f"Labels_{name}.txt").write_text(text)
    return labels


def test_nuswide_prunes_and_reads_columns(tmp_path):
    labels = nus(tmp_path / "n")
    manifest = make_manifest("nuswide", str(tmp_path / "m"), path=str(tmp_path / "n"), n_query=5, n_train=20)
    kept = np.flatnonzero(labels.any(axis=1))
    assert rows_of(manifest, "uri", "labels") == [
        (f"{tmp_path}/n/Flickr/actor/{i:04d}.jpg", np.flatnonzero(labels[i]).tolist()) for i in kept
    ]
    assert manifest.source["pruned_unlabelled"] == 60 - len(kept) >= 7
    assert manifest.class_names == ("sky", "dog", "sea")
    two = make_manifest(
        "nuswide", str(tmp_path / "t"), path=str(tmp_path / "n"), n_concepts=2, n_query=5, n_train=20
    )
    assert two.class_names == ("dog", "sea")


def test_nuswide_keeps_the_unlabelled_in_the_database_only(tmp_path):
    labels = nus(tmp_path / "n")
    n_labelled = int(labels.any(axis=1).sum())
    options = {"n_query": 5, "n_train": n_labelled - 5, "keep_unlabelled": True}
    manifest = make_manifest("nuswide", str(tmp_path / "m"), path=str(tmp_path / "n"), **options)
    assert (len(manifest), manifest.count("database")) == (60, 55)
    assert manifest.labels("query").any(axis=1).all()
    assert manifest.labels("train").any(axis=1).all()
    assert (~manifest.labels("database").any(axis=1)).sum() == 60 - n_labelled
    assert manifest.source["kept_unlabelled"] == 60 - n_labelled


def test_nuswide_defaults_are_the_papers(tmp_path):
    nus(tmp_path / "n")
    with pytest.raises(DataError, match="5,000 query rows were requested"):
        make_manifest("nuswide", str(tmp_path / "m"), path=str(tmp_path / "n"))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (
            "Groundtruth/AllLabels/Labels_dog.txt",
            "0\n1\n",
            "Labels_dog.txt has 2 labels, the image list has 60 images",
        ),
        (
            "Groundtruth/AllLabels/Labels_dog.txt",
            "0\n2\n",
            "Labels_dog.txt line 2: a label must be 0 or 1, got '2'",
        ),
        ("Groundtruth/AllLabels/Labels_dog.txt", None, "cannot read the labels of 'dog'"),
        ("ConceptsList/Concepts81.txt", None, r"has no Concepts81.txt or ConceptsList/Concepts81.txt"),
    ],
)
def test_nuswide_mistakes(tmp_path, file, text, message):
    nus(tmp_path / "n")
    path = tmp_path / "n" / file
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(DataError, match=message):
        make_manifest("nuswide", str(tmp_path / "m"), path=str(tmp_path / "n"))


# --- coco -------------------------------------------------------------------------------------


def instances(root, name: str = "train2014", first: int = 1, n: int = 12) -> None:
    categories = [{"id": 3, "name": "car"}, {"id": 1, "name": "person"}, {"id": 18, "name": "traffic light"}]
    images = [{"id": first + i, "file_name": f"COCO_{name}_{first + i:012d}.jpg"} for i in range(n)]
    annotations = []
    for i in range(n - 2):  # the last two have no label
        for category in ([1], [1, 1, 3], [18, 3])[i % 3]:
            annotations.append({"id": len(annotations), "image_id": first + i, "category_id": category})
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    (root / name).mkdir()
    content = {"images": images[::-1], "annotations": annotations, "categories": categories, "info": {}}
    (root / "annotations" / f"instances_{name}.json").write_text(json.dumps(content))


def test_coco_prunes_joins_files_and_orders_classes_by_id(tmp_path):
    instances(tmp_path / "c")
    instances(tmp_path / "c", "val2014", first=100)
    manifest = make_manifest("coco", str(tmp_path / "m"), path=str(tmp_path / "c"), n_query=4, n_train=10)
    assert manifest.class_names == ("person", "car", "traffic light")
    assert len(manifest) == 20
    assert manifest.source["pruned_unlabelled"] == 4
    assert rows_of(manifest, "uri", "labels")[:3] == [
        (f"{tmp_path}/c/train2014/COCO_train2014_000000000001.jpg", [0]),
        (f"{tmp_path}/c/train2014/COCO_train2014_000000000002.jpg", [0, 1]),
        (f"{tmp_path}/c/train2014/COCO_train2014_000000000003.jpg", [1, 2]),
    ]
    assert rows_of(manifest, "uri")[10] == (f"{tmp_path}/c/val2014/COCO_val2014_000000000100.jpg",)
    one = make_manifest(
        "coco", str(tmp_path / "o"), path=f"{tmp_path}/c/annotations/instances_val2014.json", images="s3://b/val",
        classes=["traffic light", "car"], n_query=1, n_train=5,
    )  # fmt: skip
    assert one.class_names == ("car", "traffic light")
    assert rows_of(one, "uri", "labels")[0] == ("s3://b/val/COCO_val2014_000000000101.jpg", [0])


def test_coco_one_file_by_its_uri(tmp_path):
    instances(tmp_path / "c")
    uri = f"file://{tmp_path}/c/annotations/instances_train2014.json?option=1"
    manifest = make_manifest("coco", str(tmp_path / "m"), path=uri, n_query=2, n_train=4)
    (first, *_) = rows_of(manifest, "uri")
    assert first[0].startswith(f"{tmp_path}/c/train2014/")
    assert first[0].endswith(".jpg")


def test_coco_mistakes(tmp_path):
    instances(tmp_path / "c")
    path = str(tmp_path / "c")
    with pytest.raises(DataError, match="5,000 query rows were requested, but there are only 10"):
        make_manifest("coco", str(tmp_path / "m"), path=path)
    with pytest.raises(
        DataError, match=r"1 of 1 classes are not in .*, the first is 'cars'; did you mean 'car'"
    ):
        make_manifest("coco", str(tmp_path / "m"), path=path, classes=["cars"])
    (tmp_path / "x.json").write_text('{"images": []}')
    with pytest.raises(DataError, match="is not an instances file of COCO: it has no 'annotations'"):
        make_manifest("coco", str(tmp_path / "m"), path=str(tmp_path / "x.json"))
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(DataError, match=r"cannot read .*x.json"):
        make_manifest("coco", str(tmp_path / "m"), path=str(tmp_path / "x.json"))
    about = json.loads((tmp_path / "c/annotations/instances_train2014.json").read_text())
    (tmp_path / "c/annotations/instances_train2014.json").write_text(
        json.dumps({**about, "images": about["images"] * 2})
    )
    with pytest.raises(DataError, match="has 12 duplicated image ids"):
        make_manifest("coco", str(tmp_path / "m"), path=path)
    (tmp_path / "c" / "train2014").rmdir()
    with pytest.raises(DataError, match="found neither train2014/ nor images/"):
        make_manifest("coco", str(tmp_path / "m"), path=path)


# --- cifar10 ----------------------------------------------------------------------------------


def test_cifar_pictures_by_reference(tmp_path):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (120, 3, 32, 32), dtype=np.uint8)
    classes = (np.arange(120) % 10).astype(np.uint8)
    for number in range(6):
        part = slice(20 * number, 20 * number + 20)
        records = np.concatenate([classes[part, None], pixels[part].reshape(20, -1)], axis=1)
        name = "test_batch.bin" if number == 5 else f"data_batch_{number + 1}.bin"
        (tmp_path / name).write_bytes(records.tobytes())
    manifest = make_manifest(
        "cifar10", str(tmp_path / "m"), path=str(tmp_path), query_per_class=2, train_per_class=5
    )
    assert manifest.splits == {"train": 50, "query": 20, "database": 100}
    np.testing.assert_array_equal(manifest.labels().argmax(1), classes)
    assert manifest.class_names[3] == "cat"
    for picture, truth in zip(fetch_images(manifest.read()), pixels, strict=True):
        np.testing.assert_array_equal(decode(picture), truth.transpose(1, 2, 0))
    with pytest.raises(DataError, match="class 0 has only 12 images to draw 100 query images"):
        make_manifest("cifar10", str(tmp_path / "n"), path=str(tmp_path))


def test_cifar_mistakes(tmp_path):
    with pytest.raises(DataError, match=r"has no data_batch_1.bin; unpack cifar-10-binary.tar.gz"):
        make_manifest("cifar10", str(tmp_path / "m"), path=str(tmp_path))
    (tmp_path / "data_batch_1.bin").write_bytes(b"\x01" * 3000)
    with pytest.raises(DataError, match="has 3,000 bytes, not a multiple of 3,073"):
        make_manifest("cifar10", str(tmp_path / "m"), path=str(tmp_path))
    (tmp_path / "data_batch_1.bin").write_bytes(b"\x01" * 3073 + b"\x63" * 3073)
    with pytest.raises(DataError, match="record 1 has class 99, CIFAR-10 has 10"):
        make_manifest("cifar10", str(tmp_path / "m"), path=str(tmp_path))


# --- synthetic --------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["inline", "tar"])
def test_synthetic_is_the_same_wherever_it_is_kept(tmp_path, store):
    options = {"n_images": 300, "n_classes": 5, "side": 16, "seed": 3}
    manifest = make_manifest("synthetic", str(tmp_path / "m.parquet"), store=store, **options)
    pictures = fetch_images(manifest.read())
    assert decode(pictures[299]).shape == (16, 16, 3)
    inside = make_manifest("synthetic", str(tmp_path / "n.parquet"), **options)
    assert pictures == fetch_images(inside.read())
    np.testing.assert_array_equal(manifest.labels(), inside.labels())
    other = make_manifest("synthetic", str(tmp_path / "o.parquet"), **options | {"seed": 4})
    assert fetch_images(other.read(stop=3)) != pictures[:3]


def test_synthetic_classes_look_alike_and_differ(tmp_path):
    """A nearest-centroid rule on raw pixels beats chance by far: there is something to learn."""
    manifest = make_manifest("synthetic", str(tmp_path / "m"), n_images=600, n_classes=6, side=16)
    pixels = np.stack([decode(p) for p in fetch_images(manifest.read())]).reshape(600, -1).astype(float)
    truth = manifest.labels().argmax(1)
    centroids = np.stack([pixels[:300][truth[:300] == c].mean(0) for c in range(6)])
    guess = ((pixels[300:, None] - centroids) ** 2).sum(-1).argmin(1)
    assert (guess == truth[300:]).mean() > 0.5


def test_synthetic_several_labels_imbalance_and_broken_pictures(tmp_path):
    manifest = make_manifest(
        "synthetic",
        str(tmp_path / "m"),
        n_images=3000,
        n_classes=8,
        side=8,
        labels_per_image=3,
        imbalance=20,
        broken=0.1,
    )
    labels = manifest.labels()
    per_image = labels.sum(1)
    assert set(per_image.tolist()) == {1, 2, 3}
    assert labels[:, 0].sum() > 8 * labels[:, 7].sum() > 0
    broken = 0
    for picture in fetch_images(manifest.read(stop=500)):
        try:
            decode(picture)
        except BadImage:
            broken += 1
    assert 25 <= broken <= 80
    single = make_manifest("synthetic", str(tmp_path / "s"), n_images=500, n_classes=3, side=8, imbalance=1)
    assert (single.labels().sum(1) == 1).all()


def test_synthetic_labels_are_the_sorted_classes_of_each_picture():
    classes = np.array([[4, 1, -1], [2, -1, -1], [-1, -1, -1], [3, 0, 5]])
    assert synthetic._label_lists(classes).to_pylist() == [[1, 4], [2], [], [0, 3, 5]]
    assert synthetic._label_lists(classes[:2, :1]).to_pylist() == [[4], [2]]
    rare = 2_000_000_000  # a byte a class and picture would not fit into memory
    assert synthetic._label_lists(np.array([[rare, 7]] * 100)).to_pylist() == [[7, rare]] * 100


def test_synthetic_leaves_foreign_pictures_alone_and_nothing_behind(tmp_path):
    (tmp_path / "m-images").mkdir()
    (tmp_path / "m-images" / "mine.txt").write_text("x")
    with pytest.raises(DataError, match="is not empty; remove it or choose another folder"):
        make_manifest("synthetic", str(tmp_path / "m.parquet"), n_images=20, side=8, store="tar")
    with pytest.raises(DataError, match="900 query rows were requested, but there are only 20"):
        make_manifest("synthetic", str(tmp_path / "n.parquet"), n_images=20, side=8, store="tar", n_query=900)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m-images"]
