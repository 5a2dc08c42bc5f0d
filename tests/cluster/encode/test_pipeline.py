"""Encoding on a real Ray: the codes of a plain loop, resumable, whatever comes in between."""

from __future__ import annotations

import io
import logging
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch
from PIL import Image

from cluster.encode import pipeline
from cluster.encode.job import EncodeConfig, encode_database
from cluster.runtime import ray_internals, reraise_hashnet_error
from hashnet import CodeStore, Encoder, Manifest
from hashnet.data import Preprocess
from hashnet.data.writer import SourceRows, append_rows, write_manifest
from hashnet.errors import (
    ConfigError,
    DataError,
    FormatError,
    HashnetError,
    LineageMismatch,
    StorageError,
    TooManyBad,
)
from hashnet.models.bundle import ModelArtefact, bundle_info, save_bundle
from hashnet.models.hash_model import build_model
from hashnet.store import FeatureStore

DATABASE, QUERY = 4, 2
N = 640


def jpeg(seed: int) -> bytes:
    file = io.BytesIO()
    small = np.random.default_rng(seed).integers(0, 256, size=(5, 6, 3), dtype=np.uint8)
    Image.fromarray(small).resize((42, 36)).save(file, "JPEG")
    return file.getvalue()


def picture_rows(folder, seeds) -> SourceRows:
    """Files on disk, so that one can be broken and repaired."""
    folder.mkdir(exist_ok=True)
    paths = []
    for seed in seeds:
        path = folder / f"{seed}.jpg"
        path.write_bytes(jpeg(seed))
        paths.append(str(path))
    table = pa.table({"uri": paths})
    labels = pa.array([[seed % 3] for seed in seeds], pa.list_(pa.int32()))
    return SourceRows(len(paths), lambda a, b: table[a:b], labels=labels, n_classes=3)


@pytest.fixture
def run(tmp_path):
    """A run folder with a model and a manifest of N pictures; every tenth is a query, three are bad."""
    rows = picture_rows(tmp_path / "images", range(N))
    images = tmp_path / "images"
    (images / "11.jpg").write_bytes(b"")
    (images / "12.jpg").write_bytes(jpeg(12)[:200])
    (images / "13.jpg").unlink()
    flags = np.where(np.arange(N) % 10 == 0, QUERY, DATABASE).astype(np.uint8)
    write_manifest(str(tmp_path / "run" / "manifest.parquet"), rows, flags)
    torch.manual_seed(0)
    save_bundle(str(tmp_path / "run" / "model"), build_model("small_cnn", 32))
    return tmp_path / "run"


@pytest.fixture
def feature_run(tmp_path):
    """A run folder with a model and 5,000 feature rows; row 70 holds NaN."""
    values = np.random.default_rng(0).normal(size=(5000, 12)).astype(np.float32)
    values[70, 3] = np.nan
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 12)
    table = pa.table({"uri": pa.nulls(5000, pa.string()), "feature": column})
    rows = SourceRows(5000, lambda a, b: table[a:b], modality="features", n_features=12)
    write_manifest(str(tmp_path / "run" / "manifest.parquet"), rows, np.full(5000, DATABASE, np.uint8))
    torch.manual_seed(0)
    save_bundle(str(tmp_path / "run" / "model"), build_model("features", 32, n_features=12))
    return tmp_path / "run", values


def config(run, **changes) -> EncodeConfig:
    """Settings for Ray, whose actors take chunks of rows."""
    return replace(config_without_ray(run), chunk_rows=32, **changes)


def config_without_ray(run, **changes) -> EncodeConfig:
    """So few rows are encoded in this process, a second instead of the ten that actors need to start."""
    return EncodeConfig(run=str(run), rows_per_shard=100, device="cpu", compile=False, **changes)


def shard_files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


