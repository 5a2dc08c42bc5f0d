"""Near-duplicates on a real Ray: the files of one process, whatever the workers and crashes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cluster import dedup
from cluster.dedup import DedupConfig, find_duplicates
from hashnet.cli.entry import main
from hashnet.data import Manifest
from hashnet.dedup import BlockTask, DuplicatesArtefact
from hashnet.errors import ConfigError, DataError, FormatError, LineageMismatch
from hashnet.run import Run
from hashnet.store import write_store
from tests.support.picture_run import make_picture_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with 900 codes in shards of 100."""
    folder = tmp_path_factory.mktemp("dedup") / "run"
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (200, 8), dtype=np.uint8)[rng.integers(0, 200, 900)]
    codes[:, 0] ^= (1 << rng.integers(0, 8, 900)).astype(np.uint8)
    write_store(str(folder / "codes"), codes, rows_per_shard=100)
    return folder


def files_of(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.parquet")}


def test_tasks_on_ray_write_the_files_of_one_process(run, ray_local, tmp_path, monkeypatch):
    config = DedupConfig(run=str(run), out=str(tmp_path / "ray"), rows_per_block=300, figures=False)
    told = find_duplicates(config)
    assert len(list((tmp_path / "ray" / "pairs").iterdir())) == 6
    monkeypatch.setattr(dedup, "_run_tasks", lambda tasks: (task.run() for task in tasks))
    here = find_duplicates(
        DedupConfig(run=str(run), out=str(tmp_path / "here"), rows_per_block=300, figures=False)
    )
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "here")
    assert {**told, "duplicates": 0, "seconds": 0} == {**here, "duplicates": 0, "seconds": 0}


def test_it_goes_on_where_it_was(run, tmp_path, monkeypatch):
    config = DedupConfig(run=str(run), out=str(tmp_path / "out"), rows_per_block=300, figures=False)
    done = []

    def whole(tasks):
        return (task.run() for task in tasks)

    def watched(tasks):
        for record in whole(tasks):
            done.append(record.name)
            yield record
            if len(done) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(dedup, "_run_tasks", watched)
    with pytest.raises(KeyboardInterrupt):
        find_duplicates(config)
    assert not (tmp_path / "out" / "duplicates.json").exists()
    kept = {path.stem for path in (tmp_path / "out" / "_records").iterdir()}
    find_duplicates(config)
    assert len(set(done)) >= 6 - len(kept)
    assert not set(done[2:]) & (kept & set(done[:2]))  # what was finished is not joined again
    reference = tmp_path / "reference"
    monkeypatch.setattr(dedup, "_run_tasks", whole)
    find_duplicates(DedupConfig(run=str(run), out=str(reference), rows_per_block=300, figures=False))
    assert files_of(tmp_path / "out") == files_of(reference)


