"""RUN/index/ on disk: plain FAISS files, refused when changed, never seen half written."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading

import faiss
import numpy as np
import pytest

from hashnet import BinaryIndex, errors
from hashnet.index import files
from hashnet.index.artefact import IndexArtefact
from hashnet.index.kinds import KINDS
from hashnet.io import storage


@pytest.fixture
def made(codes_of, tmp_path):
    """(folder, codes, ids) of a saved index of any kind."""

    def make(kind="flat", plain_ids=False, name="index"):
        codes = codes_of("clustered", 300, 64)
        ids = np.arange(300) if plain_ids else np.sort(np.random.default_rng(0).permutation(9000)[:300])
        index = BinaryIndex.from_arrays(
            codes, ids, labels=np.arange(300) % 3, kind=kind, lineage={"model_sha256": "f00"}
        )
        folder = tmp_path / name
        index.save(folder)
        return folder, codes, ids

    return make


def change(folder, seal=True, **values):
    """index.json with other values; ``seal`` as one who knows how would."""
    about = json.loads((folder / IndexArtefact.header_file).read_text()) | values
    if seal:
        del about["sha256"]
        about["sha256"] = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    (folder / IndexArtefact.header_file).write_text(json.dumps(about))


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("engine", ["kernel", "faiss"])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(made, kind, engine, mmap):
    folder, codes, ids = made(kind)
    index = BinaryIndex.load(folder, engine=engine, mmap=mmap)
    fresh = BinaryIndex.from_arrays(codes, ids, labels=np.arange(300) % 3, kind=kind, engine=engine)
    assert index.search(codes[:20], 30) == fresh.search(codes[:20], 30)
    assert index.search_radius(codes[:20], 5) == fresh.search_radius(codes[:20], 5)
    about = index.describe()
    assert about["memory_mapped"] == (mmap and kind in ("flat", "ivf"))
    assert about["lineage"] == {"model_sha256": "f00"}
    assert (index.version, index.kind, index.n_bits, len(index)) == (1, kind, 64, 300)
    assert (index.codes(ids[5:9]) == codes[5:9]).all()
    if kind != "ivf":
        hits = index.search(codes[:2], 300, where={"labels": 1})
        assert sorted(hits.ids[0][hits.ids[0] >= 0]) == ids[1::3].tolist()


@pytest.mark.parametrize("plain_ids", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_faiss_reads_the_file_with_our_ids(made, kind, plain_ids):
    folder, codes, ids = made(kind, plain_ids)
    (file,) = folder.glob("*.faiss")
    theirs = faiss.read_index_binary(str(file))
    assert (theirs.ntotal, theirs.d) == (300, 64)
    limit = 4 if kind == "multihash" else 65
    if kind == "hnsw":
        assert theirs.search(codes[:3], 1)[1][:, 0].tolist() == ids[:3].tolist()
    else:
        _, _, found = theirs.range_search(codes[:1], limit)
        ours = BinaryIndex.load(folder).search_radius(codes[:1], limit - 1)[0]
        assert sorted(found) == sorted(ours.ids)


def test_the_mapped_file_may_go_away(made):
    """Readers of an old version go on while a writer removes its files."""
    for kind in ("flat", "ivf"):
        folder, codes, _ = made(kind, name=kind)
        index = BinaryIndex.load(folder)
        before = index.search(codes, 10)
        for file in folder.iterdir():
            file.unlink()
        assert index.search(codes, 10) == before


def test_versions_grow_and_are_followed(made):
    folder, codes, ids = made()
    reader = BinaryIndex.load(folder)
    writer = BinaryIndex.load(folder)
    assert not reader.refresh()
    writer.add(codes[:4], [20_001, 20_002, 20_003, 20_004])
    assert (reader.version, IndexArtefact(reader.path).version()) == (1, 2)
    assert reader.refresh()
    assert reader.search(codes, 9) == writer.search(codes, 9)
    writer.remove(ids[:9])
    writer.compact()
    assert IndexArtefact(folder).version() == 4
    assert reader.refresh()
    assert reader.search(codes, 9) == writer.search(codes, 9)
    assert reader.search(codes, 9).version == 4
    other = BinaryIndex.from_arrays(codes, ids)
    assert other.save(folder) == 5  # a rebuild is the next version
    assert reader.refresh()
    assert len(reader) == 300
    for stale in (lambda: writer.remove(ids[20:21]), lambda: writer.save(folder)):
        with pytest.raises(errors.IndexMismatch, match="is at version 5, this index at 4: another process"):
            stale()
    newest = writer.newest()
    assert (newest.version, writer.version) == (5, 4)  # looked at, not taken over
    assert newest.newest() is newest
    writer.refresh()
    writer.save(folder)
    kept = {name for name in os.listdir(folder) if name.endswith(".faiss")}
    assert len(kept) == 1  # of version 5; version 4's files are gone by now


def test_a_commit_stands_although_old_files_cannot_be_removed(made, monkeypatch):
    monkeypatch.setattr(files, "LOG_BYTES", 0)  # every version is written whole
    folder, codes, ids = made()
    index = BinaryIndex.load(folder)
    index.remove(ids[:1])

    def refuse(uri):
        raise errors.StorageError(f"cannot remove {uri}: slow down")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "delete", refuse)
        for number in (1, 2):
            index.remove(ids[number : number + 1])
    assert BinaryIndex.load(folder).search(codes, 9) == index.search(codes, 9)
    assert len([name for name in os.listdir(folder) if name.startswith("removed-")]) == 6
    index.remove(ids[3:4])
    assert len([name for name in os.listdir(folder) if name.startswith("removed-")]) == 4


def test_rows_are_read_once_while_somebody_else_removes_items(made, monkeypatch):
    """Each time the large file has been read, the small ones named with it are gone already."""
    folder, codes, ids = made()
    writer = BinaryIndex.load(folder)
    writer.remove(ids[:1])
    removals, open_rows = iter(range(1, 100, 2)), files._open_rows

    def open_slowly(*arguments):
        first = next(removals)
        for number in (first, first + 1):
            writer.remove(ids[number : number + 1])
        return open_rows(*arguments)

    monkeypatch.setattr(files, "_open_rows", open_slowly)
    assert BinaryIndex.load(folder).search(codes, 9) == writer.search(codes, 9)
    assert next(removals) == 3


@pytest.mark.parametrize("follow", ["refresh", "newest"])
def test_a_rebuild_with_other_labels_brings_them(made, follow):
    """The codes are the same file, byte for byte; the labels are not."""
    folder, codes, ids = made()
    reader = BinaryIndex.load(folder)
    BinaryIndex.from_arrays(codes, ids, labels=np.full(300, 2)).save(folder)
    reader = reader.newest() if follow == "newest" else reader
    reader.refresh()
    assert reader.labels(ids[:2]) == [[2], [2]]
    assert (reader.search(codes[:1], 300, where={"labels": 2}).ids >= 0).all()
    BinaryIndex.from_arrays(codes, ids).save(folder)
    reader.refresh()
    assert reader.labels(ids[:2]) is None


def test_deleted_and_built_anew_is_another_index(made, codes_of):
    """Both are at version 1."""
    folder, _, ids = made()
    reader, writer = BinaryIndex.load(folder), BinaryIndex.load(folder)
    shutil.rmtree(folder)
    other = codes_of("random", 400, 64, seed=9)
    BinaryIndex.from_arrays(other).save(folder)
    stale = r"is at version 1, this index at another 1: another process wrote it; call refresh\(\)"
    for write in (lambda: writer.remove(ids[:1]), lambda: writer.save(folder)):
        with pytest.raises(errors.StaleIndex, match=stale):
            write()
    newest = reader.newest()
    assert (newest.codes([399]) == other[399]).all()
    assert reader.refresh()
    assert not reader.refresh()
    assert reader.search(other, 3) == BinaryIndex.load(folder).search(other, 3) == newest.search(other, 3)
    reader.remove([0])
    assert len(BinaryIndex.load(folder)) == 399


def test_saved_again_where_it_was_deleted(made):
    folder, codes, ids = made()
    index = BinaryIndex.load(folder)
    index.remove(ids[:1])
    shutil.rmtree(folder)
    assert index.save(folder) == 2
    assert BinaryIndex.load(folder).search(codes, 5) == index.search(codes, 5)


def test_save_elsewhere_is_a_whole_copy(made, tmp_path):
    folder, codes, _ = made()
    index = BinaryIndex.load(folder)
    index.add(codes[:3])
    index.remove([int(index.ids()[0])])
    index.save(tmp_path / "copy")
    for file in folder.iterdir():
        file.unlink()
    copy = BinaryIndex.load(tmp_path / "copy")
    assert copy.search(codes, 10) == index.search(codes, 10)
    assert copy.version == 3


def test_a_mapped_index_saved_elsewhere_holds_its_codes(made, tmp_path):
    """FAISS would write mapped lists as the name of the file they lie in."""
    for kind in ("flat", "ivf"):
        folder, _, ids = made(kind, name=kind)
        before = [path.read_bytes() for path in folder.glob("*.faiss")]
        index = BinaryIndex.load(folder)
        index.remove(ids[:1])
        index.save(tmp_path / f"{kind}-copy")
        assert [path.read_bytes() for path in (tmp_path / f"{kind}-copy").glob("*.faiss")] == before


def test_other_spellings_of_a_folder_are_the_same(made, monkeypatch):
    folder, codes, _ = made("ivf")
    before = sorted(path.name for path in folder.glob("*.faiss"))
    monkeypatch.chdir(folder.parent)
    for spelling in (f"{folder}/", folder.name, f"./{folder.name}//", folder):
        index = BinaryIndex.load(folder)
        index.save(spelling)
        assert index.path == str(folder)
        assert sorted(path.name for path in folder.glob("*.faiss")) == before  # nothing new to write
    monkeypatch.chdir("/")
    assert BinaryIndex.load(folder).search(codes, 5) == index.search(codes, 5)


@pytest.mark.parametrize("plain_ids", [True, False])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 64])
def test_multihash_keeps_a_bucket_that_holds_every_row(codes_of, tmp_path, n, plain_ids):
    """Codes that agree in one of two tables, or in both: FAISS's file has no room for a size of 2**m."""
    for free in (0, 1, 2):  # bytes that differ from row to row
        codes = codes_of("equal", n, 16)
        codes[:, 2 - free :] = codes_of("random", n, 16, seed=1)[:, 2 - free :]
        ids = None if plain_ids else np.arange(n) * 3 + 1
        index = BinaryIndex.from_arrays(codes, ids, kind="multihash", nhash=2, bits=8)
        index.save(tmp_path / f"{free}")
        found = BinaryIndex.load(tmp_path / f"{free}").search_radius(codes, 1)
        assert found == index.search_radius(codes, 1)
        assert [list(hits.ids).count(i) for hits, i in zip(found, index.ids(), strict=True)] == [1] * n


