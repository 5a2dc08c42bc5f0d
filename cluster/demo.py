"""The whole system in one go: train → encode → index → evaluate → compare → query, on one run folder.

Without ``images`` it runs on scikit-learn's digits; with a folder of pictures (folder names are the labels) a
hash layer is trained on a pretrained backbone that came by pip. Every stage is the function that the job of
its name calls, so the run can be looked at, resumed and served like any other.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cluster.build_index import IndexConfig, build_index
from cluster.compare import CompareConfig, compare
from cluster.encode import EncodeConfig, encode_database
from cluster.evaluate import EvaluateConfig, evaluate_run
from cluster.runtime import connection
from cluster.train import train
from hashnet.codes import check_n_bits
from hashnet.data import Manifest, fetch_images
from hashnet.errors import BadImage, ConfigError
from hashnet.io import REQUIRED, duration, key, storage
from hashnet.io import config as configs
from hashnet.reports import TITLES
from hashnet.store import read_plan
from hashnet.training import TrainConfig

LEAST_PICTURES = 20  # a tenth of them are the queries
METHODS = ["lsh", "itq", "dhn"]
DIGITS = str(Path(connection.CHECKOUT) / "jobs" / "configs" / "digits.yaml")


@dataclass(frozen=True)
class DemoConfig:
    run: str = key(REQUIRED, "run folder; made if it is not there, gone on with if it is", path=True)
    images: str | None = key(
        None, "a folder of your own pictures, one folder a class (default: digits)", path=True
    )
    n_bits: int = key(48, "code length", check=check_n_bits)
    num_workers: int = key(2, "training workers", low=1)
    k: int = key(1000, "depth of MAP", low=1)
    open: bool = key(
        False, "when done, show the report in a browser, then serve the search page until Ctrl-C"
    )


def demo(config: DemoConfig) -> dict[str, Any]:
    """Runs every stage and returns the table, where the report lies and what a query found."""
    started = time.monotonic()
    connection.connect()
    trained = _stage("train", train, _train_config(config))
    # Compiling takes longer than a demo's pictures; codes that are there already keep their engine.
    engine = "auto" if read_plan(storage.join(config.run, "codes")) else "cpu-eager"
    _stage("encode", encode_database, EncodeConfig(run=config.run, engine=engine))
    _stage("index", build_index, IndexConfig(run=config.run, kind="flat"))
    measured = _stage("evaluate", evaluate_run, EvaluateConfig(run=config.run, k=config.k))
    compared = _stage("compare with LSH, ITQ and DHN", compare, _compare_config(config))
    found = _query(config.run)
    rows = _table(config, measured, compared)
    took = time.monotonic() - started
    _say(config, rows, measured, compared, found, took)
    if config.open:
        _show(config.run, measured["page"])
    return {
        "run": config.run,
        "table": rows,
        "report": measured["page"],
        "model_sha256": trained["sha256"],
        "query": found,
        "seconds": round(took, 1),
    }


def _stage(name: str, function: Any, config: Any) -> dict[str, Any]:
    print(f"\n── {name} ".ljust(80, "─"), file=sys.stderr, flush=True)
    started = time.monotonic()
    result = function(config)
    print(f"   {name}: {duration(time.monotonic() - started)}", file=sys.stderr, flush=True)
    return result


def _train_config(config: DemoConfig) -> TrainConfig:
    words = [f"run={config.run}", f"n_bits={config.n_bits}", f"num_workers={config.num_workers}"]
    if config.images is None:
        return configs.load(TrainConfig, DIGITS, words)
    words += [f"manifest={_manifest_of(config)}", "backbone=lite0", "weights=pretrained"]
    words += ["freeze_backbone=true"]  # minutes instead of hours without a GPU
    return configs.load(TrainConfig, None, words)


def _manifest_of(config: DemoConfig) -> str:
    """RUN/pictures.parquet of the folder, made once."""
    from hashnet.data import load_source, make_manifest

    assert config.images is not None
    where, folder = storage.join(config.run, "pictures.parquet"), storage.absolute(config.images)
    if not storage.exists(storage.join(where, "_manifest.json")):
        rows = load_source("imagefolder", path=folder).rows
        if rows.labels is None or (rows.n_classes or 0) < 2 or rows.n < LEAST_PICTURES:
            raise ConfigError(
                f"{folder} has {rows.n} pictures in {rows.n_classes or 'no'} class folders; the demo learns "
                f"to tell classes apart and measures it: give at least {LEAST_PICTURES} pictures, in one "
                "folder a class, two classes or more"
            )
        make_manifest("imagefolder", where, path=folder)
    made_of = Manifest.open(where).source["options"]["path"]
    if made_of != folder:
        raise ConfigError(f"{config.run} was made of the pictures in {made_of}; give {folder} another run=")
    return where


def _compare_config(config: DemoConfig) -> CompareConfig:
    base = _train_config(config)
    values = {name: getattr(base, name) for name in base.__dataclass_fields__}
    values |= {"run": storage.join(config.run, "compare"), "num_workers": 1}
    values |= {"manifest": storage.join(config.run, "manifest.parquet"), "dataset": None}
    return CompareConfig(
        **values, methods=METHODS, bits=[config.n_bits], zero_shot=0.0, k=config.k, engine="cpu-eager"
    )


def _query(run: str) -> dict[str, Any]:
    """One query picture through model and index, as a program of one's own would do it."""
    from hashnet.encoding import Encoder
    from hashnet.index import BinaryIndex
    from hashnet.store import CodeStore

    manifest = Manifest.open(storage.join(run, "manifest.parquet"))
    row_id = int(CodeStore.open(storage.join(run, "codes-query")).ids()[0])  # the first that could be encoded
    row = manifest.read(start=row_id, stop=row_id + 1)
    picture = fetch_images(row)[0]
    if isinstance(picture, BadImage):
        raise picture
    store = CodeStore.open(storage.join(run, "codes"))
    encoder = Encoder.load(storage.join(run, "model"), engine=store.lineage.get("engine"))
    hits = BinaryIndex.load(storage.join(run, "index")).search(encoder.encode([picture]), k=10)
    place = {int(i): n for n, i in enumerate(store.ids())}
    labels = store.labels()
    names = manifest.class_names or [str(c) for c in range(manifest.n_classes or 0)]
    return {
        "row_id": row_id,
        "uri": row["uri"][0].as_py(),
        "labels": [names[c] for c in row["labels"][0].as_py()],
        "ids": hits.ids[0].tolist(),
        "distances": hits.distances[0].tolist(),
        "hit_labels": [
            [] if labels is None or i < 0 else [names[c] for c in np.flatnonzero(labels[place[i]])]
            for i in hits.ids[0].tolist()
        ],
    }


