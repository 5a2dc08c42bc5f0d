"""Building by tasks, the job, and a ShardedIndex whose actors are killed, on a real local Ray."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import ray

from cluster import build_index as indexing
from cluster.build_index import IndexConfig, build_index
from cluster.runtime import capacity, connection
from cluster.serve.sharded_index import ShardedIndex, _cut
from hashnet import BinaryIndex, errors
from hashnet.store.code_store import write_store


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


@pytest.fixture(scope="module")
def sharded(ray_local, run):
    with ShardedIndex(run[1], 2, num_cpus=0.5) as index:
        yield index


@pytest.mark.parametrize("kind", ["flat", "ivf", "multihash"])
def test_tasks_build_the_index_that_one_process_builds(ray_local, run, tmp_path, kind):
    folder, store, codes, _, _ = run
    made = build_index(IndexConfig(run=str(folder), kind=kind, out=str(tmp_path / "two"), num_workers=2))
    assert made["rows"] == 3000
    assert made["version"] == 1
    build_index(IndexConfig(run=str(folder), kind=kind, out=str(tmp_path / "one"), num_workers=0))
    files = {place: sorted((tmp_path / place).glob("*.faiss")) for place in ("one", "two")}
    assert files["one"][0].read_bytes() == files["two"][0].read_bytes()
    index = BinaryIndex.load(tmp_path / "two")
    assert index.search(codes[:50], 10) == BinaryIndex.build(store, kind=kind).search(codes[:50], 10)
    assert index.lineage["codes_sha256"] == store.sha256


def test_a_group_that_ends_every_worker_is_given_up(run, tmp_path, monkeypatch):
    """Ray repeats a task whose worker died as often as it is told; -1 is without end."""
    options = {}

    def remote(**given):
        options.update(given)
        return lambda function: SimpleNamespace(remote=function)

    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(ray, "get", lambda part: part)
    monkeypatch.setattr(connection, "connect", lambda: None)
    monkeypatch.setattr(capacity, "require", lambda stage, needs: None)
    made = build_index(IndexConfig(run=str(run[0]), out=str(tmp_path / "index"), num_workers=2))
    assert made["rows"] == 3000
    assert 0 < options["max_retries"] < 100


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
    with pytest.raises(errors.LineageMismatch, match=r"was updated 1 times.*overwrite=true"):
        build(kind="flat")
    fresh = build(kind="flat", overwrite=True)
    assert (fresh["rows"], fresh["version"]) == (3000, 7)
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


def test_sharded_equals_one_index(sharded, run):
    _, store, codes, ids, _ = run
    one = BinaryIndex.build(store)
    queries = codes[:30]
    for k in (1, 10, 3001):
        assert sharded.search(queries, k) == one.search(queries, k)
    assert sharded.search_radius(queries, 4) == one.search_radius(queries, 4)
    for where in (ids[::3], {"labels": [2, 5]}):
        assert sharded.search(queries, 9, where=where) == one.search(queries, 9, where=where)
    own = ids[:30].copy()
    own[3] = -1
    assert sharded.search(queries, 9, exclude_self=own) == one.search(queries, 9, exclude_self=own)
    about = sharded.describe()
    assert about["rows"] == len(sharded) == 3000
    assert sum(about["slices"]) == 3000
    assert max(about["slices"]) - min(about["slices"]) <= 128
    assert about["engine"] == "kernel"
    assert sharded.missing() == []


def test_sharded_mistakes(sharded, run, ray_local):
    _, store, codes, _, _ = run
    wide = np.zeros((1, 8), np.uint8)
    for call, kind, sentence in [
        (lambda: sharded.search(wide), errors.IndexMismatch, "48 bits, the query has 64"),
        (lambda: sharded.search(codes, 0), errors.IndexMismatch, "k must be a whole number of at least 1"),
        (lambda: sharded.search(codes, where={"labels": 99}), errors.IndexMismatch, "label 99"),
        (lambda: sharded.search(codes[:1], exclude_self=[49_999_999]), errors.UnknownId, "no id 49999999"),
        (lambda: sharded.search(codes, on_missing="ignore"), errors.IndexMismatch, "wait or raise"),
        (lambda: ShardedIndex(store, 99), errors.ClusterError, "between 1 and 24"),
        (lambda: ShardedIndex(store, 2, kind="tree"), errors.Unsupported, "one of flat"),
        (lambda: ShardedIndex(store, 2, num_cpus=500), errors.ClusterError, "can fit"),
    ]:
        with pytest.raises(kind, match=sentence):
            call()


def test_slices_hold_rows():
    assert _cut([0, 5], 1) == [[1]]
    assert _cut([4, 0, 0, 4, 0], 2) == [[0], [3]]
    assert _cut([1, 9, 1, 1], 3) == [[0, 1], [2], [3]]
    rng = np.random.default_rng(0)
    for _ in range(200):
        rows = rng.choice([0, 0, 1, 7, 100], 12).tolist()
        filled = [number for number, held in enumerate(rows) if held]
        for n_slices in range(1, len(filled) + 1):
            slices = _cut(rows, n_slices)
            assert len(slices) == n_slices
            assert all(slices)
            assert [number for slice_ in slices for number in slice_] == filled


def test_a_store_with_too_few_rows_is_told_without_ray(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "connect", None)  # not reached
    empty = write_store(str(tmp_path / "empty"), np.zeros((0, 2), np.uint8))
    with pytest.raises(errors.DataError, match="empty has 0 rows; encode some first"):
        ShardedIndex(empty, 1)
    store = write_store(str(tmp_path / "codes"), np.zeros((4, 2), np.uint8), rows_per_shard=2)
    store.shards[0] = dataclasses.replace(store.shards[0], rows=0)  # as if all its pictures were bad
    with pytest.raises(errors.ClusterError, match=r"between 1 and 1 .* that hold rows\), got 2"):
        ShardedIndex(store, 2)


def _kill(ray, actor):
    """SIGKILL to the actor's process, as the out-of-memory killer would."""
    os.kill(ray.get(actor.describe.remote())["pid"], signal.SIGKILL)