def damage(folder, rng):
    """One of many ways to spoil a file; returns which."""
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    path = folder / names[rng.integers(len(names))]
    data = bytearray(path.read_bytes())
    how = rng.integers(5)
    if how == 0:
        data = data[: rng.integers(len(data))]
    elif how == 1:
        for _ in range(rng.integers(1, 9)):
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    elif how == 2:
        data += rng.bytes(rng.integers(1, 50))
    elif how == 3:
        data = bytearray(rng.bytes(rng.integers(1, 400)))
    else:
        start = rng.integers(len(data))
        data[start : start + 8] = rng.bytes(8)
    path.write_bytes(bytes(data))
    return path.name


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_refused_or_harmless(made, kind):
    """Bit flips, cuts, garbage in any file: a FormatError or the same answers, never a crash."""
    folder, codes, _ = made(kind)
    index = BinaryIndex.load(folder)
    index.add(codes[:5])
    index.remove([int(i) for i in index.ids()[:7]])
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    expected = index.search(codes[:10], 8)
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(60):
        name = damage(folder, rng)
        try:
            damaged = BinaryIndex.load(folder)
            assert damaged.search(codes[:10], 8) == expected
            assert damaged.describe() == index.describe() | {"memory_mapped": kind in ("flat", "ivf")}
            assert name != IndexArtefact.header_file or json.loads(whole[name]) == json.loads(
                (folder / name).read_text()
            )
        except errors.HashnetError:
            refused += 1
        for path, data in whole.items():
            (folder / path).write_bytes(data)
    assert refused > 45


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"format_version": 99}, "format version 99; this hashnet reads up to 2: upgrade"),
        ({"kind": "manifest"}, "is not a hashnet index"),
        ({"n_bits": 32}, "holds 300 codes of 64 bits, index.json says 300 of 32"),
        ({"n_bits": "x"}, "n_bits = 'x'"),
        ({"rows": 7}, "says 7 rows, its segments hold 300"),
        ({"index_kind": "tree"}, "kind must be one of"),
        ({"segments": 3}, "is damaged"),
        ({"options": {"nprobe": 1}}, "no option 'nprobe'"),
        ({"version": -1}, "version = -1"),
    ],
)
def test_a_wrong_index_json_is_refused(made, values, sentence):
    folder, _, _ = made()
    change(folder, **values)
    with pytest.raises(errors.FormatError, match=sentence):
        BinaryIndex.load(folder)


