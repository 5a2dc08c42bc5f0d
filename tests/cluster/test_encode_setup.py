"""What is asked of a worker before encoding starts, on a real local Ray."""

import logging
import time

import pytest

from cluster import encode_setup, placement
from hashnet.errors import ModelError


def test_a_busy_cluster_is_said_while_a_worker_is_waited_for(ray_local, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "cluster.encode_setup")
    monkeypatch.setattr(placement, "LINE_EVERY_S", 0.2)
    taken = ray_local.remote(num_cpus=2)(lambda: time.sleep(2)).remote()
    while ray_local.available_resources().get("CPU", 0):
        time.sleep(0.05)
    assert encode_setup.settle_engine("cpu-eager", "never opened", "image", 0) == "cpu-eager"
    assert caplog.messages[0] == "waiting for room: a worker of {CPU 1}, to settle the engine"
    assert caplog.messages[-1].startswith("engine: cpu-eager")
    ray_local.get(taken)


def test_an_engine_that_no_worker_has_is_refused_with_its_own_sentence(ray_local):
    with pytest.raises(ModelError, match="cuda"):
        encode_setup.settle_engine("cuda", "never opened", "image", 0)
