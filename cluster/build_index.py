"""Builds a run's index from its code store: in this process, or with Ray tasks that read the shards.

Reading Parquet takes most of the time of a large build, so tasks on all nodes do it; the index itself is
built in one process, since it is one file. ``cluster.serve.ShardedIndex`` is for larger databases.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.runtime import Need, capacity, connection, telemetry
from hashnet.errors import LineageMismatch
from hashnet.index import KINDS, BinaryIndex, CodeBlock, IndexSpec, parse_options, read_code_blocks
from hashnet.io import REQUIRED, Progress, events, key
from hashnet.run import Run
from hashnet.store import CodeStore

SHARDS_PER_TASK = 64  # 8 MB of 64-bit codes and ids: about a second
MAX_RETRIES = 20  # of a task whose worker or node is lost
SHARDS_PER_WORKER = 512  # below this many, starting tasks costs more than reading here

log = logging.getLogger(__name__)


def with_option_keys(config: type) -> type:
    """``config`` with one key per option of any index kind; none leaves the choice to the kind."""
    for name, kind in KINDS.items():
        for field in dataclasses.fields(kind.options):
            meaning = key(None, f"{name}: {field.metadata['help']}", low=field.metadata["low"])
            config.__annotations__[field.name] = "int | None"
            setattr(config, field.name, meaning)
    return config


@dataclass(frozen=True)
@with_option_keys
class IndexConfig:
    run: str = key(REQUIRED, "run folder, a path or a URI; its codes/ are indexed", path=True)
    kind: str = key(
        "flat",
        "flat is exact; ivf and hnsw are approximate and faster; multihash finds a small radius",
        choices=tuple(KINDS),
    )
    codes: str | None = key(None, "code store (none: RUN/codes)", path=True)
    out: str | None = key(None, "output folder (none: RUN/index)", path=True)
    labels: bool = key(True, "store labels with the index, for filters")
    recall: float | None = key(None, "ivf: tune nprobe to this recall@k on sample queries", low=0, high=1)
    k: int = key(10, "results per query that recall is measured on", low=1)
    num_workers: int | None = key(
        None, "tasks that read shards at once; 0: this process reads them (none: by size)", low=0
    )
    overwrite: bool = key(False, "replace an index that was updated after it was built, or is damaged")

    @property
    def artefacts(self) -> Run:
        """The run, with the artefacts that were given by key at their own places."""
        return Run(self.run, codes=self.codes, index=self.out)

    @property
    def options(self) -> dict[str, int]:
        """The options that were given, also those of other kinds, which are refused by name."""
        names = {field.name for kind in KINDS.values() for field in dataclasses.fields(kind.options)}
        given = {name: getattr(self, name) for name in sorted(names)}
        return {name: value for name, value in given.items() if value is not None}


def build_index(config: IndexConfig) -> dict[str, Any]:
    """Builds RUN/index from RUN/codes; returns what the job prints. Does nothing if it is up to date."""
    store = config.artefacts.codes.open()
    started = time.monotonic()
    if config.overwrite:
        config.artefacts.index.drop_damaged()
    index = _existing(config, store)
    reused = index is not None
    if index is None:
        workers = _workers(config, store)
        parts = _read_by_tasks(config, store, workers) if workers else _read_here(config, store)
        spec = IndexSpec.of_store(store, config.kind, config.options, labels=config.labels)
        index = BinaryIndex.from_blocks(parts, len(store), spec)
    if config.recall is not None and not _is_tuned(config, index):
        tuned = index.tune(recall=config.recall, k=config.k)
        log.info("nprobe %d reaches recall %.4f", tuned["nprobe"], tuned["recall"])
        reused = False
    if index.path is None:
        config.artefacts.index.write(index)
    seconds = time.monotonic() - started
    events.event(
        "index built", run=telemetry.run_name(config.run), stage="index", rows=len(index), reused=reused
    )
    about = index.describe()
    return {
        "index": config.artefacts.index.uri,
        **{name: about[name] for name in ("kind", "n_bits", "rows", "version", "n_classes", "options")},
        **({"tuned": about["tuned"]} if "tuned" in about else {}),
        "reused": reused,
        "bytes": config.artefacts.index.stored_bytes(),
        "seconds": round(seconds, 3),
        "rows_per_second": round(len(index) / max(seconds, 1e-9)),
    }


def _existing(config: IndexConfig, store: CodeStore) -> BinaryIndex | None:
    """The index that is there already, if it is the requested one; refused if its updates would be lost."""
    if config.overwrite or not config.artefacts.index.exists():
        return None
    index = config.artefacts.index.open()
    about = index.describe()
    same = (
        index.lineage.get("codes_sha256") == store.sha256
        and about["kind"] == config.kind
        and (index.n_classes is not None) == (config.labels and store.n_classes is not None)
        and all(
            about["options"].get(name) == value for name, value in _requested_options(config, store).items()
        )
    )
    if same:
        log.info("%s is up to date (version %d)", config.artefacts.index.uri, index.version)
        return index
    if about["updates"]:
        built_from = str(index.lineage.get("codes_sha256"))
        raise LineageMismatch(
            f"{index.path} was updated {about['updates']} times after it was built from codes "
            f"{built_from[:12]}…; building it again ({config.kind}, codes {store.sha256[:12]}…) would lose "
            "these updates: give overwrite=true to drop them, or another out="
        )
    return None


def _is_tuned(config: IndexConfig, index: BinaryIndex) -> bool:
    tuned = index.describe().get("tuned") or {}
    return (tuned.get("wished"), tuned.get("k")) == (config.recall, config.k)


def _requested_options(config: IndexConfig, store: CodeStore) -> dict[str, int]:
    """The given options, clipped as a build would; without nprobe where ``recall`` tunes it."""
    made = dataclasses.asdict(parse_options(config.kind, config.options, store.n_bits, len(store)))
    return {n: made[n] for n in config.options if not (n == "nprobe" and config.recall is not None)}


def _workers(config: IndexConfig, store: CodeStore) -> int:
    """How many tasks read shards at once; 0: this process reads them, without Ray."""
    if config.num_workers is not None:
        return config.num_workers
    useful = len(store.shards) // SHARDS_PER_WORKER
    return 0 if useful < 2 else min(useful, max(1, capacity.workers_that_fit({"CPU": 1})))


def _read_here(config: IndexConfig, store: CodeStore) -> Iterator[CodeBlock]:
    with Progress(len(store), "codes", "index") as progress:
        for part in read_code_blocks(store, config.labels):
            progress.update(len(part.ids))
            yield part


def _read_by_tasks(config: IndexConfig, store: CodeStore, workers: int) -> Iterator[CodeBlock]:
    """The same parts in the same order, read by tasks that stay a few parts ahead."""
    connection.connect()
    import ray

    capacity.require(
        "build_index", [Need("reader", workers, {"CPU": 1}, at_least=1, fix="lower num_workers")]
    )
    read = ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(read_group)
    starts = deque(range(0, len(store.shards), SHARDS_PER_TASK))
    running: deque[Any] = deque()
    with Progress(len(store), "codes", "index") as progress:
        while starts or running:
            while starts and len(running) <= 2 * workers:
                first = starts.popleft()
                group = range(first, min(first + SHARDS_PER_TASK, len(store.shards)))
                running.append(read.remote(store.uri, store.sha256, group, config.labels))
            part = ray.get(running.popleft())
            progress.update(len(part.ids))
            yield part


def read_group(uri: str, sha256: str, shards: Sequence[int], labels: bool) -> CodeBlock:
    """Task: some shards of a store as one part."""
    store = CodeStore.open(uri)
    if store.sha256 != sha256:
        raise LineageMismatch(f"{uri} changed while it was being indexed; run the same command again")
    parts = list(read_code_blocks(store, labels, shards))
    starts = np.cumsum([0, *(len(part.ids) for part in parts)])
    pairs = [
        (part.labels, part.label_rows + start)
        for part, start in zip(parts, starts[:-1], strict=True)
        if part.labels is not None and part.label_rows is not None
    ]
    return CodeBlock(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.codes for part in parts]),
        np.concatenate([found for found, _ in pairs]) if pairs else None,
        np.concatenate([row for _, row in pairs]) if pairs else None,
    )