@pytest.mark.parametrize(
    "values", [{"lineage": {"model_sha256": "f01"}}, {"n_classes": None}, {"version": 7}, {"sha256": None}]
)
def test_a_changed_index_json_is_refused(made, values):
    """Also where every value could be true: whose codes they are must not change unseen."""
    folder, _, _ = made()
    change(folder, seal=False)
    BinaryIndex.load(folder)  # other spaces are no change
    change(folder, seal=False, **values)
    for read in (BinaryIndex.load, lambda path: IndexArtefact(path).version()):
        with pytest.raises(errors.FormatError, match=r"index\.json was changed.*jobs/build_index.py"):
            read(folder)


def test_any_lineage_is_sealed_as_it_is_read(codes_of, tmp_path):
    odd = {"tuple": (1, 2), "keys": {2: "b", 10: "a"}, "real": 0.1, "none": None}
    BinaryIndex.from_arrays(codes_of("random", 9, 32), lineage=odd).save(tmp_path)
    read = {"tuple": [1, 2], "keys": {"2": "b", "10": "a"}, "real": 0.1, "none": None}
    assert BinaryIndex.load(tmp_path).lineage == read


def test_files_outside_the_folder_are_never_opened(made):
    folder, _, _ = made()
    (segment,) = json.loads((folder / IndexArtefact.header_file).read_text())["segments"]
    change(folder, segments=[segment | {"file": "../secret.faiss"}])
    with pytest.raises(errors.FormatError, match="not one of its own"):
        BinaryIndex.load(folder)


