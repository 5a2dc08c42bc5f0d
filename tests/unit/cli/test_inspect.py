"""inspect: every kind of artefact, sound and damaged."""

from __future__ import annotations

import json
import re

import numpy as np
import pyarrow as pa
import pytest

from hashnet.cli.entry import main
from hashnet.cli.inspect import inspect
from hashnet.data.pairs import PairTable
from hashnet.data.sources import make_manifest
from hashnet.errors import FormatError
from hashnet.io.arrow import binary_column
from hashnet.metrics import NeighbourReport
from hashnet.run import Run
from hashnet.store import PlannedPart, StorePlan, StoreWriter, write_store
from tests.support.small_run import make_model, with_features


def damage(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def test_a_manifest_and_its_pictures(tmp_path):
    uri = make_manifest("synthetic", str(tmp_path / "m"), n_images=80, side=8, store="tar", broken=0.1).uri
    found = inspect(uri)
    assert (found.kind, found.sound) == ("manifest", True)
    assert found.facts["rows"] == 80
    assert found.facts["splits"]["database"]["rows"] == 72
    assert found.lineage["source"]["name"] == "synthetic"
    looked = inspect(uri, pictures=-1)
    assert looked.facts["pictures"]["looked_at"] == 80
    assert 0 < looked.facts["pictures"]["bad"] < 30
    assert not looked.sound
    assert "of 80 pictures cannot be used" in looked.problems[0]
    assert inspect(uri, pictures=5).facts["pictures"]["looked_at"] == 5
    json.dumps(found.to_dict())


def test_codes(tmp_path):
    codes = np.random.default_rng(0).integers(0, 256, (3000, 8), dtype=np.uint8)
    write_store(str(tmp_path / "codes"), codes, rows_per_shard=1000, lineage={"model_sha256": "ab" * 32})
    found = inspect(str(tmp_path / "codes"))
    assert (found.kind, found.problems) == ("codes", [])
    assert found.facts["rows"] == 3000
    assert found.facts["n_bits"] == 64
    assert found.facts["shards"] == 3
    assert found.lineage["model_sha256"] == "ab" * 32
    damage(tmp_path / "codes" / "codes-00001.parquet")
    damaged = inspect(str(tmp_path / "codes"))
    assert [p.split(":")[0] for p in damaged.problems] == ["codes-00001.parquet is damaged"]
    (tmp_path / "codes" / "codes-00001.parquet").unlink()
    assert inspect(str(tmp_path / "codes")).problems == ["codes-00001.parquet is missing"]
    (tmp_path / "codes" / "_SUCCESS").unlink()
    assert "not finished" in inspect(str(tmp_path / "codes")).problems[0]


def test_the_quarantine_of_codes(tmp_path):
    plan = StorePlan("codes", 8, rows_per_shard=2, parts=(PlannedPart("part-00000", "aa", 2),))
    (shard,) = StoreWriter(str(tmp_path), plan).begin().plan.ranges()
    rows = pa.table(
        {"row_id": [0], "uri": ["0.jpg"], "labels": [[0]], "code": binary_column(np.array([[7]], np.uint8))}
    )
    bad = pa.table({"row_id": [1], "uri": ["1.jpg"], "reason": ["corrupt"]})
    StoreWriter(str(tmp_path), plan).commit(shard, rows, bad)
    StoreWriter(str(tmp_path), plan).finish()
    assert inspect(str(tmp_path)).sound
    damage(tmp_path / "_quarantine" / "codes-00000.parquet")
    (problem,) = inspect(str(tmp_path)).problems
    assert problem.startswith("_quarantine/codes-00000.parquet is damaged: its sha256 is")


def test_codes_that_say_nothing(tmp_path):
    codes = np.random.default_rng(0).integers(0, 256, (2000, 4), dtype=np.uint8)
    codes[:, 1] = 0
    write_store(str(tmp_path / "dead"), codes)
    assert (
        "8 of 32 bits are the same in nearly all rows, the first is bit 8"
        in inspect(str(tmp_path / "dead")).problems
    )
    write_store(str(tmp_path / "flat"), np.tile(np.array([[1, 2], [3, 4]], np.uint8), (1000, 1)))
    assert any("only 2 different codes for 2,000 rows" in p for p in inspect(str(tmp_path / "flat")).problems)


def test_a_model(tmp_path):
    pytest.importorskip("torch")
    from hashnet.models.bundle import save_bundle
    from hashnet.models.hash_model import build_model

    model = build_model("features", 16, n_features=8)
    sha256 = save_bundle(str(tmp_path / "model"), model, class_names=["a", "b"], summary={"map": 0.5})
    found = inspect(str(tmp_path / "model"))
    assert (found.kind, found.problems) == ("model", [])
    assert found.facts["n_bits"] == 16
    assert found.facts["sha256"] == sha256
    assert found.facts["n_classes"] == 2
    assert found.facts["summary"] == {"map": 0.5}
    damage(tmp_path / "model" / "model.safetensors")
    assert "model.safetensors is damaged" in inspect(str(tmp_path / "model")).problems[0]


def test_an_index(tmp_path):
    pytest.importorskip("faiss")
    from hashnet.index.binary import BinaryIndex

    codes = np.random.default_rng(0).integers(0, 256, (100, 8), dtype=np.uint8)
    BinaryIndex.from_arrays(codes).save(str(tmp_path / "index"))
    found = inspect(str(tmp_path / "index"))
    assert (found.kind, found.problems) == ("index", [])
    assert found.facts["rows"] == 100
    assert found.facts["index_kind"] == "flat"
    damage(next((tmp_path / "index").glob("*.faiss")))
    assert "is damaged" in inspect(str(tmp_path / "index")).problems[0]


@pytest.mark.parametrize("values", [{"n_classes": 7}, {"lineage": {"model_sha256": "f01"}}, {"sha256": None}])
def test_an_index_json_that_was_changed(tmp_path, values):
    pytest.importorskip("faiss")
    from hashnet.index.binary import BinaryIndex

    BinaryIndex.from_arrays(np.arange(8, dtype=np.uint8).reshape(8, 1)).save(str(tmp_path / "index"))
    path = tmp_path / "index" / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    (problem,) = inspect(str(tmp_path / "index")).problems
    assert "index.json was changed" in problem
    assert "jobs/build_index.py" in problem


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("manifest.json", {"kind": "codes"}),
        ("manifest.json", {"kind": "codes", "shards": [3]}),
        ("report.json", {"kind": "evaluation", "lineage": 3}),
        ("model.json", {"kind": "model", "arguments": []}),
    ],
)
def test_values_that_are_missing_or_of_another_type(tmp_path, name, values):
    if name == "manifest.json":
        for mark in ("_plan.json", "_SUCCESS"):
            (tmp_path / mark).write_text("{}")
    (tmp_path / name).write_text(json.dumps({"format_version": 1} | values))
    (problem,) = inspect(str(tmp_path)).problems
    assert re.search(r"is damaged .*Error: .*; .* with .?(jobs/|hashnet dataset)", problem)


