"""The artefacts of a run that a server opens."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hashnet import BinaryIndex
from hashnet.errors import LineageMismatch
from hashnet.server import ServeConfig, ServedRun
from tests.support.small_run import make_model


def test_items_are_those_of_the_code_store_given(own_run: str) -> None:
    """Encoded anew beside RUN/codes, as an upgrade does."""

    shutil.move(f"{own_run}/codes", f"{own_run}/codes-2")
    assert ServedRun.open(ServeConfig(run=own_run)).codes is None
    config = ServeConfig(run=own_run, codes=f"{own_run}/codes-2", base_uri="/pictures")
    items = ServedRun.open(config).open_items()
    assert items is not None
    assert (items.store.uri, items.base_uri) == (f"{own_run}/codes-2", "/pictures")


def test_a_model_that_did_not_make_the_index_is_refused_with_both_hashes(
    own_run: str, tmp_path: Path
) -> None:
    other = make_model(str(tmp_path / "model"), seed=1)
    with pytest.raises(LineageMismatch) as caught:
        ServedRun.open(ServeConfig(run=own_run, model=str(tmp_path / "model")))
    for sha256 in (other, BinaryIndex.load(f"{own_run}/index").lineage["model_sha256"]):
        assert sha256 in str(caught.value)
    without = ServedRun.open(ServeConfig(run=own_run, model="off"))
    assert without.modality is None