def test_foreign_and_missing_files(made, tmp_path):
    folder, codes, ids = made()
    (file,) = folder.glob("*.faiss")
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    with pytest.raises(errors.FormatError, match=r"bytes, index\.json says .*truncated or changed"):
        BinaryIndex.load(folder)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(errors.FormatError, match="is damaged: its sha256"):
        BinaryIndex.load(folder)
    BinaryIndex.from_arrays(codes, ids).save(folder)  # which is what the sentence says to do
    assert len(BinaryIndex.load(folder)) == 300
    (file,) = (path for path in folder.glob("*.faiss") if path != file)
    file.unlink()
    with pytest.raises(errors.FormatError, match="is missing"):
        BinaryIndex.load(folder)
    with pytest.raises(errors.FormatError, match="holds no index"):
        BinaryIndex.load(tmp_path / "nothing")
    (folder / IndexArtefact.header_file).write_bytes(b"not json")
    with pytest.raises(errors.FormatError, match="not JSON"):
        BinaryIndex.load(folder)


CRASHING = textwrap.dedent(
    """
    import json, os, shutil, sys
    import numpy as np
    from hashnet import BinaryIndex
    from hashnet.index import files

    files.LOG_BYTES = 0  # every version is written whole

    def update(folder, what, after):
        index = BinaryIndex.load(folder)
        replace, done = os.replace, 0

        def crash(source, target):
            nonlocal done
            done += 1
            if done > after:
                os._exit(9)  # as a power cut would: nothing is cleaned up
            replace(source, target)

        os.replace = crash
        if what == "add":
            index.add(np.arange(40, dtype=np.uint8).reshape(5, 8), labels=[0, 1, 2, 0, 1])
        elif what == "remove":
            index.remove(index.ids()[::2])
        elif what == "compact":
            index.compact()
        else:
            BinaryIndex.from_arrays(np.zeros((7, 8), np.uint8)).save(folder)
        os._exit(0)

    BinaryIndex.from_arrays(np.zeros((2, 8), np.uint8))  # loads the kernels for all children
    ends = {}
    for what in ("add", "remove", "compact", "rebuild"):
        for after in range(9):
            folder = f"{sys.argv[1]}-{what}-{after}"
            shutil.copytree(sys.argv[1], folder)
            child = os.fork()  # importing everything anew would take seconds each time
            if child == 0:
                update(folder, what, after)
            ends[f"{what}-{after}"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps(ends))
    """
)


