"""Cells as Ray tasks: finished ones are read, the others run, the table so far is logged.

Where little is left to run and nothing would run side by side, this process does it, without Ray.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cluster.runtime import OUT_OF_MEMORY_ADVICE, Need, capacity, hashnet_error_in, ray_internals
from hashnet.comparison import TITLES, Cell, CellResult, CellTask, Features, finished_cell, run_cell
from hashnet.errors import ClusterError, HashnetError
from hashnet.io import Progress
from hashnet.run import Run

logger = logging.getLogger(__name__)
TABLE_EVERY_S = 30.0
LOCAL_CELLS = 4  # as few as these run here, where one at most trains a network

Outcome = CellResult | HashnetError


@dataclass(frozen=True)
class CellResources:
    """What cells run with: ``cpus`` each, a GPU per deep cell by ``device``, ``n_workers`` per training."""

    cpus: int = 1
    device: str = "auto"
    n_workers: int = 1
    max_concurrent: int | None = None  # None: as many as the cluster holds
    max_retries: int = 3  # of a task whose worker died
    fix: str = "lower cpus_per_cell"  # advice where a cell does not fit

    def use_gpu(self) -> bool:
        """Whether deep cells get a GPU; auto: where the cluster has one or can add one."""
        if self.device != "auto":
            return self.device == "cuda"
        return capacity.workers_that_fit({"CPU": self.cpus, "GPU": 1}, include_addable=True) > 0


class CellRunner:
    """Runs cells for a ``job`` (compare, sweep), resuming what is on disk.

    ``load_features`` is called once, when the first shallow cell runs; all tasks share its result. ``label``
    and ``unit`` are the words of the progress line.
    """

    def __init__(
        self,
        job: str,
        resources: CellResources,
        load_features: Callable[[], Features] | None = None,
        label: str | None = None,
        unit: str = "models",
    ) -> None:
        self.job, self.resources, self.label, self.unit = job, resources, label or job, unit
        self._load_features = load_features
        self._features: Any = None  # a Ray object reference
        self._done: dict[Cell, CellResult] = {}

    def finished(self, tasks: list[CellTask]) -> dict[Cell, CellResult]:
        """The results that are there already; LineageMismatch for one made with other settings."""
        for task in tasks:
            if task.cell not in self._done and (result := finished_cell(task)) is not None:
                self._done[task.cell] = result
        return {task.cell: self._done[task.cell] for task in tasks if task.cell in self._done}

    def run(self, tasks: list[CellTask]) -> list[CellResult]:
        """The results of all cells, those that were finished before included."""
        tasks = list({task.cell: task for task in tasks}.values())  # a cell given twice runs once
        done = self.finished(tasks)
        left = [task for task in tasks if task.cell not in done]
        if left:
            done |= self._run(left, done)
        return [done[task.cell] for task in tasks if task.cell in done]

    def _run(self, tasks: list[CellTask], before: dict[Cell, CellResult]) -> dict[Cell, CellResult]:
        if self._fits_here(tasks):
            outcomes = self._outcomes_here(tasks)
        else:
            gpu = self.resources.use_gpu()
            capacity.require(self.job, cell_needs([task.cell for task in tasks], self.resources, gpu))
            capacity.require_shared(tasks[0].folder)
            outcomes = self._outcomes(tasks, gpu)
        so_far: dict[Cell, Outcome] = dict(before)
        tables, table_at = self.job == "compare", time.monotonic()  # a sweep has a table of its own
        total = len(before) + len(tasks)
        with Progress(total, self.unit, self.label, done=len(before)) as progress:
            for cell, outcome in outcomes:
                so_far[cell] = outcome
                if isinstance(outcome, HashnetError):
                    logger.warning("%s failed: %s", cell.name, outcome)
                progress.update(1, last=f"{TITLES[cell.method]} with {cell.n_bits} bits")
                if tables and len(so_far) < total and time.monotonic() - table_at > TABLE_EVERY_S:
                    table_at = time.monotonic()
                    logger.info("%s", table_so_far(so_far))
        if tables:
            logger.info("%s", table_so_far(so_far))
        failed = [f"{cell.name}: {e}" for cell, e in so_far.items() if isinstance(e, HashnetError)]
        if failed:
            sentence = f"{len(failed)} of {len(tasks)} {self.unit} failed; the others are kept. "
            raise ClusterError(sentence + " | ".join(failed[:5]))
        return {cell: result for cell, result in so_far.items() if not isinstance(result, HashnetError)}

    def _fits_here(self, tasks: list[CellTask]) -> bool:
        """Whether this process should run the cells: starting Ray and its workers would take longer."""
        elsewhere = os.environ.get("RAY_ADDRESS") or ray_internals.connected()
        untrained = [task for task in tasks if task.cell.deep and not Run(task.folder).model.exists()]
        few = len(tasks) <= LOCAL_CELLS and len(untrained) <= 1
        return few and not elsewhere and self.resources.n_workers == 1

    def _outcomes_here(self, tasks: list[CellTask]) -> Iterator[tuple[Cell, Outcome]]:
        import torch

        device = "cuda" if self.resources.device != "cpu" and torch.cuda.is_available() else "cpu"
        features: Features | None = None
        for task in tasks:
            if task.needs_features and features is None:
                assert self._load_features is not None
                features = self._load_features()
            try:
                with _quietly():
                    result = run_cell(task, features if task.needs_features else None, device=device)
            except HashnetError as error:
                yield task.cell, error
            else:
                yield task.cell, result

    def _outcomes(self, tasks: list[CellTask], gpu: bool) -> Iterator[tuple[Cell, Outcome]]:
        resources = self.resources
        work = {
            on_gpu: capacity.task(
                _run_in_task, cpus=resources.cpus, gpu=on_gpu, max_retries=resources.max_retries
            )
            for on_gpu in (False, True)
        }
        waiting: dict[Any, Cell] = {}
        for task in tasks:
            cell = task.cell
            if cell.deep and resources.n_workers > 1:
                yield from _completed(waiting, timeout_s=0)  # what ended while the last network was trained
                try:
                    self._train_on_many(task)
                except HashnetError as error:
                    yield cell, error
                    continue
            yield from _completed(waiting, leave=(resources.max_concurrent or len(tasks)) - 1)
            features = self._shared_features() if task.needs_features else None
            on_gpu = gpu and cell.deep
            waiting[work[on_gpu].remote(task, features, resources.cpus, on_gpu)] = cell
        yield from _completed(waiting)

    def _train_on_many(self, task: CellTask) -> None:
        """Data-parallel training, driven from here; the cell's task then finds the model and measures it."""
        from cluster.train import train

        assert task.train is not None
        train(dataclasses.replace(task.train, manifest=task.manifest))

    def _shared_features(self) -> Any:
        if self._features is None:
            import ray

            assert self._load_features is not None
            self._features = ray.put(self._load_features())
        return self._features


