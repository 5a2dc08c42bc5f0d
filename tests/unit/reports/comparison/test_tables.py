import csv
import dataclasses
import io
import re

import numpy as np
import pytest

from hashnet.comparison.cell import CellInputs, CellResult, TrainedNetwork
from hashnet.metrics.evaluation import evaluate
from hashnet.reports.comparison import figures, tables
from hashnet.reports.comparison.report import ComparisonInfo, comparison_notes, write_comparison_report
from hashnet.reports.comparison.tables import gaps, gather
from hashnet.reports.style import new_axes

INFO = ComparisonInfo("/run", 100)


def cell(method, n_bits, seed, good, part="main", n_queries=60, n_database=300):
    """A cell that nothing computed: codes that carry the class in a share ``good`` of their bytes."""
    rng = np.random.default_rng([seed, n_bits, round(good * 100)])
    y, y_query = np.arange(n_database) % 3, np.arange(n_queries) % 3
    wide = np.array([[0] * (n_bits // 8), [255] * (n_bits // 8), [15] * (n_bits // 8)], dtype=np.uint8)

    def codes(classes):
        noise = rng.integers(0, 256, size=(len(classes), n_bits // 8), dtype=np.uint8)
        return np.where(rng.random(noise.shape) < good, wide[classes], noise)

    report = evaluate(codes(y_query), y_query, codes(y), y, k=100)
    inputs = CellInputs(method, n_bits, seed, {}, 100, 0.0, "0")
    return CellResult(
        part, inputs, fit_s=1.0 + seed, fit_cpu_s=1.0, encode_s=0.5, encoded_rows=360, report=report
    )


def grids(cells, paper=None):
    """Every table and difference, as printed."""
    found = gather(cells, paper)
    return [*map(tables.table_grid, found), *tables.difference_grids(gaps(found))]


def test_a_method_that_is_not_the_papers_stands_in_table_1(monkeypatch):
    monkeypatch.setitem(tables.TITLES, "mine", "Mine")
    cells = [
        cell("hashnet", 16, 0, 0.9),
        cell("mine", 16, 0, 0.5),
        cell("hashnet-w", 16, 0, 0.8),
    ]
    first, third = gather(cells)
    assert first.methods == ["hashnet", "mine"]
    assert third.methods == ["hashnet", "hashnet-w"]


@pytest.fixture(scope="module")
def records():
    quality = {"hashnet": 0.9, "hashnet+c": 0.88, "itq": 0.6, "lsh": 0.3}
    found = [cell(m, n, s, q) for m, q in quality.items() for n in (16, 32) for s in (0, 1, 2)]
    return [
        *found,
        cell("hashnet", 16, 0, 0.7, "zero-shot"),
        cell("dhn", 16, 0, 0.5, "zero-shot"),
    ]


def test_tables_hold_their_rows_in_the_paper_s_order(records):
    one, two, three = gather(records, "coco")
    assert one.methods == ["hashnet", "itq", "lsh"]
    assert two.methods == ["hashnet", "dhn"]
    assert three.methods == ["hashnet+c", "hashnet"]
    assert one.bits == (16, 32)


def test_mean_and_deviation_are_over_seeds(records):
    table = gather(records)[0]
    itq = [r for r in records if (r.made_from.method, r.made_from.n_bits) == ("itq", 16)]
    values = [r.report.map for r in itq]
    entry = table.entry("itq", 16)
    assert entry.mean() == pytest.approx(sum(values) / 3)
    assert entry.sd() == pytest.approx(np.std(values, ddof=1))
    assert entry.seconds("fit_s") == 2.0


def test_the_first_is_bold_and_the_far_behind_is_not(records):
    text = tables.markdown(map(tables.table_grid, gather(records, "coco")), ["a note"])
    hashnet = next(line for line in text.splitlines() if line.startswith("| HashNet |"))
    lsh = next(line for line in text.splitlines() if line.startswith("| LSH |"))
    assert hashnet.count("**") == 4
    assert "**" not in lsh
    assert "(0.6873)" in hashnet  # the paper's number
    assert "±" in lsh
    assert text.endswith("- a note\n")


def test_a_method_asked_other_queries_than_the_first_is_not_bold():
    cells = [cell("hashnet", 16, 0, 0.9), cell("itq", 16, 0, 0.9, n_queries=59)]
    (table,) = gather(cells)
    first = table.first(16).method
    (other,) = {"hashnet", "itq"} - {first}
    assert table.as_good_as_first(first, 16)
    assert not table.as_good_as_first(other, 16)


def test_csv_and_rows_say_the_same(records):
    found = gather(records, "coco")
    values = tables.table_rows(found)
    lines = list(csv.DictReader(io.StringIO(tables.as_csv(tables.TableRow, values))))
    assert len(lines) == len(values) == 6 + 2 + 4
    assert [float(line["map"]) for line in lines] == [row.map for row in values]
    assert lines[0]["seeds"] == "0 1 2"
    behind = next(row for row in values if row.method == "lsh" and row.n_bits == 16)
    assert behind.behind_low <= behind.behind_first <= behind.behind_high
    assert not behind.as_good_as_first


def test_a_variant_alone_is_no_ablation(records):
    assert [table.number for table in gather([r for r in records if r.made_from.method != "hashnet+c"])] == [
        1,
        2,
    ]


def test_another_variant_than_hashnet_is_never_left_out(records):
    found = gather([r for r in records if r.made_from.method in ("hashnet+c", "itq")])
    assert [table.methods for table in found] == [["itq"], ["hashnet+c"]]


def test_differences_are_those_of_the_mean_ap_of_each_query(records):
    """Against HashNet and against the first, variants included; interval by resampling with a loop."""
    found = gaps(gather(records))
    to_hashnet = {(g.method, g.n_bits): g for g in found if g.against == "hashnet"}
    assert set(to_hashnet) == {(m, n) for m in ("hashnet+c", "itq", "lsh") for n in (16, 32)}

    def ap(method):
        rows = [r for r in records if r.part == "main" and r.made_from.method == method]
        return np.mean([r.report.ap for r in rows if r.made_from.n_bits == 16], axis=0)

    per_query = ap("itq") - ap("hashnet")
    rng = np.random.default_rng(1)
    means = [rng.choice(per_query, len(per_query)).mean() for _ in range(4000)]
    gap = to_hashnet["itq", 16]
    assert gap.difference == pytest.approx(per_query.mean())
    assert (gap.low, gap.high) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.01)
    assert gap.clear
    best = max(("hashnet", "hashnet+c"), key=lambda m: ap(m).mean())
    assert {g.reference for g in found if g.against == "first" and g.n_bits == 16} == {best}


def test_differences_are_printed_with_their_intervals(records):
    found = gaps(gather(records))
    text = tables.markdown(grids(records), [])
    to_hashnet, to_first = text.split("## Difference of MAP to ")[1:]
    itq = next(gap for gap in found if (gap.against, gap.method, gap.n_bits) == ("hashnet", "itq", 16))
    assert f"| ITQ | {itq.difference:+.4f} [{itq.low:+.4f}, {itq.high:+.4f}] |" in to_hashnet
    assert "| HashNet | 0 | 0 |" in to_hashnet
    assert to_first.startswith("the first")
    assert to_first.count(" first |") == 2  # one at each code length
    text = tables.as_csv(tables.Gap, found)
    lines = list(csv.DictReader(io.StringIO(text)))
    assert [float(line["low"]) for line in lines] == [gap.low for gap in found]


def test_differences_to_the_first_are_not_repeated_where_hashnet_is_first():
    cells = [cell(method, 16, 0, good) for method, good in (("hashnet", 0.9), ("itq", 0.5))]
    titles = [grid.title for grid in grids(cells)]
    assert titles == ["Table 1: MAP of all methods", "Difference of MAP to HashNet"]


def test_the_report_is_one_page_without_outside_requests(records, tmp_path):
    shallow = [r for r in records if r.made_from.method in ("itq", "lsh")]
    info = ComparisonInfo(
        str(tmp_path), 100, {"bits": [16, 32], "base_uri": None}, "coco", {}, {"sha256": "0"}
    )
    result = write_comparison_report(str(tmp_path / "report"), shallow, info)
    names = {str(p.relative_to(tmp_path / "report")) for p in (tmp_path / "report").rglob("*.*")}
    assert {"tables.md", "tables.csv", "tables.json", "differences.csv", "comparison.html"} <= names
    assert {
        "figures/precision_h2.png",
        "figures/precision_recall.png",
        "figures/precision_recall_radius.png",
        "figures/precision_top_n.png",
    } <= names
    page = (tmp_path / "report" / "comparison.html").read_text()
    assert not re.search(r"https?:|@import|url\(", page)
    assert page.count("<img") == 4
    assert page.count("<caption><span>Difference of MAP to the first") == 1
    assert "<li>ITQ: Iterative Quantisation, without labels (Gong and Lazebnik, 2011).</li>" in page
    assert "<dt>configuration</dt><dd>bits=16,32</dd>" in page
    assert result["first"] == {"16": "itq", "32": "itq"}


def test_a_network_of_the_run_has_no_cpu_time_but_a_footnote():
    before, here = cell("hashnet", 16, 0, 0.9), cell("dhn", 16, 0, 0.5)
    before = dataclasses.replace(before, training=TrainedNetwork(), fit_s=103.4, fit_cpu_s=0.1)
    here = dataclasses.replace(here, training=TrainedNetwork(), fit_s=90.0, fit_cpu_s=85.0)
    text = tables.markdown(grids([before, here]), [])
    assert "| 103.4 (run) |" in text
    assert "| 90.0 (85.0) |" in text

    def footnotes(*cells):
        return [note for note in comparison_notes(gather(cells), INFO) if note.startswith("(run): ")]

    assert len(footnotes(before, here)) == 1
    assert footnotes(here) == []


@pytest.mark.parametrize(("run", "name"), [("table", "table"), ("digits/compare", "digits")])
def test_a_page_is_named_after_its_run(records, tmp_path, run, name):
    info = ComparisonInfo(str(tmp_path / run), 100)
    shallow = [r for r in records if r.made_from.method in ("itq", "lsh")]
    write_comparison_report(str(tmp_path / "report"), shallow, info)
    page = (tmp_path / "report" / "comparison.html").read_text()
    assert f"<title>Comparison of hashing methods: {name}</title>" in page
    assert f"<h1>Comparison of hashing methods: {name}</h1>" in page
    assert "2 methods at 16, 32 bits: 60 queries against 300 items, ranked to k = 100." in page


def test_one_code_length_gives_no_curve_over_code_lengths():
    names = [figure.name for figure in figures.draw(gather([cell("itq", 16, 0, 0.9)]))]
    assert names == ["precision_recall", "precision_recall_radius", "precision_top_n"]


def test_a_network_that_collapsed_is_said_on_the_page(tmp_path):
    cells = [cell("dhn", 16, 0, 0.1), cell("itq", 16, 0, 0.9)]
    network = TrainedNetwork(warnings=("only 1 different codes", "16 of 16 bits are equal"))
    cells[0] = dataclasses.replace(cells[0], training=network)
    cells[1] = dataclasses.replace(cells[1], warnings=("itq took all rows",))
    notes = comparison_notes(gather(cells), ComparisonInfo("/run", 100))
    assert notes[-2:] == ["DHN, 16 bits, seed 0: only 1 different codes.", "itq took all rows"]


def test_tables_measured_otherwise_say_so(records):
    alike = comparison_notes(gather(records), ComparisonInfo("/run", 5000))
    assert alike[0].startswith("MAP@100, mean average precision: the denominator is the relevant")
    assert alike[-1] == "60 queries, 300 database rows, chance level 0.3333."
    fewer = [cell("hashnet", 16, 0, 0.7, "zero-shot", n_queries=30, n_database=90)]
    notes = comparison_notes(
        gather([r for r in records if r.part == "main"] + fewer), ComparisonInfo("/run", 5000)
    )
    assert notes[0].startswith("MAP@k, mean average precision: the denominator is the relevant")
    assert notes[-2:] == [
        "Table 1, Table 3: MAP@100, 60 queries, 300 database rows, chance level 0.3333.",
        "Table 2: MAP@90, 30 queries, 90 database rows, chance level 0.3333.",
    ]


def test_rows_that_all_have_several_labels_leave_the_embedding_empty(records, tmp_path):
    """-1 says that a row does not have exactly one label."""
    codes = np.zeros((40, 2), dtype=np.uint8)
    np.savez(tmp_path / "codes.npz", query=codes, database=codes, classes=np.full(40, -1))
    hashnet = next(r for r in records if r.made_from.method == "hashnet")
    hashnet = dataclasses.replace(hashnet, folder=str(tmp_path))
    ax = new_axes()
    figures._tsne(gather([hashnet])[0].entry("hashnet", 16), ax)
    assert not ax.collections


def test_our_own_variants_stay_out_of_the_papers_tables():
    cells = [cell(name, 16, 0, 0.5) for name in ("hashnet", "hashnet+c", "hashnet+l", "dhn", "dhn+a", "itq")]
    first, third, fourth = gather(cells)
    assert first.methods == ["hashnet", "dhn", "itq"]
    assert third.methods == ["hashnet+c", "hashnet"]
    assert fourth.methods == ["hashnet+c", "hashnet", "dhn", "hashnet+l", "dhn+a"]
    assert fourth.reported("hashnet", 16) is None
