"""Frozen ranges, and what may be written into which folder."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hashnet.errors import FormatError, LineageMismatch
from hashnet.store import PlannedPart, StorePlan, StoreWriter, check_plan, read_plan

LINEAGE = {
    "model_sha256": "m1",
    "preprocess_version": "1",
    "engine": "cpu-eager",
    "dtype": "float32",
    "batch_rows": 32,
    "bit_order": "msb first, 1 where >= 0",
}


def make(parts=(("a", 5), ("b", 3)), **changes) -> StorePlan:
    listed = tuple(PlannedPart(f"part-{sha}", sha, rows) for sha, rows in parts)
    return replace(StorePlan("codes", 64, rows_per_shard=4, parts=listed, lineage=dict(LINEAGE)), **changes)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(1, 9))
def test_ranges_cover_every_row_once_and_never_cross_a_part(rows, per_shard):
    plan = StorePlan(
        "codes", 64, per_shard, tuple(PlannedPart(f"p{i}", str(i), n) for i, n in enumerate(rows))
    )
    ranges = list(plan.ranges())
    covered = [(shard.part.name, row) for shard in ranges for row in range(shard.start, shard.stop)]
    assert covered == [(f"p{i}", row) for i, n in enumerate(rows) for row in range(n)]
    assert [shard.name for shard in ranges] == [f"codes-{i:05d}" for i in range(plan.n_shards)]
    assert all(1 <= len(shard) <= per_shard for shard in ranges)
    assert plan.n_rows == sum(rows)


def test_an_appended_part_leaves_the_earlier_ranges_as_they_were():
    before = list(make((("a", 5),)).ranges())
    assert list(make((("a", 5), ("b", 3))).ranges())[: len(before)] == before


def test_a_plan_survives_its_file(tmp_path):
    folder = str(tmp_path / "codes")
    assert read_plan(folder) is None
    plan = StoreWriter(folder, make(n_classes=7)).begin().plan
    assert read_plan(folder) == plan


def test_more_parts_extend_and_are_frozen_in_turn(tmp_path):
    folder = str(tmp_path)
    StoreWriter(folder, make((("a", 5),))).begin()
    StoreWriter(folder, make((("a", 5), ("b", 3)))).begin()
    assert len(read_plan(folder).parts) == 2
    with pytest.raises(LineageMismatch, match=r"part 1 \(part-b\).*now it is missing"):
        StoreWriter(folder, make((("a", 5),))).begin()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"width": 48}, "n_bits 64, requested is 48"),
        ({"output": "features"}, "output codes, requested is features"),
        ({"split": "query"}, "split database, requested is query"),
        ({"rows_per_shard": 5}, "rows_per_shard 4, requested is 5"),
        ({"n_classes": 3}, "n_classes None, requested is 3"),
    ],
)
def test_another_shape_is_refused_with_both_values(tmp_path, changes, words):
    StoreWriter(str(tmp_path), make()).begin()
    with pytest.raises(LineageMismatch, match=words):
        check_plan(str(tmp_path), make(**changes))


@pytest.mark.parametrize("name", sorted(LINEAGE))
def test_another_lineage_is_refused_with_both_values(tmp_path, name):
    StoreWriter(str(tmp_path), make()).begin()
    with pytest.raises(LineageMismatch, match=f"{name} {LINEAGE[name]!r}, requested is 'other'"):
        check_plan(str(tmp_path), make(lineage=LINEAGE | {name: "other"}))


@pytest.mark.parametrize("parts", [(("a", 5), ("x", 3)), (("a", 6), ("b", 3)), (("b", 3), ("a", 5))])
def test_another_manifest_is_refused(tmp_path, parts):
    StoreWriter(str(tmp_path), make()).begin()
    with pytest.raises(LineageMismatch, match="may be appended, not changed"):
        check_plan(str(tmp_path), make(parts))


def test_other_versions_are_no_reason_to_refuse(tmp_path):
    StoreWriter(str(tmp_path), make(lineage=LINEAGE | {"versions": {"torch": "1"}})).begin()
    check_plan(str(tmp_path), make(lineage=LINEAGE | {"versions": {"torch": "2"}}))


def test_a_newer_plan_is_refused(tmp_path):
    StoreWriter(str(tmp_path), make()).begin()
    path = tmp_path / "_plan.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(FormatError, match="upgrade hashnet"):
        read_plan(str(tmp_path))
