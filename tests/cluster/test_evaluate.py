"""Evaluation on a real Ray: the report of a plain local call, whatever the tasks, shards and crashes."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import hashnet
from cluster import evaluate as evaluation
from cluster.encode.job import EncodeConfig, encode_database
from cluster.evaluate import EvaluateConfig, Evaluation, evaluate_run
from cluster.runtime import connection
from hashnet import Encoder, EvalReport, Manifest
from hashnet.cli.entry import main
from hashnet.codes import pack_signs
from hashnet.data import make_manifest
from hashnet.data.columns import feature_matrix
from hashnet.data.writer import SourceRows, write_manifest
from hashnet.errors import ConfigError, DataError, FormatError, LineageMismatch
from hashnet.io import events
from hashnet.metrics import QueryMeasures
from hashnet.models.bundle import save_bundle
from hashnet.models.hash_model import build_model
from hashnet.run import Run
from hashnet.store import CodesArtefact

DATABASE, QUERY = 4, 2
N, CLASSES = 2400, 6


def feature_rows(n: int, labelled: bool = True) -> SourceRows:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(CLASSES, 12)) * 2
    classes = rng.integers(0, CLASSES, n)
    values = (centres[classes] + rng.normal(size=(n, 12))).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 12)
    table = pa.table({"feature": column})
    lists = [
        sorted({int(c), int(c + 1) % CLASSES} if i % 5 == 0 else {int(c)}) for i, c in enumerate(classes)
    ]
    labels = pa.array(lists, pa.list_(pa.int32())) if labelled else None
    return SourceRows(
        n,
        lambda a, b: table[a:b],
        modality="features",
        labels=labels,
        n_classes=CLASSES if labelled else None,
        n_features=12,
    )


def make_run(folder, labelled: bool = True) -> str:
    flags = np.where(np.arange(N) % 4 == 0, QUERY, DATABASE).astype(np.uint8)
    write_manifest(str(folder / "manifest.parquet"), feature_rows(N, labelled), flags)
    torch.manual_seed(0)
    save_bundle(str(folder / "model"), build_model("features", 24, n_features=12))
    return str(folder)


@pytest.fixture(autouse=True)
def _on_tasks(monkeypatch):
    """The runs here are small enough for one process, which a test of its own covers."""
    monkeypatch.setattr(evaluation, "LOCAL_PAIRS", 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory, ray_local):
    """A run whose database is encoded in shards of 200 rows."""
    folder = make_run(tmp_path_factory.mktemp("evaluation") / "run")
    encode_database(EncodeConfig(run=folder, rows_per_shard=200, device="cpu", compile=False))
    return folder


@pytest.fixture(scope="module")
def expected(run) -> EvalReport:
    """What one process says, from the manifest and the model alone."""
    manifest, encoder = Manifest.open(run + "/manifest.parquet"), Encoder.load(run + "/model", "cpu-eager")
    logits = {name: encoder.logits(feature_matrix(manifest.read(name))) for name in ("query", "database")}
    return hashnet.evaluate(
        pack_signs(logits["query"]),
        manifest.labels("query"),
        pack_signs(logits["database"]),
        manifest.labels("database"),
        k=100,
        database_ids=manifest.row_ids("database"),
        query_logits=logits["query"],
    )


@pytest.mark.parametrize(("rows_per_task", "range_bytes"), [(10_000, 64 << 20), (150, 64 << 20), (500, 1)])
def test_report_does_not_depend_on_tasks(run, expected, tmp_path, monkeypatch, rows_per_task, range_bytes):
    # 1, 9 and 4 groups of shards (9 are folded first), and 1 or 3 ranges of queries
    monkeypatch.setattr(evaluation, "RANGE_BYTES", range_bytes)
    out = str(tmp_path / "report")
    config = EvaluateConfig(run=run, k=100, out=out, rows_per_task=rows_per_task, figures=False)
    result = evaluate_run(config)
    assert EvalReport.load(out + "/report.json") == expected
    assert result["map"] == expected.map
    assert result["n_queries"] == 600
    assert not list((tmp_path / "report").glob("parts-*"))


def test_report_does_not_depend_on_shards(run, expected, tmp_path):
    codes = str(tmp_path / "codes")
    encode_database(EncodeConfig(run=run, out=codes, rows_per_shard=777, device="cpu", compile=False))
    evaluate_run(EvaluateConfig(run=run, codes=codes, k=100, out=str(tmp_path / "report"), figures=False))
    assert EvalReport.load(str(tmp_path / "report" / "report.json")) == expected


def test_few_comparisons_need_no_ray_and_give_the_same_report(run, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "LOCAL_PAIRS", 1 << 30)
    monkeypatch.setattr(evaluation, "RANGE_BYTES", 1)
    monkeypatch.setattr(connection, "connect", lambda: pytest.fail("Ray was started"))
    evaluate_run(EvaluateConfig(run=run, k=100, rows_per_task=200, out=str(tmp_path), figures=False))
    assert EvalReport.load(str(tmp_path / "report.json")) == expected


def test_it_goes_on_where_it_was(run, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "RANGE_BYTES", 1)
    out = tmp_path / "report"
    config = EvaluateConfig(run=run, k=100, out=str(out), figures=False)
    whole, counted = evaluation.run_ranges, []

    def watched(*args):
        for span, blocks in whole(*args):
            counted.append(span)
            yield span, blocks

    def stopping(*args):
        yield next(watched(*args))
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "run_ranges", stopping)
    with pytest.raises(KeyboardInterrupt):
        evaluate_run(config)
    assert not (out / "report.json").exists()
    assert len(list(out.glob("parts-*/*"))) == 1
    monkeypatch.setattr(evaluation, "run_ranges", watched)
    with monkeypatch.context() as patch:  # everything is counted, but the report is not written yet
        patch.setattr(evaluation, "build_report", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            evaluate_run(config)
    assert len(list(out.glob("parts-*/*"))) == 3
    evaluate_run(config)
    assert not list(out.glob("parts-*"))
    assert sorted(counted) == [(0, 256), (256, 512), (512, 600)]  # none of them twice
    assert EvalReport.load(str(out / "report.json")) == expected
    evaluate_run(config)  # finished: nothing is counted again
    assert len(counted) == 3
    evaluate_run(replace(config, k=50))  # other settings: everything is
    assert len(counted) == 6
    assert EvalReport.load(str(out / "report.json")).k == 50


def test_k_none_ranks_the_whole_database(run, tmp_path):
    result = evaluate_run(EvaluateConfig(run=run, k=None, out=str(tmp_path / "report"), figures=False))
    assert result["k"] == result["n_database"] == 1800


def test_rankings_for_trec_eval(run, tmp_path):
    evaluate_run(EvaluateConfig(run=run, out=str(tmp_path), k=20, figures=False, trec=True))
    ranking = (tmp_path / "trec" / "run.txt").read_text().splitlines()
    queries = Run(run).query_codes.open()
    assert len(ranking) == 20 * len(queries)
    assert {int(line.split()[0]) for line in ranking} == set(queries.ids().tolist())
    assert (tmp_path / "trec" / "qrels.txt").stat().st_size > 0


def test_codes_of_another_model_are_refused(run, tmp_path):
    torch.manual_seed(1)
    other = str(tmp_path / "model")
    save_bundle(other, build_model("features", 24, n_features=12))
    with pytest.raises(LineageMismatch, match="encode the database with this model"):
        evaluate_run(EvaluateConfig(run=run, model=other, query_codes=str(tmp_path / "q"), figures=False))


def slow_recall(folder: str) -> float:
    """The share of the 10 nearest vectors among the first 100 codes, by loops, over all orders of ties."""
    manifest, encoder = (
        Manifest.open(folder + "/manifest.parquet"),
        Encoder.load(folder + "/model", "cpu-eager"),
    )
    vectors = {name: feature_matrix(manifest.read(name)) for name in ("query", "database")}
    codes = {name: encoder.encode(values) for name, values in vectors.items()}
    recalls = []
    for vector, code in zip(vectors["query"], codes["query"], strict=True):
        nearest = np.argsort(((vectors["database"] - vector) ** 2).sum(axis=1))[:10]
        distances = np.bitwise_count(codes["database"] ^ code).sum(axis=1).astype(int)
        nearer = np.array([(distances < d).sum() for d in distances[nearest]])
        tied = np.array([(distances == d).sum() for d in distances[nearest]])
        recalls.append(np.clip((100 - nearer) / tied, 0, 1).mean())
    return float(np.mean(recalls))


def test_a_run_without_labels_is_measured_by_its_vectors(ray_local, tmp_path):
    folder = make_run(tmp_path / "run", labelled=False)
    encode_database(EncodeConfig(run=folder, rows_per_shard=500, device="cpu", compile=False))
    told = evaluate_run(EvaluateConfig(run=folder))
    assert told["recall"] == pytest.approx(slow_recall(folder))
    assert (told["n_queries"], told["k"], told["within"]) == (600, 10, 100)
    assert f"{told['recall']:.4f}" in (tmp_path / "run" / "report" / "report.html").read_text()
    assert evaluate_run(EvaluateConfig(run=folder))["recall"] == told["recall"]


def test_pictures_without_labels_are_measured_by_the_features_of_their_backbone(ray_local, tmp_path):
    rng = np.random.default_rng(0)
    for i in range(60):
        pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i:02d}.png")
    folder = str(tmp_path / "run")
    run = Run(folder)
    make_manifest("imagefolder", run.manifest.uri, path=str(tmp_path), n_query=20, n_train=30)
    torch.manual_seed(0)
    save_bundle(run.model.uri, build_model("small_cnn", 24))
    encode_database(EncodeConfig(run=folder, output="codes,features", features_dtype="int8", device="cpu"))
    told = evaluate_run(EvaluateConfig(run=folder))
    assert (told["n_queries"], told["n_database"], told["k"]) == (20, 40, 10)
    page = (tmp_path / "run" / "report" / "report.html").read_text()
    assert [page.count(f"{kind} query") for kind in ("Best", "Median", "Worst")] == [2, 2, 2]
    assert page.count("data:image/png") >= 6 * 11  # each with its ten nearest
    assert evaluate_run(EvaluateConfig(run=folder))["recall"] == told["recall"]


def test_a_manifest_without_queries_is_told(tmp_path):
    run = Run(str(tmp_path / "run"))
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(30, 8)).astype(np.float32))
    source = {"path": str(tmp_path / "x.npy"), "all_in": ["train", "database"]}
    make_manifest("npy", run.manifest.uri, **source)
    save_bundle(run.model.uri, build_model("features", 16, n_features=8))
    encode_database(EncodeConfig(run=run.uri, device="cpu"))
    with pytest.raises(ConfigError) as caught:
        evaluate_run(EvaluateConfig(run=run.uri))
    assert str(caught.value).endswith(
        "has no query rows (its rows by split: 30 train, 30 database); "
        "make a manifest that has some with --n-query of hashnet dataset"
    )


def test_neighbours_are_measured_beside_labels_on_request(run, tmp_path):
    out = tmp_path / "report"
    config = EvaluateConfig(run=run, query_codes=str(tmp_path / "q"), out=str(out), figures=False)
    assert "neighbours" not in evaluate_run(config)
    told = evaluate_run(replace(config, neighbours=True))
    assert told["neighbours"]["recall"] == pytest.approx(slow_recall(run))
    assert "map" in told
    assert f"{told['neighbours']['recall']:.4f}" in (out / "neighbours.html").read_text()


def test_a_run_without_codes_says_so(ray_local, tmp_path):
    with pytest.raises(FormatError):
        evaluate_run(EvaluateConfig(run=make_run(tmp_path / "run"), figures=False))


def test_figures_and_page(run, tmp_path):
    out = tmp_path / "report"
    result = evaluate_run(EvaluateConfig(run=run, k=100, out=str(out)))
    assert result["page"] == str(out / "report.html")
    text = (out / "report.html").read_text(encoding="utf-8")
    assert f"{result['map']:.4f}" in text
    assert (out / "figures" / "precision-recall.png").exists()


def test_the_job_prints_one_json_line(run, expected, python, repo):
    done = subprocess.run(
        [python, "jobs/evaluate.py", f"run={run}", "k=100", "figures=false"],
        cwd=repo,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["map"] == expected.map
    assert result["report"] == run + "/report/report.json"


def test_the_job_tells_mistakes_in_a_sentence(run, python, repo):
    done = subprocess.run(
        [python, "jobs/evaluate.py", f"run={run}", "k=0", "devise=cpu"],
        cwd=repo,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "must be at least 1" in done.stderr
    assert "did you mean 'device'" in done.stderr
    assert "Traceback" not in done.stderr


def test_evaluation_reports_each_range_of_queries(monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(events, "event", lambda message, **fields: told.append({"event": message, **fields}))
    spans = [(0, 64), (64, 100)]
    monkeypatch.setattr(connection, "connect", lambda: None)
    monkeypatch.setattr(evaluation, "query_ranges", lambda n, k: spans)
    monkeypatch.setattr(evaluation, "shard_groups", lambda store, rows: [])
    monkeypatch.setattr(evaluation, "run_ranges", lambda *_: iter([(span, []) for span in spans]))
    monkeypatch.setattr(QueryMeasures, "dump_blocks", lambda blocks: b"{}")
    monkeypatch.setattr(QueryMeasures, "load_blocks", lambda data: [])
    monkeypatch.setattr(QueryMeasures, "concatenate", list)
    config = EvaluateConfig(run=str(tmp_path / "demo"))
    queries = Evaluation(store=(), codes=range(100), labels=None, k=10, seed=0, device="cpu")
    evaluation._measure_all(config, queries, {})
    about = {"event": "queries measured", "stage": "evaluate", "run": "demo"}
    assert told == [{**about, "first": 0, "stop": 64}, {**about, "first": 64, "stop": 100}]


def import_codes(run: str, name: str, codes: np.ndarray, *options: str, labels: list | None = None) -> str:
    """A store of codes from elsewhere, made as a user would."""
    columns = {"code": pa.array([row.tobytes() for row in codes], pa.binary(codes.shape[1]))}
    source = f"{run}-{name}.parquet"
    pq.write_table(pa.table(columns | ({} if labels is None else {"label": labels})), source)
    options = ("--label", "label", *options) if labels is not None else options
    assert main(["dataset", "codes", source, *options, "--out", f"{run}/{name}", "--overwrite"]) == 0
    return f"{run}/{name}"


ELSEWHERE = np.random.default_rng(5)
ITEMS, QUERIES = (ELSEWHERE.integers(0, 256, (n, 2), dtype=np.uint8) for n in (200, 30))
ITEM_LABELS, QUERY_LABELS = (ELSEWHERE.permutation(np.arange(n) % 4).tolist() for n in (200, 30))


@pytest.fixture
def elsewhere(tmp_path) -> str:
    """A run of 200 random codes of 16 bits from elsewhere, labelled from 4 classes, without queries."""
    import_codes(str(tmp_path / "run"), "codes", ITEMS, labels=ITEM_LABELS)
    return str(tmp_path / "run")


def test_codes_from_elsewhere_are_evaluated_by_their_bits(elsewhere, tmp_path, ray_local):
    import_codes(elsewhere, "codes-query", QUERIES, labels=QUERY_LABELS)
    told = evaluate_run(EvaluateConfig(run=elsewhere, k=200))
    assert (told["n_queries"], told["n_database"], told["n_bits"]) == (30, 200, 16)
    assert told["map_asymmetric"] is None  # no logits, no asymmetric ranking
    precisions = []
    for code, label in zip(QUERIES, QUERY_LABELS, strict=True):
        near = [
            theirs == label
            for other, theirs in zip(ITEMS, ITEM_LABELS, strict=True)
            if sum((int(a) ^ int(b)).bit_count() for a, b in zip(code, other, strict=True)) <= 2
        ]
        precisions.append(sum(near) / len(near) if near else 0.0)
    assert 0 < np.mean(precisions) == pytest.approx(told["precision_within_2"])
    page = (tmp_path / "run" / "report" / "report.html").read_text(encoding="utf-8")
    assert f"{told['map']:.4f}" in page
    assert evaluate_run(EvaluateConfig(run=elsewhere, k=200))["map"] == told["map"]


def test_query_codes_from_elsewhere_may_lie_elsewhere(elsewhere, tmp_path, ray_local):
    itself = import_codes(str(tmp_path / "other"), "some", ITEMS, labels=ITEM_LABELS)
    config = EvaluateConfig(run=elsewhere, query_codes=itself, k=1, figures=False, trec=True)
    told = evaluate_run(config)
    assert told["n_queries"] == 200
    lines = (tmp_path / "run" / "report" / "trec" / "run.txt").read_text().splitlines()
    nearest = [line.split() for line in lines]
    assert all((ITEMS[int(words[0])] == ITEMS[int(words[2])]).all() for words in nearest)


def test_queries_that_do_not_fit_codes_from_elsewhere_are_refused(elsewhere, ray_local):
    def check(error, words):
        with pytest.raises(error, match=words):
            evaluate_run(EvaluateConfig(run=elsewhere, figures=False))

    check(DataError, "hashnet dataset codes queries.parquet --out .*/run/codes-query")
    import_codes(elsewhere, "codes-query", QUERIES[:, :1], labels=QUERY_LABELS)
    check(LineageMismatch, "has 8 bits, .*/codes 16")
    import_codes(elsewhere, "codes-query", QUERIES, "--n-classes", "5", labels=QUERY_LABELS)
    check(LineageMismatch, "has 5 classes, .*/codes 4; .*--n-classes")
    import_codes(elsewhere, "codes-query", QUERIES)
    check(LineageMismatch, "has None classes, .*/codes 4")
    import_codes(elsewhere, "codes", ITEMS)
    check(DataError, "no manifest with the vectors .*--label")


def test_logits_need_no_gpu_where_one_encoded_the_queries(run, tmp_path, monkeypatch):
    config = EvaluateConfig(run=run, k=100, out=str(tmp_path), figures=False)
    evaluate_run(config)  # encodes the queries
    queries = Run(run).query_codes.open()
    features = Run(run).store("features", "query").open()
    features.lineage["engine"] = "cuda"
    monkeypatch.setattr(CodesArtefact, "open", lambda _: features)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = feature_matrix(Manifest.open(run + "/manifest.parquet").read("query"))
    expected = Encoder.load(run + "/model", "cpu-eager").logits(rows)
    np.testing.assert_array_equal(evaluation._query_logits(config, queries), expected)
