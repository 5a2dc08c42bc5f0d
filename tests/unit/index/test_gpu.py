"""How ties of a GPU index are settled. FAISS's GPU index is played by one that cuts ties at random."""

import faiss
import numpy as np
import pytest

from hashnet import BinaryIndex
from hashnet.index import gpu


class RandomTies:
    """Right distances, any ids of a tie in any order, as a GPU's selection gives them."""

    def __init__(self, flat):
        self.flat, self.rng, self.asked = flat, np.random.default_rng(0), []

    def search(self, queries, k):
        self.asked.append(k)
        assert k <= gpu.MAX_K
        distances, positions = self.flat.search(queries, self.flat.ntotal)
        shuffled = np.lexsort((self.rng.random(distances.shape), distances), axis=1)[:, :k]
        return np.take_along_axis(distances, shuffled, 1), np.take_along_axis(positions, shuffled, 1)


@pytest.fixture
def with_gpu(monkeypatch):
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(
        faiss, "index_binary_cpu_to_gpu", lambda resources, device, flat: RandomTies(flat), raising=False
    )


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
