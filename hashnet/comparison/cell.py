"""One cell of a comparison: a method at one code length with one seed is learned, encodes and is measured.

CELL/cell.json    the CellResult: inputs, seconds, the EvalReport; written last, so a cell that has it is done
CELL/codes.npz    packed codes of queries and database, so that figures need no second fit
CELL/method/      the fitted shallow method, or CELL/model/ the trained bundle with its history

A trial (``validation`` > 0) tries settings: it holds out a share of the training rows and is measured by
validation MAP on them alone. It never sees the queries. Without labels (``neighbours``) a cell is measured by
neighbour recall, of vectors that every method compresses to the same number of bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hashnet.codes import pack_signs
from hashnet.comparison.methods import DEEP, PQ
from hashnet.data import NEAREST, Manifest
from hashnet.errors import Diverged, LineageMismatch
from hashnet.io import config as configs
from hashnet.io import read_checked, read_sealed, storage, write_sealed
from hashnet.losses import METHODS
from hashnet.metrics import (
    EvalReport,
    NeighbourReport,
    VectorSample,
    evaluate,
    exact_neighbours,
    neighbour_report,
    ranked_report,
    validation_map,
)
from hashnet.run import Run
from hashnet.training import TrainConfig

KIND, FORMAT_VERSION, FILE, CODES = "comparison_cell", 1, "cell.json", "codes.npz"

MAX_QUERIES, CORRELATED = 1000, 1000  # queries, and items of the database whose distances are correlated


@dataclass(frozen=True)
class Cell:
    """``part`` is ``main``, ``zero-shot`` or ``tune``; ``settings`` lists what differs from the defaults."""

    part: str
    method: str
    n_bits: int
    seed: int
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """A folder name; the trials of one cell differ by a digest of their settings."""
        name = f"{self.method}-{self.n_bits}-{self.seed}"
        if self.part != "tune":
            return name
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()
        return f"{name}-{digest[:8]}"

    @property
    def deep(self) -> bool:
        return self.method in DEEP

    def folder(self, run: str) -> str:
        return Run(run).cell(self.part, self.name)


@dataclass(frozen=True)
class CellInputs:
    """What must be equal for a finished cell to stand for another one: ``made_from`` in cell.json."""

    method: str
    n_bits: int
    seed: int
    settings: dict[str, Any]
    k: int
    validation: float
    manifest_sha256: str

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CellInputs:
        return cls(**{f.name: values.get(f.name) for f in dataclasses.fields(cls)})  # type: ignore[arg-type]

    def differences(self, new: CellInputs) -> dict[str, str]:
        """Name → sentence for each input that differs in ``new``."""
        pairs = {f.name: (getattr(self, f.name), getattr(new, f.name)) for f in dataclasses.fields(self)}
        return {name: f"{name} was {old}, now {now}" for name, (old, now) in pairs.items() if old != now}


class RowValues(NamedTuple):
    """Features or packed codes of rows, multi-hot labels if there are any, and row ids, which break ties."""

    values: np.ndarray
    labels: np.ndarray | None
    row_ids: np.ndarray


@dataclass(frozen=True)
class Features:
    """What the shallow methods learn from: the three sets."""

    train: RowValues
    query: RowValues
    database: RowValues


@dataclass(frozen=True)
class CellTask:
    """A cell with everything it needs besides the features: paths and numbers, cheap to send to a worker.

    ``train`` is a deep cell's training configuration (see ``deep_config``), None for a shallow method.
    ``validation`` > 0 makes it a trial. ``neighbours`` measures recall of neighbours, within the first ``k``.
    """

    cell: Cell
    folder: str
    manifest: str
    manifest_sha256: str
    k: int
    train: TrainConfig | None = None
    validation: float = 0.0
    neighbours: bool = False

    @property
    def needs_features(self) -> bool:
        return self.neighbours or not self.cell.deep

    @property
    def inputs(self) -> CellInputs:
        cell = self.cell
        return CellInputs(
            cell.method, cell.n_bits, cell.seed, cell.settings, self.k, self.validation, self.manifest_sha256
        )


@dataclass(frozen=True)
class TrainedNetwork:
    """What training recorded about a deep cell's network; ``measured`` is the model summary's entry."""

    sha256: str | None = None
    J: float | None = None
    L: float | None = None
    quantisation: float | None = None
    binary_share: float | None = None
    epochs: int | None = None
    steps: int | None = None
    measured: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    seconds: float | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainedNetwork:
        return cls(**{**_known(cls, values), "warnings": tuple(values.get("warnings") or ())})


def _known(record: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a dataclass has a field for: those of other versions are left out."""
    return {f.name: values[f.name] for f in dataclasses.fields(record) if f.name in values}