def test_a_list_of_shards_that_is_none(tmp_path):
    (tmp_path / "codes").mkdir()
    for name in ("_plan.json", "_SUCCESS"):
        (tmp_path / "codes" / name).write_text("{}")
    (tmp_path / "codes" / "manifest.json").write_text("[]")
    (problem,) = inspect(str(tmp_path / "codes")).problems
    assert "is not a hashnet codes" in problem


def test_pairs_reports_and_other_json(tmp_path):
    PairTable.from_arrays([0, 1], [1, 2], [True, False]).save(str(tmp_path / "pairs.parquet"))
    assert inspect(str(tmp_path / "pairs.parquet")).facts == {"pairs": 2, "similar": 1}
    assert inspect(f"file://{tmp_path}/pairs.parquet?option=1").kind == "pairs"
    (tmp_path / "report").mkdir()
    about = {
        "kind": "evaluation",
        "format_version": 1,
        "map": 0.71,
        "curves": [1, 2],
        "lineage": {"model_sha256": "x"},
    }
    (tmp_path / "report" / "report.json").write_text(json.dumps(about))
    found = inspect(str(tmp_path / "report"))
    assert (found.kind, found.facts, found.lineage) == ("evaluation", {"map": 0.71}, {"model_sha256": "x"})
    assert inspect(f"file://{tmp_path}/report/report.json?option=1").kind == "evaluation"


