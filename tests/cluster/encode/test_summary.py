"""What encoding says before and after, in words and as JSON, from a store on disk; no Ray."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from cluster.encode import summary
from hashnet import CodeStore
from hashnet.errors import FormatError, TooManyBad
from hashnet.io.arrow import binary_column
from hashnet.store import PlannedPart, StorePlan, StoreWriter, read_records, repair_range

LINEAGE = {"engine": "cpu-eager", "dtype": "float32", "model_sha256": "ab" * 32}
PLAN = StorePlan("codes", 8, rows_per_shard=4, parts=(PlannedPart("part-00000", "aa", 6),), lineage=LINEAGE)
CODES = {0: 0b11110000, 1: 0b11110000, 3: 0b11110001, 4: 0b10110000, 5: 0b11110000}  # 2 and 5 are bad


def rows_of(ids: list[int]) -> pa.Table:
    code = binary_column(np.array([[CODES[i]] for i in ids], np.uint8))
    return pa.table(
        {
            "row_id": ids,
            "uri": ["x"] * len(ids),
            "labels": pa.nulls(len(ids), pa.list_(pa.int32())),
            "code": code,
        }
    )


@pytest.fixture
def folder(tmp_path):
    """Four rows in two shards, two of them bad for two reasons."""
    StoreWriter(str(tmp_path), PLAN).begin()
    for shard, good, bad, reason in zip(
        PLAN.ranges(), ([0, 1, 3], [4]), (2, 5), ("missing", "corrupt"), strict=True
    ):
        refused = pa.table({"row_id": [bad], "uri": ["x"], "reason": [reason]})
        StoreWriter(str(tmp_path), PLAN).commit(shard, rows_of(good), refused)
    return str(tmp_path)


def test_the_end_in_words_and_as_json(folder, caplog):
    with caplog.at_level(logging.INFO):
        result = summary.finish(folder, PLAN, 0.5, 6, 2.0, {"node-a/1", "node-a/2", "node-b/7"})
    assert json.loads(json.dumps(result)) == result
    assert (result["rows"], result["bad_rows"]) == (4, 2)
    assert result["bad_reasons"] == {"corrupt": 1, "missing": 1}
    assert (result["rows_per_s"], result["shards"], result["actors"], result["nodes"]) == (3.0, 2, 3, 2)
    assert result["bytes"] == sum(record.bytes for record in read_records(folder).values())
    # four codes: bits 0, 2 and 3 always 1, bit 1 in three of four, bit 7 in one of four, the rest 0
    assert result["distinct_codes"] == 3
    assert result["bit_balance"] == {"min": 0.0, "mean": (3 + 0.75 + 0.25) / 8, "max": 1.0, "dead_bits": 6}
    words = caplog.messages[-1].splitlines()
    assert words[0].startswith("4 rows in 2 shards, ")
    assert words[0].endswith("2 bad rows (1 corrupt, 1 missing)")
    assert words[1] == "encoded 6 now in 2s: 3.0/s on 3 actors, 2 nodes, cpu-eager"
    assert words[2] == "3 distinct codes of 8 bits; ones per bit 0.00–1.00, 6 dead bits"


def test_too_many_bad_rows_until_they_are_repaired(folder):
    with pytest.raises(TooManyBad, match=r"2 of 6 rows \(33.33%\) are bad, .* 30.00%: 1 corrupt, 1 missing"):
        summary.finish(folder, PLAN, 0.3, 6, 1.0, set())
    with pytest.raises(FormatError, match="not complete: 2 of 2 shards are there"):
        CodeStore.open(folder)
    StoreWriter(folder, PLAN).commit(repair_range(PLAN, 0, 1), rows_of([5]), repair=True)
    result = summary.finish(folder, PLAN, 0.3, 1, 1.0, set())
    assert (result["rows"], result["bad_reasons"]) == (5, {"missing": 1})


def test_one_bad_row_among_few_does_not_fail_the_job(folder):
    StoreWriter(folder, PLAN).commit(repair_range(PLAN, 0, 1), rows_of([5]), repair=True)
    with pytest.raises(TooManyBad, match=r"1 of 6 rows \(16.67%\) are bad"):
        summary.finish(folder, PLAN, 0.0, 6, 1.0, set())
    assert summary.finish(folder, PLAN, 0.01, 6, 1.0, set())["bad_rows"] == 1


def test_a_sound_store_stays_usable_when_a_stricter_or_larger_run_fails(folder):
    summary.finish(folder, PLAN, 0.5, 6, 1.0, set())
    with pytest.raises(TooManyBad):
        summary.finish(folder, PLAN, 0.1, 0, 1.0, set())
    assert len(CodeStore.open(folder)) == 4
    grown = replace(PLAN, parts=(*PLAN.parts, PlannedPart("part-00001", "bb", 1)))
    StoreWriter(folder, grown).begin()
    new = list(grown.ranges())[-1]
    refused = pa.table({"row_id": [6], "uri": ["x"], "reason": ["missing"]})
    StoreWriter(folder, grown).commit(new, grown.schema.empty_table(), refused)
    with pytest.raises(TooManyBad, match="3 of 7 rows"):
        summary.finish(folder, grown, 0.4, 1, 1.0, set())
    CodeStore.open(folder).verify()  # the list of the four rows
    summary.finish(folder, grown, 0.5, 1, 1.0, set())
    with pytest.raises(TooManyBad, match="2 of 6 rows"):  # a run that does not know of the new part
        summary.finish(folder, PLAN, 0.1, 0, 1.0, set())
    CodeStore.open(folder).verify()
    first = next(iter(grown.ranges()))  # encoded anew with other bad rows: the list is true no more
    refused = pa.table({"row_id": [0, 2], "uri": ["x"] * 2, "reason": ["missing"] * 2})
    StoreWriter(folder, grown).commit(first, rows_of([1, 3]), refused)
    with pytest.raises(TooManyBad, match="4 of 7 rows"):
        summary.finish(folder, grown, 0.4, 4, 1.0, set())
    with pytest.raises(FormatError, match="not complete"):
        CodeStore.open(folder)


def test_the_plan_before_anything_is_there_and_half_way(folder, tmp_path, caplog):
    info = SimpleNamespace(sha256="ab" * 32, backbone="small_cnn", n_bits=8)
    fresh = summary.describe(f"{tmp_path}/new", PLAN, {}, info)
    assert (fresh["rows"], fresh["rows_to_do"], fresh["shards_done"], fresh["shards_to_do"]) == (6, 6, 0, 2)
    records = read_records(folder)
    half = {"codes-00000": records["codes-00000"]}
    with caplog.at_level(logging.INFO):
        plan = summary.describe(folder, PLAN, half, info)
    assert (plan["rows_to_do"], plan["shards_done"], plan["shards_to_do"]) == (2, 1, 1)
    assert plan["estimated_bytes"] == round(records["codes-00000"].bytes / 4 * 6)  # by what is there
    assert "2 shards (1 done, 1 to do)" in caplog.text
    assert f"sha256 {'ab' * 6}, engine cpu-eager" in caplog.text
