"""The commit protocol: what a reader and the next run see, wherever a run was cut off."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hashnet import CodeStore
from hashnet.errors import FormatError, StorageError
from hashnet.io import storage
from hashnet.io.arrow import binary_column, binary_matrix
from hashnet.store import (
    PlannedPart,
    StorePlan,
    StoreWriter,
    commit,
    read_quarantine,
    read_records,
    repair_range,
)

PLAN = StorePlan("codes", 16, rows_per_shard=4, parts=(PlannedPart("part-00000", "aa", 6),), n_classes=3)


def rows_of(ids) -> pa.Table:
    """Good rows: the code of row i is (i, 255 - i), its label i % 3."""
    codes = np.array([[i, 255 - i] for i in ids], np.uint8).reshape(-1, 2)
    return pa.table(
        {
            "row_id": pa.array(ids, pa.int64()),
            "uri": pa.array([f"{i}.jpg" for i in ids], pa.string()),
            "labels": pa.array([[i % 3] for i in ids], pa.list_(pa.int32())),
            "code": binary_column(codes),
        }
    )


def bad_of(ids, reason="corrupt") -> pa.Table:
    return pa.table({"row_id": ids, "uri": [f"{i}.jpg" for i in ids], "reason": [reason] * len(ids)})


def run(folder: str) -> None:
    """A whole run over PLAN that skips what is committed: row 2 is bad."""
    StoreWriter(folder, PLAN).begin()
    first, second = PLAN.ranges()
    done = read_records(folder)
    if first.name not in done:
        StoreWriter(folder, PLAN).commit(first, rows_of([3, 0, 1]), bad_of([2]))
    if second.name not in done:
        StoreWriter(folder, PLAN).commit(second, rows_of([4, 5]))
    StoreWriter(folder, PLAN).finish()


def files_of(folder) -> dict[str, bytes]:
    return {
        os.path.relpath(os.path.join(where, name), folder): open(os.path.join(where, name), "rb").read()
        for where, _, names in os.walk(folder)
        for name in names
    }


def test_a_run_leaves_these_files_and_rows(tmp_path):
    run(str(tmp_path))
    assert sorted(files_of(tmp_path)) == [
        "_SUCCESS", "_plan.json", "_quarantine/codes-00000.parquet", "_records/codes-00000.json",
        "_records/codes-00001.json", "codes-00000.parquet", "codes-00001.parquet", "manifest.json",
    ]  # fmt: skip
    store = CodeStore.open(str(tmp_path))
    assert store.ids().tolist() == [0, 1, 3, 4, 5]
    assert store.codes()[:, 0].tolist() == [0, 1, 3, 4, 5]
    assert (len(store), store.n_bad) == (5, 1)
    assert store.quarantine().to_pylist() == [{"row_id": 2, "uri": "2.jpg", "reason": "corrupt"}]
    assert store.shards[0].reasons == {"corrupt": 1}
    assert [(s.start, s.stop, s.part, s.part_sha256) for s in store.shards] == [
        (0, 4, "part-00000", "aa"),
        (4, 6, "part-00000", "aa"),
    ]


def test_the_order_of_rows_does_not_change_a_byte(tmp_path):
    first, _ = PLAN.ranges()
    for name, ids in (("a", [0, 1, 2, 3]), ("b", [3, 1, 0, 2])):
        StoreWriter(str(tmp_path / name), PLAN).begin()
        whole = rows_of(ids)
        table = pa.concat_tables([whole.slice(0, 1), whole.slice(1)])  # chunked differently, too
        StoreWriter(str(tmp_path / name), PLAN).commit(first, table)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_bytes_name_neither_time_nor_place(tmp_path, monkeypatch):
    import socket
    import time

    run(str(tmp_path / "here"))
    monkeypatch.setattr(time, "time", lambda: 1e9)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    run(str(tmp_path / "there"))
    assert files_of(tmp_path / "here") == files_of(tmp_path / "there")


class Cut(BaseException):
    """A process that ends here."""


def test_cut_off_before_any_write_and_run_again(tmp_path, monkeypatch):
    """Stops before the k-th write, for every k; a reader sees nothing, the next run makes the same files."""
    run(str(tmp_path / "whole"))
    wanted = files_of(tmp_path / "whole")
    write = storage.write_bytes
    for k in range(100):
        folder = tmp_path / f"cut-{k}"
        left = [k]

        def cut(uri, data, left=left):
            if left[0] == 0:
                raise Cut
            left[0] -= 1
            write(uri, data)

        monkeypatch.setattr(storage, "write_bytes", cut)
        try:
            run(str(folder))
        except Cut:
            cut_off = True
        else:
            cut_off = False
        monkeypatch.setattr(storage, "write_bytes", write)
        if not cut_off:
            break
        with pytest.raises(FormatError):
            CodeStore.open(str(folder))
        run(str(folder))
        assert files_of(folder) == wanted
    assert k == len(wanted)  # every file was once the one that is missing


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_record_without_its_file_does_not_count(tmp_path, damage):
    run(str(tmp_path))
    path = tmp_path / "codes-00001.parquet"
    wanted = path.read_bytes()
    path.unlink() if damage == "gone" else path.write_bytes(wanted[:-1])
    assert list(read_records(str(tmp_path))) == ["codes-00000"]
    run(str(tmp_path))
    assert path.read_bytes() == wanted


def test_a_shard_without_a_record_does_not_count(tmp_path):
    run(str(tmp_path))
    (tmp_path / "_records" / "codes-00000.json").unlink()
    assert list(read_records(str(tmp_path))) == ["codes-00001"]
    with pytest.raises(FormatError, match="lacks 1 of 2 shards, the first is codes-00000"):
        StoreWriter(str(tmp_path), PLAN).finish()


def test_leftovers_of_a_killed_run_are_removed_at_the_end(tmp_path):
    for name in ("codes-00001.parquet.tmp-1", "_records/codes-00001.json.tmp-2"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    run(str(tmp_path))
    assert not [name for name in files_of(tmp_path) if "tmp" in name]


def test_a_run_of_a_shorter_plan_leaves_a_store_that_was_extended_alone(tmp_path):
    folder = str(tmp_path)
    run(folder)
    longer = replace(PLAN, parts=(*PLAN.parts, PlannedPart("part-00001", "bb", 2)))
    StoreWriter(folder, longer).begin()
    StoreWriter(folder, longer).commit([*longer.ranges()][-1], rows_of([6]), bad_of([7]))
    StoreWriter(folder, longer).finish()
    before = files_of(tmp_path)
    with pytest.raises(FormatError, match="has been extended by a job with more parts"):
        StoreWriter(folder, PLAN).finish()
    assert files_of(tmp_path) == before
    assert CodeStore.open(folder).quarantine()["row_id"].to_pylist() == [2, 7]


def test_bad_rows_of_a_shard_that_is_not_listed_yet_are_kept(tmp_path):
    """Another run extends the store just after this one has looked at the plan."""
    folder = str(tmp_path)
    StoreWriter(folder, PLAN).begin()
    longer = replace(PLAN, parts=(*PLAN.parts, PlannedPart("part-00001", "bb", 2)))
    StoreWriter(folder, longer).commit([*longer.ranges()][-1], rows_of([6]), bad_of([7]))
    run(folder)
    assert (tmp_path / "_quarantine" / "codes-00002.parquet").exists()


def test_a_shard_with_the_wrong_number_of_rows_is_refused(tmp_path):
    first, _ = PLAN.ranges()
    with pytest.raises(FormatError, match="codes-00000 must hold 4 rows, got 2 and 1 bad ones"):
        StoreWriter(str(tmp_path), PLAN).commit(first, rows_of([0, 1]), bad_of([2]))


def test_mended_rows_become_an_extra_shard(tmp_path):
    folder = str(tmp_path)
    run(folder)
    before = files_of(tmp_path)
    assert read_quarantine(folder, read_records(folder))["row_id"].to_pylist() == [2]
    StoreWriter(folder, PLAN).commit(repair_range(PLAN, 0, 1), rows_of([2]), repair=True)
    assert CodeStore.open(folder).ids().tolist() == [0, 1, 3, 4, 5]  # the list does not name it yet
    StoreWriter(folder, PLAN).finish()
    store = CodeStore.open(folder)
    assert store.ids().tolist() == [0, 1, 3, 4, 5, 2]
    assert (len(store), store.n_bad, store.quarantine().num_rows) == (6, 0, 0)
    assert store.shards[-1].file == "codes-mended-00000.parquet"
    after = files_of(tmp_path)
    unchanged = [name for name in before if name not in ("manifest.json",)]
    assert all(after[name] == before[name] for name in unchanged)


def test_a_row_mended_before_its_shard_was_lost_is_there_once(tmp_path):
    """Rows 2 and 4 are mended; then shard 0 is lost and made anew, and row 2 is good by now."""
    folder = str(tmp_path)
    StoreWriter(folder, PLAN).begin()
    first, second = PLAN.ranges()
    StoreWriter(folder, PLAN).commit(first, rows_of([0, 1, 3]), bad_of([2]))
    StoreWriter(folder, PLAN).commit(second, rows_of([5]), bad_of([4]))
    StoreWriter(folder, PLAN).commit(repair_range(PLAN, 0, 2), rows_of([2, 4]), repair=True)
    StoreWriter(folder, PLAN).finish()
    assert CodeStore.open(folder).ids().tolist() == [0, 1, 3, 5, 2, 4]
    (tmp_path / "codes-00000.parquet").unlink()
    assert list(read_records(folder)) == ["codes-00001"]
    StoreWriter(folder, PLAN).commit(first, rows_of([0, 1, 2, 3]))
    StoreWriter(folder, PLAN).finish()
    store = CodeStore.open(folder)
    assert store.ids().tolist() == [0, 1, 2, 3, 5]  # not 2 twice; 4 waits to be mended again
    assert (len(store), store.n_bad) == (5, 1)
    assert store.quarantine()["row_id"].to_pylist() == [4]
    assert [path.name for path in (tmp_path / "_quarantine").iterdir()] == ["codes-00001.parquet"]
    StoreWriter(folder, PLAN).commit(repair_range(PLAN, 0, 1), rows_of([4]), repair=True)
    StoreWriter(folder, PLAN).finish()
    assert CodeStore.open(folder).ids().tolist() == [0, 1, 2, 3, 5, 4]


def test_a_shard_of_bad_rows_alone_is_an_empty_shard(tmp_path):
    folder = str(tmp_path)
    StoreWriter(folder, PLAN).begin()
    first, second = PLAN.ranges()
    StoreWriter(folder, PLAN).commit(first, rows_of([]), bad_of([0, 1, 2, 3]))
    StoreWriter(folder, PLAN).commit(second, rows_of([4, 5]))
    about = StoreWriter(folder, PLAN).finish()
    assert CodeStore.open(folder).ids().tolist() == [4, 5]
    assert about["statistics"]["bit_balance"][:2] == [0, 0]
    assert about["statistics"]["distinct_codes"] == 2


def test_shards_are_read_side_by_side_at_the_end(tmp_path, monkeypatch):
    run(str(tmp_path))
    both, open_input = threading.Barrier(2), storage.open_input

    def watched(uri):
        if storage.name_of(uri).endswith(".parquet"):
            both.wait(timeout=10)
        return open_input(uri)

    before = storage.read_json(str(tmp_path / "manifest.json"))
    monkeypatch.setattr(storage, "open_input", watched)
    assert StoreWriter(str(tmp_path), PLAN).finish()["statistics"] == before["statistics"]


@pytest.mark.parametrize("readers", [1, 3])
def test_statistics_of_many_shards_are_those_of_all_codes(tmp_path, monkeypatch, readers):
    monkeypatch.setattr(commit, "READERS", readers)
    plan = StorePlan("codes", 16, rows_per_shard=2, parts=(PlannedPart("part-00000", "aa", 14),), n_classes=3)
    StoreWriter(str(tmp_path), plan).begin()
    for shard in plan.ranges():
        StoreWriter(str(tmp_path), plan).commit(
            shard, rows_of([i % 5 for i in range(shard.start, shard.stop)])
        )
    found = StoreWriter(str(tmp_path), plan).finish()["statistics"]
    values = [i % 5 for i in range(14)]
    ones = [sum(value >> (7 - bit) & 1 for value in values) / 14 for bit in range(8)]
    assert found["distinct_codes"] == 5
    assert found["bit_balance"][:8] == [round(share, 6) for share in ones]


def test_features_go_by_the_same_protocol(tmp_path):
    from hashnet.store import FeatureStore

    plan = StorePlan("features", 3, rows_per_shard=2, parts=(PlannedPart("p", "aa", 3),))
    StoreWriter(str(tmp_path), plan).begin()
    values = np.arange(9, dtype=np.float32).reshape(3, 3)
    for shard in plan.ranges():
        ids = list(range(shard.start, shard.stop))
        column = pa.FixedSizeListArray.from_arrays(pa.array(values[ids].ravel()), 3)
        StoreWriter(str(tmp_path), plan).commit(
            shard, rows_of(ids).drop_columns(["code"]).append_column("feature", column)
        )
    StoreWriter(str(tmp_path), plan).finish()
    store = FeatureStore.open(str(tmp_path))
    assert store.features().tolist() == values.tolist()
    assert [block[1].shape for block in store.blocks(2)] == [(2, 3), (1, 3)]
    assert [shard.file for shard in store.shards] == ["features-00000.parquet", "features-00001.parquet"]
    assert pq.read_schema(store.paths()[0]).metadata[b"hashnet.n_features"] == b"3"


@pytest.mark.parametrize("offset", [0, 3])
def test_binary_columns_are_matrices(offset):
    matrix = np.arange(40, dtype=np.uint8).reshape(8, 5)
    column = binary_column(matrix)
    assert binary_matrix(column.slice(offset), 5).tolist() == matrix[offset:].tolist()
    chunked = pa.chunked_array([column.slice(0, 3), column.slice(3)])
    assert binary_matrix(chunked, 5).tolist() == matrix.tolist()
    assert binary_matrix(column.slice(0, 0), 5).shape == (0, 5)


FULL_DISK = """
import resource, signal, sys
sys.path.insert(0, {repo!r})
from hashnet.io import storage
from hashnet.errors import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # a write beyond 100 bytes fails, as on a full disk
try:
    storage.write_bytes({target!r}, b"x" * 4096)
