"""Duplicates in files: from blocks of any size, after a crash, after rows were added."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hashnet
from hashnet.dedup import DuplicatesArtefact, DuplicatesInfo, finish, plan_tasks, refuse_too_many
from hashnet.dedup import blocks as blocks_module
from hashnet.errors import DataError, FormatError
from hashnet.store import CodeStore, write_store

N, SHARD = 1000, 100


@pytest.fixture
def store(tmp_path, clustered) -> CodeStore:
    return write_store(str(tmp_path / "codes"), clustered(N, 32), rows_per_shard=SHARD)


def find(store, out, radius=1, rows=350, max_pairs=None, against=None, run=lambda task: task.run(threads=1)):
    tasks = plan_tasks(store, against, radius, max_pairs, rows, str(out))
    records = [task.record() or run(task) for task in tasks]
    other = None if against is None else len(against)
    info = DuplicatesInfo(radius, radius, len(store), other, store.n_bits, (), 0, 0, 0, 0, "first")
    artefact = DuplicatesArtefact(str(out))
    return finish(artefact, info, records, max_pairs, {"codes": store.sha256}, lambda ids: None)


def all_pairs(found) -> list[tuple[int, int, int]]:
    table = pa.concat_tables(found.pairs())
    return sorted(tuple(row.values()) for row in table.to_pylist())


def files_of(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("rows", [100, 350, 10_000])
def test_blocks_of_any_size_find_the_pairs_of_a_loop(store, slow, tmp_path, rows):
    found = find(store, tmp_path / "out", rows=rows)
    wanted = slow(store.codes(), 1)
    assert all_pairs(found) == wanted
    assert found.info.n_at == tuple(sum(d == distance for _, _, d in wanted) for distance in (0, 1))
    assert found.info.n_pairs == len(wanted)
    table = found.clusters()
    assert set(table["row_id"].to_pylist()) == {i for pair in wanted for i in pair[:2]}
    assert table["cluster"].to_pylist() == sorted(table["cluster"].to_pylist())
    assert found.info.n_removed == len(found.removed()) == found.info.n_near - found.info.n_clusters
    assert not set(table["representative"].to_pylist()) & set(found.removed().tolist())
    assert DuplicatesArtefact(found.uri).verify() == []


def test_the_clusters_do_not_depend_on_blocks(store, tmp_path):
    one, other = (find(store, tmp_path / str(rows), rows=rows).clusters() for rows in (100, 10_000))
    assert one.equals(other)


def test_it_goes_on_after_a_crash_with_the_same_files(store, tmp_path):
    whole = find(store, tmp_path / "whole")
    done = []

    def run(task):
        if len(done) == 2 and "crash" in armed:
            armed.clear()
            raise KeyboardInterrupt
        done.append(task.name)
        return task.run()

    armed = {"crash"}
    with pytest.raises(KeyboardInterrupt):
        find(store, tmp_path / "out", run=run)
    # a damaged record and a lost file count as not done
    records = tmp_path / "out" / "_records"
    (records / "00000-00000.json").write_text("{", encoding="utf-8")
    (tmp_path / "out" / "pairs" / "00000-00001.parquet").unlink()
    found = find(store, tmp_path / "out", run=run)
    assert done[:2] == ["00000-00000", "00000-00001"]
    assert sorted(done[2:]) == sorted(task.name for task in plan_tasks(store, None, 1, None, 350, "x"))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert found.info == whole.info


def test_added_rows_join_only_what_changed(store, slow, tmp_path):
    few = CodeStore.open(store.uri)  # as it was when it had 8 shards
    few.shards, few.n_rows = few.shards[:8], 800
    find(few, tmp_path / "out", rows=300)  # blocks of 300, 300 and 200 rows
    done = []
    found = find(store, tmp_path / "out", rows=300, run=lambda task: done.append(task.name) or task.run())
    assert sorted(done) == [
        f"{i:05d}-{j:05d}" for i, j in ((0, 2), (0, 3), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3))
    ]
    assert all_pairs(found) == slow(store.codes(), 1)


def test_a_store_against_another(tmp_path, clustered):
    codes = clustered(300, 32)
    one = write_store(str(tmp_path / "one"), codes[:200], rows_per_shard=50)
    other = write_store(str(tmp_path / "other"), codes[200:], ids=np.arange(200, 300), rows_per_shard=50)
    found = find(one, tmp_path / "out", radius=2, rows=100, against=other)
    wanted = hashnet.dedup.cross_duplicates(one, other, 2)
    assert all_pairs(found) == list(
        zip(wanted.a.tolist(), wanted.b.tolist(), wanted.distances.tolist(), strict=True)
    )
    nearest = {}
    for a, b, distance in all_pairs(found):
        nearest[a] = min(nearest.get(a, (99, 0)), (distance, b))
    assert {
        row["row_id"]: (row["distance"], row["nearest"]) for row in found.matches().to_pylist()
    } == nearest
    assert found.removed().tolist() == sorted(nearest)
    assert (found.info.n_near, found.info.n_removed, found.info.n_clusters) == (len(nearest), len(nearest), 0)


@pytest.mark.parametrize("max_pairs", [0, 40, 10_000])
def test_max_pairs_cuts_the_files_and_leaves_the_clusters_whole(store, slow, tmp_path, max_pairs):
    whole = find(store, tmp_path / "whole", radius=3)
    found = find(store, tmp_path / "out", radius=3, max_pairs=max_pairs)
    assert found.clusters().equals(whole.clusters())
    assert found.info.n_at == whole.info.n_at
    within = np.cumsum(whole.info.n_at)
    complete = int((within <= max_pairs).sum()) - 1
    assert found.info.complete_radius == complete
    assert all_pairs(found) == [pair for pair in slow(store.codes(), 3) if pair[2] <= complete]


def test_too_many_pairs_are_refused_before_any_work(tmp_path, store, monkeypatch):
    monkeypatch.setattr(blocks_module, "MAX_PAIRS", 100)
    tasks = plan_tasks(store, None, 32, None, 10_000, str(tmp_path / "out"))
    with pytest.raises(
        DataError, match=r"about 499,500 pairs of 1,000 codes lie within radius 32.*max_pairs=N"
    ):
        refuse_too_many(store, None, tasks)
    equal = write_store(str(tmp_path / "equal"), np.zeros((1000, 4), np.uint8))
    tasks = plan_tasks(equal, None, 2, None, 10_000, str(tmp_path / "out"))
    with pytest.raises(DataError, match="499,500"):
        refuse_too_many(equal, None, tasks)
    refuse_too_many(equal, None, plan_tasks(equal, None, 2, 0, 10_000, "x"))  # clusters alone cost nothing
    with pytest.raises(DataError, match="about 1,000,000"):
        refuse_too_many(store, store, plan_tasks(store, store, 32, None, 10_000, "x"))


def test_damage_is_told(store, tmp_path):
    found = find(store, tmp_path / "out")
    (tmp_path / "out" / "clusters.parquet").write_bytes(b"PAR1")
    with pytest.raises(FormatError, match=r"clusters\.parquet is damaged.*jobs/dedup\.py"):
        found.clusters()
    assert "clusters.parquet is damaged" in DuplicatesArtefact(found.uri).verify()[0]
    header = json.loads((tmp_path / "out" / "duplicates.json").read_text())
    header["info"]["radius"] = 9
    (tmp_path / "out" / "duplicates.json").write_text(json.dumps(header))
    with pytest.raises(FormatError, match="changed or damaged"):
        DuplicatesArtefact(found.uri).open()
    with pytest.raises(FormatError, match=r"jobs/dedup.py"):
        DuplicatesArtefact(str(tmp_path / "none")).open()


def test_other_tools_read_the_files(store, tmp_path):
    found = find(store, tmp_path / "out")
    table = pq.read_table(str(tmp_path / "out" / "clusters.parquet"))
    assert table.column_names == ["row_id", "cluster", "size", "representative"]
    assert dataclasses.asdict(found.info)["n_rows"] == N
