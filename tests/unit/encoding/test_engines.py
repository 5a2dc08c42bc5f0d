"""One batch shape: a row's logits depend on the row alone. And which engine runs where."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hashnet.encoding import engines as engines
from hashnet.encoding.engines import Engine, EngineSpec, choose_engine
from hashnet.errors import DeviceMemoryError, ModelError
from hashnet.models import BatchedInference
from hashnet.models.hash_model import build_model


def model(kind: str):
    torch.manual_seed(0)
    if kind == "image":
        return build_model("small_cnn", 48)
    return build_model("features", 48, n_features=20, hidden=33)


def rows(kind: str, n: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    if kind == "image":
        return rng.integers(0, 256, size=(n, 3, 32, 32), dtype=np.uint8)
    return rng.normal(size=(n, 20)).astype(np.float32)


KINDS = [("image", "cpu-fused"), ("image", "cpu-eager"), ("features", "cpu-eager")]


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_neighbours_place_caller_batch_and_threads_change_no_bit(kind, name):
    engine = Engine(model(kind), name, batch_rows=16)
    x = rows(kind, 40)
    wanted = engine.run(x)
    for size in (1, 3, 16, 17, 40):
        parts = [engine.run(x[i : i + size]) for i in range(0, 40, size)]
        assert np.array_equal(np.concatenate(parts), wanted)
    order = np.random.default_rng(2).permutation(40)
    assert np.array_equal(engine.run(x[order]), wanted[order])
    threads = torch.get_num_threads()
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            assert np.array_equal(engine.run(x), wanted)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_logits_are_the_models(kind, name):
    """Against the plain module on one row at a time, within rounding."""
    plain = model(kind).eval()
    engine = Engine(model(kind), name)
    x = rows(kind, 5)
    with torch.inference_mode():
        slow = torch.cat([plain(torch.from_numpy(row[None])) for row in x]).numpy()
    np.testing.assert_allclose(engine.run(x), slow, rtol=1e-4, atol=1e-5)


def test_nothing_in_nothing_out():
    engine = Engine(model("image"), "cpu-eager")
    assert engine.run(rows("image", 0)).shape == (0, 48)
    assert engine.run(rows("image", 0), "features").shape == (0, 512)


def test_features_are_what_the_backbone_gives():
    plain = model("image").eval()
    x = rows("image", 3)
    with torch.inference_mode():
        slow = plain.raw_features(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(
        Engine(model("image"), "cpu-eager").run(x, "features"), slow, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", ["cpu-fused", "cpu-eager"])
def test_kept_features_give_the_same_bits_as_their_pictures(name):
    engine = Engine(model("image"), name, batch_rows=8)
    x = rows("image", 21)
    features = engine.run(x, "features")
    assert np.array_equal(engine.head(features[[20, 3, 7]]), engine.run(x)[[20, 3, 7]])


def test_read_only_rows_are_fine(recwarn):
    x = rows("features", 4)
    wanted = Engine(model("features"), "cpu-eager", batch_rows=4).run(x)
    x.flags.writeable = False
    assert np.array_equal(Engine(model("features"), "cpu-eager", batch_rows=4).run(x), wanted)
    assert not recwarn.list


def test_the_choice_and_its_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(engines, "_compiler", lambda: None)
    assert choose_engine("auto", "image") == ("cpu-fused", "the fastest on a CPU")
    with pytest.raises(ModelError, match="install g"):
        choose_engine("cpu-compiled", "image")
    with pytest.raises(ModelError, match="no CUDA device"):
        choose_engine("cuda", "image")
    monkeypatch.setattr(engines, "_compiler", lambda: "/usr/bin/g++")
    assert choose_engine("auto", "features")[0] == "cpu-eager"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert choose_engine("auto", "image") == ("cuda", "a GPU")
    assert choose_engine("cpu", "image")[0] == "cpu-fused"
    assert choose_engine("cpu", "image", compile=False) == ("cpu-eager", "as requested")
    assert choose_engine("cpu", "features", compile=True) == ("cpu-compiled", "as requested")
    assert choose_engine("cpu-fused", "image", compile=True) == ("cpu-fused", "as requested")
    with pytest.raises(ModelError, match="compile=true is for the CPU"):
        choose_engine("cuda", "image", compile=True)
    with pytest.raises(ModelError, match="unknown engine 'gpu'"):
        Engine(model("image"), "gpu")


def test_a_compiler_that_fails_says_so(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("cannot find -lgomp")

    monkeypatch.setattr(engines, "_compiler", lambda: "/usr/bin/g++")
    monkeypatch.setattr(torch, "compile", fail)
    with pytest.raises(ModelError, match="cannot be compiled here: cannot find -lgomp; leave compile out"):
        Engine(model("image"), "cpu-compiled")


def test_the_entries_of_the_lineage():
    assert EngineSpec.of("cpu-eager", "image") == EngineSpec("cpu-eager", "float32", 32)
    assert EngineSpec.of("cuda", "image").dtype == "float16 autocast"


@pytest.mark.slow
def test_compiled_and_eager_differ_only_near_zero():
    """Counts the bits that differ; each must have a logit within rounding of zero."""
    eager, compiled = Engine(model("image"), "cpu-eager"), Engine(model("image"), "cpu-compiled")
    x = rows("image", 500)
    a, b = eager.run(x), compiled.run(x)
    error = np.abs(a - b).max()
    assert error < 1e-4 * np.abs(a).max()
    flipped = (a >= 0) != (b >= 0)
    print(f"{flipped.sum()} of {flipped.size} bits differ; largest difference of a logit {error:.2e}")
    assert (np.abs(a[flipped]) <= error).all()
    parts = [compiled.run(x[i : i + 7]) for i in range(0, 70, 7)]
    assert np.array_equal(np.concatenate(parts), b[:70])


class Shapes(torch.nn.Module):
    """Stands for a network: notes the rows of each batch, returns each row's sum."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        return x.float().sum(dim=1, keepdim=True).expand(-1, 48)