@pytest.mark.slow
def test_the_job_prints_one_json_line(run, python, repo, tmp_path):
    words = [f"run={run}", "radius=1", f"out={tmp_path / 'out'}"]
    done = subprocess.run(
        [python, "jobs/dedup.py", *words], cwd=repo, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["n_rows"] == 900
    assert told["n_removed"] > 100
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.slow
def test_the_files_are_the_same_with_one_to_four_nodes_and_after_a_kill(run, python, repo, tmp_path):
    from tests.support.local_cluster import LocalCluster

    def words(out):
        return [python, "jobs/dedup.py", f"run={run}", f"out={out}", "rows_per_block=100", "figures=false"]

    find_duplicates(DedupConfig(run=str(run), out=str(tmp_path / "here"), rows_per_block=100, figures=False))
    wanted = files_of(tmp_path / "here")
    with LocalCluster() as cluster:
        cluster.add_node("head", cpus=1)
        for n in range(1, 5):
            if n > 1:
                cluster.add_node(f"node-{n}", cpus=1)
            env = {**cluster.env, "RAY_ADDRESS": cluster.address, "PYTHONPATH": str(repo)}
            out = tmp_path / f"nodes-{n}"
            if n == 2:  # killed as soon as the first files are there, and started again
                begun = subprocess.Popen(
                    words(out), cwd=repo, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
                while begun.poll() is None and not list((out / "_records").glob("*.json")):
                    time.sleep(0.05)
                begun.kill()
                begun.wait()
            done = subprocess.run(words(out), cwd=repo, env=env, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            assert files_of(out) == wanted


def test_one_task_starts_no_ray(run, tmp_path, monkeypatch):
    monkeypatch.setattr(dedup.connection, "connect", lambda: pytest.fail("no Ray is needed"))
    threads = []
    real = BlockTask.run
    monkeypatch.setattr(BlockTask, "run", lambda task, n=None: threads.append(n) or real(task, n))
    find_duplicates(DedupConfig(run=str(run), out=str(tmp_path / "out"), figures=False))
    assert threads == [None]  # all cores


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return make_picture_run(tmp_path_factory.mktemp("pictures"))


def test_the_summary_the_clusters_and_the_page(pictures, tmp_path):
    out = tmp_path / "out"
    told = find_duplicates(DedupConfig(run=pictures.uri, radius=2, out=str(out), keep="largest"))
    assert (told["n_rows"], told["n_clusters"], told["n_near"], told["n_removed"]) == (24, 3, 7, 4)
    assert told["n_pairs"] == 3 + 1 + 1
    table = DuplicatesArtefact(str(out)).open().clusters()
    kept = dict(zip(table["row_id"].to_pylist(), table["representative"].to_pylist(), strict=True))
    assert kept == {0: 0, 20: 0, 21: 0, 5: 5, 22: 5, 7: 23, 23: 23}  # the larger copy stays
    text = (out / "report.html").read_text(encoding="utf-8")
    assert told["page"] == str(out / "report.html")
    assert "3 items, cluster 0" in text
    assert text.count("data:image/") == 7
    assert text.count('<li class="item hit">') == 3
    assert text.count("stays</span>") == 3
    assert text.count("would go</span>") == 4
    assert " more</p>" not in text
    assert "<script" not in text
    again = find_duplicates(DedupConfig(run=pictures.uri, radius=2, out=str(out), keep="largest"))
    assert {**told, "seconds": 0} == {**again, "seconds": 0}


def test_the_page_says_how_many_items_it_leaves_out(tmp_path):
    """A cluster of 39 equal codes, of which 11 are shown; without any pair there is no chart."""
    codes = np.random.default_rng(0).integers(0, 256, (50, 8), dtype=np.uint8)
    write_store(str(tmp_path / "none/codes"), codes)
    codes[:39] = codes[0]
    write_store(str(tmp_path / "some/codes"), codes)
    pages = {}
    for name in ("none", "some"):
        page = find_duplicates(DedupConfig(run=str(tmp_path / name)))["page"]
        pages[name] = Path(page).read_text(encoding="utf-8")
    assert "39 items, cluster 0" in pages["some"]
    assert pages["some"].count('<li class="item') == 11
    assert "and 28 more" in pages["some"]
    assert "Distances of the pairs" in pages["some"]
    assert "Distances of the pairs" not in pages["none"]
    assert "<svg" not in pages["none"]
    assert "No pairs: nothing would be removed." in pages["none"]


def test_what_would_remove_more_than_a_twentieth_unconfirmed_is_told(tmp_path, caplog):
    """100 codes, far apart; the first 5 or 6 have a copy: 5 of 105 rows (4.8 %), 6 of 106 (5.7 %)."""
    codes = np.random.default_rng(0).integers(0, 256, (100, 8), dtype=np.uint8)
    for copies in (5, 6):
        write_store(str(tmp_path / f"{copies}/codes"), np.concatenate([codes, codes[:copies]]))
    find_duplicates(DedupConfig(run=str(tmp_path / "5")))
    assert "rarely all copies" not in caplog.text + (tmp_path / "5/duplicates/report.html").read_text()
    find_duplicates(DedupConfig(run=str(tmp_path / "6")))
    told = "6 of 106 rows would be removed: so many are rarely all copies; use confirm=vectors"
    assert told in caplog.text
    assert told in (tmp_path / "6/duplicates/report.html").read_text()  # what a reader looks at


def test_what_is_confirmed_may_remove_up_to_half(vectors, tmp_path, caplog):
    """10 of 60 rows are copies, which vectors confirm; all 59 but one agree at a similarity of -1."""
    config = DedupConfig(run=vectors, radius=0, out=str(tmp_path / "some"), figures=False)
    config = replace(config, confirm="vectors", min_similarity=0.99)
    find_duplicates(config)
    assert "rarely all copies" not in caplog.text
    find_duplicates(replace(config, radius=16, min_similarity=-1, out=str(tmp_path / "all")))
    assert "59 of 60 rows would be removed" in caplog.text
    assert "use a larger min_similarity" in caplog.text


def test_it_ends_with_a_sentence(vectors, pictures, tmp_path, caplog):
    caplog.set_level("INFO")
    out = tmp_path / "out"
    find_duplicates(DedupConfig(run=pictures.uri, radius=2, out=str(out)))
    assert caplog.messages[-1] == (
        f"5 pairs within 2 bits; 4 of 24 rows would be removed; look at {out}/report.html"
    )
    config = DedupConfig(run=vectors, radius=0, out=str(out), figures=False, confirm="vectors")
    n_found = find_duplicates(config)["n_candidates"]
    assert caplog.messages[-1] == (
        f"{n_found} pairs within 0 bits, 10 confirmed; 10 of 60 rows would be removed"
    )


def test_radius_and_keep_are_part_of_what_is_up_to_date(pictures, tmp_path):
    out = str(tmp_path / "out")
    assert find_duplicates(DedupConfig(run=pictures.uri, radius=0, out=out, figures=False))["n_removed"] == 2
    assert find_duplicates(DedupConfig(run=pictures.uri, radius=1, out=out, figures=False))["n_removed"] == 3
    assert (
        find_duplicates(DedupConfig(run=pictures.uri, radius=1, out=out, figures=False, keep="row_id"))[
            "page"
        ]
        is None
    )
    kept = DuplicatesArtefact(out).open().clusters()["representative"].to_pylist()
    assert max(kept) == 23  # the greatest value of the column


def test_the_cleaned_manifest(pictures, tmp_path, capsys):
    find_duplicates(DedupConfig(run=pictures.uri, out=str(tmp_path / "found"), figures=False))
    out = str(tmp_path / "clean.parquet")
    words = ["dataset", "drop-duplicates", pictures.manifest.uri, str(tmp_path / "found"), "--out", out]
    assert main(words) == 0
    clean, before = Manifest.open(out), Manifest.open(pictures.manifest.uri)
    stays = [row for row in range(24) if row not in (20, 21, 22, 23)]
    uris = before.read(columns=["uri"])["uri"].to_pylist()
    assert clean.read(columns=["uri"])["uri"].to_pylist() == [uris[row] for row in stays]
    assert clean.read(columns=["splits"]).equals(before.read(columns=["splits"]).take(stays).combine_chunks())
    assert clean.row_ids().tolist() == list(range(20))
    assert clean.source["name"] == "drop_duplicates"
    assert main(words) == 2
    assert "exists" in capsys.readouterr().err


def test_another_manifest_is_refused(pictures, tmp_path, capsys):
    find_duplicates(DedupConfig(run=pictures.uri, out=str(tmp_path / "found"), figures=False))
    clean = str(tmp_path / "clean.parquet")
    assert (
        main(["dataset", "drop-duplicates", pictures.manifest.uri, str(tmp_path / "found"), "--out", clean])
        == 0
    )
    again = str(tmp_path / "again.parquet")
    assert main(["dataset", "drop-duplicates", clean, str(tmp_path / "found"), "--out", again]) == 2
    assert "names row 23, but" in capsys.readouterr().err


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """A run on vectors: 40 rows, 10 copies with little noise, and 10 others that share a code."""
    from hashnet.data import make_manifest
    from hashnet.models import build_model, save_bundle

    folder = tmp_path_factory.mktemp("vectors")
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(60, 16)).astype(np.float32)
    rows[40:50] = rows[:10] + 0.01 * rng.normal(size=(10, 16))
    np.save(folder / "x.npy", rows)
    uri = str(folder / "run")
    made = make_manifest("npy", f"{uri}/manifest.parquet", path=str(folder / "x.npy"))
    assert len(made) == 60
    model = build_model("features", 16, n_features=16).eval()
    save_bundle(f"{uri}/model", model)
    from hashnet import Encoder

    codes = Encoder.load(f"{uri}/model").encode(rows)
    codes[40:50] = codes[:10]
    codes[50:] = codes[10:20]  # of other vectors
    write_store(f"{uri}/codes", codes)
    return uri


def test_pairs_are_confirmed_by_vectors(vectors, tmp_path):
    out = tmp_path / "out"
    config = DedupConfig(run=vectors, radius=0, out=str(out), figures=False)
    found = find_duplicates(config)["n_pairs"]
    told = find_duplicates(dataclasses.replace(config, confirm="vectors", min_similarity=0.99))
    assert (told["n_candidates"], told["n_pairs"]) == (found, 10)
    opened = DuplicatesArtefact(str(out)).open()
    pairs = pa.concat_tables(list(opened.pairs()))
    assert pairs["a"].to_pylist() == list(range(10))
    assert pairs["b"].to_pylist() == list(range(40, 50))
    assert (told["n_clusters"], told["n_removed"]) == (10, 10)
    assert opened.removed().tolist() == list(range(40, 50))


def test_pairs_are_confirmed_by_scores(vectors, tmp_path):
    config = DedupConfig(run=vectors, radius=0, out=str(tmp_path / "out"), figures=False, confirm="scores")
    told = find_duplicates(config)
    ids = pa.concat_tables(list(DuplicatesArtefact(told["duplicates"]).open().pairs()))["b"].to_pylist()
    assert set(range(40, 50)) <= set(ids)
    assert told["n_pairs"] < told["n_candidates"]


def test_what_cannot_be_confirmed_is_told(vectors, pictures, tmp_path):
    with pytest.raises(ConfigError, match="leave max_pairs out"):
        DedupConfig(run=vectors, confirm="vectors", max_pairs=10)
    with pytest.raises(ConfigError, match="only query has them"):
        DedupConfig(run=vectors, confirm="vectors", against="/elsewhere")
    with pytest.raises(DataError, match="no vectors of its database pictures"):
        find_duplicates(DedupConfig(run=pictures.uri, out=str(tmp_path / "out"), confirm="vectors"))


def test_leakage(pictures, tmp_path):
    queries = pictures.codes.open().codes()[[0, 5, 11]].copy()
    queries[2] ^= 255  # far from everything
    write_store(pictures.query_codes.uri, queries, ids=np.array([0, 5, 11]), overwrite=True)
    told = find_duplicates(DedupConfig(run=pictures.uri, against="query"))
    assert told["duplicates"] == pictures.leakage.uri
    found = pictures.leakage.open()
    assert found.removed().tolist() == [0, 5, 20, 21, 22]
    assert told["n_near"] == told["n_removed"] == 5
    assert "Leakage in" in (tmp_path.parent / told["page"]).read_text(encoding="utf-8")


def test_leakage_without_queries_is_told(tmp_path):
    from hashnet.data import make_manifest

    run = Run(str(tmp_path / "run"))
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32))
    config = DedupConfig(run=run.uri, against="query")
    write_store(run.codes.uri, np.zeros((20, 1), np.uint8))
    with pytest.raises(FormatError, match="import them with: hashnet dataset codes"):
        find_duplicates(config)
    source = {"path": str(tmp_path / "x.npy")}
    make_manifest("npy", run.manifest.uri, **source, all_in=["train", "database"])
    with pytest.raises(FormatError, match="has no queries, either: make one with --n-query"):
        find_duplicates(config)
    make_manifest("npy", run.manifest.uri, **source, n_query=5, n_train=5, overwrite=True)
    with pytest.raises(FormatError, match=r"jobs/evaluate.py run=.*/run encodes the queries"):
        find_duplicates(config)