def test_a_crash_at_any_point_leaves_one_whole_version(made, codes_of, repo):
    folder, codes, ids = made()
    index = BinaryIndex.load(folder)
    index.add(codes_of("random", 50, 64, seed=4), labels=np.zeros(50, int))
    index.remove(ids[:20])
    old = index.search(codes, 20)
    run = subprocess.run(
        [sys.executable, "-c", CRASHING, str(folder)], cwd=repo, capture_output=True, text=True, check=True
    )
    ends = json.loads(run.stdout)
    assert set(ends.values()) == {0, 9}
    for name, end in ends.items():
        survivor = BinaryIndex.load(f"{folder}-{name}")
        assert survivor.version == (4 if end == 0 else 3)
        if end:
            assert survivor.search(codes, 20) == old
            survivor.remove(ids[30:31])  # and it can be written again
            assert BinaryIndex.load(f"{folder}-{name}").version == 4
    for what in ("add", "remove", "compact", "rebuild"):
        steps = [ends[f"{what}-{after}"] for after in range(9)]
        assert steps[0] == 9  # before the first file
        assert steps[-1] == 0
        assert steps == sorted(steps, reverse=True)  # done once index.json is in place, never earlier


def test_readers_load_while_a_writer_commits(made, codes_of):
    """A reader that opens the index at any moment gets a version whole: item 10,000 + v comes with v."""
    folder, codes, _ = made()
    writer = BinaryIndex.load(folder)
    stop, seen, wrong = threading.Event(), set(), []

    def read():
        while not stop.is_set():
            try:
                index = BinaryIndex.load(folder)
                newest = index.ids()[-1]
                seen.add(index.version)
                if index.version > 1 and newest != 10_000 + index.version - index.version % 2:
                    wrong.append((index.version, newest))
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for version in range(2, 60, 2):
        writer.add(codes[:1], [10_000 + version])
        writer.compact()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(seen) > 3


def test_no_permission_to_write(made):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    folder, codes, _ = made()
    folder.chmod(0o500)
    try:
        with pytest.raises(errors.StorageError, match="cannot write"):
            BinaryIndex.load(folder).add(codes[:1])
    finally:
        folder.chmod(0o700)


def test_a_full_disk_leaves_the_old_version(made, monkeypatch):
    folder, codes, _ = made()
    index = BinaryIndex.load(folder)

    def full(uri, data):
        raise errors.StorageError(f"cannot write {uri}: No space left on device")

    monkeypatch.setattr(storage, "write_bytes", full)
    with pytest.raises(errors.StorageError, match="No space left"):
        index.add(codes[:1])
    monkeypatch.undo()
    assert index.version == 1
    assert len(index) == 300
    assert BinaryIndex.load(folder).version == 1