@pytest.mark.parametrize(
    ("n", "seen"), [(1, [16]), (16, [16]), (17, [16, 16]), (256, [256]), (300, [256, 16, 16, 16]), (0, [])]
)
def test_a_single_row_is_not_padded_to_a_large_batch(n, seen):
    """As on CUDA, where a batch has 256 pictures."""
    network, x = Shapes(), rows("features", n)
    run = BatchedInference(model("features"), batch_rows=256, pad=True, tail_rows=16, module=network)
    found = run(lambda start, stop: torch.from_numpy(x[start:stop]), n)
    assert network.seen == seen
    np.testing.assert_allclose(found.numpy(), np.repeat(x.sum(axis=1)[:, None], 48, axis=1), rtol=1e-5)


def test_only_cuda_has_a_smaller_last_batch():
    engine = Engine(model("image"), "cpu-eager")
    assert engine._tail_rows() is None
    engine.spec = EngineSpec.of("cuda", "image")
    assert engine._tail_rows() == 16
    engine.spec = EngineSpec.of("cuda", "image", 8)
    assert engine._tail_rows() == 8


def test_out_of_device_memory_names_the_batch():
    def full(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    run = BatchedInference(model("features"), batch_rows=64, pad=True, module=full)
    with pytest.raises(DeviceMemoryError, match="a batch of 64 rows; give the encoder a smaller batch_rows"):
        run(lambda start, stop: torch.zeros(stop - start, 20), 100)


def test_a_model_that_does_not_fit_on_the_device_is_told_as_one(monkeypatch):
    def full(self, *_, **__):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(DeviceMemoryError, match="too little memory for the model; use device=cpu"):
        Engine(model("features"), "cpu-eager")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_and_cpu_differ_only_near_zero():
    x = rows("image", 500)
    a, b = Engine(model("image"), "cpu-eager").run(x), Engine(model("image"), "cuda").run(x)
    flipped = (a >= 0) != (b >= 0)
    assert (np.abs(a[flipped]) <= np.abs(a - b).max()).all()
