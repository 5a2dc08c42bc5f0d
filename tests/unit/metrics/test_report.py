"""EvalReport: frozen, JSON and back, and its lookups."""

from __future__ import annotations

import dataclasses
import json

import pytest

import hashnet
from hashnet.errors import FormatError, HashnetError
from hashnet.metrics.measures import curve_ranks
from hashnet.metrics.report import DEFINITIONS


@pytest.fixture
def report(make):
    return hashnet.evaluate(*make("multi"), k=20, class_names=[f"class {c}" for c in range(70)])


def test_json_round_trip_is_exact(report, tmp_path):
    again = hashnet.EvalReport.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again == report
    report.save(str(tmp_path / "report.json"))
    assert hashnet.EvalReport.load(str(tmp_path / "report.json")) == report


def test_every_query_has_its_values(report):
    assert len(report.ap) == len(report.ap_relevant) == len(report.ap_tie_aware) == report.n_queries


def test_it_is_frozen(report):
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.map = 1.0
    hash(report)  # tuples all the way down


def test_every_number_is_explained(report):
    explained = report.to_dict()["definitions"]
    assert explained == DEFINITIONS
    names = {field.name for field in dataclasses.fields(report)}
    assert {"map", "map_relevant", "map_tie_aware", "chance", "queries_without_hit"} <= names & set(explained)


def test_lookups(report):
    assert report.precision_at(5) == report.by_rank.precision[4]
    assert report.recall_at(20) == report.by_rank.recall[-1]
    assert report.precision_within() == report.by_radius.precision[2]
    assert report.empty_within(0) == report.by_radius.empty[0]
    assert report.recall_within(24) == report.by_radius.recall[-1]
    assert report.per_class[0].name == "class " + str(report.per_class[0].class_id)
    with pytest.raises(HashnetError, match=r"rank 21 .*k = 20; choose 20$"):
        report.precision_at(21)
    with pytest.raises(HashnetError, match=r"rank 0 .*; choose 1$"):
        report.recall_at(0)
    ranks = dataclasses.replace(report.by_rank, ranks=(1, 2, 5, *range(6, 23)))
    thinned = dataclasses.replace(report, by_rank=ranks, k=22)
    assert thinned.precision_at(5) == report.by_rank.precision[2]
    with pytest.raises(HashnetError, match=r"no rank 4 .*k = 22; choose 2 or 5$"):
        thinned.precision_at(4)
    with pytest.raises(HashnetError, match="between 0 and n_bits = 24, got 25"):
        report.precision_within(25)


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"kind": "index"},
        {"kind": "evaluation", "format_version": 99},
        {"kind": "evaluation", "format_version": 1},
    ],
)
def test_foreign_and_damaged_reports_are_refused(broken):
    with pytest.raises(FormatError):
        hashnet.EvalReport.from_dict(broken)


def test_long_curves_are_thinned_and_say_so(make):
    assert curve_ranks(10_000).tolist() == list(range(1, 10_001))
    ranks = curve_ranks(1_281_167)
    assert ranks[:1000].tolist() == list(range(1, 1001))
    assert ranks[-1] == 1_281_167
    assert len(ranks) < 16_000
