"""Methods x code lengths x seeds on one data set, each cell a Ray task, resumable cell by cell.

Finished work is on disk (RUN/cells/PART/METHOD-BITS-SEED/cell.json): the same command resumes where it
stopped, and with more methods, lengths or seeds it adds those. Tables and figures are made from the cells
at the end, into RUN/report.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster.compare.compare_config import MAY_CHANGE, CompareConfig
from cluster.compare.data import comparison_manifest, shallow_features, zero_shot_manifest
from cluster.compare.runner import CellResources, CellRunner
from cluster.train import find_nearest
from hashnet.comparison import (
    DEEP,
    PAPER_K,
    UNLABELLED,
    Cell,
    CellTask,
    Features,
    TunedSettings,
    candidates,
    deep_config,
    expand_methods,
    mean_over_seeds,
)
from hashnet.data import Manifest
from hashnet.errors import ClusterError, ConfigError, DataError
from hashnet.io import config as configs
from hashnet.io import storage
from hashnet.metrics import validation_k
from hashnet.run import Run
from hashnet.training import KINDS, learn_from_neighbours, refuse_other_config, refuse_unlabelled

if TYPE_CHECKING:
    from hashnet.reports import ComparisonInfo

VALIDATION_SHARE = 0.2
WITHIN = 100  # items among which neighbours are looked for, without labels
NOTHING_TUNED = TunedSettings({}, {})


class PartOfComparison:
    """The cells on one manifest: ``main``, or ``zero-shot`` with other rows."""

    def __init__(self, config: CompareConfig, name: str, manifest: Manifest, k: int) -> None:
        self.config, self.name, self.manifest, self.k = config, name, manifest, k
        self._train = config.train_config()
        resources = CellResources(config.cpus_per_cell, config.device, config.num_workers)
        label = "compare (zero-shot)" if name == "zero-shot" else "compare"
        self.runner = CellRunner("compare", resources, self._features, label)

    def tasks(self, methods: list[str], tuned: TunedSettings) -> list[CellTask]:
        """Every method at every code length with every seed."""
        return [
            self.task(Cell(self.name, method, n_bits, seed, tuned.nearest(method, n_bits)))
            for seed in self.config.seeds
            for n_bits in self.config.bits
            for method in reversed(methods)  # the quick ones first, so that there is soon something to see
        ]

    def trials(self, methods: list[str]) -> list[CellTask]:
        """Every candidate setting of the methods, with the first seed."""
        return [
            self.task(Cell("tune", method, n_bits, self.config.seeds[0], settings), VALIDATION_SHARE)
            for n_bits in self.config.tune_bits or self.config.bits
            for method in reversed(methods)
            for settings in self.candidates(method)
        ]

    def candidates(self, method: str) -> list[dict[str, Any]]:
        """The settings to try, with the learning rates of the kind of backbone."""
        return candidates(method, KINDS[self._train.kind_for(self.manifest.modality)].lr_grid)

    def task(self, cell: Cell, validation: float = 0.0) -> CellTask:
        folder = cell.folder(self.config.run)
        k = validation_k(round(validation * self.manifest.count("train"))) if validation else self.k
        train = deep_config(cell, self._train, self.manifest, folder, validation) if cell.deep else None
        unlabelled = self.manifest.n_classes is None
        if unlabelled and train is not None:
            train = learn_from_neighbours(train, self.manifest)
        return CellTask(
            cell, folder, self.manifest.uri, self.manifest.sha256, k, train, validation, unlabelled
        )

    def _features(self) -> Features:
        folder = Run(self.config.run).backbone(self.name)
        return shallow_features(self.config, self.manifest, folder)


def compare(config: CompareConfig) -> dict[str, Any]:
    """Runs every cell that is not finished, writes RUN/report and returns what the job prints."""
    saved_at = Run(config.run).config
    begun = storage.exists(saved_at)
    if begun:
        before = configs.load(CompareConfig, saved_at, [f"run={config.run}"], saved=True)
        refuse_other_config(config, before, MAY_CHANGE)
    manifest = comparison_manifest(config)
    if manifest.n_classes is None:
        return _compare_neighbours(config, manifest, saved_at)
    _check_labels(config, manifest)
    if not begun:
        configs.save(config, saved_at)
    source = str(manifest.source.get("name"))
    dataset = config.paper or (source if source in PAPER_K else None)
    k = config.k or PAPER_K.get(dataset or "", 5000)
    unseen = zero_shot_manifest(config, manifest)
    if unseen is not None:
        refuse_unlabelled(_labels(unseen, "query"), "zero-shot query")
    main = PartOfComparison(config, "main", manifest, k)
    tuned = _tuned_settings(main)
    work = [(main, main.tasks(expand_methods(config.methods), tuned))]
    if unseen is not None:
        zero_shot = PartOfComparison(config, "zero-shot", unseen, k)
        work.append((zero_shot, zero_shot.tasks(expand_methods(config.zero_shot_methods), tuned)))
    for part, tasks in work:
        part.runner.finished(tasks)  # refuses cells made with other settings
    configs.save(config, saved_at)  # only now: settings that cells refuse are not saved
    results = [result for part, tasks in work for result in part.runner.run(tasks)]

    from hashnet.reports import write_comparison_report

    info = dataclasses.replace(_info(config, manifest, k), paper=dataset, settings=tuned.to_dict())
    return write_comparison_report(Run(config.run).report.uri, results, info)


def _info(config: CompareConfig, manifest: Manifest, k: int) -> ComparisonInfo:
    from hashnet.reports import ComparisonInfo

    about = {"uri": manifest.uri, "sha256": manifest.sha256}
    about |= {"source": manifest.source, "splits": manifest.splits}
    return ComparisonInfo(config.run, k, configs.to_dict(config), manifest=about)


def _compare_neighbours(config: CompareConfig, manifest: Manifest, saved_at: str) -> dict[str, Any]:
    """The comparison without labels: how many of the nearest vectors each method finds."""
    from hashnet.reports import write_neighbour_comparison
    from hashnet.training import frozen_pretrained, write_neighbours

    methods = list(UNLABELLED) if config.methods == ["all"] else expand_methods(config.methods)
    others = [name for name in methods if name not in UNLABELLED]
    mistakes = [f"{manifest.uri} has no labels, which {', '.join(others)} learn from; leave them out"]
    if config.tune or others:
        raise ConfigError(mistakes if others else [f"tune needs labels, and {manifest.uri} has none"])
    configs.save(config, saved_at)
    if manifest.modality == "image":
        config = frozen_pretrained(config)
    pairs = Run(config.run).pairs
    if not storage.exists(pairs) and set(DEEP) & set(methods):
        write_neighbours(pairs, config.train_config(), manifest, find_nearest)
    config = dataclasses.replace(config, pairs=pairs)
    part = PartOfComparison(config, "neighbours", manifest, config.k or WITHIN)
    results = part.runner.run(part.tasks(methods, NOTHING_TUNED))
    return write_neighbour_comparison(Run(config.run).report.uri, results, _info(config, manifest, part.k))


def _check_labels(config: CompareConfig, manifest: Manifest) -> None:
    """Refuses unlabelled queries, and unlabelled held-out rows where networks are tuned on them."""
    refuse_unlabelled(_labels(manifest, "query"), "query")
    if config.tune and config.settings is None and set(DEEP) & set(expand_methods(config.methods)):
        from hashnet.training import held_out  # loads torch, which most drivers do without

        _, held = held_out(manifest.count("train"), VALIDATION_SHARE)
        refuse_unlabelled(_labels(manifest, "train")[held], "held-out training", "tune")


def _labels(manifest: Manifest, split: str) -> np.ndarray:
    labels = manifest.labels(split)
    if labels is None:
        raise DataError(f"{manifest.uri} has no labels: a comparison needs them to know what is relevant")
    return labels


def _tuned_settings(part: PartOfComparison) -> TunedSettings:
    """The settings given, or the best candidates by validation MAP, or none.

    Choices made before stay as they are: finished cells were made with them.
    """
    config = part.config
    if config.settings is not None:
        return TunedSettings.load(config.settings)
    if not config.tune:
        return NOTHING_TUNED
    names = [name for name in expand_methods(config.methods) if len(part.candidates(name)) > 1]
    uri = Run(config.run).tuned
    before = TunedSettings.load(uri) if storage.exists(uri) else NOTHING_TUNED
    trials = part.trials(names)
    part.runner.finished(trials)  # refuses trials on other data
    left = [task for task in trials if task.cell.n_bits not in before.settings.get(task.cell.method, {})]
    tuned = before.extended(TunedSettings.choose(mean_over_seeds(part.runner.run(left))))
    lost = [name for name in names if not tuned.settings.get(name)]
    if lost:
        raise ClusterError(
            f"every trial of {', '.join(lost)} diverged; give settings=FILE with lower learning rates"
        )
    tuned.save(uri)
    return tuned
