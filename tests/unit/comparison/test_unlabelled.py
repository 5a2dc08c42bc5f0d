"""Cells and the report of a comparison without labels."""

import csv
import json

import numpy as np
import pytest

from hashnet.comparison import Cell, CellTask, Features, RowValues, deep_config, finished_cell, run_cell
from hashnet.data import make_manifest
from hashnet.reports import ComparisonInfo, write_neighbour_comparison
from hashnet.training import TrainConfig, learn_from_neighbours, write_neighbours

METHODS = ("hashnet", "itq", "lsh", "sign", "pq")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """(cells by method, folder): every method at 16 bits on clustered vectors."""
    folder = tmp_path_factory.mktemp("unlabelled")
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(30, 20)) * [3, 3, 2, 2, *[0.5] * 16]
    vectors = (centres[rng.integers(0, 30, 900)] + 0.4 * rng.normal(size=(900, 20))).astype(np.float32)
    np.save(folder / "x.npy", vectors)
    manifest = make_manifest("npy", str(folder / "m"), path=str(folder / "x.npy"), n_query=60, n_train=400)
    rows = {
        split: RowValues(vectors[ids := manifest.row_ids(split)], None, ids)
        for split in ("train", "query", "database")
    }
    base = TrainConfig(run=str(folder), pairs=str(folder / "pairs.parquet"), first_epochs=10, stages=2)
    write_neighbours(base.pairs, base, manifest)
    found = {}
    for method in METHODS:
        cell = Cell("neighbours", method, 16, 0)
        train = None
        if cell.deep:
            made = deep_config(cell, base, manifest, cell.folder(str(folder)))
            train = learn_from_neighbours(made, manifest)
        task = CellTask(
            cell, cell.folder(str(folder)), manifest.uri, manifest.sha256, 50, train, neighbours=True
        )
        found[method] = run_cell(task, Features(**rows))
        assert finished_cell(task).neighbours == found[method].neighbours
    return found, folder


@pytest.mark.filterwarnings("ignore::hashnet.baselines.BaselineWarning")
def test_every_method_is_measured_by_neighbour_recall(compared):
    found, _ = compared
    recall = {method: cell.neighbours.recall for method, cell in found.items()}
    assert recall["itq"] > recall["lsh"]
    assert recall["hashnet"] > recall["itq"] - 0.05
    assert found["itq"].neighbours.asymmetric > recall["itq"]
    assert found["pq"].neighbours.asymmetric is None
    assert all(cell.report is None for cell in found.values())


def test_the_report_has_tables_and_figures(compared):
    found, folder = compared
    told = write_neighbour_comparison(
        str(folder / "report"), list(found.values()), ComparisonInfo(str(folder), 50)
    )
    assert set(told["recall"]) == set(METHODS)
    assert told["first"]["16"] in METHODS
    page = (folder / "report" / "comparison.html").read_text(encoding="utf-8")
    assert "HashNet from neighbours" in page
    assert page.count("<figure") == 1  # one code length: no curve over lengths
    with (folder / "report" / "tables.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == list(METHODS)
    saved = json.loads((folder / "report" / "tables.json").read_text(encoding="utf-8"))
    assert saved["rows"][1]["recall"] == float(rows[1]["recall"]) == round(found["itq"].neighbours.recall, 4)
    assert "In brackets" in (folder / "report" / "tables.md").read_text(encoding="utf-8")