def loop(run, manifest: Manifest) -> dict[int, bytes]:
    """The oracle: the same engine over one file after the other, in this process."""
    encoder = Encoder.load(str(run / "model"), engine="cpu-eager")
    rows = manifest.read("database", columns=["row_id", "uri"]).to_pylist()
    good = [row for row in rows if row["row_id"] not in (11, 12, 13)]
    codes = encoder.encode([row["uri"] for row in good])
    return {row["row_id"]: code.tobytes() for row, code in zip(good, codes, strict=True)}


def codes_of(store: CodeStore) -> dict[int, bytes]:
    ids = store.ids().tolist()
    assert len(set(ids)) == len(ids)
    return dict(zip(ids, [code.tobytes() for code in store.codes()], strict=True))


def test_pictures_resume_repair_and_append(ray_local, run, tmp_path):
    """One story on one run folder: actors encode first, and fill a gap; then this process goes on."""
    result = encode_database(config(run))
    wanted = loop(run, Manifest.open(str(run / "manifest.parquet")))
    store = CodeStore.open(str(run / "codes"))
    assert codes_of(store) == wanted
    assert (result["rows"], result["bad_rows"], result["shards"]) == (573, 3, 6)
    assert result["bad_reasons"] == {"corrupt": 1, "empty": 1, "missing": 1}
    assert result["distinct_codes"] == len(set(wanted.values()))
    assert result["actors"] == 2
    first = shard_files(run / "codes")

    # A crash between shard and record, and one before a shard: only those two are made again, now by one
    # actor and in other chunks, and come out the same.
    (run / "codes" / "_records" / "codes-00002.json").unlink()
    (run / "codes" / "codes-00004.parquet").unlink()
    (run / "codes" / "_SUCCESS").unlink()
    untouched = (run / "codes" / "codes-00001.parquet").stat().st_mtime_ns
    again = encode_database(replace(config(run, num_actors=1), chunk_rows=77))
    assert (again["rows_encoded_now"], again["actors"]) == (200, 1)
    assert shard_files(run / "codes") == first
    assert (run / "codes" / "codes-00001.parquet").stat().st_mtime_ns == untouched

    # Two of the three bad pictures are repaired: an extra shard, the others as they were.
    for seed in (11, 12):
        (tmp_path / "images" / f"{seed}.jpg").write_bytes(jpeg(seed))
    result = encode_database(config_without_ray(run, only_failed=True))
    assert (result["rows"], result["bad_rows"], result["shards"]) == (575, 1, 7)
    assert result["bad_reasons"] == {"missing": 1}
    store = CodeStore.open(str(run / "codes"))
    assert store.shards[-1].repair
    assert store.quarantine()["row_id"].to_pylist() == [13]
    encoder = Encoder.load(str(run / "model"), engine="cpu-eager")
    for seed in (11, 12):
        wanted[seed] = encoder.encode(str(tmp_path / "images" / f"{seed}.jpg"))[0].tobytes()
    assert codes_of(store) == wanted
    assert {name: data for name, data in shard_files(run / "codes").items() if "mended" not in name} == first

    # A part appended to the manifest becomes new shards.
    manifest = Manifest.open(str(run / "manifest.parquet"))
    more = picture_rows(tmp_path / "images", range(N, N + 110))
    append_rows(manifest, more, np.full(110, DATABASE, np.uint8))
    result = encode_database(config_without_ray(run))
    assert (result["rows"], result["rows_encoded_now"], result["shards"]) == (685, 110, 9)
    now = shard_files(run / "codes")
    assert all(now[name] == data for name, data in first.items())
    assert CodeStore.open(str(run / "codes")).ids()[-3:].tolist() == [N + 109, 11, 12]
    assert set(codes_of(CodeStore.open(str(run / "codes")))) == set(wanted) | set(range(N, N + 110))


