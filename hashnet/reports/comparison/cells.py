"""One cell of a comparison: a method at one code length with one seed, learnt, encoded and measured.

CELL/cell.json    settings, seconds, the EvalReport, what it was made from; written last: it makes it count
CELL/codes.npz    packed codes of queries and database, so that figures need no second fit
CELL/method/      the fitted shallow method, or CELL/model/ the trained bundle with its history
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hashnet.baselines import REGISTRY, BaselineWarning
from hashnet.codes import pack_signs
from hashnet.data import Manifest
from hashnet.errors import LineageMismatch
from hashnet.io import config as configs
from hashnet.io import storage
from hashnet.metrics import EvalReport, evaluate
from hashnet.reports.comparison.methods import DEEP
from hashnet.training import VARIANTS, TrainConfig, held_out

KIND, FORMAT_VERSION, FILE, CODES = "comparison_cell", 1, "cell.json", "codes.npz"
SUMMARY = ("J", "L", "quantisation", "binary_share", "epochs", "steps", "measured", "warnings", "seconds")


@dataclass(frozen=True)
class Cell:
    """``part`` is ``main``, ``zero-shot`` or ``tune``; ``settings`` those that differ from the defaults."""

    part: str
    method: str
    n_bits: int
    seed: int
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """A folder name; trials of one cell differ by a digest of their settings."""
        name = f"{self.method}-{self.n_bits}-{self.seed}"
        if self.part != "tune":
            return name
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()
        return f"{name}-{digest[:8]}"

    @property
    def deep(self) -> bool:
        return self.method in DEEP

    def uri(self, run: str) -> str:
        return storage.join(run, "cells", self.part, self.name)


@dataclass(frozen=True)
class Features:
    """What the shallow methods see: standardised features and labels of the three sets."""

    train: tuple[np.ndarray, np.ndarray]
    query: tuple[np.ndarray, np.ndarray]
    database: tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Task:
    """A cell with all it needs besides the features: paths and numbers, small enough to send anywhere.

    ``validation`` > 0 holds out that share of the training rows and measures on them alone: each half of
    them asks the other, which no method has seen, as most of a database is not.
    """

    cell: Cell
    run: str
    manifest: str
    manifest_sha256: str
    k: int
    config: TrainConfig
    validation: float = 0.0

    @property
    def made_from(self) -> dict[str, Any]:
        """What must be the same for a finished cell to stand for this one."""
        return {
            "method": self.cell.method,
            "n_bits": self.cell.n_bits,
            "seed": self.cell.seed,
            "settings": self.cell.settings,
            "k": self.k,
            "validation": self.validation,
            "manifest_sha256": self.manifest_sha256,
        }


Encode = Callable[[str], tuple[np.ndarray, np.ndarray]]  # set name → packed codes, multi-hot labels


def run_cell(task: Task, features: Features | None = None) -> dict[str, Any]:
    """Learns, encodes and measures a cell, writes its folder; returns what ``finished`` will."""
    started, started_cpu = time.monotonic(), time.process_time()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", BaselineWarning)
        if task.cell.deep:
            encode, extra = learn_deep(task)
        else:
            assert features is not None
            encode, extra = learn_shallow(task, features)
    fit_s, fit_cpu_s = time.monotonic() - started, time.process_time() - started_cpu
    started = time.monotonic()
    if task.validation:
        held_codes, held_labels = encode("held-out")
        asking = held_labels.any(axis=1)  # nothing is relevant to a row without a label
        held_codes, held_labels = held_codes[asking], held_labels[asking]
        codes, labels = (held_codes[::2], held_codes[1::2]), (held_labels[::2], held_labels[1::2])
    else:
        codes, labels = zip(*(encode(name) for name in ("query", "database")), strict=True)
    encode_s = time.monotonic() - started
    report = evaluate(codes[0], labels[0], codes[1], labels[1], k=task.k)
    if task.validation:
        back = evaluate(codes[1], labels[1], codes[0], labels[0], k=task.k)
        extra["validation_map"] = (report.map + back.map) / 2
    record = {
        "kind": KIND,
        "format_version": FORMAT_VERSION,
        "part": task.cell.part,
        "made_from": task.made_from,
        "fit_s": round(fit_s, 3),
        "fit_cpu_s": round(fit_cpu_s, 3),  # what it costs on a machine that is doing other things, too
        "encode_s": round(encode_s, 3),
        "encoded_rows": len(codes[0]) + len(codes[1]),
        "warnings": [str(warning.message) for warning in said if warning.category is BaselineWarning],
        "report": report.to_dict(),
        **extra,
    }
    uri = task.cell.uri(task.run)
    if not task.validation:
        buffer = io.BytesIO()
        np.savez(buffer, query=codes[0], database=codes[1], classes=only_class(labels[1]))
        storage.write_bytes(storage.join(uri, CODES), buffer.getvalue())
    storage.write_json(storage.join(uri, FILE), record)
    return {**record, "folder": uri}


def only_class(labels: np.ndarray) -> np.ndarray:
    """The class of rows that have exactly one, int32 (n,), -1 for the others: what t-SNE is coloured by."""
    return np.where(labels.sum(axis=1) == 1, labels.argmax(axis=1), -1).astype(np.int32)


def learn_shallow(task: Task, features: Features) -> tuple[Encode, dict[str, Any]]:
    """Fits one of the registry's methods; trials are not kept."""
    cell = task.cell
    X, y = features.train
    kept, held = held_out(len(X), task.validation)
    method = REGISTRY[cell.method](cell.n_bits, seed=cell.seed, **cell.settings).fit(X[kept], y[kept])
    if not task.validation:
        method.save(storage.join(cell.uri(task.run), "method"))
    sets = {"held-out": (X[held], y[held]), "query": features.query, "database": features.database}

    def encode(name: str) -> tuple[np.ndarray, np.ndarray]:
        return method.encode(sets[name][0]), sets[name][1]

    return encode, {"params": method.params(), "history": method.history_}


