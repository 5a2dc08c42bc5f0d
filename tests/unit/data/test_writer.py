"""A copy of a manifest under the zero-shot protocol."""

import numpy as np
import pytest

from hashnet.data.sources import make_manifest
from hashnet.data.writer import zero_shot_copy
from hashnet.errors import DataError


@pytest.fixture
def features(tmp_path):
    rng = np.random.default_rng(0)
    y = (rng.random((200, 8)) < 0.2).astype(np.uint8)
    y[:, 0] |= ~y.any(axis=1)
    np.savez(tmp_path / "f.npz", features=rng.random((200, 3)).astype(np.float32), labels=y)
    return make_manifest("npy", str(tmp_path / "m"), path=str(tmp_path / "f.npz"), n_query=40, n_train=100)


def test_training_never_sees_a_class_that_is_asked_for(features, tmp_path):
    unseen = zero_shot_copy(features, str(tmp_path / "z"), 0.5, seed=1)
    seen_classes = unseen.labels("train").any(axis=0)
    asked_classes = unseen.labels("query").any(axis=0) | unseen.labels("database").any(axis=0)
    assert seen_classes.any()
    assert asked_classes.any()
    assert not (seen_classes & asked_classes).any()


def test_queries_stay_queries_and_rows_stay_rows(features, tmp_path):
    unseen = zero_shot_copy(features, str(tmp_path / "z"), 0.5, seed=1)
    assert set(unseen.row_ids("query")) <= set(features.row_ids("query"))
    assert set(unseen.row_ids("train")) <= set(features.row_ids("train"))
    seen = ~features.labels("train")[:, unseen.labels("database").any(axis=0)].any(axis=1)
    assert unseen.count("train") == seen.sum() > 0  # all of them that have seen classes only
    assert len(unseen) == len(features)
    old, new = features.read(columns=["feature", "labels"]), unseen.read(columns=["feature", "labels"])
    assert old.equals(new)
    assert unseen.source["share"] == 0.5


def test_a_manifest_without_labels_is_refused(tmp_path):
    np.save(tmp_path / "f.npy", np.ones((10, 3), dtype=np.float32))
    manifest = make_manifest("npy", str(tmp_path / "m"), path=str(tmp_path / "f.npy"))
    with pytest.raises(DataError, match="no labels"):
        zero_shot_copy(manifest, str(tmp_path / "z"), 0.5)
