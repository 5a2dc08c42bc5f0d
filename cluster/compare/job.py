"""Methods x code lengths x seeds on one data set, each cell a Ray task, resumable cell by cell.

What is done is on disk (RUN/cells/PART/METHOD-BITS-SEED/cell.json): the same command goes on where it
stopped, and with more methods, lengths or seeds it adds those. Tables and figures are made from the cells
at the end, into RUN/report.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.compare.cells import Part, Record
from cluster.compare.data import comparison_manifest, zero_shot_manifest
from cluster.encode import ENGINES
from cluster.runtime import connection
from hashnet.codes import check_n_bits
from hashnet.data import Manifest
from hashnet.errors import ClusterError, ConfigError, DataError
from hashnet.io import config as configs
from hashnet.io import key, storage
from hashnet.reports import DEEP, DEPTH, Cell, candidates, expand
from hashnet.training import CONFIG, HOW, TrainConfig, held_out, refuse_other_config, refuse_unlabelled

VALIDATION_SHARE = 0.2
# Keys another call may give anew: what to add or how to work. A cell checks those it is made of itself.
MAY_CHANGE = (
    *HOW, "methods", "bits", "seeds", "k", "paper", "tune", "tune_bits", "settings", "zero_shot",
    "zero_shot_manifest", "zero_shot_methods", "cpus_per_cell", "variant", "n_bits", "seed", "validation",
)  # fmt: skip
# Keys that would make every method's network one and the same variant → the methods that differ by them.
OF_A_METHOD = {"class_weights": "hashnet,hashnet-w", "continuous": "hashnet,hashnet+c"}


@dataclass(frozen=True)
class CompareConfig(TrainConfig):
    manifest: str | None = key(None, "the data: a manifest made by `hashnet dataset`", path=True)
    methods: list[str] = key(["all"], "names, or the groups all, deep, shallow, ablation")
    bits: list[int] = key([16, 32, 48, 64], "code lengths", check=check_n_bits)
    seeds: list[int] = key([0], "each is one repetition; several give mean ± deviation", low=0)
    k: int | None = key(None, "depth of MAP; none: the paper's for its data sets, else 5000", low=1)
    paper: str | None = key(
        None, "print this data set's numbers of the paper beside ours; none: by the manifest's source",
        choices=tuple(DEPTH),
    )  # fmt: skip
    tune: bool = key(
        False, "choose each method's settings on a fifth of the training rows (never on queries) first"
    )
    tune_bits: list[int] = key(
        [], "tune at these code lengths only; others take the nearest one's settings (empty: at all)",
        check=check_n_bits,
    )  # fmt: skip
    settings: str | None = key(
        None, "tuned.json of another comparison: take its settings, tune nothing", path=True
    )
    zero_shot: float = key(0.25, "share of classes unseen in training for Table 2; 0: no such table", low=0)
    zero_shot_manifest: str | None = key(
        None, "a manifest made with the zero-shot protocol, instead", path=True
    )
    zero_shot_methods: list[str] = key(["hashnet", "dhn"], "methods of Table 2")
    features: str = key(
        "auto", "what shallow methods take of pictures; auto: pixels where weights=random",
        choices=("auto", "backbone", "pixels"),
    )  # fmt: skip
    engine: str = key(
        "auto", "how that backbone runs: compiling takes a minute or two and pays for thousands of pictures",
        choices=ENGINES,
    )  # fmt: skip
    cpus_per_cell: int = key(1, "CPUs of a cell's task", low=1)
    log_every: int = key(10, "steps between rows of a deep cell's history", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        empty = [name for name in ("bits", "seeds") if not getattr(self, name)]
        mistakes = [f"{name} is empty: there is nothing to compare" for name in empty]
        if self.schedule == "plain":
            mistakes.append("schedule=plain is another method: ask for methods=hashnet-sgn instead")
        mistakes += [
            f"{name} is what tells methods apart: ask for methods={instead} instead"
            for name, instead in OF_A_METHOD.items()
            if getattr(self, name) is not None
        ]
        if mistakes:
            raise ConfigError(mistakes)
        expand(self.methods)
        expand(self.zero_shot_methods)

    @property
    def features_from(self) -> str:
        if self.features != "auto":
            return self.features
        return "pixels" if self.weights == "random" else "backbone"

    def train_config(self) -> TrainConfig:
        """The part of this configuration that deep cells are trained with."""
        names = [field.name for field in dataclasses.fields(TrainConfig)]
        return TrainConfig(**{name: getattr(self, name) for name in names})


def compare(config: CompareConfig) -> dict[str, Any]:
    """Runs every cell that is not done yet, writes RUN/report and returns what the job prints."""
    saved_at = storage.join(config.run, CONFIG)
    begun = storage.exists(saved_at)
    if begun:
        before = configs.load(CompareConfig, saved_at, [f"run={config.run}"], saved=True)
        refuse_other_config(config, before, MAY_CHANGE)
    manifest = comparison_manifest(config)
    refuse_unlabelled(_labels(manifest, "query"), "query")
    if config.tune and config.settings is None and set(DEEP) & set(expand(config.methods)):
        _, held = held_out(manifest.count("train"), VALIDATION_SHARE)  # training itself scores all of them
        refuse_unlabelled(_labels(manifest, "train")[held], "held-out training", "tune")
    if not begun:
        configs.save(config, saved_at)
    connection.connect()
    source = str(manifest.source.get("name"))
    dataset = config.paper or (source if source in DEPTH else None)
    k = config.k or DEPTH.get(dataset or "", 5000)
    unseen = zero_shot_manifest(config, manifest)
    if unseen is not None:
        refuse_unlabelled(_labels(unseen, "query"), "zero-shot query")
    main = Part(config, "main", manifest, k)
    tuned = _tune(main)
    work = [(main, main.cells(expand(config.methods), tuned))]
    if unseen is not None:
        part = Part(config, "zero-shot", unseen, k)
        work.append((part, part.cells(expand(config.zero_shot_methods), tuned)))
    for part, tasks in work:
        part.done(tasks)
    configs.save(config, saved_at)  # settings that cells refuse are not written down
    records = [record for part, tasks in work for record in part.run(tasks)]
    return _report(config, records, dataset, k, tuned, manifest)


def _labels(manifest: Manifest, split: str) -> np.ndarray:
    labels = manifest.labels(split)
    if labels is None:
        raise DataError(f"{manifest.uri} has no labels: methods are compared by which rows share one")
    return labels


def _tune(part: Part) -> dict[str, Any]:
    """method → n_bits → settings: read, or the best of the grid on held-out training rows, or none."""
    config = part.config
    if config.settings is not None:
        return storage.check_format(storage.read_json(config.settings), config.settings, "tuned", 1)[
            "settings"
        ]
    if not config.tune:
        return {}
    names = [name for name in expand(config.methods) if len(candidates(name)) > 1]
    trials = [
        Cell("tune", name, n_bits, config.seeds[0], chosen)
        for n_bits in config.tune_bits or config.bits
        for name in reversed(names)
        for chosen in candidates(name)
    ]
    records = part.run([part.task(cell, VALIDATION_SHARE) for cell in trials])
    best: dict[str, dict[str, Record]] = {}
    for record in records:
        made = record["made_from"]
        column = best.setdefault(made["method"], {})
        held = column.get(str(made["n_bits"]))
        if held is None or record["validation_map"] > held["validation_map"]:
            column[str(made["n_bits"])] = record
    lost = [name for name in names if name not in best]
    if lost:
        raise ClusterError(
            f"every trial of {', '.join(lost)} diverged; give settings=FILE with smaller rates"
        )
    settings = {
        name: {n_bits: record["made_from"]["settings"] for n_bits, record in column.items()}
        for name, column in best.items()
    }
    validation = {
        name: {n_bits: record["validation_map"] for n_bits, record in column.items()}
        for name, column in best.items()
    }
    about = {"kind": "tuned", "format_version": 1, "settings": settings, "validation_map": validation}
    storage.write_json(storage.join(config.run, "tuned.json"), about)
    return settings


def _report(
    config: CompareConfig,
    records: list[Record],
    dataset: str | None,
    k: int,
    tuned: dict[str, Any],
    manifest: Manifest,
) -> dict[str, Any]:
    from hashnet.reports import write_report

    about = {
        "run": config.run,
        "config": configs.to_dict(config),
        "k": k,
        "paper": dataset,
        "settings": tuned,
        "manifest": {"uri": manifest.uri, "sha256": manifest.sha256, "source": manifest.source,
                     "splits": manifest.splits},
    }  # fmt: skip
    return write_report(storage.join(config.run, "report"), records, about)
