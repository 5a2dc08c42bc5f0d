"""No damage of any file of a run is used: flips, truncations, swaps and deletions, in every consumer.

The small version runs with `make test`, the large one with `make test-all`. Both print how often a consumer
refused, and how often the damage did not matter: in the spaces of a JSON file, in a file it does not need.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.dedup import DedupConfig, find_duplicates
from cluster.encode import EncodeConfig
from hashnet import BinaryIndex, CodeStore, Encoder, Run, evaluate
from hashnet.cli.inspect import inspect
from hashnet.comparison import Cell, CellTask, Features, RowValues, finished_cell, run_cell
from hashnet.data import feature_matrix, make_manifest
from hashnet.errors import FormatError
from hashnet.io import binary_column, storage
from hashnet.server import ServeConfig, ServedRun
from hashnet.store import (
    ItemLookup,
    PlannedPart,
    StorePlan,
    StoreWriter,
    check_plan,
    read_quarantine,
    read_records,
    write_store,
)
from hashnet.training import TrainConfig, prepare, read_config, read_history, train_run
from hashnet.training.checkpoints import Checkpoints
from tests.support.damage import Consumer, try_damage


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> Path:
    """A trained run of 120 vectors: a quarantine, an index with changes, a report, duplicates, a cell."""
    folder = tmp_path_factory.mktemp("damage") / "run"
    rng = np.random.default_rng(0)
    labels = np.arange(120) % 3
    np.savez(f"{folder}.npz", features=rng.normal(size=(120, 16)) + labels[:, None], labels=labels)
    manifest = make_manifest("npy", f"{folder}-data", path=f"{folder}.npz", n_query=20, n_train=40)
    config = TrainConfig(
        run=str(folder), manifest=manifest.uri, n_bits=16, batch_size=20, first_epochs=2, stages=2,
        stage_epochs=1, checkpoint_every=2,
    )  # fmt: skip
    run = Run(folder)
    train_run(prepare(config).config)
    encoder = Encoder.load(run.model.uri, engine="cpu-eager")
    _write_codes(run, encoder)
    store, queries = run.codes.open(), run.query_codes.open()
    _write_index(run, store)
    find_duplicates(DedupConfig(run=str(folder), radius=1, figures=False))
    rows = RowValues(rng.normal(size=(60, 16)), labels[:60, None] == np.arange(3), np.arange(60))
    run_cell(_cell(folder), Features(rows, rows, rows))
    report = evaluate(queries.codes(), queries.labels(), store.codes(), store.labels(), k=10)
    run.report.write(report, {"database": store.sha256})
    storage.write_bytes(storage.join(run.report.uri, "report.html"), b"<p>the page</p>")
    storage.write_bytes(storage.join(run.report.uri, "figures", "a.svg"), b"<svg/>")
    run.report.list_page()
    return folder


def _write_codes(run: Run, encoder: Encoder) -> None:
    """codes/ in three shards with two rows in quarantine, and codes-query/."""
    manifest = run.manifest.open()
    rows = manifest.read("database")
    table = rows.select(["row_id", "uri", "labels"]).append_column(
        "code", binary_column(encoder.encode(feature_matrix(rows)))
    )
    part = PlannedPart(manifest.parts[0].name, manifest.parts[0].sha256, len(table))
    plan = StorePlan("codes", 16, 40, (part,), n_classes=3, lineage=encoder.lineage)
    writer = StoreWriter(run.codes.uri, plan).begin()
    for number, shard in enumerate(plan.ranges()):
        good = table.slice(shard.start, len(shard))
        bad = None
        if number == 1:
            bad = good.slice(0, 2).select(["row_id", "uri"]).append_column("reason", [["missing", "empty"]])
            good = good.slice(2)
        writer.commit(shard, good, bad)
    writer.finish()
    some = manifest.read("query", stop=20)
    write_store(
        run.query_codes.uri, encoder.encode(feature_matrix(some)), ids=some["row_id"].to_numpy(),
        labels=manifest.labels("query")[:20], lineage=encoder.lineage,
    )  # fmt: skip


def _write_index(run: Run, store: CodeStore) -> None:
    """The store's codes and further ones, without some, and with a log of later changes."""
    index = BinaryIndex.build(store)
    more = np.arange(8, dtype=np.uint8).reshape(4, 2)
    index.add(more, ids=np.arange(1000, 1004), labels=np.array([0, 1, 2, 0]))
    index.remove([1001, int(store.ids()[0])])
    index.save(run.index.uri)
    index.remove([1002])  # committed at once, to the log


def _cell(folder: Path) -> CellTask:
    cell = Cell("main", "itq", 8, 0)
    return CellTask(cell, cell.folder(str(folder)), "manifest", "0", k=10)


def _compared(folder: Path) -> Any:
    result = finished_cell(_cell(folder))
    if result is None:
        raise FormatError("the cell would run again")
    return result.to_dict(), {name: array.tolist() for name, array in result.codes().items()}