def test_features_are_the_loop(ray_local, feature_run, monkeypatch):
    run, values = feature_run
    counted: dict[str, int] = {}

    def count(name, n, **tags):
        assert (name, tags["run"], tags["stage"]) == ("images", "run", "encode")
        counted[tags["status"]] = counted.get(tags["status"], 0) + n

    monkeypatch.setattr("cluster.runtime.telemetry.count", count)
    handler = logging.NullHandler()  # somebody else's: only Ray's own is made quiet
    monkeypatch.setattr(
        logging.getLogger("ray.data"), "handlers", [*logging.getLogger("ray.data").handlers, handler]
    )
    result = encode_database(EncodeConfig(run=str(run), rows_per_shard=700, num_actors=2))
    assert handler.level == logging.NOTSET
    assert counted == {"ok": 4999, "not_finite": 1}
    encoder = Encoder.load(str(run / "model"))
    good = [i for i in range(5000) if i != 70]
    store = CodeStore.open(str(run / "codes"))
    assert np.array_equal(store.ids(), good)
    assert np.array_equal(store.codes(), encoder.encode(values[good]))
    assert result["bad_reasons"] == {"not_finite": 1}
    assert store.labels() is None


def test_a_killed_encoder_actor_loses_nothing(ray_local, run, tmp_path):
    """Features, this time: they take the way of codes."""
    killed = []

    def kill_one() -> None:
        """Once the first shard is there, an encoder actor dies."""
        while not list((tmp_path / "chaos" / "_records").glob("*.json")):
            time.sleep(0.02)
        for process in psutil.process_iter(["cmdline"]):
            if "PictureEncoder" in " ".join(process.info["cmdline"] or []) and is_ours(process):
                process.send_signal(signal.SIGKILL)
                killed.append(process.pid)
                return

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    result = encode_database(
        replace(config(run, out=str(tmp_path / "chaos")), output="features", chunk_rows=8)
    )
    killer.join()
    assert killed
    store = FeatureStore.open(str(tmp_path / "chaos"))
    assert (result["output"], len(store), store.n_features) == ("features", 573, 512)
    rows = (
        Manifest.open(str(run / "manifest.parquet")).read("database", columns=["row_id", "uri"]).to_pylist()
    )
    good = [row for row in rows if row["row_id"] not in (11, 12, 13)]
    assert store.ids().tolist() == [row["row_id"] for row in good]
    encoder = Encoder.load(str(run / "model"), engine="cpu-eager")
    wanted = encoder.features([row["uri"] for row in good])
    assert np.array_equal(store.features(), wanted.astype(np.float16))
    store.verify()
    assert core_lines("has constructor arguments in the object store") == []


def core_lines(words: str) -> list[str]:
    """Lines with these words in what Ray's core has logged in this process."""
    folder = Path(ray_internals.log_folder() or "")
    logs = [path.read_text() for path in folder.glob(f"python-core-driver-*_{os.getpid()}.log")]
    assert logs
    return [line for text in logs for line in text.splitlines() if words in line]


def is_ours(process: psutil.Process) -> bool:
    """Whether the process belongs to the Ray this test process started, and to no other on the machine."""
    try:
        return any(parent.pid == os.getpid() for parent in process.parents())
    except psutil.NoSuchProcess:
        return False


def test_too_many_bad_rows_fail_at_the_end_and_another_model_is_refused(run):
    with pytest.raises(
        TooManyBad, match=r"3 of 576 rows \(0.52%\) are bad, max_bad_fraction allows 0.10%"
    ) as error:
        encode_database(config_without_ray(run, max_bad_fraction=0.001))
    assert error.value.exit_code == 1
    assert not (run / "codes" / "_SUCCESS").exists()
    assert len(shard_files(run / "codes")) == 6
    with pytest.raises(FormatError, match="not complete: 6 of 6"):
        CodeStore.open(str(run / "codes"))
    assert (
        encode_database(config_without_ray(run))["rows_encoded_now"] == 0
    )  # within the default: the same shards count
    assert len(CodeStore.open(str(run / "codes"))) == 573

    torch.manual_seed(1)
    old = Encoder.load(str(run / "model"), engine="cpu-eager").model_sha256
    new = save_bundle(str(run / "model"), build_model("small_cnn", 32))
    with pytest.raises(LineageMismatch, match=f"model_sha256 '{old}', requested is '{new}'"):
        encode_database(config_without_ray(run))
    save_bundle(str(run / "model"), build_model("small_cnn", 64))
    with pytest.raises(LineageMismatch, match="n_bits 32, requested is 64"):
        encode_database(config_without_ray(run))


