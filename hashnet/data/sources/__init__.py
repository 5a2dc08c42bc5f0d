"""Data sets → manifests: one file per source, each with its ``Options``, ``load`` and default split.

make_manifest("listfile", "manifest.parquet", path="train.txt", root="/data/coco", n_query=500)
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import numpy as np

from hashnet.data.manifest import Manifest
from hashnet.data.splits import DATABASE, Protocol, assign_splits
from hashnet.data.writer import SourceRows, append_rows, write_manifest
from hashnet.errors import ConfigError, DataError
from hashnet.io import config

SOURCES = {  # name → what it reads, for --help
    "digits": "scikit-learn's 1,797 handwritten digits; nothing to download",
    "synthetic": "drawn JPEG pictures, any number of classes and images",
    "imagefolder": "ROOT/CLASS/picture.jpg, or ROOT/train/CLASS/… and ROOT/val/CLASS/…, or one flat folder",
    "listfile": "the public hashing lists: path 0 1 0 … (or path class_id), one list or one per split",
    "parquet": "picture bytes (plain, or a struct with bytes and path) or feature vectors",
    "webdataset": "tars of KEY.jpg with KEY.cls or KEY.json",
    "npy": "features in an .npy or .npz file, with labels",
    "imagenet100": "100 classes of ILSVRC's folders, the paper's protocol",
    "nuswide": "NUS-WIDE's concept files, 81 or the 21 most frequent",
    "coco": "MS COCO's instances JSON, 80 classes",
    "cifar10": "CIFAR-10's binary version",
}


_PROTOCOL = {field.name for field in fields(Protocol)}


@dataclass(frozen=True)
class LoadedSource:
    """What a source read: its rows, how to split them, and every option with its value."""

    name: str
    rows: SourceRows
    protocol: Protocol
    options: Mapping[str, Any]

    def split_flags(self) -> np.ndarray:
        """uint8 (n,), see ``hashnet.data.splits``."""
        rows = self.rows
        return assign_splits(self.protocol, rows.n, rows.labels, rows.n_classes, rows.names, rows.fixed)

    def description(self) -> dict[str, Any]:
        """The ``source`` of a manifest made from this."""
        return {"name": self.name, "options": self.options, **self.rows.notes}


def make_manifest(
    name: str, out: str, *, overwrite: bool = False, show_progress: bool = False, **options: Any
) -> Manifest:
    """The manifest ``out`` of a source, split by a protocol; an error leaves nothing behind.

    ``options`` are those of the source (see its ``Options``) and of the protocol (``n_query``,
    ``n_train``, ``seed``, ``zero_shot``, …, see ``Protocol``).
    """
    loaded = load_source(name, out, **options)
    flags = loaded.split_flags()
    if not (flags & DATABASE).any() and "train" not in options.get("all_in", ()):
        raise DataError(
            f"the split leaves no database rows of {loaded.rows.n:,}, so there is nothing to search; draw "
            "fewer queries (n_query), or put every row into it (all_in=database)"
        )
    return write_manifest(
        out,
        loaded.rows,
        flags,
        source=loaded.description(),
        overwrite=overwrite,
        show_progress=show_progress,
    )


def append_source(
    manifest: Manifest, name: str, *, existing: str = "refuse", show_progress: bool = False, **options: Any
) -> Manifest:
    """The manifest with a source's rows added, to the database unless the options say otherwise.

    ``existing`` says what becomes of rows whose uri the manifest holds: refuse, or skip.
    """
    if all(options.get(k) in (None, []) for k in _PROTOCOL - {"seed"}):  # a seed alone requests no draw
        options["all_in"] = ["database"]
    loaded = load_source(name, manifest.uri, defaults=False, **options)
    return append_rows(
        manifest,
        loaded.rows,
        loaded.split_flags(),
        existing=existing,
        source=loaded.description(),
        show_progress=show_progress,
    )


def load_source(name: str, out: str | None = None, defaults: bool = True, **options: Any) -> LoadedSource:
    """A source's rows and the requested protocol, completed by the source's defaults unless told not to.

    A source that writes pictures (``synthetic``) writes them beside the manifest ``out``.
    """
    module = _module(name)
    own = {field.name for field in fields(module.Options)}
    unknown = [word for word in options if word not in own | _PROTOCOL]
    if unknown:
        near = difflib.get_close_matches(unknown[0], own | _PROTOCOL, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(sorted(own | _PROTOCOL))}"
        raise ConfigError(f"{name} has no option {unknown[0]!r}; {hint}")
    given = {word: value for word, value in options.items() if value is not None}
    mine = config.from_dict(module.Options, {word: value for word, value in given.items() if word in own})
    requested = {word: value for word, value in given.items() if word in _PROTOCOL}
    usual = getattr(module, "DEFAULTS", {}) if defaults else {}
    protocol = _protocol(requested, usual(mine) if callable(usual) else usual)
    rows = module.load(mine, out) if getattr(module, "WRITES", False) else module.load(mine)
    if rows.n == 0:
        raise DataError(f"{name} found no image or feature; check the path and the options")
    values = config.to_dict(mine) | config.to_dict(protocol)
    return LoadedSource(name, rows, protocol, {k: v for k, v in values.items() if v not in (None, "", [])})


def source_options(name: str) -> type:
    """The ``Options`` of a source, a dataclass."""
    return _module(name).Options


def _module(name: str) -> ModuleType:
    """The module of a source; DataError suggests the nearest name."""
    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise DataError(f"there is no data source {name!r}; {hint}There are: {', '.join(SOURCES)}")
    return importlib.import_module(f"hashnet.data.sources.{name}")


def _protocol(requested: Mapping[str, Any], defaults: Mapping[str, Any]) -> Protocol:
    """The requested protocol with the source's defaults for what it leaves open.

    Requesting n_train overrides a default train_per_class, too. The paper's counts are for the plain
    protocol: only a number per class means the same in the zero-shot one.
    """
    instead = {"query_per_class": "n_query", "train_per_class": "n_train"}
    taken = {instead.get(word, word) for word in requested}
    added = {
        word: value
        for word, value in defaults.items()
        if instead.get(word, word) not in taken
        and ("zero_shot" not in requested or word == "train_per_class")
    }
    return config.from_dict(Protocol, {**requested, **added})
