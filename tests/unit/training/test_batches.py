"""Which rows are in which batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hashnet.training.batches import PairSampler, RowSampler, batch_slice, chunk_bytes


@given(st.integers(1, 200), st.integers(1, 64), st.integers(0, 5))
def test_an_epoch_holds_every_row_once(n_rows, batch_size, epoch):
    sampler = RowSampler(n_rows, batch_size, seed=1)
    steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
    rows = np.concatenate([sampler.rows_of(step) for step in steps])
    assert sorted(rows) == list(range(n_rows))


def test_order_follows_seed_and_epoch_alone():
    forward, backward = RowSampler(50, 16, 3), RowSampler(50, 16, 3)
    steps = list(range(12))
    one = {s: forward.rows_of(s).tolist() for s in steps}
    other = {s: backward.rows_of(s).tolist() for s in reversed(steps)}  # as after a restart
    assert one == other
    assert one[0] != one[4]  # the next epoch begins differently
    assert one[0] != RowSampler(50, 16, 4).rows_of(0).tolist()


@given(st.integers(1, 40), st.integers(1, 7))
def test_shares_are_equal_and_make_up_the_batch(n, world):
    sampler = RowSampler(40 + n, 40, seed=0)
    rows = sampler.rows_of(1)  # the last n
    parts = [batch_slice(sampler, 1, rank, world) for rank in range(world)]
    assert len({len(part.rows) for part in parts}) == 1
    joined, valid = np.concatenate([part.rows for part in parts]), parts[0].valid
    assert joined.tolist() == parts[0].all_rows.tolist()
    assert joined[valid].tolist() == rows.tolist()
    assert all(joined[p.first : p.first + len(p.rows)].tolist() == p.rows.tolist() for p in parts)
    assert all(0 <= row < 40 + n for row in joined)  # padding repeats rows that exist


def test_a_lone_row_is_padded_with_many_others():
    """256 copies of one row would be the whole batch to BatchNorm."""
    sampler = RowSampler(257, 256, seed=1)
    part = batch_slice(sampler, 3, 0, 1)  # the last batch of the second epoch
    assert part.valid.tolist() == [True] + [False] * 255
    assert part.all_rows.tolist() == [*sampler.rows_of(3), *sampler.rows_of(2)[:255]]
    assert len(set(part.all_rows.tolist())) == 256


def test_workers_are_padded_by_going_round():
    parts = [batch_slice(RowSampler(3, 256, seed=0), 0, rank, 2) for rank in range(2)]  # 3 rows for 2 x 2
    order = RowSampler(3, 256, seed=0).rows_of(0).tolist()
    assert np.concatenate([part.rows for part in parts]).tolist() == order + order[:1]


def test_pair_batches_hold_whole_pairs_and_walk_the_list():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 30, 45), rng.integers(30, 60, 45)
    sampler = PairSampler(a, b, batch_size=16, seed=2)
    seen: set[tuple[int, int]] = set()
    for step in range(6):  # 6 * 8 pairs >= 45
        rows = sampler.rows_of(step)
        assert len(rows) == len(set(rows.tolist())) <= 16
        seen |= {(i, j) for i, j in zip(a, b, strict=True) if i in rows and j in rows}
    assert seen == set(zip(a, b, strict=True))
    assert sampler.rows_of(5).tolist() == PairSampler(a, b, 16, 2).rows_of(5).tolist()
    assert sampler.steps_per_epoch == -(-len(set(a) | set(b)) // 16)


def test_pair_batches_are_padded_evenly():
    a, b = np.triu_indices(30, 1)
    sampler = PairSampler(a, b, batch_size=16, seed=0)
    part = batch_slice(sampler, 0, 0, 1)
    rows, times = np.unique(part.all_rows, return_counts=True)
    assert rows.tolist() == sampler.rows_of(0).tolist()
    assert (len(rows) < 16, times.max()) == (True, 2)


def test_few_rows_in_many_pairs_are_a_smaller_batch_not_a_padded_one():
    a, b = np.triu_indices(10, 1)
    sampler = PairSampler(a, b, batch_size=256, seed=0)
    assert (sampler.batch_size, sampler.steps_per_epoch) == (10, 1)
    assert sampler.rows_of(0).tolist() == list(range(10))  # 45 pairs, walked nearly three times


HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import gradient_worker  # noqa: E402


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Gradients of 4 and of 2 workers, of every case."""
    folder = tmp_path_factory.mktemp("workers")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / "gradient_worker.py"), str(folder), str(rank), "4,2"], env=environment
        )
        for rank in range(4)
    ]
    assert [process.wait(timeout=200) for process in started] == [0] * 4
    return folder


@pytest.mark.parametrize("case", gradient_worker.CASES)
def test_gradients_do_not_depend_on_the_number_of_workers(trained, case):
    alone = gradient_worker.outcome(gradient_worker.train(case))
    for size in (2, 4):
        together = torch.load(trained / f"{case}-{size}.pt", weights_only=True)
        assert together.keys() == alone.keys()
        for name, expected in alone.items():
            scale = expected.abs().max()
            assert (together[name] - expected).abs().max() <= 1e-10 * scale, (size, name)


def test_a_pass_on_a_gpu_may_keep_a_third_of_its_free_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (24 << 30, 80 << 30))
    assert chunk_bytes(torch.device("cuda", 0)) == 8 << 30
    assert chunk_bytes(torch.device("cpu")) == 1 << 30