def test_what_does_not_fit_is_refused_with_both_values(run, tmp_path, monkeypatch):
    """None of this starts Ray."""
    monkeypatch.setattr("cluster.runtime.connection.connect", lambda *_: pytest.fail("Ray was started"))
    plan = encode_database(config(run, dry_run=True))
    assert (plan["rows"], plan["shards"], plan["shards_done"], plan["shards_to_do"]) == (576, 6, 0, 6)
    assert plan["estimated_bytes"] > 576 * 4
    assert not (run / "codes").exists()
    with pytest.raises(LineageMismatch, match=r"n_bits=64 was requested, .* has 32"):
        encode_database(config(run, n_bits=64))
    with pytest.raises(ConfigError, match="has no train rows"):
        encode_database(config(run, split="train"))
    with pytest.raises(ConfigError, match="run without only_failed first"):
        encode_database(config(run, only_failed=True))
    with pytest.raises(HashnetError, match="holds no model"):
        encode_database(config(run, model=str(tmp_path)))
    with pytest.raises(DataError):
        encode_database(config(run, manifest=str(tmp_path)))
    save_bundle(str(tmp_path / "rows"), build_model("features", 32, n_features=12))
    with pytest.raises(LineageMismatch, match=r"holds image rows, but .* takes features"):
        encode_database(config(run, model=str(tmp_path / "rows")))


