"""Builds a run's index from its code store, in one process: it is one file, and threads read the shards.

``jobs/serve.py slices=N`` is for databases larger than one machine.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cluster.runtime import telemetry
from hashnet.index import KINDS, BinaryIndex, CodeBlock, IndexSpec, parse_options, read_code_blocks
from hashnet.io import REQUIRED, Progress, events, key
from hashnet.run import Run
from hashnet.store import CodeStore, FeatureStore

log = logging.getLogger(__name__)


def with_option_keys(config: type) -> type:
    """``config`` with one key per option of any index kind; none leaves the choice to the kind."""
    described: dict[str, dict[str, list[str]]] = {}  # option → what it means → the kinds it means that for
    lowest: dict[str, int] = {}
    for kind in KINDS.values():
        for field in dataclasses.fields(kind.options):
            described.setdefault(field.name, {}).setdefault(field.metadata["help"], []).append(kind.name)
            lowest[field.name] = min(field.metadata["low"], lowest.get(field.name, field.metadata["low"]))
    for name, meanings in described.items():
        help = "; ".join(f"{', '.join(kinds)}: {meaning}" for meaning, kinds in meanings.items())
        config.__annotations__[name] = "int | None"
        setattr(config, name, key(None, help, low=lowest[name]))
    return config


@dataclass(frozen=True)
@with_option_keys
class IndexConfig:
    run: str = key(REQUIRED, "run folder, a path or a URI; its codes/ are indexed", path=True)
    kind: str = key(
        "flat", "; ".join(f"{kind.name}: {kind.summary}" for kind in KINDS.values()), choices=tuple(KINDS)
    )
    codes: str | None = key(None, "code store (none: RUN/codes)", path=True)
    out: str | None = key(None, "output folder (none: RUN/index)", path=True)
    labels: bool = key(True, "store labels with the index, for filters")
    features: bool | None = key(
        None, "rescore by the vectors in RUN/features (none: where they are there and fit the codes)"
    )
    recall: float | None = key(
        None,
        "tune to this recall@k on sample queries: nprobe of ivf, and oversample where there are features",
        low=0,
        high=1,
    )
    k: int = key(10, "results per query that recall is measured on", low=1)
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
    merged = {}
    if index is None:
        spec = IndexSpec.of_store(store, config.kind, config.options, labels=config.labels)
        index = BinaryIndex.from_blocks(_blocks(config, store), len(store), spec)
        if (features := _features(config, store)) is not None:
            index.attach_features(features)
    if config.recall is not None and not _is_tuned(config, index):
        tuned = index.tune(recall=config.recall, k=config.k)
        if "nprobe" in tuned:
            log.info("nprobe %d reaches recall %.4f", tuned["nprobe"], tuned["recall"])
        if "oversample" in tuned:
            log.info("oversample %d reaches recall %.4f", tuned["oversample"], tuned["rescored_recall"])
        reused = False
    if index.path is None and config.overwrite:
        config.artefacts.index.write(index)
    elif index.path is None:
        kept, removed = index.replace(config.artefacts.index.uri)
        if kept or removed:
            log.info("kept %d items added since the last build and %d removals", kept, removed)
            merged = {"kept_items": kept, "kept_removals": removed}
    seconds = time.monotonic() - started
    events.event(
        "index built", run=telemetry.run_name(config.run), stage="index", rows=len(index), reused=reused
    )
    about = index.describe()
    return {
        "index": config.artefacts.index.uri,
        **{name: about[name] for name in ("kind", "n_bits", "rows", "version", "n_classes", "options")},
        **({"tuned": about["tuned"]} if "tuned" in about else {}),
        "features": about["features"],
        "reused": reused,
        **merged,
        "bytes": config.artefacts.index.stored_bytes(),
        "seconds": round(seconds, 3),
        "rows_per_second": round(len(index) / max(seconds, 1e-9)),
    }


def _existing(config: IndexConfig, store: CodeStore) -> BinaryIndex | None:
    """The index that is there, if it is the requested one.

    Any other is built again and its updates are kept; one whose updates cannot be is refused.
    """
    if config.overwrite or not config.artefacts.index.exists():
        return None
    index: BinaryIndex = config.artefacts.index.open()
    about = index.describe()
    same = (
        index.lineage.get("codes_sha256") == store.sha256
        and about["kind"] == config.kind
        and (about["features"] is not None) == (_features(config, store) is not None)
        and (index.n_classes is not None) == (config.labels and store.n_classes is not None)
        and all(
            about["options"].get(name) == value for name, value in _requested_options(config, store).items()
        )
    )
    if same:
        log.info("%s is up to date (version %d)", config.artefacts.index.uri, index.version)
        return index
    if about["updates"]:
        index.refuse_lost_updates(store.lineage.get("model_sha256"), store.n_bits)
    return None


def _features(config: IndexConfig, store: CodeStore) -> FeatureStore | None:
    """The vectors that the index is to rescore by; None where there are none, or none of these codes."""
    artefact = config.artefacts.store("features", "database")
    if config.features is False or (config.features is None and not artefact.exists()):
        return None
    features: FeatureStore = artefact.open()
    fits = features.rows_sha256 == store.rows_sha256 and features.plan.dtype is not None
    if not fits and config.features is None:
        log.warning("%s is of other rows than %s: built without features", features.uri, store.uri)
        return None
    return features


def _is_tuned(config: IndexConfig, index: BinaryIndex) -> bool:
    tuned = index.describe().get("tuned") or {}
    return (tuned.get("wished"), tuned.get("k")) == (config.recall, config.k)


def _requested_options(config: IndexConfig, store: CodeStore) -> dict[str, int]:
    """The given options, clipped as a build would; without nprobe where ``recall`` tunes it."""
    made = dataclasses.asdict(parse_options(config.kind, config.options, store.n_bits, len(store)))
    return {n: made[n] for n in config.options if not (n == "nprobe" and config.recall is not None)}


def _blocks(config: IndexConfig, store: CodeStore) -> Iterator[CodeBlock]:
    with Progress(len(store), "codes", "index") as progress:
        for block in read_code_blocks(store, config.labels):
            progress.update(len(block.ids))
            yield block
