"""The demo: its mistakes and what it opens, quickly; all of it, as typed, with the slow tests."""

import json
import logging
import re
import shlex
import socket
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest

import hashnet
import hashnet.server
from cluster import demo
from cluster.compare import CompareConfig
from hashnet.cli import entry as cli
from hashnet.comparison import Cell
from hashnet.data import Manifest, make_manifest
from hashnet.data.sources import digits
from hashnet.errors import ConfigError
from hashnet.store import CodeStore, write_store
from tests.support.small_run import make_run


def pictures(folder, n, classes=True):
    """``n`` of the embedded digits as files, in one folder per class or all in one."""
    rows = digits.load(digits.Options())
    table = rows.payload(0, n)
    for i, (png, labels) in enumerate(zip(table["image"].to_pylist(), rows.labels.to_pylist(), strict=False)):
        place = folder / f"digit {labels[0]}" if classes else folder
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{i:03d}.png").write_bytes(png)
    return str(folder)


def test_too_few_pictures_without_class_folders_are_refused_each_time(tmp_path):
    flat = pictures(tmp_path / "flat", 3, classes=False)
    settings = demo.DemoConfig(run=str(tmp_path / "run"), images=flat)
    for _ in range(2):  # nothing half-made is found the second time
        with pytest.raises(ConfigError, match="has 3 pictures; give at least 20, of which"):
            demo._train_config(settings)


def test_pictures_without_class_folders_are_learnt_from_neighbours(tmp_path):
    flat = pictures(tmp_path / "flat", 30, classes=False)
    settings = demo._train_config(demo.DemoConfig(run=str(tmp_path / "run"), images=flat))
    assert (settings.variant, settings.freeze_backbone) == ("auto", True)
    assert Manifest.open(settings.manifest).n_classes is None


def test_too_few_pictures_are_refused_before_anything_is_trained(tmp_path):
    for name, n, found in (("few", 6, "6 pictures"), ("none", 1, "1 picture")):
        settings = demo.DemoConfig(run=str(tmp_path / "run"), images=pictures(tmp_path / name, n))
        with pytest.raises(ConfigError, match=rf"has {found}; give at least 20, of which"):
            demo._train_config(settings)


def test_a_single_class_folder_is_refused_with_what_may_be_given_instead(tmp_path):
    pictures(tmp_path / "pets" / "cats", 25, classes=False)
    settings = demo.DemoConfig(run=str(tmp_path / "run"), images=str(tmp_path / "pets"))
    with pytest.raises(
        ConfigError, match=r"has one class folder, cats; give at least two, or images=.*/cats"
    ):
        demo._train_config(settings)


def test_pictures_beside_class_folders_are_refused_with_advice_that_make_can_follow(tmp_path):
    folder = pictures(tmp_path / "pets", 30)
    (tmp_path / "pets" / "stray.png").write_bytes((tmp_path / "pets" / "digit 0" / "000.png").read_bytes())
    settings = demo.DemoConfig(run=str(tmp_path / "run"), images=folder)
    with pytest.raises(ConfigError, match=r"1 of the 31 pictures in .*such as stray\.png; move") as refused:
        demo._train_config(settings)
    assert "layout" not in str(refused.value)


def test_the_first_sentence_says_what_the_digits_are(tmp_path):
    config = demo.DemoConfig(run=str(tmp_path / "run"))
    settings = demo._train_config(config)
    manifest = make_manifest(settings.dataset, str(tmp_path / "digits.parquet"), modality=settings.modality)
    splits = [manifest.count(split) for split in ("database", "train", "query")]
    counts = [f"{n:,}" for n in (len(manifest), *splits)]
    said = demo._data_text(config, settings)
    assert re.findall(r"\d[\d,]*\d(?= |:)", said) == counts


def test_the_first_sentence_counts_pictures_and_says_which_cannot_be_found_by_id(tmp_path):
    flat = pictures(tmp_path / "flat", 30, classes=False)
    config = demo.DemoConfig(run=str(tmp_path / "run"), images=flat)
    said = demo._data_text(config, demo._train_config(config))
    assert said.startswith(f"30 pictures without classes from {flat}: 27 to search (the index), 3 kept aside")
    (advice,) = re.findall(r"`hashnet (.*)` puts", said)
    words = [*shlex.split(advice)[:-1], str(tmp_path / "all.parquet")]
    assert cli.main(words) == 0
    everything = Manifest.open(str(tmp_path / "all.parquet"))
    assert everything.count("database") == everything.count("train") == 30


def test_a_stage_that_was_done_before_says_so_once(capsys):
    demo._stage("encode", lambda _: {}, None, done=True)
    said = capsys.readouterr().err.splitlines()
    assert said[2:] == ["done before: nothing to do"]


MEASURED = {"k": 10, "n_queries": 30, "n_database": 270, "page": "/run/report/report.html"}


@pytest.mark.parametrize(("interval", "lost"), [((0.42, 0.62), True), ((0.5, 0.62), False)])
def test_an_interval_that_holds_chance_is_said_to_prove_nothing(interval, lost):
    table = [
        demo.TableLine("HashNet", "HashNet", 48, map=0.5132),
        demo.TableLine("chance", demo.RANDOM, None, map=0.4990),
    ]
    said = "\n".join(demo._table_text(table, MEASURED | {"map_interval": interval}))
    assert ("not distinguishable from chance (0.50)" in said) == lost


def test_without_labels_hashnet_is_called_what_the_page_calls_it():
    measured = MEASURED | {"recall": 0.5, "within": 100, "recall_interval": (0.4, 0.6)}
    compared = {"recall": {"hashnet": {"48": 0.5}, "itq": {"48": 0.4}}}
    table = demo._table(demo.DemoConfig(run="/run"), measured, compared)
    assert [line.method for line in table] == ["HashNet from neighbours", "ITQ", "chance"]
    rows = demo._table_text(table, measured)[-3:]
    assert len({row.index("0.") for row in rows}) == 1  # one below the other


