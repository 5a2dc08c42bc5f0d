"""Methods x code lengths x seeds on one data set, each cell a Ray task, resumable cell by cell.

What is done is on disk (RUN/cells/PART/METHOD-BITS-SEED/cell.json): the same command goes on where it
stopped, and with more methods, lengths or seeds it adds those. Tables and figures are made from the cells
at the end, into RUN/report.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cluster import placement, session
from cluster.causes import ours
from cluster.compare_data import comparison_manifest, shallow_features, zero_shot_manifest
from cluster.encoding import ENGINES
from cluster.planning import Need
from hashnet import config as configs
from hashnet import storage
from hashnet.codes import check_n_bits
from hashnet.comparison.cells import Cell, Features, Task, deep_config, finished, run_cell
from hashnet.comparison.methods import TITLES, candidates, expand
from hashnet.comparison.paper import DEPTH
from hashnet.config import key
from hashnet.data import Manifest
from hashnet.errors import ClusterError, Diverged, HashnetError
from hashnet.progress import Progress
from hashnet.training.config import HOW, TrainConfig
from hashnet.training.run import CONFIG, refuse_other_config

logger = logging.getLogger(__name__)
TABLE_EVERY_S = 30.0
VALIDATION_SHARE = 0.2
# Keys another call may give anew: what to add or how to work. A cell checks those it is made of itself.
MAY_CHANGE = (
    *HOW, "methods", "bits", "seeds", "k", "paper", "tune", "tune_bits", "settings", "zero_shot",
    "zero_shot_manifest", "zero_shot_methods", "cpus_per_cell", "variant", "n_bits", "seed", "validation",
)  # fmt: skip
Record = dict[str, Any]


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
    if storage.exists(saved_at):
        before = configs.load(CompareConfig, saved_at, [f"run={config.run}"])
        refuse_other_config(config, before, MAY_CHANGE)
    manifest = comparison_manifest(config)
    configs.save(config, saved_at)
    session.connect()
    source = str(manifest.source.get("name"))
    dataset = config.paper or (source if source in DEPTH else None)
    k = config.k or DEPTH.get(dataset or "", 5000)
    unseen = zero_shot_manifest(config, manifest)
    main = _Part(config, "main", manifest, k)
    tuned = _tune(main)
    records = main.run(main.cells(expand(config.methods), tuned))
    if unseen is not None:
        part = _Part(config, "zero-shot", unseen, k)
        records += part.run(part.cells(expand(config.zero_shot_methods), tuned))
    return _report(config, records, dataset, k, tuned, manifest)


class _Part:
    """Cells on one manifest; the shallow methods' features are made once and shared by all tasks."""

    def __init__(self, config: CompareConfig, name: str, manifest: Manifest, k: int) -> None:
        self.config, self.name, self.manifest, self.k = config, name, manifest, k
        self._features: Any = None

    def cells(self, methods: list[str], tuned: dict[str, Any]) -> list[Task]:
        return [
            self.task(Cell(self.name, method, n_bits, seed, nearest(tuned.get(method, {}), n_bits)))
            for seed in self.config.seeds
            for n_bits in self.config.bits
            for method in reversed(methods)  # the quick ones first: something to look at
        ]

    def task(self, cell: Cell, validation: float = 0.0) -> Task:
        k = self.k
        if validation:  # half of the held-out rows are searched: the same share of them, not the same number
            n_searched = validation * self.manifest.count("train") / 2
            k = max(1, round(self.k * n_searched / self.manifest.count("database")))
        train = self.config.train_config()
        return Task(cell, self.config.run, self.manifest.uri, self.manifest.sha256, k, train, validation)

    def run(self, tasks: list[Task]) -> list[Record]:
        """The records of all cells, those that were done before included."""
        done = {task.cell: record for task in tasks if (record := finished(task)) is not None}
        left = [task for task in tasks if task.cell not in done]
        if left:
            done |= self._run(left, done)
        return [done[task.cell] for task in tasks if task.cell in done]

    def _run(self, tasks: list[Task], before: dict[Cell, Record]) -> dict[Cell, Record]:
        cpus = self.config.cpus_per_cell
        need = Need("cell", len(tasks), {"CPU": cpus}, at_least=1, fix="lower cpus_per_cell")
        placement.ensure("compare", [need])
        found: dict[Cell, Record] = {}
        failed: list[str] = []
        table = _Progress(self.name, {**before}, len(tasks))
        for cell, outcome in self._outcomes(tasks):
            if isinstance(outcome, HashnetError):
                logger.warning("%s failed: %s", cell.name, outcome)
                if not (cell.part == "tune" and isinstance(outcome, Diverged)):  # then others are better
                    failed.append(f"{cell.name}: {outcome}")
            else:
                found[cell] = outcome
            table.add(cell, outcome)
        table.close()
        if failed:
            raise ClusterError(
                f"{len(failed)} of {len(tasks)} cells failed; the others are kept. " + " | ".join(failed[:5])
            )
        return found

    def _outcomes(self, tasks: list[Task]) -> Iterator[tuple[Cell, Record | HashnetError]]:
        import ray

        gpus = 1 if self.config.gpu or (self.config.gpu is None and placement.capacity({"GPU": 1})) else 0
        waiting = {}
        for task in tasks:
            cell = task.cell
            if cell.deep and self.config.num_workers > 1:
                try:
                    self._train_on_many(task)
                except HashnetError as error:
                    yield cell, error
                    continue
            features = None if cell.deep else self._shared_features()
            options = {"num_cpus": self.config.cpus_per_cell, "num_gpus": gpus if cell.deep else 0}
            ref = (
                ray.remote(_work)
                .options(**options, max_retries=3)
                .remote(task, features, options["num_cpus"])
            )
            waiting[ref] = cell
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1)
            cell = waiting.pop(ready[0])
            try:
                yield cell, ray.get(ready[0])
            except ray.exceptions.RayTaskError as error:
                known = ours(error)
                if known is None:
                    raise
                yield cell, known

    def _train_on_many(self, task: Task) -> None:
        """Data-parallel training from here (num_workers > 1); the task finds the model and measures it."""
        from cluster.training import train

        train(dataclasses.replace(deep_config(task), manifest=task.manifest))

    def _shared_features(self) -> Any:
        if self._features is None:
            import ray

            folder = storage.join(self.config.run, f"backbone-{self.name}")
            self._features = ray.put(shallow_features(self.config, self.manifest, folder))
        return self._features