def learn_deep(task: Task) -> tuple[Encode, dict[str, Any]]:
    """Trains a variant of HashNet or a deep baseline here; an interrupted cell goes on where it was."""
    import torch

    from hashnet.models import load_bundle
    from hashnet.training import (
        CHECKPOINTS,
        CONFIG,
        MODEL,
        finished_result,
        logits_of,
        open_rows,
        read_config,
        record_data,
        refuse_other_config,
        train_run,
    )

    manifest = Manifest.open(task.manifest)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = deep_config(task, manifest)
    if storage.exists(storage.join(config.run, CONFIG)):  # begun before, or trained by many workers
        refuse_other_config(config, read_config(config.run))
    else:
        configs.save(config, storage.join(config.run, CONFIG))
    config = config.resolved(manifest.modality, manifest.count("train"))
    if finished_result(config.run) is None:
        record_data(config.run, manifest)
        train_run(config, device=device, manifest=manifest)
    model, info = load_bundle(storage.join(config.run, MODEL))
    if (trained_on := info.summary["manifest_sha256"]) != manifest.sha256:
        raise LineageMismatch(
            f"{config.run} was trained on data with sha256 {trained_on[:12]}…, {manifest.uri} has "
            f"{manifest.sha256[:12]}…; use another run folder, or remove this cell to make it anew"
        )
    storage.delete(storage.join(config.run, CHECKPOINTS))
    _, held = held_out(manifest.count("train"), task.validation)

    def encode(name: str) -> tuple[np.ndarray, np.ndarray]:
        split, positions = ("train", held) if name == "held-out" else (name, None)
        rows = open_rows(manifest, split, model, config, positions=positions)
        logits, usable = logits_of(model, rows.source, device=device)
        assert rows.labels is not None
        return pack_signs(logits[torch.from_numpy(usable)]), rows.labels[usable]

    about = {"sha256": info.sha256, **{name: info.summary.get(name) for name in SUMMARY}}
    return encode, {"params": dataclasses.asdict(config), "training": about}


def deep_config(task: Task, manifest: Manifest) -> TrainConfig:
    """The training configuration of a deep cell: the run's, with the cell's own settings.

    Methods without continuation keep to their own schedule, and have as many epochs as HashNet in all.
    """
    cell, settings = task.cell, dict(task.cell.settings)
    if (scale := settings.pop("alpha_n_bits", None)) is not None:
        settings["alpha"] = scale / cell.n_bits
    if VARIANTS[cell.method]["schedule"] != "staged":
        settings.setdefault("schedule", None)
        if task.config.first_epochs is not None:  # else `resolved` gives them as many
            hashnet = dataclasses.replace(task.config, variant="hashnet")
            stages = hashnet.resolved(manifest.modality, manifest.count("train")).make_stages()
            settings.setdefault("first_epochs", sum(stage.epochs for stage in stages))
    return dataclasses.replace(
        task.config,
        run=cell.uri(task.run),
        manifest=None,
        dataset=None,
        variant=cell.method,
        n_bits=cell.n_bits,
        seed=cell.seed,
        validation=task.validation,
        **settings,
    )


def finished(task: Task) -> dict[str, Any] | None:
    """The record of a cell that is done, with its ``folder``; None when it is not; another's is refused."""
    where = storage.join(task.cell.uri(task.run), FILE)
    if not storage.exists(where):
        return None
    record = storage.check_format(storage.read_json(where), where, KIND, FORMAT_VERSION)
    old, new = record["made_from"], task.made_from
    differing = [f"{name} was {old.get(name)}, now {new[name]}" for name in new if old.get(name) != new[name]]
    if differing:
        raise LineageMismatch(
            f"{where} was made with other settings: {'; '.join(differing)}. Use another run folder, or "
            "remove this cell to make it anew"
        )
    return {**record, "folder": task.cell.uri(task.run)}


def report_of(record: dict[str, Any]) -> EvalReport:
    """The EvalReport of a finished cell."""
    return EvalReport.from_dict(record["report"])
