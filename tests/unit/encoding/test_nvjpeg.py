"""The engine cuda-nvjpeg, with torchvision's decoder on the CPU in place of the GPU's: the same call."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from hashnet import Encoder
from hashnet.data import Preprocess, is_plain_jpeg
from hashnet.data.writer import SourceRows, write_manifest
from hashnet.encoding import RowReader, choose_engine, encode_rows, picture_rows, shard_tasks
from hashnet.encoding import engines as engines
from hashnet.encoding.engines import EngineSpec
from hashnet.encoding.nvjpeg import JpegDecoder
from hashnet.errors import BadImage, LineageMismatch, ModelError
from hashnet.models import build_model, save_bundle
from hashnet.store import PlannedPart, StorePlan, StoreWriter, check_plan

SMALL = Preprocess(resize=32, crop=24)


def encoded(seed: int, kind: str = "JPEG", size: tuple[int, int] = (40, 50), mode: str = "RGB", **options):
    """A smooth picture that no other seed has, so that decoders agree within rounding."""
    coarse = np.random.default_rng(seed).integers(0, 256, size=(3, 4, 3), dtype=np.uint8)
    picture = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).convert(mode)
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def upside_down() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 3
    return encoded(7, exif=exif)


PLAIN = {
    "colour": encoded(0, quality=95, subsampling=0),
    "halved colour": encoded(1, quality=95),
    "gray": encoded(2, mode="L", quality=95),
    "progressive": encoded(3, progressive=True, quality=95),
    "wide": encoded(4, size=(300, 33), quality=95),
}
OTHERS = {
    "png": encoded(5, "PNG"),
    "cmyk": encoded(6, mode="CMYK"),
    "upside down": upside_down(),
    "RGB, not YCbCr": encoded(8, keep_rgb=True),
    "twice the size": encoded(9, size=(64, 70)),
}
BAD = {
    "truncated": encoded(10)[:-40],
    "empty": b"",
    "no picture": b"no picture",
    "not there": BadImage("missing", "nowhere"),
    "only the ends of one": b"\xff\xd8 and \xff\xd9",
}


def decoder(decode=None) -> JpegDecoder:
    found = JpegDecoder(SMALL, device="cpu")
    if decode is not None:
        found._decode = decode
    return found


@pytest.mark.parametrize("name", PLAIN)
def test_plain_jpegs_are_for_the_gpu(name):
    assert is_plain_jpeg(PLAIN[name], SMALL)


@pytest.mark.parametrize("name", OTHERS | BAD)
def test_whatever_else_is_not(name):
    assert not is_plain_jpeg((OTHERS | BAD)[name], SMALL)


def test_every_picture_comes_out_at_its_place_and_the_bad_ones_say_why():
    order = np.random.default_rng(0).permutation(90) % 15
    kinds = [*PLAIN.values(), *OTHERS.values(), *BAD.values()]
    pictures = [kinds[i] for i in order]
    seen = []

    def decode(jpegs, mode, device):
        seen.extend(jpeg.numpy().tobytes() for jpeg in jpegs)
        return torchvision_decode(jpegs, mode=mode, device=device)

    torchvision_decode = decoder()._decode
    pixels, bad = decoder(decode).eval_many(pictures)
    wanted, why = SMALL.eval_many(pictures)
    assert {i: error.reason for i, error in bad.items()} == {i: error.reason for i, error in why.items()}
    assert sorted(seen) == sorted(data for data in pictures if data in PLAIN.values())
    difference = np.abs(pixels.astype(int) - wanted).max(axis=(1, 2, 3))
    assert difference[order < 5].max() <= 4  # of 255; another seed's picture differs by a hundred
    assert difference[order >= 5].max() == 0


def test_a_jpeg_that_the_gpu_refuses_is_decoded_on_the_cpu_and_changes_no_other():
    pictures = [encoded(seed) for seed in range(75)]
    refused = {3, 40, 41, 74}
    torchvision_decode = decoder()._decode

    def decode(jpegs, mode, device):
        if any(jpeg.numpy().tobytes() == pictures[i] for jpeg in jpegs for i in refused):
            raise RuntimeError("Failed to decode jpeg stream: 4")
        return torchvision_decode(jpegs, mode=mode, device=device)

    pixels, bad = decoder(decode).eval_many(pictures)
    assert bad == {}
    for i, data in enumerate(pictures):
        alone = SMALL.eval(data) if i in refused else decoder().eval_many([data])[0][0]
        assert np.array_equal(pixels[i], alone)


@pytest.mark.parametrize("text", ["CUDA out of memory. Tried to allocate 2 GiB", "nvjpegDecode failed: 5"])
def test_a_full_gpu_is_not_taken_for_a_bad_picture(text):
    def decode(jpegs, mode, device):
        raise RuntimeError(text)

    with pytest.raises(torch.OutOfMemoryError, match=text):
        decoder(decode).eval_many([PLAIN["colour"]])


def test_it_is_an_engine_of_its_own_on_request_and_only_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match=r"decode=nvjpeg needs a GPU, .* no CUDA device here; leave it out"):
        choose_engine("cuda-nvjpeg", "image")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert choose_engine("auto", "image")[0] == choose_engine("cuda", "image")[0] == "cuda"
    with pytest.raises(ModelError, match="takes vectors"):
        choose_engine("cuda-nvjpeg", "features")
    with pytest.raises(ModelError, match="compile=true is for the CPU"):
        choose_engine("cuda-nvjpeg", "image", compile=True)
    monkeypatch.setattr(engines, "check_nvjpeg", lambda: None)
    assert choose_engine("cuda-nvjpeg", "image") == ("cuda-nvjpeg", "as requested")
    assert EngineSpec.of("cuda-nvjpeg", "image") == EngineSpec("cuda-nvjpeg", "float16 autocast", 256)


@pytest.fixture
def run(tmp_path):
    """A folder with pictures of every sort, in the order good, other, bad, good again; and an encoder."""
    data = [*PLAIN.values(), *OTHERS.values(), *BAD.values(), *(encoded(seed) for seed in range(20, 40))]
    data = [None if isinstance(one, BadImage) else one for one in data]
    table = pa.table({"uri": [f"{i}" for i in range(len(data))], "image": pa.array(data, pa.binary())})
    rows = SourceRows(len(data), lambda a, b: table[a:b], inline=True)
    manifest = write_manifest(str(tmp_path / "manifest.parquet"), rows, np.full(len(data), 4, np.uint8))
    torch.manual_seed(0)
    save_bundle(str(tmp_path / "model"), build_model("small_cnn", 16))
    encoder = Encoder.load(str(tmp_path / "model"), "cpu-eager", batch_rows=8)
    parts = tuple(PlannedPart(part.name, part.sha256, part.rows) for part in manifest.parts)
    plan = StorePlan("codes", 16, len(data), parts, lineage=encoder.lineage)
    return str(tmp_path / "codes"), RowReader(manifest, "database"), plan, encoder, data


def test_rows_of_the_pipeline_are_the_encoders_own(run):
    _, reader, plan, encoder, data = run
    ordinary = [
        encode_rows(encoder, "codes", table)
        for task in shard_tasks(list(plan.ranges()))
        for table in picture_rows(reader, task, encoder.preprocess, 7)
    ]
    encoder._engine._decoder = JpegDecoder(encoder.preprocess, device="cpu")
    decoded = [
        table
        for task in shard_tasks(list(plan.ranges()))
        for table in picture_rows(reader, task, encoder.preprocess, 7, nvjpeg=True)
    ]
    left = pa.concat_tables(decoded)["jpeg"].to_pylist()
    assert [one for one in left if one] == [one for one in data if is_plain_jpeg(one, encoder.preprocess)]
    found = pa.concat_tables(encode_rows(encoder, "codes", table) for table in decoded)
    assert found.schema == ordinary[0].schema
    reasons = found["reason"].to_pylist()
    assert reasons == pa.concat_tables(ordinary)["reason"].to_pylist()
    assert sum(reason is not None for reason in reasons) == len(BAD)
    for code, reason, one in zip(found["code"].to_pylist(), reasons, data, strict=True):
        assert code == (bytes(2) if reason else encoder.encode([one])[0].tobytes())


def test_a_jpeg_that_turns_out_bad_on_the_gpu_is_quarantined(run, monkeypatch):
    _, reader, plan, encoder, _ = run
    encoder._engine._decoder = JpegDecoder(encoder.preprocess, device="cpu")
    tables = picture_rows(reader, shard_tasks(list(plan.ranges()))[0], encoder.preprocess, 5, nvjpeg=True)
    table = next(tables)
    wrong = PLAIN["gray"][:300] + b"\xff\xd9"
    jpegs = table["jpeg"].to_pylist()
    jpegs[2] = wrong
    table = table.set_column(table.column_names.index("jpeg"), "jpeg", pa.array(jpegs, pa.binary()))

    def decode(jpegs, mode, device):
        raise RuntimeError("nvjpegGetImageInfo failed: 3")

    encoder._engine._decoder._decode = decode
    assert encode_rows(encoder, "codes", table)["reason"].to_pylist() == [None, None, "corrupt", None, None]


def test_codes_of_two_engines_are_not_mixed(run):
    uri, _, plan, encoder, _ = run
    lineage = encoder.lineage | {"engine": "cuda"}
    plan = StorePlan("codes", 16, plan.rows_per_shard, plan.parts, lineage=lineage)
    StoreWriter(uri, plan).begin()
    other = StorePlan(
        "codes", 16, plan.rows_per_shard, plan.parts, lineage=lineage | {"engine": "cuda-nvjpeg"}
    )
    with pytest.raises(LineageMismatch, match="cuda-nvjpeg"):
        check_plan(uri, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nvjpeg_and_the_cpu_see_the_same_pictures():
    choose_engine("cuda-nvjpeg", "image")
    pictures = list(PLAIN.values()) * 20
    pixels, bad = JpegDecoder(SMALL).eval_many(pictures)
    wanted, _ = SMALL.eval_many(pictures)
    assert bad == {}
    assert np.abs(pixels.astype(int) - wanted).mean() < 4