def nearest(settings: dict[str, dict[str, Any]], n_bits: int) -> dict[str, Any]:
    """The settings found at the code length nearest to ``n_bits``, the shorter one when two are as near.

    >>> nearest({"16": {"lr": 1}, "48": {"lr": 2}}, 32), nearest({}, 32)
    ({'lr': 1}, {})
    """
    known = sorted(settings, key=lambda length: (abs(int(length) - n_bits), int(length)))
    return settings[known[0]] if known else {}


def _work(task: Task, features: Features | None, cpus: int) -> Record:
    """One cell, inside a Ray task."""
    import numba
    import torch

    logging.getLogger("hashnet").setLevel(logging.ERROR)  # warnings are kept in the cell, not said 100 times
    torch.set_num_threads(cpus)
    numba.set_num_threads(min(cpus, numba.config.NUMBA_NUM_THREADS))
    return run_cell(task, features)


def _tune(part: _Part) -> dict[str, Any]:
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


class _Progress:
    """A line with rate and time left, and now and then the table as far as it is known."""

    def __init__(self, part: str, done: dict[Cell, Record], n_left: int) -> None:
        self.done: dict[Cell, Record | HashnetError] = dict(done)
        self.progress = Progress(len(done) + n_left, "cells", f"compare ({part})", done=len(done))
        self.last_table = time.monotonic()

    def add(self, cell: Cell, outcome: Record | HashnetError) -> None:
        self.done[cell] = outcome
        self.progress.update(1, last=cell.name)
        more = self.progress.done < (self.progress.total or 0)
        if more and time.monotonic() - self.last_table > TABLE_EVERY_S:
            self.last_table = time.monotonic()
            logger.info("%s", progress_table(self.done))

    def close(self) -> None:
        self.progress.close()
        logger.info("%s", progress_table(self.done))


def progress_table(done: dict[Cell, Record | HashnetError]) -> str:
    """MAP so far, a line a method: the mean over its finished seeds (the best trial while tuning)."""
    columns = sorted({cell.n_bits for cell in done})
    lines = ["method      " + "".join(f"{n:>9}" for n in columns)]
    for method, title in TITLES.items():
        words = []
        for n_bits in columns:
            here = [(c, r) for c, r in done.items() if (c.method, c.n_bits) == (method, n_bits)]
            values = [r.get("validation_map", r["report"]["map"]) for _, r in here if isinstance(r, dict)]
            if not values:
                words.append("failed" if here else "")
            else:
                tuning = any(c.part == "tune" for c, _ in here)
                words.append(f"{max(values) if tuning else sum(values) / len(values):.4f}")
        if any(words):
            lines.append(f"{title:<12}" + "".join(f"{word:>9}" for word in words))
    return "\n".join(lines)


def _report(
    config: CompareConfig,
    records: list[Record],
    dataset: str | None,
    k: int,
    tuned: dict[str, Any],
    manifest: Manifest,
) -> dict[str, Any]:
    from hashnet.comparison.page import write_report

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