def test_a_folder_that_cannot_be_written_is_a_clear_error(ray_local, run, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(HashnetError, match=r"cannot .*file/codes"):
        encode_database(config(run, out=str(tmp_path / "file" / "codes")))


@pytest.mark.parametrize("kind", [pytest.param("run", marks=pytest.mark.slow), "feature_run"])
def test_a_shard_that_cannot_be_written_is_a_clear_error_and_what_is_there_stays(ray_local, request, kind):
    """As on a disk that fills up half-way: the driver writes pictures' shards, the actors write features'."""
    run = request.getfixturevalue(kind)
    run = run[0] if kind == "feature_run" else run
    out = run / "codes"
    (out / "codes-00003.parquet").mkdir(parents=True)  # not even root can write here
    with pytest.raises(StorageError, match=r"cannot write .*codes-00003\.parquet") as error:
        encode_database(config(run))
    assert "UDF" not in str(error.value)
    assert not (out / "_SUCCESS").exists()
    assert not list(out.rglob("*.tmp-*"))
    (out / "codes-00003.parquet").rmdir()
    if kind == "run":
        assert 0 < encode_database(config(run))["rows_encoded_now"] < 576
        CodeStore.open(str(out)).verify()


def test_what_an_actor_refuses_at_its_start_is_a_clear_error(ray_local, feature_run, monkeypatch):
    """The model changes between plan and actors: neither a stack trace nor a job that hangs."""
    info = bundle_info(str(feature_run[0] / "model"))
    monkeypatch.setattr(ModelArtefact, "info", lambda self: replace(info, sha256="0" * 64))
    with pytest.raises(LineageMismatch, match=f"it was {'0' * 12}, now it is {info.sha256[:12]}; run again"):
        encode_database(config(feature_run[0]))


def test_few_pictures_are_encoded_without_ray_to_the_same_bytes(run, monkeypatch, tmp_path):
    """Twice as the actors do it, once more from the features that were kept, and the bad rows again."""
    monkeypatch.setattr("cluster.runtime.connection.connect", lambda *_: pytest.fail("Ray was started"))
    few = config_without_ray(run)
    result = encode_database(few)
    assert (result["rows"], result["bad_rows"], result["actors"], result["nodes"]) == (573, 3, 1, 1)
    assert codes_of(CodeStore.open(str(run / "codes"))) == loop(run, Manifest.open(f"{run}/manifest.parquet"))
    decoded = []
    plain = Preprocess.eval
    monkeypatch.setattr(Preprocess, "eval", lambda self, data: decoded.append(data) or plain(self, data))
    encode_database(replace(few, out=str(tmp_path / "other")))
    assert shard_files(tmp_path / "other") == shard_files(run / "codes")
    assert len(decoded) == 2  # empty and truncated; the third is missing
    (tmp_path / "images" / "13.jpg").write_bytes(jpeg(13))
    repaired = encode_database(replace(few, only_failed=True))
    assert (repaired["rows"], repaired["bad_rows"], repaired["rows_encoded_now"]) == (574, 2, 3)
    few_queries = encode_database(replace(few, split="query", rows_per_shard=None, cache=str(tmp_path / "c")))
    assert few_queries["rows"] == 64
    assert len(list((tmp_path / "c").glob("features-*/*.npz"))) == 1


def test_few_feature_rows_are_encoded_without_ray(feature_run, monkeypatch):
    run, values = feature_run
    monkeypatch.setattr("cluster.runtime.connection.connect", lambda *_: pytest.fail("Ray was started"))
    result = encode_database(EncodeConfig(run=str(run), rows_per_shard=700))
    assert (result["rows"], result["bad_reasons"]) == (4999, {"not_finite": 1})
    codes = Encoder.load(f"{run}/model").encode(np.delete(values, 70, axis=0))
    assert np.array_equal(CodeStore.open(f"{run}/codes").codes(), codes)


def test_an_error_from_elsewhere_keeps_its_causes_apart():
    """It was raised from itself once, and the job that looked for the cause never ended."""
    known, strange = StorageError("full"), RuntimeError("actor died")
    with pytest.raises(RuntimeError) as error:
        reraise_hashnet_error(strange)
    assert error.value.__cause__ is None
    outer = RuntimeError("in a task")
    outer.__cause__ = known
    with pytest.raises(StorageError, match="full"):
        reraise_hashnet_error(outer)


def test_a_damaged_manifest_part_is_refused(run):
    part = run / "manifest.parquet" / "part-00000.parquet"
    data = bytearray(part.read_bytes())
    data[50] ^= 255
    part.write_bytes(data)
    with pytest.raises(FormatError, match="is damaged: its sha256"):
        encode_database(config_without_ray(run))


def test_rows_that_a_dead_committer_held_are_encoded_again(ray_local, run, tmp_path, monkeypatch, caplog):
    steps, passes, died = pipeline.run_pictures, [], tmp_path / "died"

    class DyingCommitter(pipeline.Committer):
        """Dies in its second call: the rows of the first are acknowledged, their shard is incomplete."""

        n_calls = 0

        def add(self, table):
            self.n_calls += 1
            if self.n_calls == 2 and not died.exists():
                died.touch()
                os._exit(1)
            return super().add(table)

    def counting(settings, tasks, committers):
        passes.append(len(committers))
        return steps(settings, tasks, committers)

    monkeypatch.setattr(pipeline, "Committer", DyingCommitter)
    monkeypatch.setattr(pipeline, "run_pictures", counting)
    with caplog.at_level(logging.INFO):
        result = encode_database(config(run))
    assert len(passes) >= 2
    assert "were lost with a worker; encoding them again" in caplog.text
    assert (result["rows"], result["bad_rows"], result["rows_encoded_now"]) == (573, 3, 576)
    assert codes_of(CodeStore.open(str(run / "codes"))) == loop(run, Manifest.open(f"{run}/manifest.parquet"))
