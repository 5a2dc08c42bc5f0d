"""Neighbours of many vectors, found by tasks on Ray."""

import numpy as np

from cluster import train
from hashnet.data import nearest_rows


def test_tasks_find_what_one_process_finds(ray_local, monkeypatch):
    vectors = np.random.default_rng(0).normal(size=(250, 5)).astype(np.float32)
    monkeypatch.setattr(train, "NEIGHBOUR_ROWS", 100)
    assert (train.find_nearest(vectors) == nearest_rows(vectors, 0, 250)).all()