def test_a_run_whose_stages_do_not_fit(tmp_path, capsys):
    make_manifest("digits", str(tmp_path / "manifest.parquet"))
    sha256 = make_model(str(tmp_path / "model"))
    codes = np.zeros((5, 2), dtype=np.uint8)
    write_store(str(tmp_path / "codes"), codes, lineage={"model_sha256": "22" * 32})
    found = inspect(str(tmp_path))
    assert found.kind == "run"
    assert [part.kind for part in found.parts] == ["manifest", "model", "codes"]
    assert found.problems == [
        f"codes was made with model {'22' * 6}…, the run's model is {sha256[:12]}…; make it again"
    ]
    assert main(["inspect", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM: codes was made with model" in out
    assert out.startswith("NOT sound: 1 problem\n")


def test_a_run_with_vectors_that_was_evaluated_without_labels(tmp_path):
    run = Run(with_features(tmp_path))
    found = NeighbourReport(
        100, 400, 64, 10, 100, 0.9, (0.8, 1.0), (100,), (0.9,), None, None, recalls=(0.9,) * 100
    )
    run.neighbours.write(found, {"model_sha256": run.model.read()["sha256"]})
    inspected = inspect(run.uri)
    assert inspected.problems == []
    assert [(part.kind, part.problems) for part in inspected.parts] == [
        (kind, []) for kind in ("manifest", "model", "codes", "index", "neighbours", "codes", "features")
    ]
    assert inspect(run.report.uri).kind == "neighbours"


def compared(folder) -> Run:
    """A small comparison as jobs/compare.py leaves it: LSH and ITQ at 8 and 16 bits."""
    from hashnet.comparison import Cell, CellTask, Features, RowValues, run_cell

    rng, run = np.random.default_rng(0), Run(str(folder))
    labels = np.eye(2, dtype=np.uint8)[np.arange(20) % 2]
    rows = RowValues(rng.normal(size=(20, 16)).astype(np.float32), labels, np.arange(20))
    for method, n_bits in (("lsh", 8), ("lsh", 16), ("itq", 8), ("itq", 16)):
        cell = Cell("main", method, n_bits, 0)
        run_cell(CellTask(cell, cell.folder(run.uri), "manifest", "00", 10), Features(rows, rows, rows))
    report = folder / "report"
    report.mkdir()
    for name in ("comparison.html", "tables.json"):
        (report / name).write_text("{}")
    (folder / "config.yaml").write_text(f"run: {folder}\n")
    return run


def test_a_comparison(tmp_path, capsys):
    run = compared(tmp_path / "compare")
    assert main(["inspect", run.uri]) == 0
    out = capsys.readouterr().out
    assert out.startswith("sound\n")
    for line in ("methods: itq, lsh", "bits: 8, 16", "main: 4 of 4 finished", "/comparison.html"):
        assert line in out
    damage(tmp_path / "compare/cells/main/itq-8-0/codes.npz")
    (tmp_path / "compare/cells/main/lsh-8-0/cell.json").unlink()
    (tmp_path / "compare/report/comparison.html").unlink()
    (part,) = inspect(run.uri).parts
    assert part.facts["cells"] == {"main": "2 of 4 finished"}
    damaged, unfinished, missing = part.problems
    assert "itq-8-0/codes.npz is damaged" in damaged
    assert unfinished.startswith(
        "1 cell not finished, main/lsh-8-0 is the first; run the same jobs/compare.py"
    )
    assert "has no comparison.html; run the same" in missing
    assert main(["inspect", run.uri]) == 1
    assert capsys.readouterr().out.startswith("NOT sound: 3 problems\n")


def test_a_cell_of_a_comparison_that_is_not_what_it_should_be(tmp_path):
    run = compared(tmp_path / "compare")
    path = tmp_path / "compare/cells/main/lsh-16-0/cell.json"
    kept = {key: json.loads(path.read_text())[key] for key in ("kind", "format_version")}
    path.write_text(json.dumps(kept))
    (part,) = inspect(run.uri).parts
    assert "lsh-16-0 is damaged (KeyError" in part.problems[0]


def test_what_is_nothing_of_ours(tmp_path, capsys):
    (tmp_path / "x.txt").write_text("hello")
    for path in (tmp_path, tmp_path / "x.txt", tmp_path / "none"):
        with pytest.raises(FormatError):
            inspect(str(path))
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(FormatError, match="was not written by hashnet"):
        inspect(str(tmp_path / "x.json"))
    assert main(["inspect", str(tmp_path)]) == 2
    assert "was not written by hashnet" in capsys.readouterr().err


def test_inspecting_loads_neither_torch_nor_faiss(tmp_path, python, repo):
    import subprocess

    make_manifest("digits", str(tmp_path / "m"))
    code = (
        f"import sys; from hashnet.cli import main; main(['inspect', '{tmp_path}/m']); "
        "print({'torch', 'faiss'} & set(sys.modules))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=repo, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_bad_rows_are_named_with_their_reasons(tmp_path, capsys):
    part = PlannedPart("part", "00", 30)
    writer = StoreWriter(str(tmp_path), StorePlan("codes", 8, 30, (part,))).begin()
    rows = pa.table(
        {"row_id": [0], "uri": ["0.jpg"], "labels": pa.array([None], pa.list_(pa.int32())), "code": [b"a"]}
    )
    bad = pa.table(
        {"row_id": range(1, 30), "uri": [f"{i}.jpg" for i in range(1, 30)], "reason": ["truncated"] * 29}
    )
    (shard,) = writer.plan.ranges()
    writer.commit(shard, rows, bad)
    assert main(["inspect", str(tmp_path)]) == 1  # not finished yet
    writer.finish()
    capsys.readouterr()
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "row 1: truncated: 1.jpg" in text
    assert "row 20: truncated: 20.jpg" in text
    assert "row 21" not in text
    assert "more: 9" in text