def test_codes_from_elsewhere(tmp_path, caplog):
    """No model and no manifest; rows 3 and 7 are copies of row 0, query 1 of row 5."""
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (12, 8), dtype=np.uint8)
    codes[[3, 7]] = codes[0]
    stores = {"codes": codes, "codes-query": np.stack([~codes[1], codes[5]])}
    for name, some in stores.items():
        np.save(tmp_path / f"{name}.npy", some)
        source, out = str(tmp_path / f"{name}.npy"), str(tmp_path / "run" / name)
        assert main(["dataset", "codes", source, "--out", out]) == 0
    uri = str(tmp_path / "run")
    found = DuplicatesArtefact(find_duplicates(DedupConfig(run=uri))["duplicates"]).open()
    assert found.removed().tolist() == [3, 7]
    leaked = DuplicatesArtefact(find_duplicates(DedupConfig(run=uri, against="query"))["duplicates"]).open()
    assert leaked.removed().tolist() == [5]
    assert "1 of 12 rows would be removed: so many are rarely all copies" in caplog.text
    assert "use confirm=vectors (with against=query)" in caplog.text


def test_a_single_pair_is_confirmed(vectors, tmp_path):
    """Row 40 is row 0 with little noise, and they alone are near: their own mean would lie between them."""
    codes = np.random.default_rng(0).integers(0, 256, (60, 8), dtype=np.uint8)
    codes[40] = codes[0]
    apart = write_store(str(tmp_path / "codes"), codes).uri
    config = DedupConfig(run=vectors, codes=apart, confirm="vectors", out=str(tmp_path / "out"))
    told = find_duplicates(replace(config, figures=False))
    assert (told["n_candidates"], told["n_pairs"], told["n_removed"]) == (1, 1, 1)
    codes[40], codes[1] = codes[41], codes[0]  # row 1 is another vector than row 0
    other = write_store(str(tmp_path / "other"), codes[:40]).uri
    told = find_duplicates(replace(config, codes=other, figures=False))
    assert (told["n_candidates"], told["n_pairs"]) == (1, 0)