@dataclass(frozen=True)
class CellResult:
    """A finished cell. ``report`` is None for a trial, ``validation_map`` for any other cell.

    A trial that diverged has an ``error`` and neither; a cell without labels has ``neighbours`` instead.
    """

    part: str
    made_from: CellInputs
    folder: str = ""
    fit_s: float = 0.0
    fit_cpu_s: float = 0.0  # tells the cost on a machine that is also doing other work
    encode_s: float = 0.0
    encoded_rows: int = 0
    warnings: tuple[str, ...] = ()
    report: EvalReport | None = None
    neighbours: NeighbourReport | None = None
    validation_map: float | None = None
    error: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    history: Any = None
    training: TrainedNetwork | None = None
    codes_sha256: str | None = None  # None for a trial, and for cells of older versions

    def codes(self) -> Mapping[str, np.ndarray]:
        """``query``, ``database`` (packed codes), ``query_ids``, ``database_ids`` (row ids, not in cells of
        older versions) and ``classes`` of the database; FormatError if damaged."""
        where = storage.join(self.folder, CODES)
        again = "remove the folder of this cell to run it again"
        sha256 = self.codes_sha256
        data = storage.read_buffer(where) if sha256 is None else read_checked(where, sha256, again)
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return dict(arrays)

    def to_dict(self) -> dict[str, Any]:
        """The contents of cell.json."""
        values = vars(self) | {"folder": None, "report": self.report and self.report.to_dict()}
        return {
            name: dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
            for name, value in values.items()
            if value is not None
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any], folder: str) -> CellResult:
        """The result in a cell.json; keys that this version does not know are left out."""
        known = _known(cls, values)
        known["made_from"] = CellInputs.from_dict(values["made_from"])
        known["warnings"] = tuple(values.get("warnings") or ())
        records: dict[str, Any] = {
            "report": EvalReport,
            "neighbours": NeighbourReport,
            "training": TrainedNetwork,
        }
        for name, record in records.items():
            known[name] = record.from_dict(values[name]) if values.get(name) else None
        return cls(**known | {"folder": folder})


@dataclass(frozen=True)
class Learned:
    """A learned method: ``encode`` maps query, database or (shallow methods) held-out to codes and labels."""

    encode: Callable[[str], RowValues]  # packed codes
    logits: Callable[[str], np.ndarray]  # float32 (n, n_bits)
    params: dict[str, Any]
    history: Any = None
    training: TrainedNetwork | None = None
    validation_map: float | None = None


def run_cell(task: CellTask, features: Features | None = None, device: str = "cpu") -> CellResult:
    """Learns, encodes and measures a cell and writes its folder; returns what ``finished_cell`` will.

    Divergence of a trial is a result: its settings are not chosen. Of any other cell it is an error.
    """
    from hashnet.baselines import BaselineWarning

    started, started_cpu = time.monotonic(), time.process_time()
    result = CellResult(task.cell.part, task.inputs, task.folder)
    if task.cell.method == PQ:
        assert features is not None
        return _write(_measure_quantised(task, result, features))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BaselineWarning)
        try:
            learned = _learn(task, features, device)
        except Diverged as error:
            if not task.validation:
                raise
            return _write(dataclasses.replace(result, error=str(error)))
    result = dataclasses.replace(
        result,
        fit_s=max(
            round(time.monotonic() - started, 3),
            (learned.training and learned.training.seconds) or 0.0,  # a network may have been trained before
        ),
        fit_cpu_s=round(time.process_time() - started_cpu, 3),
        warnings=tuple(str(one.message) for one in caught if one.category is BaselineWarning),
        params=learned.params,
        history=learned.history,
        training=learned.training,
    )
    return _write(_measure(task, result, learned, features))


def _learn(task: CellTask, features: Features | None, device: str) -> Learned:
    if task.cell.deep:
        return learn_deep(task, device)
    assert features is not None, "a shallow method needs features"
    return learn_shallow(task, features)


