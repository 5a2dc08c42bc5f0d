"""How ties of a GPU index are settled. FAISS's GPU index is played by one that cuts ties at random."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import faiss
import numpy as np
import pytest

from hashnet import BinaryIndex
from hashnet.index.faiss_search import GPU_MAX_K


class RandomTies:
    """Right distances, any ids of a tie in any order, as a GPU's selection gives them."""

    def __init__(self, flat):
        self.flat, self.rng, self.asked = flat, np.random.default_rng(0), []
        self.busy = threading.Lock()

    def search(self, queries, k):
        assert self.busy.acquire(blocking=False), "a GPU index is not safe for concurrent use"
        try:
            time.sleep(0.001)
            return self._search(queries, k)
        finally:
            self.busy.release()

    def _search(self, queries, k):
        self.asked.append(k)
        assert k <= GPU_MAX_K
        distances, positions = self.flat.search(queries, self.flat.ntotal)
        shuffled = np.lexsort((self.rng.random(distances.shape), distances), axis=1)[:, :k]
        return np.take_along_axis(distances, shuffled, 1), np.take_along_axis(positions, shuffled, 1)


@pytest.fixture
def with_gpu(monkeypatch):
    """The copies sent to the GPU, in order."""
    sent = []
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)

    def send(resources, device, flat):
        sent.append(RandomTies(flat))
        return sent[-1]

    monkeypatch.setattr(faiss, "index_binary_cpu_to_gpu", send, raising=False)
    return sent


@pytest.mark.parametrize("sort", ["random", "clustered", "duplicated", "equal"])
def test_ties_come_out_as_on_the_cpu(codes_of, with_gpu, sort):
    codes = codes_of(sort, 3000, 32)
    ids = np.random.default_rng(0).permutation(9000)[:3000]
    on_gpu = BinaryIndex.from_arrays(codes, ids, device="cuda")
    on_cpu = BinaryIndex.from_arrays(codes, ids)
    assert on_gpu.describe()["device"] == "cuda"
    for k in (1, 10, 1000, 2048, 2500, 4000):  # beyond 2048 the CPU answers
        assert on_gpu.search(codes[:20], k) == on_cpu.search(codes[:20], k)
    own = ids[:20]
    assert on_gpu.search(codes[:20], 5, exclude_self=own) == on_cpu.search(codes[:20], 5, exclude_self=own)
    assert on_gpu.search(codes[:20], 5, where=ids[:9]) == on_cpu.search(codes[:20], 5, where=ids[:9])


def test_updates_and_large_k(codes_of, with_gpu, caplog):
    codes = codes_of("clustered", 500, 32)
    on_gpu, on_cpu = BinaryIndex.from_arrays(codes[:400], device="cuda"), BinaryIndex.from_arrays(codes[:400])
    for index in (on_gpu, on_cpu):
        index.add(codes[400:450])
    assert on_gpu.search(codes[:9], 30) == on_cpu.search(codes[:9], 30)
    for index in (on_gpu, on_cpu):
        index.remove([0, 1, 2])
    assert on_gpu.search(codes[:9], 30) == on_cpu.search(codes[:9], 30)
    fresh = BinaryIndex.from_arrays(codes, device="cuda")
    fresh.search(codes[:1], 3000)
    assert "beyond the GPU's 2048; searching on the CPU" in caplog.text


@pytest.mark.parametrize("sort", ["random", "clustered", "duplicated", "equal"])
def test_removed_rows_are_searched_around_on_the_gpu(codes_of, with_gpu, sort):
    codes = codes_of(sort, 3000, 32)
    on_gpu, on_cpu = BinaryIndex.from_arrays(codes, device="cuda"), BinaryIndex.from_arrays(codes)
    gone = np.random.default_rng(0).permutation(3000)[:1000]
    for index in (on_gpu, on_cpu):
        index.remove(gone)
    for k in (1, 10, 1000, 2048):
        assert on_gpu.search(codes[:20], k) == on_cpu.search(codes[:20], k)
    assert len(with_gpu) == 1
    assert len(with_gpu[0].asked) == 4


def test_the_gpu_follows_the_main_rows_and_is_sent_them_once(codes_of, with_gpu, tmp_path):
    codes = codes_of("random", 500, 32)
    index = BinaryIndex.from_arrays(codes[:400], device="cuda")
    index.save(tmp_path)
    reader = BinaryIndex.load(tmp_path, device="cuda")
    index.add(codes[400:450])
    index.remove([0, 420])
    server = reader.newest()
    assert reader.refresh()
    assert len(with_gpu) == 2, "the main rows are still the same"
    for one in (index, reader, server):
        before = sum(len(copy.asked) for copy in with_gpu)
        one.search(codes[:3], 5)
        assert sum(len(copy.asked) for copy in with_gpu) == before + 1
    assert index.compact()
    assert len(with_gpu) == 3
    assert index.search(codes[:9], 5) == BinaryIndex.load(tmp_path).search(codes[:9], 5)
    assert len(with_gpu[-1].asked) == 1
    index.remove(index.ids())
    index.add(codes)
    index.search(codes[:3], 5)
    assert len(with_gpu[-1].asked) == 1
    assert with_gpu[-1].flat.ntotal == 500
    BinaryIndex.from_arrays(codes, kind="ivf").save(tmp_path)
    assert reader.refresh()
    assert reader.describe()["device"] == "cpu"
    assert reader.search(codes[:9], 1).ids[:, 0].tolist() == list(range(9))


def test_many_threads_take_turns_on_the_gpu(codes_of, with_gpu):
    codes = codes_of("random", 500, 32)
    index = BinaryIndex.from_arrays(codes, device="cuda")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: index.search(codes[i : i + 1], 1).ids[0, 0], range(40)))
    assert found == list(range(40))
