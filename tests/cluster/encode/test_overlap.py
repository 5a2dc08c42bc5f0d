"""Encoder actors keep a GPU busy: as many calls as Ray is asked for, on a stand-in device with fixed times.

Each caller has a clock of its own, copying and computing are shared, and nothing sleeps: of the callers, the
one whose clock is behind goes first.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch

from cluster.encode import pipeline
from hashnet import Encoder
from hashnet.io import binary_column
from hashnet.models import build_model, inference, save_bundle

CHUNKS, ROWS, CROP = 40, 4, 16


class StandIn:
    """A feed that takes ``copy`` and ``compute`` seconds per batch of pictures, in the order of the calls."""

    in_flight = 2

    def __init__(self, copy: float, compute: float, callers: int) -> None:
        self.copy_s, self.compute_s = copy, compute
        self.copy_free = self.compute_free = 0.0
        self.now, self.finished_at = [0.0] * callers, 0.0
        self.turn, self.mine = threading.Condition(), threading.local()

    def start(self, batch, call):
        me, is_picture = self.mine.number, batch.ndim == 4
        with self.turn:
            assert self.turn.wait_for(lambda: self.now[me] == min(self.now), timeout=60)
            self.copy_free = max(self.copy_free, self.now[me]) + self.copy_s * is_picture
            self.compute_free = max(self.compute_free, self.copy_free) + self.compute_s * is_picture
            return call(batch).float(), self.compute_free

    def finish(self, ticket):
        outputs, done = ticket
        self._move(max(self.now[self.mine.number], done))
        return outputs

    def leave(self):
        self.finished_at = max(self.finished_at, self.now[self.mine.number])
        self._move(float("inf"))

    def _move(self, now: float) -> None:
        with self.turn:
            self.now[self.mine.number] = now
            self.turn.notify_all()


def pixels(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (ROWS, 3, CROP, CROP), dtype=np.uint8)


def chunk(number: int) -> pa.Table:
    """A chunk as decode tasks yield them: one batch of the engine."""
    columns = {
        "shard": pa.array(["codes-00000"] * ROWS),
        "row_id": pa.array(range(number * ROWS, number * ROWS + ROWS)),
        "reason": pa.nulls(ROWS, pa.string()),
        "pixels": binary_column(pixels(number).reshape(ROWS, -1)),
    }
    return pa.table(columns)


class Kept:
    """A stand-in for the handle of a committer: keeps codes by row."""

    def __init__(self) -> None:
        self.codes: dict[int, bytes] = {}
        self.add = SimpleNamespace(remote=self._add)

    def _add(self, rows: pa.Table) -> tuple[int, list]:
        self.codes |= zip(rows["row_id"].to_pylist(), rows["code"].to_pylist(), strict=True)
        return len(rows), []


def asked_of_ray(gpus: float):
    return pipeline._actor_pool(SimpleNamespace(gpus_per_actor=gpus, n_actors=3), 10)


def calls_at_once(gpus: float) -> int:
    pool = asked_of_ray(gpus)
    return pool.max_concurrent_calls_per_actor if pool._enable_true_multi_threading else 1


@pytest.fixture
def encode(tmp_path, monkeypatch):
    """encode(device) has an actor encode all chunks by as many calls at once as the device has callers."""
    torch.manual_seed(0)
    save_bundle(str(tmp_path), build_model("small_cnn", 16, resize=CROP, crop=CROP))
    encoder = Encoder.load(str(tmp_path), engine="cpu-eager", batch_rows=ROWS)
    codes = np.concatenate([encoder.encode(pixels(number)) for number in range(CHUNKS)])
    expected = {i: code.tobytes() for i, code in enumerate(codes)}
    monkeypatch.setattr("ray.get", lambda results: results)

    def encode(device: StandIn, callers: int) -> float:
        monkeypatch.setattr(inference, "make_feed", lambda _: device)
        actor = object.__new__(pipeline.PictureEncoder)
        actor.settings = SimpleNamespace(run="run", output="codes")
        actor.name, actor.refused, actor.committers = "here", None, [Kept()]
        actor.encoder = Encoder.load(str(tmp_path), engine="cpu-eager", batch_rows=ROWS)
        waiting, failed = iter(range(CHUNKS)), []

        def caller(number: int) -> None:
            device.mine.number = number
            try:
                while (at := next(waiting, None)) is not None:
                    actor(chunk(at))
            except BaseException as error:
                failed.append(error)
            device.leave()

        threads = [threading.Thread(target=caller, args=(number,)) for number in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert actor.committers[0].codes == expected
        return CHUNKS / device.finished_at

    return encode


@pytest.mark.parametrize("times", [(3, 3), (5, 2), (2, 5), (0, 4)])
def test_calls_at_once_run_at_the_rate_of_the_slower_stage(encode, times):
    callers = calls_at_once(gpus=1)
    assert encode(StandIn(*times, callers), callers) >= 0.9 / max(times)


def test_one_call_at_a_time_would_take_turns(encode):
    """The bound above can fail: one call's pixels are copied, then computed."""
    assert encode(StandIn(3, 3, 1), 1) < 0.55 / 3


@pytest.mark.parametrize(("gpus", "calls"), [(1, 2), (0.5, 2), (0, 1)])
def test_what_ray_is_asked_for(gpus, calls):
    """Without true multi-threading Ray runs one call of an actor at a time, whatever else is asked for."""
    pool = asked_of_ray(gpus)
    assert calls_at_once(gpus) == calls
    assert pool.max_tasks_in_flight_per_actor == 2 * calls  # the next input is there when a call ends
    assert (pool.min_size, pool.max_size) == (3, 3)
