"""The decisions before encoding starts; no Ray is started."""

import pytest

from cluster.encode import job, pipeline
from hashnet.errors import ModelError


@pytest.mark.parametrize(
    ("device", "compile", "begun", "engine"),
    [
        ("auto", None, None, "auto"),
        ("auto", False, None, "auto"),  # a worker chooses: cuda or cpu-eager
        ("cpu", None, None, "cpu"),
        ("cpu", True, None, "cpu-compiled"),
        ("cuda", None, None, "cuda"),
        ("auto", None, "cpu-eager", "cpu-eager"),  # left open: as begun
        ("cpu", None, "cpu-compiled", "cpu-compiled"),
        ("auto", True, "cuda", "cuda"),
        ("auto", None, "cuda-nvjpeg", "cuda-nvjpeg"),
        ("cuda", None, "cuda-nvjpeg", "cuda-nvjpeg"),
        ("cpu", None, "cuda-nvjpeg", "cpu"),
        ("cpu", None, "cuda", "cpu"),  # these contradict what is there
        ("cuda", None, "cpu-eager", "cuda"),
        ("auto", True, "cpu-eager", "cpu-compiled"),
    ],
)
def test_the_engine_that_is_requested(device, compile, begun, engine):
    assert job.requested_engine(device, compile, begun) == engine


@pytest.mark.parametrize(
    ("engine", "compile", "modality", "name"),
    [
        ("auto", None, "image", "cpu-fused"),
        ("cpu", None, "image", "cpu-fused"),
        ("auto", False, "image", "cpu-eager"),
        ("cpu-compiled", None, "image", "cpu-compiled"),
        ("auto", None, "features", "cpu-eager"),
    ],
)
def test_without_gpus_no_worker_is_asked(engine, compile, modality, name, monkeypatch):
    monkeypatch.setattr("hashnet.encoding.engines._compiler", lambda: "/usr/bin/g++")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # the driver's own is not an actor's
    assert pipeline.engine_of_workers(engine, compile, modality, 0) == name


def test_an_engine_that_is_not_here_is_refused_with_its_own_sentence(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ModelError, match="cuda was requested"):
        pipeline.engine_of_workers("cuda", None, "image", 0)
    with pytest.raises(ModelError, match="decode=nvjpeg needs a GPU"):
        pipeline.engine_of_workers("cuda-nvjpeg", None, "image", 0)