def test_what_to_try_next_names_an_id_of_the_index():
    found = demo.QueryHits(0, "", ["3"], [1403, 55], [1, 2], [["3"], ["8"]], ["", ""])
    measured, compared = MEASURED, {"report": "/run/compare/report/comparison.html"}
    lines = demo._summary_text(demo.DemoConfig(run="/run"), measured, compared, found, 1.0)
    assert lines[1] == "example query: row 0 of the data, kept aside and so not in the index, class 3"
    assert lines[2] == "ids (and classes) of its ten nearest items: 1403 (3), 55 (8)"
    assert "query --id 1403 --run /run -k 10 " in lines[-1]


def test_a_run_keeps_to_its_pictures(tmp_path):
    first, other = (pictures(tmp_path / name, 30) for name in ("first", "other"))
    settings = demo._train_config(demo.DemoConfig(run=str(tmp_path / "run"), images=first))
    assert (settings.backbone, settings.weights, settings.download) == ("lite0", "pretrained", False)
    again = demo._train_config(demo.DemoConfig(run=str(tmp_path / "run"), images=f"{first}/"))
    assert again.manifest == settings.manifest
    with pytest.raises(ConfigError, match=r"give .*other a run of its own"):
        demo._train_config(demo.DemoConfig(run=str(tmp_path / "run"), images=other))


def test_the_comparison_learns_with_the_settings_of_the_run(tmp_path):
    config = demo.DemoConfig(run=str(tmp_path), n_bits=16, k=50, device="cpu")
    compared, trained = demo._compare_config(config), demo._train_config(config)
    assert (compared.bits, compared.k, compared.num_workers, compared.device) == ([16], 50, 1, "cpu")
    assert (compared.backbone, compared.first_epochs) == (trained.backbone, trained.first_epochs)


def test_the_comparison_takes_over_the_model_of_the_run(tmp_path):
    run = hashnet.Run(make_run(tmp_path / "run"))
    settings = CompareConfig(run=str(tmp_path / "run" / "compare"), methods=["hashnet"], bits=[16], n_bits=16)
    demo._share_model(run, settings)
    cell = hashnet.Run(Cell("main", "hashnet", 16, 0).folder(settings.run))
    assert cell.model.header() == run.model.header()


def test_commands_are_printed_so_that_they_run(monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert demo.command("python") == "python"
    monkeypatch.setenv("PATH", "/nowhere")
    assert Path(demo.command("python")).samefile(sys.executable)


def test_a_stage_explains_itself_and_keeps_the_log_of_its_job_quiet(caplog, capsys):
    def stage(_):
        logging.getLogger("cluster.train").info("stage 0 done: J 0.3")
        logging.getLogger("hashnet.training").warning("row 7 is left out")
        return {"bad_rows": 2, "bad_reasons": {"corrupt": 2}}

    caplog.set_level(logging.INFO)
    demo._stage("encode", stage, None)
    assert [record.message for record in caplog.records] == ["row 7 is left out"]
    said = capsys.readouterr().err.splitlines()
    assert said[2:4] == [demo.STAGES["encode"], "left out, as they cannot be read: 2 corrupt"]


def test_open_shows_the_report_and_then_the_page(monkeypatch, tmp_path):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(hashnet.server, "serve_standalone", lambda config, when_up: when_up(f"{config.url}/"))
    demo._show(str(tmp_path), f"{tmp_path}/report/report.html")
    assert opened == [f"file://{tmp_path}/report/report.html", "http://127.0.0.1:8000/"]


def test_the_query_is_one_that_could_be_encoded(tmp_path):
    """The first three query pictures are broken: they are not among the codes of the queries."""
    run = make_run(tmp_path / "run")
    store = CodeStore.open(f"{run}/codes-query")
    good = store.ids()[3:]
    write_store(store.uri, store.codes()[3:], ids=good, lineage=store.lineage, overwrite=True)
    found = demo._query(hashnet.Run(run))
    assert found.row_id == good[0]
    assert len(found.ids) == 10


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("own_pictures", [False, True])
def test_all_of_it(own_pictures, python, repo, tmp_path):
    words = [f"run={tmp_path}/run"]
    if own_pictures:
        words += [f"images={pictures(tmp_path / 'my pictures', 300)}", "n_bits=16", "k=100"]
    done = subprocess.run([python, "jobs/demo.py", *words], cwd=repo, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    maps = {row["method"]: row["map"] for row in result["table"]}
    assert list(maps) == ["HashNet", "DHN", "ITQ", "LSH", "chance"]
    assert maps["HashNet"] > maps["LSH"] > maps["chance"]
    assert Path(result["report"]).exists()
    serve, query = done.stderr.split("try next:\n")[1].splitlines()[:2]
    assert "hashnet serve " in serve
    found = subprocess.run(shlex.split(query), cwd=repo, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "10 hits" in found.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_cluster_demo_runs_the_four_jobs_and_takes_its_cluster_down(python, repo, tmp_path):
    words = [python, "-m", "tests.support.cluster_demo", str(tmp_path / "run")]
    done = subprocess.run(words, cwd=repo, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    said, _, rows = done.stdout.partition("cluster-demo: all four jobs succeeded, the cluster is down\n")
    assert [line.split()[0] for line in rows.splitlines()] == [
        *("train", "encode_db", "build_index", "evaluate"), "run:",
    ]  # fmt: skip
    (dashboard,) = re.findall(r"dashboard at http://127\.0\.0\.1:(\d+), token on", said)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(dashboard))) != 0  # nobody listens there any more