def _duplicates(folder: Path) -> Any:
    found = Run(folder).duplicates.open()
    return found.info, [t.to_pylist() for t in found.pairs()], found.clusters().to_pylist()


def _looked_up(folder: Path) -> Any:
    """What a server shows of items."""
    return ItemLookup(CodeStore.open(Run(folder).codes.uri)).items(range(0, 100, 9))


def _rows(store: CodeStore) -> Any:
    return [table.to_pylist() for table in store.tables()], store.quarantine().to_pylist()


def _searched(index: BinaryIndex) -> Any:
    found = index.search(np.arange(10, dtype=np.uint8).reshape(5, 2), 7)
    return found.ids.tolist(), found.distances.tolist()


def _resumed(folder: Path) -> Any:
    """What encode_db reads before it goes on."""
    uri = Run(folder).codes.uri
    records = read_records(uri)
    plan = CodeStore.open(uri).plan
    check_plan(uri, plan)
    assert EncodeConfig(run=str(folder)).target.uri == uri
    return records, read_quarantine(uri, records).to_pylist(), StoreWriter(uri, plan).listed()


def _evaluated(folder: Path) -> Any:
    run = Run(folder)
    store, queries = run.codes.open(), run.query_codes.open()
    return [(one.codes().tolist(), one.labels().tolist()) for one in (store, queries)]


def _trained(folder: Path) -> Any:
    return read_config(str(folder)), read_history(Run(folder).model.uri)


def _continued(folder: Path) -> Any:
    """The newest checkpoint alone: a damaged one is left for the one before."""
    checkpoints = Checkpoints(Run(folder).checkpoints)
    newest = max(storage.list_names(checkpoints.uri))
    found = checkpoints._read(storage.join(checkpoints.uri, newest))
    return found.state, found.history, {name: tensor.tolist() for name, tensor in found.tensors.items()}


def _inspected(folder: Path) -> Any:
    found = inspect(str(folder))
    if not found.sound:
        raise FormatError(str(found.to_dict()))
    return found


def _is_content(name: str) -> bool:
    """Whether damage of a file can never be harmless: all but JSON and YAML, which may have other spaces."""
    beside = name.startswith(("checkpoints/", "cells/", "duplicates/_links/"))  # nothing lists them
    return not beside and not name.endswith((".json", ".yaml", "_SUCCESS"))


CODES, QUERIES, MANIFEST = "codes/", "codes-query/", "manifest.parquet/"
SERVED = ("index/index.json", CODES, MANIFEST, "model/")
CONSUMERS = [
    Consumer("CodeStore", lambda run: _rows(CodeStore.open(Run(run).codes.uri)), (CODES,)),
    Consumer("BinaryIndex.build", lambda run: _searched(BinaryIndex.build(Run(run).codes.open())), (CODES,)),
    Consumer("BinaryIndex.load", lambda run: _searched(BinaryIndex.load(Run(run).index.uri)), ("index/",)),
    Consumer(
        "Encoder.load",
        lambda run: Encoder.load(Run(run).model.uri, engine="cpu-eager").encode(np.eye(16)[:9]).tolist(),
        ("model/",),
    ),
    Consumer("Manifest", lambda run: Run(run).manifest.open().read().to_pylist(), (MANIFEST,)),
    Consumer("evaluate", _evaluated, (CODES, QUERIES)),
    Consumer("encode_db", _resumed, (CODES,)),
    Consumer("report", lambda run: Run(run).report.open(), ("report/report.json",)),
    Consumer("serve", lambda run: ServedRun.open(ServeConfig(run=str(run))), SERVED),
    Consumer("training", _trained, ("config.yaml", "model/")),
    Consumer("checkpoint", _continued, ("checkpoints/step-",)),
    Consumer("lookup", _looked_up, (CODES,)),
    Consumer("duplicates", _duplicates, ("duplicates/",)),
    Consumer("comparison", _compared, ("cells/",)),
    Consumer("inspect", _inspected, ("",), _is_content),
]  # fmt: skip


def _check(run: Path, copy: Path, n: int, capsys: pytest.CaptureFixture[str], **part: int) -> None:
    shutil.copytree(run, copy)
    assert list(copy.glob("index/changes-*.log"))
    found = try_damage(copy, CONSUMERS, n, **part)
    with capsys.disabled():
        print(f"\n{found}")
    assert found.wrong == []
    assert found.counts["flip", "refused"] > n


def test_damaged_files_are_refused(whole_run, tmp_path, capsys):
    _check(whole_run, tmp_path / "run", 3, capsys)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(6))
def test_damaged_files_are_refused_many_times(whole_run, tmp_path, capsys, part):
    _check(whole_run, tmp_path / "run", 300, capsys, part=part, parts=6)
