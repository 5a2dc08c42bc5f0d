"""The decisions before encoding starts; those that need a worker on a real local Ray."""

import logging

import pytest

from cluster.encode import planner
from cluster.runtime import capacity
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
        ("cpu", None, "cuda", "cpu"),  # these contradict what is there
        ("cuda", None, "cpu-eager", "cuda"),
        ("auto", True, "cpu-eager", "cpu-compiled"),
    ],
)
def test_the_engine_that_is_requested(device, compile, begun, engine):
    assert planner.requested_engine(device, compile, begun) == engine


class Busy:
    def is_here(self):
        return True


def test_a_busy_cluster_is_reported_while_a_worker_is_waited_for(ray_local, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "cluster.encode.planner")
    monkeypatch.setattr(capacity, "LINE_EVERY_S", 0.2)
    busy = ray_local.remote(num_cpus=2)(Busy).remote()
    assert ray_local.get(busy.is_here.remote(), timeout=60)
    make_room = logging.Handler()  # once the line was written
    make_room.emit = lambda record: ray_local.kill(busy)
    monkeypatch.setattr(planner.log, "handlers", [make_room])
    assert planner.engine_of_workers("cpu-eager", None, "never opened", "image", 0) == "cpu-eager"
    assert caplog.messages[0] == "waiting for room: a worker of {CPU 1}, to choose the engine"
    assert caplog.messages[-1].startswith("engine: cpu-eager")


def test_an_engine_that_no_worker_has_is_refused_with_its_own_sentence(ray_local):
    with pytest.raises(ModelError, match="cuda"):
        planner.engine_of_workers("cuda", None, "never opened", "image", 0)