def _table(config: DemoConfig, measured: dict[str, Any], compared: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [{"method": "HashNet", "n_bits": config.n_bits, "map": measured["map"]}]
    for method, by_bits in compared["map"]["Table 1"].items():
        rows.append({"method": TITLES[method], "n_bits": config.n_bits, "map": by_bits[str(config.n_bits)]})
    return [*rows, {"method": "chance", "n_bits": None, "map": measured["chance"]}]


def _say(
    config: DemoConfig,
    rows: list[dict[str, Any]],
    measured: dict[str, Any],
    compared: dict[str, Any],
    found: dict[str, Any],
    took: float,
) -> None:
    lines = ["", f"{measured['n_queries']:,} queries, {measured['n_database']:,} items to be found", ""]
    lines.append(f"{'method':<10}{'bits':>6}{'MAP@' + str(measured['k']):>12}")
    for row in rows:
        lines.append(f"{row['method']:<10}{row['n_bits'] or '':>6}{row['map']:>12.4f}")
    hits = ", ".join("/".join(labels) or "-" for labels in found["hit_labels"])
    asked = shlex.quote(found["uri"]) if os.path.isfile(found["uri"]) else f"--id {found['ids'][0]}"
    run = shlex.quote(config.run)
    lines += [
        "",
        f"query row {found['row_id']} ({'/'.join(found['labels'])}) found: {hits}",
        f"report: {measured['page']}",
        f"the other three in detail: {compared['report']}",
        f"all of it took {duration(took)}",
        "",
        "try next:",
        f"  {command('python')} jobs/serve.py run={run}      # a search page at http://127.0.0.1:8000/",
        f"  {command('hashnet')} query {asked} --run {run} -k 10",
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)


def command(name: str) -> str:
    """How to call a program of this environment from here: by name where the shell finds it, else by path."""
    mine = Path(sys.executable).parent / name
    return name if shutil.which(name) == str(mine) else os.path.relpath(mine)


def _show(run: str, report: str) -> None:
    """The report, then the search page for as long as it is served."""
    import ray

    from cluster.serve import serve_run
    from hashnet.server import ServeConfig

    webbrowser.open(f"file://{storage.resolve(report)[1]}")
    ray.shutdown()  # the server starts a Ray with settings of its own
    serve_run(ServeConfig(run=run), when_up=webbrowser.open)
