"""The job that builds an index."""

import dataclasses
import json
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch

from cluster import build_index as indexing
from cluster.build_index import IndexConfig, build_index
from cluster.encode import EncodeConfig, encode_database
from hashnet import BinaryIndex, Encoder, errors
from hashnet.data import make_manifest
from hashnet.index import tuning
from hashnet.index.kinds import KINDS
from hashnet.index.segment import KindOptions, option
from hashnet.models import build_model, save_bundle
from hashnet.run import Run
from hashnet.server import AddItems, IndexWriter, RemoveItems
from hashnet.store import write_store
from tests.support.source_files import folders


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(run folder, store, codes, ids, labels): 3,000 codes of 48 bits in 24 shards, many of them equal."""
    folder = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (700, 6), dtype=np.uint8)[rng.integers(0, 700, 3000)]
    ids = np.sort(rng.permutation(50_000)[:3000])
    labels = rng.integers(0, 7, 3000)
    store = write_store(str(folder / "codes"), codes, ids, labels, rows_per_shard=128)
    return folder, store, codes, ids, labels


def test_kinds_may_share_the_name_of_an_option(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Options(KindOptions):
        neighbours: int = option(8, "rows that are kept", low=1)

    class Other(type(KINDS["hnsw"])):
        name, options = "other", Options

    monkeypatch.setitem(KINDS, "other", Other())
    about = dataclasses.fields(dataclasses.dataclass(indexing.with_option_keys(type("Config", (), {}))))
    (shared,) = (field for field in about if field.name == "neighbours")
    assert shared.metadata["meaning"] == "hnsw: links per node (none: 32); other: rows that are kept"
    assert shared.metadata["low"] == 1


def test_the_help_says_what_every_kind_is_for():
    (kind,) = (field for field in dataclasses.fields(IndexConfig) if field.name == "kind")
    for name in KINDS:
        assert re.search(rf"\b{name}: \w+", kind.metadata["meaning"])


@pytest.mark.parametrize("kind", ["flat", "ivf", "multihash"])
def test_the_job_builds_what_the_library_builds(run, tmp_path, kind):
    folder, store, codes, _, _ = run
    made = build_index(IndexConfig(run=str(folder), kind=kind, out=str(tmp_path)))
    assert (made["rows"], made["version"]) == (3000, 1)
    index = BinaryIndex.load(tmp_path)
    assert index.search(codes[:50], 10) == BinaryIndex.build(store, kind=kind).search(codes[:50], 10)
    assert index.lineage["codes_sha256"] == store.sha256


def test_keys_of_pictures_come_with_the_hits(tmp_path):
    """From a folder through manifest, encoding and store into the index."""
    path = folders(tmp_path / "pets", *(f"{c}/{i}.jpg" for c in ("cat", "dog") for i in range(5)))
    run = Run(str(tmp_path / "run"))
    make_manifest("imagefolder", run.manifest.uri, path=path, key="path", all_in=["database"])
    torch.manual_seed(0)
    save_bundle(run.model.uri, build_model("small_cnn", 24))
    encode_database(EncodeConfig(run=run.uri, device="cpu", compile=False))
    assert run.codes.open().columns == ("key",)
    build_index(IndexConfig(run=run.uri))
    index = run.index.open()
    codes = Encoder.load(run.model.uri, "cpu-eager").encode([f"{path}/dog/{i}.jpg" for i in range(5)])
    hits = index.search(codes, 10, columns=["key"])
    keys = np.array(hits.columns["key"].to_pylist()).reshape(5, 10)
    assert set(keys[0]) == {f"{c}/{i}.jpg" for c in ("cat", "dog") for i in range(5)}
    at_zero = [set(row[far == 0]) for row, far in zip(keys, hits.distances, strict=True)]
    assert all(f"dog/{i}.jpg" in found for i, found in enumerate(at_zero))
    assert index.ids_of(["dog/0.jpg"]).tolist() == [5]


def test_job_again_changed_and_updated(run, tmp_path):
    folder, _, _, ids, _ = run
    out = str(tmp_path / "index")

    def build(**keys):
        return build_index(IndexConfig(run=str(folder), out=out, **keys))

    assert not build()["reused"]
    assert build()["reused"]
    assert build(kind="ivf", nlist=16)["version"] == 2
    tuned = build(kind="ivf", nlist=16, recall=0.9)
    assert tuned["tuned"]["recall"] >= 0.9
    assert tuned["version"] == 3
    assert build(kind="ivf", nlist=16, recall=0.9)["reused"]
    assert build(kind="ivf", nlist=16, recall=0.9, k=50)["tuned"]["k"] == 50  # another wish
    assert build(kind="ivf", nlist=16, recall=0.9)["version"] == 5
    assert build(kind="ivf", nlist=16)["reused"]  # whatever it is tuned to
    BinaryIndex.load(out).remove(ids[:5])
    assert build(kind="ivf", nlist=16, recall=0.9)["reused"]
    merged = build(kind="flat")  # what was changed since stays changed
    assert (merged["rows"], merged["kept_items"], merged["kept_removals"]) == (2995, 0, 5)
    assert not BinaryIndex.load(out).contains(ids[:5]).any()
    fresh = build(kind="flat", overwrite=True)
    assert (fresh["rows"], fresh["version"]) == (3000, 8)
    with pytest.raises(errors.Unsupported, match="a flat index has no option 'nlist'"):
        build_index(IndexConfig(run=str(folder), out=str(tmp_path / "other"), nlist=4))
    with pytest.raises(errors.FormatError):
        build_index(IndexConfig(run=str(tmp_path / "nothing")))


def test_nprobe_counts_where_no_recall_is_requested(run, tmp_path):
    config = IndexConfig(run=str(run[0]), out=str(tmp_path), kind="ivf", nlist=16, recall=0.5)
    tuned = build_index(config)["options"]["nprobe"]
    assert build_index(dataclasses.replace(config, nprobe=tuned + 3))["reused"]
    asked = dataclasses.replace(config, recall=None, nprobe=tuned + 3)
    made = build_index(asked)
    assert (made["options"]["nprobe"], made["reused"], "tuned" in made) == (tuned + 3, False, False)
    assert build_index(asked)["reused"]


@pytest.mark.parametrize("updated_before", [False, True])
def test_what_is_written_while_it_is_built_is_kept(run, tmp_path, monkeypatch, updated_before):
    folder, _, codes, ids, _ = run
    config = IndexConfig(run=str(folder), out=str(tmp_path))
    build_index(config)
    writer = IndexWriter(str(tmp_path))
    if updated_before:
        writer.commit([AddItems(codes[:1], np.array([60_000]))])
    named = pa.table({"uri": ["b.jpg"], "key": ["b"]})
    changes = [
        AddItems(codes[:2], np.array([70_000, 70_001])),
        AddItems(codes[6:7], ids[5:6], [[3]], upsert=True),  # another code
        AddItems(codes[7:8], ids[7:8], [[int(run[4][7])]], upsert=True, columns=named),  # columns only
        RemoveItems(ids[10:12]),
    ]

    def blocks(store, labels):
        for number, block in enumerate(indexing_blocks(store, labels)):
            if number == 5:
                assert not any(isinstance(one, errors.HashnetError) for one in writer.commit(changes))
            yield block

    indexing_blocks = indexing.read_code_blocks
    monkeypatch.setattr(indexing, "read_code_blocks", blocks)
    made = build_index(dataclasses.replace(config, kind="ivf", nlist=16, recall=0.5))
    assert (made["kept_items"], made["kept_removals"]) == (4 + updated_before, 2)
    assert made["rows"] == 3000 + 2 - 2 + updated_before
    index = BinaryIndex.load(tmp_path)
    assert index.contains([70_000, 70_001]).all()
    assert index.contains([60_000]).all() == updated_before
    assert not index.contains(ids[10:12]).any()
    assert (index.codes(ids[5:6]) == codes[6:7]).all()
    assert index.labels(ids[5:6]) == [[3]]
    assert index.columns(ids[7:8]).to_pylist() == [{"uri": "b.jpg", "key": "b"}]
    (after,) = writer.commit([RemoveItems(np.array([70_000]))])  # the writer goes on with the new build
    assert (after.version, after.size) == (made["version"] + 1, made["rows"] - 1)


def test_what_is_written_while_it_is_tuned_is_kept(run, tmp_path, monkeypatch):
    config = IndexConfig(run=str(run[0]), out=str(tmp_path), kind="ivf", nlist=16)
    build_index(config)
    measured = tuning.tune

    def tune(*arguments):
        BinaryIndex.load(tmp_path).add(run[2][:1], [70_000])
        return measured(*arguments)

    monkeypatch.setattr(tuning, "tune", tune)
    made = build_index(dataclasses.replace(config, recall=0.5))
    assert (made["rows"], made["version"]) == (3001, 3)
    assert made["tuned"]["recall"] >= 0.5
    index = BinaryIndex.load(tmp_path)
    assert index.contains([70_000]).all()
    assert index.describe()["options"]["nprobe"] == made["tuned"]["nprobe"]


def test_updates_of_another_model_that_come_late_are_not_overwritten(run, tmp_path, monkeypatch):
    config = IndexConfig(run=str(run[0]), out=str(tmp_path))
    older = BinaryIndex.from_arrays(run[2], run[3], lineage={"model_sha256": "of another model"})
    older.save(tmp_path)

    def blocks(store, labels):
        older.remove(run[3][:1])
        return indexing_blocks(store, labels)

    indexing_blocks = indexing.read_code_blocks
    monkeypatch.setattr(indexing, "read_code_blocks", blocks)
    with pytest.raises(errors.LineageMismatch, match=r"would lose these updates.*overwrite=true"):
        build_index(config)
    assert len(BinaryIndex.load(tmp_path)) == 2999
    monkeypatch.undo()
    assert build_index(dataclasses.replace(config, overwrite=True))["rows"] == 3000


def test_options_beyond_the_rows_are_the_same_again(tmp_path):
    codes = np.random.default_rng(0).integers(0, 256, (60, 2), dtype=np.uint8)
    write_store(str(tmp_path / "codes"), codes)
    config = IndexConfig(run=str(tmp_path), kind="ivf", nlist=1000, nprobe=500)
    assert build_index(config)["options"] == {"nlist": 60, "nprobe": 60, "seed": 0}
    again = build_index(config)
    assert (again["version"], again["reused"]) == (1, True)
    assert not build_index(dataclasses.replace(config, nprobe=59))["reused"]


@pytest.mark.parametrize("text", ["", "{", '{"kind": "index", "format_version": 1}', None])
def test_a_damaged_index_json_is_replaced_when_asked_to(run, tmp_path, text):
    config = IndexConfig(run=str(run[0]), out=str(tmp_path))
    build_index(config)
    about = tmp_path / "index.json"
    about.write_text(about.read_text().replace("3000", "2999") if text is None else text)
    with pytest.raises(errors.FormatError):
        build_index(config)
    assert build_index(dataclasses.replace(config, overwrite=True))["rows"] == 3000
    assert len(BinaryIndex.load(tmp_path)) == 3000


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"format_version": 99}, "format version 99.*upgrade hashnet"),
        ({"kind": "other"}, "not a hashnet index"),
    ],
)
def test_what_is_newer_or_foreign_is_refused_before_building(run, tmp_path, monkeypatch, values, sentence):
    config = IndexConfig(run=str(run[0]), out=str(tmp_path), overwrite=True)
    build_index(config)
    about = tmp_path / "index.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | values))
    kept = about.read_bytes()
    monkeypatch.setattr(indexing.BinaryIndex, "from_blocks", None)  # not reached
    with pytest.raises(errors.FormatError, match=sentence):
        build_index(config)
    assert about.read_bytes() == kept


def test_a_damaged_index_is_built_again_as_its_error_says(run, tmp_path):
    config = IndexConfig(run=str(run[0]), out=str(tmp_path))
    build_index(config)
    (file,) = tmp_path.glob("*.faiss")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(errors.FormatError, match=r"truncated or changed.*overwrite=true"):
        build_index(config)
    assert build_index(dataclasses.replace(config, overwrite=True))["version"] == 2
    assert len(BinaryIndex.load(tmp_path)) == 3000


def test_the_job_prints_one_json_line(run, repo, tmp_path):
    folder = run[0]
    command = [sys.executable, str(repo / "jobs" / "build_index.py"), f"run={folder}", "kind=multihash"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kind"] == "multihash"
    assert result["index"] == f"{folder}/index"
    wrong = subprocess.run([*command[:2], "kind=flatt"], capture_output=True, text=True, cwd=tmp_path)
    assert wrong.returncode == 2
    assert "did you mean flat?" in wrong.stderr
    assert "run is required" in wrong.stderr