def _measure(task: CellTask, result: CellResult, learned: Learned, features: Features | None) -> CellResult:
    """The result with a report, for which codes.npz is kept, with neighbour recall or validation MAP."""
    if task.validation:
        return dataclasses.replace(result, validation_map=_validate(learned))
    started = time.monotonic()
    query, wanted, query_ids = learned.encode("query")
    database, labels, ids = learned.encode("database")
    encode_s = round(time.monotonic() - started, 3)
    result = dataclasses.replace(result, encode_s=encode_s, encoded_rows=len(query) + len(database))
    if task.neighbours:
        assert features is not None
        recall = _neighbour_recall(task, learned, features, query, database)
        return dataclasses.replace(result, neighbours=recall)
    assert wanted is not None
    assert labels is not None
    report = evaluate(query, wanted, database, labels, k=task.k, database_ids=ids)
    buffer = io.BytesIO()
    classes = only_class(labels)
    np.savez(buffer, query=query, database=database, query_ids=query_ids, database_ids=ids, classes=classes)
    storage.write_bytes(storage.join(task.folder, CODES), buffer.getvalue())
    codes_sha256 = hashlib.sha256(buffer.getvalue()).hexdigest()
    return dataclasses.replace(result, report=report, codes_sha256=codes_sha256)


def _validate(learned: Learned) -> float | None:
    """Validation MAP; a network was measured when its training ended."""
    if learned.training is not None:
        return learned.validation_map
    codes, labels, _ = learned.encode("held-out")
    assert labels is not None
    return validation_map(codes, labels)


def _neighbour_recall(
    task: CellTask, learned: Learned, features: Features, query: np.ndarray, database: np.ndarray
) -> NeighbourReport:
    """Neighbour recall of at most MAX_QUERIES queries, by both rankings."""
    some, truth = _true_neighbours(features)
    rows = np.sort(np.random.default_rng(0).permutation(len(database))[:CORRELATED])
    sample = VectorSample(features.query.values[some], rows, features.database.values[rows])
    logits = learned.logits("query")[some]
    report = neighbour_report(query[some], database, truth, task.k, logits=logits, sample=sample)
    return dataclasses.replace(report, recalls=())