def test_a_killed_slice_is_rebuilt_and_never_left_out(sharded, run, ray_local):
    _, store, codes, _, _ = run
    expected = BinaryIndex.build(store).search(codes[:20], 50)
    assert sharded.search(codes[:20], 50) == expected
    # told at once: the slice is named, nothing is returned
    _kill(ray_local, sharded._actors[1])
    told = ""
    while not told:  # until Ray has noticed; an answer given before that is whole
        try:
            assert sharded.search(codes[:20], 50, on_missing="raise") == expected
        except errors.ClusterError as error:
            told = str(error)
    assert "1 of 2 slices of the index did not respond, so the search has no result: slice 1" in told
    # waiting: the answer is whole once the slice is back
    assert sharded.search(codes[:20], 50) == expected
    for number in (0, 1, 0):
        _kill(ray_local, sharded._actors[number])
        assert sharded.search(codes[:20], 50) == expected
        assert sharded.search_radius(codes[:2], 5) == BinaryIndex.build(store).search_radius(codes[:2], 5)


def test_a_slice_that_cannot_come_back_is_named(ray_local, run, tmp_path):
    _, _, codes, ids, _ = run
    store = write_store(str(tmp_path / "codes"), codes, ids, rows_per_shard=1000)
    with ShardedIndex(store, 2, num_cpus=0.25) as index:
        write_store(str(tmp_path / "codes"), codes[::-1], ids, rows_per_shard=1000, overwrite=True)
        _kill(ray_local, index._actors[0])
        with pytest.raises(errors.ClusterError, match=r"slice 0 .*no longer has shard"):
            index.search(codes[:3], 5, timeout_s=60)
    with pytest.raises(errors.ClusterError, match="was closed"):
        index.search(codes[:3], 5)
