"""The whole system in one go: train → encode → index → evaluate → compare → query, on one run folder.

Without ``images`` it runs on scikit-learn's digits; with a folder of pictures (folder names are the labels) a
hash layer is trained on a pretrained backbone that was installed by pip. Pictures without class folders have
no labels: the hash layer learns from neighbours, and recall of neighbours is measured in place of MAP. Every
stage is the function that the job of that name calls, so the run can be inspected, resumed and served like
any other.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
import time
import webbrowser
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cluster.build_index import IndexConfig, build_index
from cluster.compare import CompareConfig, compare
from cluster.encode import EncodeConfig, encode_database
from cluster.evaluate import EvaluateConfig, evaluate_run
from cluster.runtime import connection
from cluster.train import train
from hashnet.codes import check_n_bits
from hashnet.comparison import FROM_NEIGHBOURS, FULL_NAMES, TITLES, Cell
from hashnet.data import Manifest, fetch_images
from hashnet.errors import BadImage, ConfigError
from hashnet.io import REQUIRED, counted, duration, key, storage
from hashnet.io import config as configs
from hashnet.run import Run
from hashnet.store import ItemLookup
from hashnet.training import TrainConfig

MIN_PICTURES = 20  # a tenth of them become queries
FEW_QUERIES = 100  # with fewer, the interval is as wide as the difference between methods
METHODS = ["hashnet", "dhn", "itq", "lsh"]
RANDOM = "a random order"
UNLABELLED_METHODS = ["hashnet", "itq", "lsh", "sign"]
DIGITS = str(Path(connection.CHECKOUT) / "jobs" / "configs" / "digits.yaml")
STAGES = {  # what each one does, for someone seeing it for the first time
    "train": """A network learns codes in which similar items differ in few bits. Its progress shows:
  epoch  which pass over the training items this is, one batch of them per step
  beta   how close the outputs are to bits: it doubles from stage to stage (continuation)
  lr     the learning rate, the size of a step
  J, L   the loss of the outputs and of their signs, which are the bits, as means of the last steps: both
         should fall, and meet""",
    "encode": "The network turns every item of the database into a code.",
    "index": "The codes are put into an index, searched by Hamming distance: the number of bits that differ.",
    "evaluate": "Queries that were kept aside are encoded and searched for, and the results are measured.",
    "compare": "Other methods learn from the same data and are measured alike; the table below names them.",
}
NOTHING, REDRAWN = "done before: nothing to do", "done before: only what is missing, and the page again"
DONE = {"train": NOTHING, "encode": NOTHING, "index": NOTHING, "evaluate": REDRAWN, "compare": REDRAWN}
OF_DIGITS = (
    "1,797 pictures of handwritten digits (scikit-learn's): 1,600 to search, 1,000 of them to learn "
    "from, 197 queries; five stages, less than a minute on two idle cores"
)
C = TypeVar("C")


@dataclass(frozen=True)
class DemoConfig:
    run: str = key(REQUIRED, "run folder; created if missing, resumed if it exists", path=True)
    images: str | None = key(
        None, "a folder of your own pictures, with one folder per class or without; none: digits", path=True
    )
    n_bits: int = key(48, "code length", check=check_n_bits)
    num_workers: int = key(1, "training workers; with one, this process trains without Ray", low=1)
    device: str = key(
        "auto", "where networks run; auto: GPUs where the cluster has them", choices=("auto", "cpu", "cuda")
    )
    k: int = key(1000, "depth of MAP", low=1)
    open: bool = key(
        False, "at the end, show the report in a browser, then serve the search page until Ctrl-C"
    )


@dataclass(frozen=True)
class TableLine:
    """MAP of one method, without labels its neighbour recall; ``n_bits`` is None for chance."""

    method: str
    name: str  # spelled out
    n_bits: int | None
    map: float | None = None
    recall: float | None = None

    @property
    def value(self) -> float:
        return float(self.recall if self.map is None else self.map)  # type: ignore[arg-type]


@dataclass(frozen=True)
class QueryHits:
    """A query picture and the ten nearest items, with the class names of each."""

    row_id: int
    uri: str
    labels: list[str]
    ids: list[int]
    distances: list[int]
    hit_labels: list[list[str]]
    hit_uris: list[str]


def demo(config: DemoConfig) -> dict[str, Any]:
    """Runs every stage; returns the table, where the report is and what a query found."""
    started = time.monotonic()
    settings, run = _train_config(config), Run(config.run)
    print(_data_text(config, settings), file=sys.stderr)
    trained = _stage("train", train, settings, run.model.exists())
    _stage("encode", encode_database, EncodeConfig(run=config.run, device=config.device), run.codes.exists())
    _stage("index", build_index, IndexConfig(run=config.run, kind="flat"), run.index.exists())
    measured = _stage(
        "evaluate",
        evaluate_run,
        EvaluateConfig(run=config.run, k=config.k),
        run.report.exists() or run.neighbours.exists(),
    )
    beside = _compare_config(config)
    _share_model(run, beside)
    compared = _stage("compare", compare, beside, storage.exists(_tables(run)))
    found = _query(run)
    table = _table(config, measured, compared)
    seconds = time.monotonic() - started
    lines = _table_text(table, measured) + _summary_text(config, measured, compared, found, seconds)
    print("\n".join(lines), file=sys.stderr, flush=True)
    if config.open:
        _show(config.run, measured["page"])
    return {
        "run": config.run,
        "table": [{k: v for k, v in asdict(line).items() if v is not None} for line in table],
        "report": measured["page"],
        "model_sha256": trained["sha256"],
        "query": asdict(found),
        "seconds": round(seconds, 1),
    }


def _stage(
    name: str, function: Callable[[C], dict[str, Any]], config: C, done: bool = False
) -> dict[str, Any]:
    """Runs a stage: says what it does and how long it took, without what its job would log.

    ``done``: an earlier call finished it.
    """
    intro = DONE[name] if done else STAGES[name]
    print(f"\n── {name} ".ljust(80, "─"), intro, sep="\n", file=sys.stderr, flush=True)
    started = time.monotonic()
    loggers = [logging.getLogger(package) for package in ("cluster", "hashnet")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        result = function(config)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    if result.get("bad_rows"):
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in result["bad_reasons"].items())
        print(f"left out, as they cannot be read: {reasons}", file=sys.stderr)
    if not done:
        print(f"({name} took {duration(time.monotonic() - started)})", file=sys.stderr, flush=True)
    return result


def _data_text(config: DemoConfig, settings: TrainConfig) -> str:
    """What the demo runs on, in a sentence."""
    if config.images is None:
        return OF_DIGITS
    assert settings.manifest is not None
    manifest = Manifest.open(settings.manifest)
    classes = "without classes" if manifest.n_classes is None else f"in {manifest.n_classes} classes"
    folder = storage.absolute(config.images)
    everything = f"hashnet dataset imagefolder {shlex.quote(folder)} --all-in train,database --out FILE"
    return (
        f"{len(manifest):,} pictures {classes} from {folder}: {manifest.count('database'):,} to search "
        f"(the index), {manifest.count('query'):,} kept aside as queries, which are not in the index and so "
        f"cannot be found by id (`{everything}` puts all into it); five stages"
    )


def _train_config(config: DemoConfig) -> TrainConfig:
    words = [f"{name}={getattr(config, name)}" for name in ("run", "n_bits", "num_workers", "device")]
    if config.images is None:
        return configs.load(TrainConfig, DIGITS, words)
    words += [f"manifest={(manifest := _picture_manifest(config)).uri}", "backbone=lite0"]
    words += ["weights=pretrained", "freeze_backbone=true"]  # without a GPU: minutes instead of hours
    if manifest.n_classes is None:
        words.append("variant=auto")  # learns from neighbours
    return configs.load(TrainConfig, None, words)


def _picture_manifest(config: DemoConfig) -> Manifest:
    """RUN/pictures.parquet, made from the folder of pictures on the first call."""
    from hashnet.data import load_source, make_manifest

    assert config.images is not None
    own = Run(config.run).pictures
    folder = storage.absolute(config.images)
    if not own.exists():
        _refuse_strays(folder)
        rows = load_source("imagefolder", path=folder).rows
        if rows.n < MIN_PICTURES:
            raise ConfigError(
                f"{folder} has {counted(rows.n, 'picture')}; give at least {MIN_PICTURES}, of which a tenth "
                "become queries"
            )
        if rows.n_classes == 1:
            (name,) = rows.class_names or ()
            raise ConfigError(
                f"{folder} has one class folder, {name}; give at least two, or images={folder}/{name} (with "
                f"make, IMAGES=…), whose pictures are then taken without classes"
            )
        split = {"n_query": rows.n // 10, "n_train": rows.n - rows.n // 10} if rows.labels is None else {}
        make_manifest("imagefolder", own.uri, path=folder, **split)
    manifest = own.open()
    made_from = manifest.source["options"]["path"]
    if made_from != folder:
        raise ConfigError(
            f"{config.run} was made from the pictures in {made_from}; give {folder} a run of its own: "
            "run=FOLDER (with make, RUN=FOLDER)"
        )
    return manifest


def _refuse_strays(folder: str) -> None:
    """ConfigError for pictures that lie beside class folders: are they without a class, or misplaced?"""
    from hashnet.data import load_source

    names = load_source("imagefolder", path=folder, layout="flat").rows.names
    assert names is not None
    stray = [name for name in names.to_pylist() if "/" not in name]
    if 0 < len(stray) < len(names):
        raise ConfigError(
            f"{len(stray):,} of the {len(names):,} pictures in {folder} are in no class folder, such as "
            f"{stray[0]}; move each into the folder of its class, or all pictures into one folder, to do "
            "without classes"
        )


def _compare_config(config: DemoConfig) -> CompareConfig:
    base = _train_config(config)
    values = {field.name: getattr(base, field.name) for field in fields(base)}
    values |= {"run": Run(config.run).comparison.uri, "num_workers": 1}
    values |= {"manifest": Run(config.run).manifest.uri, "dataset": None, "cache": Run(config.run).cache}
    about = {"bits": [config.n_bits], "zero_shot": 0.0}
    if Run(config.run).manifest.exists() and Run(config.run).manifest.open().n_classes is None:
        return CompareConfig(**values | {"variant": "hashnet"}, methods=UNLABELLED_METHODS, **about)
    return CompareConfig(**values, methods=METHODS, k=config.k, **about)


def _share_model(run: Run, beside: CompareConfig) -> None:
    """Puts the run's model into the comparison's cell of HashNet, which then need not train it again."""
    cell = Cell("main", "hashnet", beside.bits[0], beside.seeds[0])
    shared = Run(cell.folder(beside.run)).model
    if beside.pairs is None and beside.variant == "hashnet" and not shared.exists():
        run.model.copy_to(shared.uri)


def _tables(run: Run) -> str:
    """The URI of what the comparison found, written when it is finished."""
    return storage.join(run.comparison.report.uri, "tables.json")


def _query(run: Run) -> QueryHits:
    """The nearest items of one query picture, found through model and index as any program would."""
    from hashnet.encoding import Encoder

    manifest = run.manifest.open()
    row_id = int(run.query_codes.open().ids()[0])  # the first that could be encoded
    row = manifest.read(start=row_id, stop=row_id + 1)
    picture = fetch_images(row)[0]
    if isinstance(picture, BadImage):
        raise picture
    store = run.codes.open()
    encoder = Encoder.load(run.model.uri, engine=store.lineage.get("engine"))
    hits = run.index.open().search(encoder.encode([picture]), k=10)
    position = {int(i): n for n, i in enumerate(store.ids())}
    labels = store.labels()
    names = manifest.class_names or [str(c) for c in range(manifest.n_classes or 0)]
    return QueryHits(
        row_id=row_id,
        uri=row["uri"][0].as_py(),
        labels=[names[c] for c in row["labels"][0].as_py() or ()],
        ids=hits.ids[0].tolist(),
        distances=hits.distances[0].tolist(),
        hit_labels=[
            [] if labels is None or i < 0 else [names[c] for c in np.flatnonzero(labels[position[i]])]
            for i in hits.ids[0].tolist()
        ],
        hit_uris=[item.uri if item else "" for item in ItemLookup(store).items(hits.ids[0].tolist())],
    )


def _table(config: DemoConfig, measured: dict[str, Any], compared: dict[str, Any]) -> list[TableLine]:
    if "recall" in measured:
        titles = TITLES | {"hashnet": FROM_NEIGHBOURS}
        found = [
            TableLine(titles[name], FULL_NAMES[name], config.n_bits, recall=by_bits[str(config.n_bits)])
            for name, by_bits in compared["recall"].items()
        ]
        chance = min(1.0, measured["within"] / measured["n_database"])
        return [*found, TableLine("chance", RANDOM, None, recall=chance)]
    found = [
        TableLine(TITLES[name], FULL_NAMES[name], config.n_bits, by_bits[str(config.n_bits)])
        for name, by_bits in compared["map"]["Table 1"].items()
    ]
    return [*found, TableLine("chance", RANDOM, None, measured["chance"])]


def _table_text(table: list[TableLine], measured: dict[str, Any]) -> list[str]:
    name = f"MAP@{measured['k']}"
    meaning = (
        f"{name}, mean average precision: how far up among the first {measured['k']} items those of the "
        "query's class are; 1 is perfect"
    )
    if "recall" in measured:
        name = f"recall@{measured['k']} within {measured['within']:,}"
        meaning = (
            f"{name}: the share of the {measured['k']} nearest pictures by the pretrained network's features "
            f"that are among the first {measured['within']} by code; 1 is perfect"
        )
    width = len(name) + 3
    left = max(len(line.method) for line in table) + 3
    rows = [
        f"{line.method:<{left}}{line.n_bits or '':>4}{line.value:>{width}.4f}  {line.name}" for line in table
    ]
    counts = [
        f"{measured['n_queries']:,} queries against a database of {measured['n_database']:,} items. The "
        "queries were kept aside: they are not in the index, and so do not find themselves."
    ]
    if measured["n_queries"] < FEW_QUERIES:
        ends = measured.get("map_interval") or measured["recall_interval"]
        low, high = (f"{end:.2f}" for end in ends)
        chance = table[-1].value
        lost = f", not distinguishable from chance ({chance:.2f})" if ends[0] <= chance <= ends[1] else ""
        counts.append(
            f"That is few queries: with others, HashNet's {table[0].value:.2f} might have been anything "
            f"from {low} to {high} (95 % interval){lost}."
            if low < high
            else "That is few queries: too few to tell good methods apart."
        )
    return ["", *counts, meaning, "", f"{'method':<{left}}{'bits':>4}{name:>{width}}", *rows]


def _summary_text(
    config: DemoConfig,
    measured: dict[str, Any],
    compared: dict[str, Any],
    found: QueryHits,
    seconds: float,
) -> list[str]:
    of_items = zip(found.ids, found.hit_labels, strict=True)
    hits = ", ".join(f"{item} ({'/'.join(labels) or '-'})" for item, labels in of_items)
    aside = f"row {found.row_id} of the data, kept aside and so not in the index"
    example = [
        f"example query: {aside}, class {'/'.join(found.labels)}",
        f"ids (and classes) of its ten nearest items: {hits}",
    ]
    if "recall" in measured:
        names = [os.path.basename(uri) for uri in found.hit_uris]
        near = ", ".join(f"{name} ({d})" for name, d in zip(names, found.distances, strict=True))
        example = [
            f"example query: {aside}, {found.uri}",
            f"its ten nearest items (and the bits that differ): {near}",
        ]
    query, what = f"--id {found.ids[0]}", "an item of the index, by its id"
    if os.path.isfile(found.uri):
        query, what = (
            shlex.quote(found.uri),
            f"a picture; by id only what is in the index: --id {found.ids[0]}",
        )
    run = shlex.quote(config.run)
    return [
        "",
        *example,
        "",
        f"report of this run:  {measured['page']}",
        f"comparison:          {compared['report']}",
        f"total time:          {duration(seconds)}",
        "",
        "try next:",
        f"  {command('hashnet')} serve {run}      # a search page at http://127.0.0.1:8000/",
        f"  {command('hashnet')} query {query} --run {run} -k 10      # {what}",
    ]


def command(name: str) -> str:
    """How to call a program of this environment: by name where the shell finds it, otherwise by path."""
    path = Path(sys.executable).parent / name
    if shutil.which(name) == str(path):
        return name
    return str(path) if (near := os.path.relpath(path)).startswith("../..") else near


def _show(run: str, report: str) -> None:
    """Opens the report, then the search page, which is served until Ctrl-C."""
    from hashnet.server import ServeConfig, serve_standalone

    webbrowser.open(f"file://{storage.resolve(report)[1]}")
    connection.disconnect()  # the server needs no Ray
    serve_standalone(ServeConfig(run=run), when_up=webbrowser.open)