def _measure_quantised(task: CellTask, result: CellResult, features: Features) -> CellResult:
    """The result of product quantisation, which ranks by distance to the quantised vectors."""
    from hashnet.index import quantised_neighbours

    started = time.monotonic()
    some, truth = _true_neighbours(features)
    queries, database, n_bits = features.query.values[some], features.database.values, task.cell.n_bits
    depth = min(len(database), max(task.k, 1000))
    found = quantised_neighbours(features.train.values, database, queries, n_bits // 8, depth, task.cell.seed)
    report = ranked_report(found, truth, len(database), n_bits, task.k)
    return dataclasses.replace(
        result,
        fit_s=round(time.monotonic() - started, 3),
        encoded_rows=len(database),
        neighbours=dataclasses.replace(report, recalls=()),
    )


def _true_neighbours(features: Features) -> tuple[np.ndarray, np.ndarray]:
    """(positions of the queries that are measured, their true neighbours int64 (q, NEAREST))."""
    queries, database = features.query.values, features.database.values
    some = np.sort(np.random.default_rng(0).permutation(len(queries))[:MAX_QUERIES])
    return some, exact_neighbours(queries[some], [database], min(NEAREST, len(database)))


def _write(result: CellResult) -> CellResult:
    write_sealed(storage.join(result.folder, FILE), KIND, FORMAT_VERSION, result.to_dict())
    return result


def only_class(labels: np.ndarray) -> np.ndarray:
    """The class of rows that have exactly one, int32 (n,), -1 for the others; t-SNE is coloured by it."""
    return np.where(labels.sum(axis=1) == 1, labels.argmax(axis=1), -1).astype(np.int32)


def learn_shallow(task: CellTask, features: Features) -> Learned:
    """Fits one of the registry's methods; the methods of trials are not kept."""
    from hashnet.baselines import REGISTRY
    from hashnet.training import held_out

    cell = task.cell
    X, y, row_ids = features.train
    kept, held = held_out(len(X), task.validation)
    method = REGISTRY[cell.method](cell.n_bits, seed=cell.seed, **cell.settings)
    method.fit(X[kept], None if y is None else y[kept])
    if not task.validation:
        method.save(storage.join(task.folder, "method"))
    sets = {"query": features.query, "database": features.database}
    sets["held-out"] = RowValues(X[held], None if y is None else y[held], row_ids[held])

    def encode(name: str) -> RowValues:
        return sets[name]._replace(values=method.encode(sets[name].values))

    return Learned(encode, lambda name: method.logits(sets[name].values), method.params(), method.history_)


def learn_deep(task: CellTask, device: str) -> Learned:
    """Trains a variant of HashNet or a deep baseline in this process; an interrupted cell is resumed."""
    from hashnet.training import (
        features_of_run,
        finished_result,
        logits_of,
        open_rows,
        read_config,
        record_data,
        refuse_other_config,
        train_run,
    )

    config = task.train
    assert config is not None, "a deep method needs a training configuration"
    manifest = Manifest.open(task.manifest)
    if storage.exists(Run(config.run).config):  # begun before, or trained by several workers
        refuse_other_config(config, read_config(config.run))
    else:
        configs.save(config, Run(config.run).config)
    config = config.resolved(manifest.modality, manifest.count("train"))
    if finished_result(config.run) is None:
        record_data(config.run, manifest, config.pairs)
        train_run(config, device=device, manifest=manifest)
    model, info = Run(config.run).model.open()
    if (trained_on := info.summary["manifest_sha256"]) != manifest.sha256:
        raise LineageMismatch(
            f"{config.run} was trained on data with sha256 {trained_on[:12]}…, {manifest.uri} has "
            f"{manifest.sha256[:12]}…; use another run folder, or remove this cell to run it again"
        )
    storage.delete(Run(config.run).checkpoints)
    features = features_of_run(config, model, manifest, device, keep=config.freeze_backbone)

    def logits(split: str) -> RowValues:
        rows = open_rows(manifest, split, model, config)
        values, usable = logits_of(model, rows.source, device, features)
        labels = None if rows.labels is None else rows.labels[usable]
        return RowValues(values.numpy()[usable], labels, rows.row_ids[usable])

    def encode(split: str) -> RowValues:
        rows = logits(split)
        return rows._replace(values=pack_signs(rows.values))

    training = TrainedNetwork.from_dict({**info.summary, "sha256": info.sha256})
    return Learned(
        encode,
        lambda split: logits(split).values,
        dataclasses.asdict(config),
        training=training,
        validation_map=info.summary.get("validation_map"),
    )


def deep_config(
    cell: Cell, base: TrainConfig, manifest: Manifest, folder: str, validation: float = 0.0
) -> TrainConfig:
    """The training configuration of a deep cell in ``folder``: ``base`` with the cell's own settings.

    ``alpha_n_bits`` is alpha * n_bits, and ``unscaled_lr`` a learning rate for alpha = 10 / n_bits, scaled as
    the default one is. Methods without continuation keep their own schedule and train for as many epochs in
    all as HashNet.
    """
    settings = dict(cell.settings)
    if (scale := settings.pop("alpha_n_bits", None)) is not None:
        settings["alpha"] = scale / cell.n_bits
    unscaled = settings.pop("unscaled_lr", None)
    if METHODS[cell.method].schedule != "staged":
        settings.setdefault("schedule", None)
        if base.first_epochs is not None:  # otherwise `resolved` gives them as many
            hashnet = dataclasses.replace(base, variant="hashnet")
            stages = hashnet.resolved(manifest.modality, manifest.count("train")).make_stages()
            settings.setdefault("first_epochs", sum(stage.epochs for stage in stages))
    config = dataclasses.replace(
        base,
        run=folder,
        manifest=None,
        dataset=None,
        variant=cell.method,
        n_bits=cell.n_bits,
        seed=cell.seed,
        validation=validation,
        **settings,
    )
    return config if unscaled is None else dataclasses.replace(config, lr=unscaled * config.lr_scale)


def read_cell(folder: str) -> CellResult | None:
    """The result in a cell's folder, None where the cell is not done."""
    where = storage.join(folder, FILE)
    if not storage.exists(where):
        return None
    values = read_sealed(where, KIND, FORMAT_VERSION, "remove the folder of this cell to run it again")
    return CellResult.from_dict(values, folder)


def finished_cell(task: CellTask) -> CellResult | None:
    """The result of a cell that is done, None when it is not; LineageMismatch if it has other inputs.

    The depth of validation MAP is not the caller's choice: a trial that an older version measured at
    another depth is measured again.
    """
    result = read_cell(task.folder)
    if result is None:
        return None
    differing = result.made_from.differences(task.inputs)
    if task.validation and set(differing) == {"k"}:
        return None
    if differing:
        where = storage.join(task.folder, FILE)
        raise LineageMismatch(
            f"{where} was made with other settings: {'; '.join(differing.values())}. Use another run folder, "
            "or remove this cell to run it again"
        )
    return result