except StorageError as error:
    print("refused:", error)
"""


def test_a_full_disk_is_a_clear_error_and_leaves_no_file(tmp_path, repo):
    target = str(tmp_path / "codes-00000.parquet")
    code = FULL_DISK.format(repo=str(repo), target=target)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith(f"refused: cannot write {target}: ")
    assert list(tmp_path.iterdir()) == []


def test_no_place_to_write_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageError, match="cannot make the folder"):
        StoreWriter(str(tmp_path / "file" / "codes"), PLAN).begin()


@pytest.fixture
def nobody():
    """Not root while the test runs, in a folder that is ours: root may write anywhere."""
    with tempfile.TemporaryDirectory() as name:
        if os.geteuid() == 0:
            os.chown(name, 65_534, 65_534)
            os.seteuid(65_534)
        yield Path(name)
        os.seteuid(os.getuid())


def test_no_permission_is_a_clear_error(nobody):
    StoreWriter(str(nobody), PLAN).begin()
    nobody.chmod(0o500)
    first, _ = PLAN.ranges()
    with pytest.raises(StorageError, match=r"cannot write .*codes-00000.parquet: .*Permission denied"):
        StoreWriter(str(nobody), PLAN).commit(first, rows_of([0, 1, 2, 3]))
    assert read_records(str(nobody)) == {}
    with pytest.raises(StorageError, match=r"cannot make the folder .*Permission denied"):
        StoreWriter(str(nobody / "below"), PLAN).begin()
    assert os.listdir(nobody) == ["_plan.json"]
