"""Updates against a dictionary: any sequence of add, remove, compact, reload gives what a dict gives."""

import contextlib
import tempfile
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hashnet import BinaryIndex, errors
from hashnet.index import IndexArtefact
from hashnet.index.kinds import KINDS

N_BITS, N_CLASSES, MAX_ID = 16, 3, 60
CODES = st.binary(min_size=2, max_size=2)
LABELS = st.integers(0, N_CLASSES - 1)
ITEMS = st.dictionaries(st.integers(0, MAX_ID), st.tuples(CODES, LABELS), min_size=1, max_size=12)


def ranking(query: bytes, items: dict) -> list[tuple[int, int]]:
    """(distance, id) of every item of the dictionary, in order, by a plain loop."""
    wanted = int.from_bytes(query, "big")
    return sorted(((wanted ^ int.from_bytes(code, "big")).bit_count(), i) for i, (code, _) in items.items())


def arrays(items: dict) -> tuple[np.ndarray, list[int], np.ndarray]:
    codes = np.frombuffer(b"".join(code for code, _ in items.values()), np.uint8).reshape(-1, N_BITS // 8)
    return codes, list(items), np.array([label for _, label in items.values()])


class IndexMachine(RuleBasedStateMachine):
    """``self.items`` is the truth: id → (code, label)."""

    kind = "flat"
    options: ClassVar[dict] = {}
    engine = "kernel"

    @initialize(items=ITEMS, saved=st.booleans())
    def build(self, items, saved):
        self.folder = tempfile.TemporaryDirectory()
        self.items = dict(items)
        codes, ids, labels = arrays(items)
        self.index = BinaryIndex.from_arrays(
            codes, ids, labels=labels, kind=self.kind, engine=self.engine, n_classes=N_CLASSES, **self.options
        )
        if saved:
            self.index.save(self.folder.name)

    @rule(items=ITEMS)
    def add(self, items):
        version = self.index.version
        codes, ids, labels = arrays(items)
        if set(items) & set(self.items):
            with pytest.raises(errors.IndexMismatch, match="already"):
                self.index.add(codes, ids, labels)
            assert self.index.version == version
            items = {i: item for i, item in items.items() if i not in self.items}
            if not items:
                return
            codes, ids, labels = arrays(items)
        self.index.add(codes, ids, labels)
        self.items |= items
        assert self.index.version == version + 1

    @rule(ids=st.sets(st.integers(0, MAX_ID), min_size=1, max_size=12))
    def remove(self, ids):
        version = self.index.version
        if ids - set(self.items):
            with pytest.raises(errors.UnknownId):
                self.index.remove(ids)
            assert self.index.version == version
            ids &= set(self.items)
        if ids:
            self.index.remove(ids)
            for i in ids:
                del self.items[i]
            assert self.index.version == version + 1

    @rule()
    def compact(self):
        self.index.compact()
        about = self.index.describe()
        assert about["removed_rows"] == 0
        held = [segment.rows.kind.name for segment in self.index._state.segments]
        assert held == ([self.kind] if self.items else [])
        assert not self.index.compact(), "nothing is left to do"

    @precondition(lambda self: self.index.path is not None)
    @rule(mmap=st.booleans())
    def reload(self, mmap):
        version = self.index.version
        self.index = BinaryIndex.load(self.folder.name, engine=self.engine, mmap=mmap)
        assert self.index.version == version

    @precondition(lambda self: self.index.path is not None)
    @rule()
    def followed_by_a_reader(self):
        if not hasattr(self, "reader"):
            self.reader = BinaryIndex.load(self.folder.name, engine=self.engine)
        behind = self.reader.version != self.index.version
        assert (IndexArtefact(self.reader.path).version() != self.reader.version) == behind
        assert self.reader.refresh() == behind
        assert self.reader.version == self.index.version
        assert self.reader.ids().tolist() == sorted(self.items)

    @rule()
    def save(self):
        self.index.save(self.folder.name)

    @rule(query=CODES, k=st.integers(1, 70))
    def search(self, query, k):
        queries = np.frombuffer(query, np.uint8)[None]
        if not self.items:
            with pytest.raises(errors.IndexMismatch, match="empty"):
                self.index.search(queries, k)
            return
        self.same(self.index.search(queries, k), 0, ranking(query, self.items)[:k])

    @precondition(lambda self: self.items)
    @rule(query=CODES, radius=st.integers(0, N_BITS + 1))
    def search_radius(self, query, radius):
        hits = self.index.search_radius(np.frombuffer(query, np.uint8)[None], radius)[0]
        truth = [hit for hit in ranking(query, self.items) if hit[0] <= radius]
        assert list(zip(hits.distances, hits.ids, strict=True)) == truth

    @precondition(lambda self: self.items and self.kind != "ivf")
    @rule(query=CODES, label=LABELS, ids=st.sets(st.integers(0, MAX_ID)))
    def search_filtered(self, query, label, ids):
        queries = np.frombuffer(query, np.uint8)[None]
        by_label = {i: item for i, item in self.items.items() if item[1] == label}
        self.same(self.index.search(queries, 9, where={"labels": label}), 0, ranking(query, by_label)[:9])
        by_id = {i: item for i, item in self.items.items() if i in ids}
        self.same(self.index.search(queries, 9, where=ids), 0, ranking(query, by_id)[:9])

    @precondition(lambda self: self.items)
    @rule(data=st.data(), k=st.integers(1, 5))
    def search_by_item(self, data, k):
        item = data.draw(st.sampled_from(sorted(self.items)))
        code = self.index.codes([item])
        assert code.tobytes() == self.items[item][0]
        others = {i: value for i, value in self.items.items() if i != item}
        self.same(self.index.search(code, k, exclude_self=[item]), 0, ranking(code.tobytes(), others)[:k])

    @invariant()
    def counts_agree(self):
        assert len(self.index) == len(self.items)
        assert self.index.ids().tolist() == sorted(self.items)

    def same(self, hits, row, truth):
        used = hits.ids[row] >= 0
        found = list(zip(hits.distances[row][used], hits.ids[row][used], strict=True))
        assert found == truth
        assert hits.version == self.index.version

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()


LIMITS = settings(
    max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


def machine(kind, engine="kernel", limits=LIMITS, **options):
    """The test case of one kind; ivf scans all its lists, so it must be exact, too."""
    made = type(f"{kind}_{engine}", (IndexMachine,), {"kind": kind, "engine": engine, "options": options})
    made.TestCase.settings = limits
    return made.TestCase


TestFlat = machine("flat")
TestFlatFaiss = machine("flat", "faiss")
TestIvf = machine("ivf", nlist=3, nprobe=3)
TestMultihash = machine("multihash")
TestHnsw = machine("hnsw", neighbours=8, ef_construction=64, ef_search=200)
TestFlatLong = pytest.mark.slow(
    machine("flat", limits=settings(LIMITS, max_examples=150, stateful_step_count=50))
)
TestIvfLong = pytest.mark.slow(
    machine("ivf", limits=settings(LIMITS, max_examples=100, stateful_step_count=50), nlist=3, nprobe=3)
)


def test_segments_stay_few(codes_of):
    """One at a time, 300 additions make at most log2(n) segments, and none is slow for it."""
    codes = codes_of("random", 1300, 32)
    index = BinaryIndex.from_arrays(codes[:1000], kind="multihash")
    for i in range(1000, 1300):
        index.add(codes[i : i + 1])
    assert len(index) == 1300
    assert index.describe()["segments"] <= 10
    assert index.search(codes, 5) == BinaryIndex.from_arrays(codes).search(codes, 5)
    assert index.compact()
    assert not index.compact()
    assert index.describe()["segments"] == 1
    assert index.search(codes, 5) == BinaryIndex.from_arrays(codes).search(codes, 5)


def test_a_removed_id_may_come_back_with_another_code(codes_of):
    codes = codes_of("random", 20, 32)
    index = BinaryIndex.from_arrays(codes[:10])
    index.remove([3])
    index.add(codes[15:16], [3])
    assert (index.codes([3]) == codes[15]).all()
    assert index.search(codes[15:16], 1).ids.tolist() == [[3]]
    assert index.search(codes[3:4], 1).distances[0, 0] > 0
    index.remove([3])
    assert not index.contains([3])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_an_emptied_index_gets_its_kind_back(codes_of, tmp_path, kind):
    codes = codes_of("random", 300, 32)
    index = BinaryIndex.from_arrays(codes[:200], kind=kind)
    index.save(tmp_path)
    if kind == "ivf":
        index.tune(recall=0.5)
    index.add(codes[200:], np.arange(200, 300))
    index.remove(np.arange(200))
    if kind == "ivf":
        with pytest.raises(errors.Unsupported, match="compact"):
            index.tune()
    assert index.compact() == (kind != "flat")
    assert BinaryIndex.load(tmp_path).search(codes[200:], 1).ids[:, 0].tolist() == list(range(200, 300))
    assert [segment.rows.kind.name for segment in index._state.segments] == [kind]
    assert "tuned" not in index.describe(), "new lists were never tuned"
    index.remove(np.arange(200, 300))
    version = index.version
    assert not index.compact()
    assert index.version == version
    index.add(codes)
    assert index.compact() == (kind != "flat")
    assert [segment.rows.kind.name for segment in index._state.segments] == [kind]


def test_codes_of_ivf_rows_in_any_order(codes_of):
    codes = codes_of("clustered", 500, 32)
    index = BinaryIndex.from_arrays(codes, kind="ivf", nlist=20)
    for ids in ([], [7], np.random.default_rng(0).integers(0, 500, 800), np.arange(500)):
        assert (index.codes(ids) == codes[np.array(ids, dtype=int)]).all()


def test_labels_come_along(codes_of):
    codes = codes_of("random", 60, 32)
    labels = np.arange(60) % 5
    index = BinaryIndex.from_arrays(codes[:30], labels=labels[:30], n_classes=5)
    index.add(codes[30:50], labels=labels[30:50])
    index.add(codes[50:])  # without labels: never found by a label
    index.remove(np.arange(0, 60, 7))
    for _ in range(2):
        found = index.search(codes[:1], 60, where={"labels": [1, 4]}).ids[0]
        wanted = [i for i in range(50) if i % 7 and i % 5 in (1, 4)]
        assert sorted(found[found >= 0]) == wanted
        assert index.labels([1, 33, 55, 1]) == [[1], [3], [], [1]]
        index.compact()


def test_labels_of_many_ids(codes_of):
    codes = codes_of("random", 90, 32)
    labels = np.random.default_rng(0).random((90, 7)) < 0.4
    index = BinaryIndex.from_arrays(codes[:80], labels=labels[:80])
    index.add(codes[80:], labels=labels[80:])
    ids = np.random.default_rng(0).permutation(90)
    assert index.labels(ids) == [np.flatnonzero(labels[i]).tolist() for i in ids]


def test_a_transaction_is_one_version(codes_of, tmp_path):
    codes = codes_of("random", 30, 32)
    index = BinaryIndex.from_arrays(codes[:20])
    index.save(tmp_path / "index")
    other = BinaryIndex.load(tmp_path / "index")
    other.add(codes[20:21], ids=[20])  # meanwhile, by another process
    with index.transaction() as draft:
        draft.add(codes[21:25], ids=[21, 22, 23, 24])
        with pytest.raises(errors.IdTaken):
            draft.add(codes[25:27], ids=[20, 25])
        draft.remove([0, 24])
        assert not index.contains([21]).any(), "searches see it when it is on disk"
    assert index.version == other.version + 1
    again = BinaryIndex.load(tmp_path / "index")
    assert again.version == index.version
    assert again.ids().tolist() == index.ids().tolist() == list(range(1, 24))
    with contextlib.suppress(RuntimeError), index.transaction() as draft:
        draft.remove([1])
        raise RuntimeError
    assert index.contains([1]).all()


def test_upsert_replaces_codes_and_labels(codes_of, tmp_path):
    codes = codes_of("random", 30, 32)
    labels = np.eye(3, dtype=np.uint8)
    index = BinaryIndex.from_arrays(codes[:3], labels=labels)
    index.save(tmp_path / "index")
    index.upsert(codes[10:12], ids=[2, 7], labels=labels[:2])
    assert index.version == 2
    assert index.ids().tolist() == [0, 1, 2, 7]
    assert (index.codes([2, 7]) == codes[10:12]).all()
    assert index.labels([1, 2, 7]) == [[1], [0], [1]]


@pytest.mark.parametrize("compacted", [False, True])
def test_updates_are_carried_over_to_a_new_build(codes_of, tmp_path, compacted):
    """Items added, replaced, relabelled and removed since; then the store has grown by ten rows."""
    codes, labels = codes_of("random", 60, 32), np.eye(3, dtype=np.uint8)[np.arange(60) % 3]
    old = BinaryIndex.from_arrays(codes[:40], labels=labels[:40])
    old.save(tmp_path / "old")
    old.add(codes[50:52], ids=[900, 901], labels=labels[:2])
    old.upsert(codes[55:56], ids=[7], labels=labels[:1])
    old.upsert(codes[8:9], ids=[8], labels=labels[:1])  # the same code, another label
    old.remove([3, 4, 901])
    old.remove([5])
    old.add(codes[5:6], ids=[5], labels=labels[5:6])  # back as it was
    if compacted:
        assert old.compact()
    old = BinaryIndex.load(tmp_path / "old")
    new = BinaryIndex.from_arrays(codes[:50], labels=labels[:50])
    assert new.merge_updates(old) == (3, 2)
    assert new.ids().tolist() == [i for i in range(50) if i not in (3, 4)] + [900]
    assert (new.codes([7, 900, 45]) == codes[[55, 50, 45]]).all()
    assert new.labels([7, 8, 900]) == [[0], [0], [0]]
    new.save(tmp_path / "new")
    again = BinaryIndex.from_arrays(codes[:50], labels=labels[:50])
    assert again.merge_updates(BinaryIndex.load(tmp_path / "new")) == (3, 2)
    assert again.ids().tolist() == new.ids().tolist()


def test_updates_of_columns_and_vectors_alone_are_carried_over(codes_of, tmp_path):
    codes = codes_of("random", 8, 32)
    given = {"features": np.arange(16.0).reshape(8, 2), "columns": {"x": [1.0, np.nan, *range(6)]}}
    old = BinaryIndex.from_arrays(codes, **given)
    old.save(tmp_path)
    old.upsert(codes[2:3], [2], features=[[4, 5]], columns={"x": [7.0]})
    old.upsert(codes[3:4], [3], features=[[9, 9]], columns={"x": [1.0]})
    old.upsert(codes[4:5], [4], features=[[8, 9]], columns={"x": [2.0]})  # as it was
    new = BinaryIndex.from_arrays(codes, **given)
    assert new.merge_updates(BinaryIndex.load(tmp_path)) == (2, 0)
    assert new.columns([2, 3, 4])["x"].to_pylist() == [7, 1, 2]
    assert new.features([2, 3, 4]).tolist() == [[4, 5], [9, 9], [8, 9]]


def test_items_added_without_vectors_are_not_dropped_by_a_build_with_them(codes_of, tmp_path):
    codes = codes_of("random", 8, 32)
    old = BinaryIndex.from_arrays(codes)
    old.save(tmp_path)
    old.add(codes[:1], [100])
    new = BinaryIndex.from_arrays(codes, features=np.ones((8, 2)))
    with pytest.raises(errors.LineageMismatch, match=r"1 items were added .* without vectors"):
        new.replace(tmp_path)
    assert BinaryIndex.load(tmp_path).contains([100]).all()


@pytest.mark.parametrize("compacted", [False, True])
def test_what_comes_while_updates_are_merged_is_kept(codes_of, tmp_path, monkeypatch, compacted):
    """Others write between the long look at all rows and the lock."""
    codes, labels = codes_of("random", 60, 32), np.eye(3, dtype=np.uint8)[np.arange(60) % 3]
    old = BinaryIndex.from_arrays(codes[:40], labels=labels[:40])
    old.save(tmp_path)
    old.add(codes[50:53], ids=[900, 901, 902], labels=labels[:3])
    old.remove([3])
    merge, looks = BinaryIndex._merge, []

    def slow(self, updated, known=None):
        found = merge(self, updated, known)
        if not looks:
            old.add(codes[53:54], ids=[903], labels=labels[:1])
            old.upsert(codes[8:9], ids=[8], labels=labels[:1])
            old.remove([4, 901])
            old.add(codes[3:4], ids=[3], labels=labels[3:4])
            assert not compacted or old.compact()
        looks.append(known)
        return found

    monkeypatch.setattr(BinaryIndex, "_merge", slow)
    new = BinaryIndex.from_arrays(codes[:50], labels=labels[:50])
    assert new.replace(tmp_path) == (5, 2)  # 900, 902, 903, 8 and 3 kept; 3, then 4 removed
    assert len(looks) == 2
    after = BinaryIndex.load(tmp_path)
    assert after.ids().tolist() == [i for i in range(50) if i != 4] + [900, 902, 903]
    assert (after.codes([8, 903]) == codes[[8, 53]]).all()
    assert after.labels([3, 8, 903]) == [[0], [0], [0]]
    assert after.version > old.version