def cell_needs(cells: Sequence[Cell], resources: CellResources, gpu: bool) -> list[Need]:
    """What the cells need from the cluster, deep ones a GPU each where ``gpu``.

    Cells take turns: where one with a GPU fits, one without does too.
    """
    n = min(len(cells), resources.max_concurrent or len(cells))
    n_gpu = min(n, sum(cell.deep for cell in cells)) if gpu else 0
    cpus, fix = resources.cpus, resources.fix
    with_gpu = Need("deep cell", n_gpu, {"CPU": cpus, "GPU": 1}, at_least=1, fix=f"give device=cpu, {fix}")
    without = Need("cell", n - n_gpu, {"CPU": cpus}, at_least=0 if n_gpu else 1, fix=fix)
    return [need for need in (with_gpu, without) if need.count]


def _run_in_task(task: CellTask, features: Features | None, cpus: int, on_gpu: bool) -> CellResult:
    """One cell, inside a Ray task; only one that was given a GPU looks for it."""
    import numba
    import torch

    torch.set_num_threads(cpus)
    numba.set_num_threads(min(cpus, numba.config.NUMBA_NUM_THREADS))
    with _quietly():
        return run_cell(task, features, device="cuda" if on_gpu and torch.cuda.is_available() else "cpu")


@contextmanager
def _quietly() -> Iterator[None]:
    """Keeps the library's warnings off the terminal: they are in the cell's result."""
    library = logging.getLogger("hashnet")
    level = library.level
    library.setLevel(logging.ERROR)
    try:
        yield
    finally:
        library.setLevel(level)


def _completed(
    waiting: dict[Any, Cell], leave: int = 0, timeout_s: float | None = None
) -> Iterator[tuple[Cell, Outcome]]:
    """Takes tasks out of ``waiting`` as they end, until ``leave`` are left or none ends in ``timeout_s``."""
    import ray

    while len(waiting) > leave:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout_s)
        if not ready:
            return
        cell = waiting.pop(ready[0])
        try:
            yield cell, ray.get(ready[0])
        except ray.exceptions.RayError as error:
            known = hashnet_error_in(error) or _worker_lost(error)
            if known is None:
                raise
            yield cell, known


def _worker_lost(error: Exception) -> ClusterError | None:
    """An error for a task whose worker died; None for a task that raised."""
    from ray.exceptions import NodeDiedError, OutOfMemoryError, WorkerCrashedError

    if isinstance(error, OutOfMemoryError):
        return ClusterError(OUT_OF_MEMORY_ADVICE)
    if isinstance(error, (NodeDiedError, WorkerCrashedError)):
        return ClusterError(f"its worker died, and died again when the cell was retried. {error}")
    return None


def table_so_far(done: dict[Cell, Outcome]) -> str:
    """MAP so far, one line per method: the mean over its finished seeds (the best trial while tuning)."""
    columns = sorted({cell.n_bits for cell in done})
    lines = ["method      " + "".join(f"{n:>9}" for n in columns)]
    for method, title in TITLES.items():
        words = []
        for n_bits in columns:
            here = [(c, r) for c, r in done.items() if (c.method, c.n_bits) == (method, n_bits)]
            values = [value for _, r in here if (value := _map_of(r)) is not None]
            if not values:
                words.append("failed" if here else "")
            else:
                tuning = any(c.part == "tune" for c, _ in here)
                words.append(f"{max(values) if tuning else sum(values) / len(values):.4f}")
        if any(words):
            lines.append(f"{title:<12}" + "".join(f"{word:>9}" for word in words))
    return "\n".join(lines)


def _map_of(outcome: Outcome) -> float | None:
    """MAP; neighbour recall where there are no labels."""
    if isinstance(outcome, HashnetError):
        return None
    if outcome.neighbours is not None:
        return outcome.neighbours.recall
    return outcome.validation_map if outcome.report is None else outcome.report.map
