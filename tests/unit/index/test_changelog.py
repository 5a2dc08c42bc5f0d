"""Small updates go into a log: durable, applied in order, cut short by a crash, refused when damaged."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from hashnet import BinaryIndex, errors
from hashnet.index import changelog, files
from hashnet.index.artefact import IndexArtefact

YEARS = {"year": [2000 + i for i in range(200)]}


@pytest.fixture
def folder(codes_of, tmp_path):
    codes = codes_of("clustered", 200, 64)
    keys = [f"k{i}" for i in range(200)]
    index = BinaryIndex.from_arrays(codes, labels=np.arange(200) % 3, columns=YEARS, keys=keys)
    index.save(tmp_path / "index")
    return tmp_path / "index"


def log_of(folder):
    (log,) = folder.glob("changes-*.log")
    return log


def update(index, rng, model):
    """One random update of the index and of the model: id → (code, labels, key, year)."""
    how = rng.integers(3)
    if how == 2 and len(model) > 20:
        gone = rng.choice(sorted(model), rng.integers(1, 5), replace=False).tolist()
        index.remove(gone)
        for id_ in gone:
            del model[id_]
        return
    n = int(rng.integers(1, 6))
    free = [i for i in range(1000) if i not in model]
    known = sorted(model)
    ids = rng.choice(free if how == 0 else known + free, n, replace=False).tolist()
    codes = rng.integers(0, 256, (n, 8), dtype=np.uint8)
    labels = np.eye(3, dtype=np.uint8)[rng.integers(0, 3, n)]
    keys = [f"k{id_}" for id_ in ids]
    years = rng.integers(1990, 2030, n).tolist()
    (index.add if how == 0 else index.upsert)(codes, ids, labels, columns={"year": years}, keys=keys)
    for row, id_ in enumerate(ids):
        model[id_] = (codes[row].tobytes(), [int(labels[row].argmax())], keys[row], years[row])


def content(index):
    """id → (code, labels, key, year) of everything an index holds."""
    ids = index.ids()
    table = index.columns(ids, ["key", "year"]).to_pydict()
    rows = zip(ids.tolist(), index.codes(ids), index.labels(ids), table["key"], table["year"], strict=True)
    return {id_: (code.tobytes(), labels, key, year) for id_, code, labels, key, year in rows}


def test_what_is_in_the_log_is_what_was_done(folder, monkeypatch):
    """Random updates against a dict; a reader opens the index anew, another one follows it."""
    monkeypatch.setattr(files, "LOG_BYTES", 4000)  # written whole now and then
    rng = np.random.default_rng(3)
    index, follower = BinaryIndex.load(folder), BinaryIndex.load(folder)
    model = content(index)
    for step in range(60):
        update(index, rng, model)
        if step % 7 == 3:
            index.compact()
        if step % 4 == 0:
            assert follower.refresh()
            assert content(follower) == model
    opened = BinaryIndex.load(folder)
    assert content(opened) == content(index) == model
    assert opened.version == index.version == IndexArtefact(str(folder)).version()
    assert IndexArtefact(str(folder)).read()["rows"] == len(model)
    queries = rng.integers(0, 256, (5, 8), dtype=np.uint8)
    assert opened.search(queries, 30) == index.search(queries, 30)
    assert opened.describe()["updates"] == index.describe()["updates"] == 60
    assert IndexArtefact(str(folder)).verify() == []


def test_an_update_appends_and_writes_nothing_else(folder, codes_of):
    index = BinaryIndex.load(folder)
    index.remove([0])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    index.add(codes_of("random", 1, 64), [900])
    changed = [path.name for path in folder.iterdir() if before.get(path.name) != path.read_bytes()]
    assert changed == [log_of(folder).name]


def test_a_record_cut_short_by_a_crash_does_not_count(folder, codes_of):
    """Every length that a killed writer can leave: the versions before it are whole, and writing goes on."""
    index = BinaryIndex.load(folder)
    index.remove([0])
    acknowledged = log_of(folder).read_bytes()
    index.add(codes_of("random", 1, 64), [900])
    data = log_of(folder).read_bytes()
    head = acknowledged[:20]  # the mark is moved only after the record is on the disk
    assert data[20 : len(acknowledged)] == acknowledged[20:]
    for length in range(len(acknowledged), len(data), 17):
        log_of(folder).write_bytes(head + data[20:length])
        survivor = BinaryIndex.load(folder)
        assert (survivor.version, 900 in survivor.ids(), 0 in survivor.ids()) == (2, False, False)
        survivor.remove([1])
        assert BinaryIndex.load(folder).version == 3


def test_damage_is_refused(folder, codes_of):
    """A cut, a flipped bit or an exchanged record in what was acknowledged; a log that is gone."""
    index = BinaryIndex.load(folder)
    for id_ in (900, 901, 902):
        index.add(codes_of("random", 1, 64, seed=id_), [id_])
    log = log_of(folder)
    data = log.read_bytes()
    for length in range(0, len(data), 23):
        log.write_bytes(data[:length])
        with pytest.raises(errors.FormatError, match="damaged"):
            BinaryIndex.load(folder)
    for at in range(0, len(data), 7):
        log.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        assert "damaged" in IndexArtefact(str(folder)).verify()[-1]
    size = (len(data) - 20) // 3
    first, second, third = (data[20 + i * size : 20 + (i + 1) * size] for i in range(3))
    log.write_bytes(data[:20] + second + first + third)
    with pytest.raises(errors.FormatError, match="damaged"):
        BinaryIndex.load(folder)
    log.unlink()
    with pytest.raises(errors.FormatError, match="is missing"):
        BinaryIndex.load(folder)


def test_a_full_disk_leaves_what_was_acknowledged(folder, codes_of, monkeypatch):
    index = BinaryIndex.load(folder)
    index.remove([0])
    pwrite = os.pwrite

    def full(file, data, offset):
        pwrite(file, data[: len(data) // 2], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(errors.StorageError, match="No space left"):
        index.add(codes_of("random", 1, 64), [900])
    monkeypatch.undo()
    assert content(BinaryIndex.load(folder)) == content(index)
    assert index.version == 2
    index.add(codes_of("random", 1, 64), [901])
    assert BinaryIndex.load(folder).version == 3


KILLED = textwrap.dedent(
    """
    import sys
    import numpy as np
    from hashnet import BinaryIndex
    index = BinaryIndex.load(sys.argv[1], engine="faiss")
    for i in range(1_000_000):
        index.add(np.full((1, 8), i % 256, np.uint8), [1000 + i])
        print(1000 + i, flush=True)
    """
)


def test_a_killed_writer_loses_nothing_it_acknowledged(folder, repo):
    words = [sys.executable, "-c", KILLED, str(folder)]
    with subprocess.Popen(words, cwd=repo, stdout=subprocess.PIPE, text=True) as writer:
        told = [int(writer.stdout.readline()) for _ in range(40)]
        writer.send_signal(signal.SIGKILL)
        told += [int(line) for line in writer.stdout.read().splitlines()]
    held = BinaryIndex.load(folder).ids()
    added = held[held >= 1000].tolist()
    assert added[: len(told)] == told
    assert len(added) <= len(told) + 1  # one may have been written and not told


def test_updates_go_on_while_an_index_is_compacted(folder, codes_of, monkeypatch):
    """What is added between the beginning and the end of a compaction is in the compacted version."""
    index, other = BinaryIndex.load(folder), BinaryIndex.load(folder)
    index.remove([0, 1])
    writing, go_on = threading.Event(), threading.Event()
    write_rows = files._write_rows

    def slow(uri, segment, name):
        if files.COMPACTED in name:
            writing.set()
            assert go_on.wait(60)
        return write_rows(uri, segment, name)

    monkeypatch.setattr(files, "_write_rows", slow)
    compaction = threading.Thread(target=index.compact)
    compaction.start()
    assert writing.wait(60)
    other.refresh()
    other.add(codes_of("random", 2, 64), [900, 901])
    other.remove([2])
    assert not other.compact()  # one at a time
    go_on.set()
    compaction.join()
    expected = content(other)
    opened = BinaryIndex.load(folder)
    assert content(opened) == expected == content(index)
    assert opened.describe()["removed_rows"] == 1  # of item 2, removed meanwhile
    assert (opened.version, other.version) == (5, 4)


def test_neighbouring_additions_are_applied_as_one():
    def block(*ids):
        ids = np.array(ids, dtype=np.int64)
        return changelog.CodeBlock(ids, np.zeros((len(ids), 8), np.uint8), ids.astype(np.int32), ids * 0)

    gone = changelog.RemovedIds(np.array([1], dtype=np.int64))
    found = list(changelog.joined([block(1), block(2, 3), gone, block(1)]))
    assert [change.ids.tolist() for change in found] == [[1, 2, 3], [1], [1]]
    assert found[0].label_rows.tolist() == [0, 1, 1]  # rows of the second block begin at 1


def test_compactions_leave_the_files_of_two_versions(folder, codes_of):
    index = BinaryIndex.load(folder)
    for id_ in range(900, 905):
        index.add(codes_of("random", 1, 64, seed=id_), [id_])
        assert index.compact()
    assert len(list(folder.glob("*.faiss"))) == 2
    assert len(list(folder.glob("changes-*.log"))) == 1  # of the version before
