"""Encoder: whatever form a picture comes in, it gets the same code."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

import hashnet
from hashnet.codes import pack_signs
from hashnet.errors import BadImage, CodeError, DataError, FormatError, ModelError, StorageError
from hashnet.models.bundle import save_bundle
from hashnet.models.hash_model import build_model


def pictures(n: int) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, size=(40, 52, 3), dtype=np.uint8)) for _ in range(n)]


def encoded(picture: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def png(picture: Image.Image) -> bytes:
    return encoded(picture, "PNG")


@pytest.fixture(scope="module")
def image_encoder(tmp_path_factory):
    torch.manual_seed(0)
    folder = str(tmp_path_factory.mktemp("model"))
    save_bundle(folder, build_model("small_cnn", 48))
    return hashnet.Encoder.load(folder, engine="cpu-eager")


@pytest.fixture(scope="module")
def feature_encoder(tmp_path_factory):
    torch.manual_seed(0)
    folder = str(tmp_path_factory.mktemp("model"))
    save_bundle(folder, build_model("features", 16, n_features=5))
    return hashnet.Encoder.load(folder)


def test_every_form_of_a_picture_gives_the_same_code(image_encoder, tmp_path):
    several = pictures(3)
    wanted = image_encoder.encode(several)
    assert wanted.shape == (3, 6)
    assert wanted.dtype == np.uint8
    data = [png(picture) for picture in several]
    paths = []
    for i, each in enumerate(data):
        paths.append(tmp_path / f"{i}.png")
        paths[-1].write_bytes(each)
    pixels = np.stack([image_encoder.preprocess.eval(each) for each in data])
    for form in (
        data, paths, [str(path) for path in paths], pixels, torch.from_numpy(pixels),
        list(pixels), list(torch.from_numpy(pixels)), (data[0], paths[1], several[2]),
    ):  # fmt: skip
        assert np.array_equal(image_encoder.encode(form), wanted)
    for one in (
        several[0], data[0], bytearray(data[0]), memoryview(data[0]), paths[0], str(paths[0]), pixels[0],
    ):  # fmt: skip
        assert np.array_equal(image_encoder.encode(one), wanted[:1])


def test_a_pil_picture_is_what_its_file_is(image_encoder):
    """Turned by EXIF, in any mode that Pillow opens, and broken: as from bytes."""
    picture = pictures(1)[0]
    exif = Image.Exif()
    exif[0x0112] = 6
    jpegs = [
        encoded(picture, "JPEG", exif=exif),
        encoded(picture.convert("CMYK"), "JPEG"),
        encoded(picture.convert("L"), "JPEG"),
    ]
    from_bytes = image_encoder.logits(jpegs)
    assert np.array_equal(image_encoder.logits([Image.open(io.BytesIO(each)) for each in jpegs]), from_bytes)
    assert not np.array_equal(from_bytes[0], image_encoder.logits(encoded(picture, "JPEG"))[0])
    with pytest.raises(BadImage, match="picture 1") as error:
        image_encoder.encode([picture, Image.open(io.BytesIO(jpegs[0][:-200]))])
    assert error.value.reason == "corrupt"
    opened = Image.open(io.BytesIO(encoded(picture.resize((800, 600)), "JPEG")))
    image_encoder.encode(opened)
    assert opened.size == (800, 600)  # the caller's picture is left as it was


def test_pixels_in_any_memory_order(image_encoder):
    """A full batch is not copied for padding, so that its strides once came as far as torch."""
    n, crop = image_encoder.batch_rows, image_encoder.preprocess.crop
    pixels = np.random.default_rng(0).integers(0, 256, (n, 3, crop, crop), dtype=np.uint8)
    wanted = image_encoder.encode(pixels)
    assert np.array_equal(image_encoder.encode(pixels[::-1])[::-1], wanted)
    assert np.array_equal(image_encoder.encode(pixels[::-1].copy()[::-1]), wanted)


def test_codes_are_the_signs_of_the_logits(image_encoder):
    several = pictures(4)
    assert np.array_equal(image_encoder.encode(several), pack_signs(image_encoder.logits(several)))
    assert image_encoder.features(several).shape == (4, image_encoder.n_features)


def test_what_it_says_about_itself(image_encoder):
    assert (image_encoder.n_bits, image_encoder.modality, image_encoder.engine) == (48, "image", "cpu-eager")
    assert set(image_encoder.lineage) == {
        "model_sha256", "preprocess_version", "engine", "dtype", "batch_rows", "bit_order", "versions",
    }  # fmt: skip


def test_a_mirrored_picture_has_the_same_code_where_both_are_averaged(tmp_path):
    folders, encoders = {}, {}
    for averaged in (False, True):
        torch.manual_seed(0)
        model = build_model("small_cnn", 16, average_flip=averaged or None)
        folders[averaged] = str(tmp_path / f"{averaged}")
        save_bundle(folders[averaged], model)
        encoders[averaged] = hashnet.Encoder.load(folders[averaged])
    pixels = np.random.default_rng(0).integers(0, 256, (40, 3, 32, 32), dtype=np.uint8)
    mirrored = pixels[..., ::-1]
    plain, both = encoders[False], encoders[True]
    wanted = (plain.features(pixels) + plain.features(mirrored)) / 2
    np.testing.assert_array_equal(both.features(pixels), wanted)
    np.testing.assert_array_equal(both.features(mirrored), wanted)
    np.testing.assert_array_equal(both.logits(pixels), plain.head(wanted))
    assert not np.array_equal(both.encode(pixels), plain.encode(pixels))
    # codes of the two must never be mixed: another bundle, and named in the lineage
    assert both.model_sha256 != plain.model_sha256
    assert both.lineage["average_flip"] is True
    assert "average_flip" not in plain.lineage


def test_no_pictures_no_codes(image_encoder, feature_encoder):
    assert image_encoder.encode([]).shape == (0, 6)
    assert feature_encoder.encode(np.zeros((0, 5))).shape == (0, 2)


def test_a_bad_picture_is_named(image_encoder):
    good = png(pictures(1)[0])
    with pytest.raises(BadImage, match="picture 1") as error:
        image_encoder.encode([good, b""])
    assert error.value.reason == "empty"
    with pytest.raises(DataError, match="picture 0 is a int"):
        image_encoder.encode([3])
    with pytest.raises(DataError, match=r"uint8 \(n, 3, 32, 32\), got uint8 \(1, 3, 40, 40\)"):
        image_encoder.encode(np.zeros((1, 3, 40, 40), np.uint8))
    with pytest.raises(DataError, match="got float32"):
        image_encoder.encode(np.zeros((1, 3, 32, 32), np.float32))
    with pytest.raises(StorageError, match="does not exist"):
        image_encoder.encode("/nowhere/cat.jpg")


def test_features_come_in_any_number_type(feature_encoder):
    rows = np.random.default_rng(0).integers(-5, 5, size=(7, 5))
    wanted = feature_encoder.encode(rows.astype(np.float32))
    for form in (rows, rows.astype(np.float64), torch.from_numpy(rows), rows.tolist()):
        assert np.array_equal(feature_encoder.encode(form), wanted)
    assert np.array_equal(feature_encoder.encode(rows[0]), wanted[:1])


def test_wrong_features_are_named(feature_encoder):
    with pytest.raises(ModelError, match=r"takes feature rows \(n, 5\), got float64 \(2, 4\)"):
        feature_encoder.encode(np.zeros((2, 4)))
    with pytest.raises(CodeError, match="feature rows are not an array: their rows differ in length"):
        feature_encoder.encode([[1.0, 2.0], [3.0]])
    rows = np.zeros((3, 5))
    rows[1, 2] = np.nan
    with pytest.raises(DataError, match="feature row 1 holds NaN"):
        feature_encoder.encode(rows)


def test_no_model_no_encoder(tmp_path):
    with pytest.raises(FormatError, match="holds no model"):
        hashnet.Encoder.load(str(tmp_path))


@pytest.mark.parametrize("hidden", [None, 8])
def test_features_and_head_make_the_logits_of_vectors(tmp_path, hidden):
    """Vectors are centred and scaled once, also where their features are stored beside their codes."""
    torch.manual_seed(0)
    model = build_model("features", 16, n_features=6, hidden=hidden)
    model.set_scaling(torch.full((6,), 5.0), 3.0)
    save_bundle(str(tmp_path), model)
    encoder = hashnet.Encoder.load(str(tmp_path))
    rows = np.random.default_rng(0).normal(5, 3, (9, 6)).astype(np.float32)
    np.testing.assert_allclose(encoder.head(encoder.features(rows)), encoder.logits(rows), atol=1e-5)
