"""What is asked of a worker before encoding starts, on a real local Ray."""

import logging

import pytest

from cluster.encode import setup as encode_setup
from cluster.runtime import capacity
from hashnet.errors import ModelError


class Busy:
    def is_here(self):
        return True


def test_a_busy_cluster_is_said_while_a_worker_is_waited_for(ray_local, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "cluster.encode.setup")
    monkeypatch.setattr(capacity, "LINE_EVERY_S", 0.2)
    busy = ray_local.remote(num_cpus=2)(Busy).remote()
    assert ray_local.get(busy.is_here.remote(), timeout=60)
    make_room = logging.Handler()  # once the line was said
    make_room.emit = lambda record: ray_local.kill(busy)
    monkeypatch.setattr(encode_setup.log, "handlers", [make_room])
    assert encode_setup.settle_engine("cpu-eager", "never opened", "image", 0) == "cpu-eager"
    assert caplog.messages[0] == "waiting for room: a worker of {CPU 1}, to settle the engine"
    assert caplog.messages[-1].startswith("engine: cpu-eager")


def test_an_engine_that_no_worker_has_is_refused_with_its_own_sentence(ray_local):
    with pytest.raises(ModelError, match="cuda"):
        encode_setup.settle_engine("cuda", "never opened", "image", 0)
