"""The cells of a comparison as Ray tasks: done ones are read, the others run, the table so far is shown."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cluster.compare.data import shallow_features
from cluster.runtime import OUT_OF_MEMORY_ADVICE, Need, capacity, hashnet_error_in
from hashnet.data import Manifest
from hashnet.errors import ClusterError, Diverged, HashnetError
from hashnet.io import Progress, storage
from hashnet.reports import TITLES, Cell, Features, Task, deep_config, finished, run_cell

if TYPE_CHECKING:
    from cluster.compare.job import CompareConfig

logger = logging.getLogger(__name__)
TABLE_EVERY_S = 30.0
Record = dict[str, Any]


class Part:
    """Cells on one manifest; the shallow methods' features are made once and shared by all tasks."""

    def __init__(self, config: CompareConfig, name: str, manifest: Manifest, k: int) -> None:
        self.config, self.name, self.manifest, self.k = config, name, manifest, k
        self._done: dict[Cell, Record] = {}
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

    def done(self, tasks: list[Task]) -> dict[Cell, Record]:
        """The records of cells that are there; LineageMismatch for one that was made with other settings."""
        for task in tasks:
            if task.cell not in self._done and (record := finished(task)) is not None:
                self._done[task.cell] = record
        return {task.cell: self._done[task.cell] for task in tasks if task.cell in self._done}

    def run(self, tasks: list[Task]) -> list[Record]:
        """The records of all cells, those that were done before included."""
        tasks = list({task.cell: task for task in tasks}.values())  # what is given twice is made once
        done = self.done(tasks)
        left = [task for task in tasks if task.cell not in done]
        if left:
            done |= self._run(left, done)
        return [done[task.cell] for task in tasks if task.cell in done]

    def _run(self, tasks: list[Task], before: dict[Cell, Record]) -> dict[Cell, Record]:
        cpus, gpu = self.config.cpus_per_cell, self.config.device == "cuda"
        if self.config.device == "auto":
            gpu = capacity.workers_that_fit({"CPU": cpus, "GPU": 1}, include_addable=True) > 0
        capacity.require("compare", needs_of([task.cell for task in tasks], cpus, gpu))
        found: dict[Cell, Record] = {}
        failed: list[str] = []
        table = _Progress(self.name, {**before}, len(tasks))
        for cell, outcome in self._outcomes(tasks, cpus, gpu):
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

    def _outcomes(
        self, tasks: list[Task], cpus: int, gpu: bool
    ) -> Iterator[tuple[Cell, Record | HashnetError]]:
        import ray

        work = ray.remote(max_retries=3)(_work)
        waiting: dict[Any, Cell] = {}
        for task in tasks:
            cell = task.cell
            if cell.deep and self.config.num_workers > 1:
                yield from _ended(waiting, timeout_s=0)  # what the last training has left behind
                try:
                    self._train_on_many(task)
                except HashnetError as error:
                    yield cell, error
                    continue
            features = None if cell.deep else self._shared_features()
            sized = work.options(num_cpus=cpus, num_gpus=1 if gpu and cell.deep else 0)
            waiting[sized.remote(task, features, cpus)] = cell
        yield from _ended(waiting)

    def _train_on_many(self, task: Task) -> None:
        """Data-parallel training from here (num_workers > 1); the task finds the model and measures it."""
        from cluster.train import train

        train(dataclasses.replace(deep_config(task, self.manifest), manifest=task.manifest))

    def _shared_features(self) -> Any:
        if self._features is None:
            import ray

            folder = storage.join(self.config.run, f"backbone-{self.name}")
            self._features = ray.put(shallow_features(self.config, self.manifest, folder))
        return self._features


def needs_of(cells: Sequence[Cell], cpus: int, gpu: bool) -> list[Need]:
    """What the cells ask of the cluster, the deep ones a GPU each where ``gpu`` says so.

    Cells take turns: where one with a GPU fits, one without will.
    """
    n_gpu = sum(cell.deep for cell in cells) if gpu else 0
    with_gpu = Need(
        "deep cell", n_gpu, {"CPU": cpus, "GPU": 1}, at_least=1, fix="give device=cpu, lower cpus_per_cell"
    )
    without = Need(
        "cell", len(cells) - n_gpu, {"CPU": cpus}, at_least=0 if n_gpu else 1, fix="lower cpus_per_cell"
    )
    return [need for need in (with_gpu, without) if need.count]


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


def _ended(
    waiting: dict[Any, Cell], timeout_s: float | None = None
) -> Iterator[tuple[Cell, Record | HashnetError]]:
    """Takes tasks out of ``waiting`` as they end, until none is left or none ends within ``timeout_s``."""
    import ray

    while waiting:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout_s)
        if not ready:
            return
        cell = waiting.pop(ready[0])
        try:
            yield cell, ray.get(ready[0])
        except ray.exceptions.RayError as error:
            known = hashnet_error_in(error) or _lost(error)
            if known is None:
                raise
            yield cell, known


def _lost(error: Exception) -> ClusterError | None:
    """What became of a task whose worker went away; None for a task that raised."""
    from ray.exceptions import NodeDiedError, OutOfMemoryError, WorkerCrashedError

    if isinstance(error, OutOfMemoryError):
        return ClusterError(OUT_OF_MEMORY_ADVICE)
    if isinstance(error, (NodeDiedError, WorkerCrashedError)):
        return ClusterError(f"its worker died, also when it was tried again. {error}")
    return None


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