@pytest.mark.parametrize("confirm", ["vectors", "scores"])
@pytest.mark.filterwarnings("error")
def test_nothing_to_confirm(vectors, tmp_path, confirm):
    """Codes that are all far apart: no pair, so no vector is read."""
    codes = np.random.default_rng(0).integers(0, 256, (60, 8), dtype=np.uint8)
    apart = write_store(str(tmp_path / "codes"), codes).uri
    config = DedupConfig(run=vectors, codes=apart, radius=2, confirm=confirm, out=str(tmp_path / "out"))
    told = find_duplicates(replace(config, figures=False))
    assert (told["n_candidates"], told["n_pairs"], told["n_removed"]) == (0, 0, 0)


def test_bad_input_is_told(pictures, tmp_path):
    def check(error, words, **settings):
        with pytest.raises(error, match=words):
            find_duplicates(
                DedupConfig(run=pictures.uri, out=str(tmp_path / "out"), figures=False, **settings)
            )

    rng = np.random.default_rng(0)
    other = write_store(str(tmp_path / "other"), rng.integers(0, 256, (5, 8), dtype=np.uint8))
    check(LineageMismatch, "32 bits", against=other.uri)
    models = [
        write_store(
            str(tmp_path / name),
            rng.integers(0, 256, (5, 4), dtype=np.uint8),
            lineage={"model_sha256": name * 8},
        )
        for name in ("aa", "bb")
    ]
    with pytest.raises(LineageMismatch, match="two models"):
        find_duplicates(
            DedupConfig(run=pictures.uri, codes=models[0].uri, against=models[1].uri, out=str(tmp_path / "x"))
        )
    check(FormatError, "none does not exist; run jobs/encode_db.py first", against=str(tmp_path / "none"))
    check(DataError, "no such column", keep="sharpness")
    check(DataError, "not numbers", keep="uri")
