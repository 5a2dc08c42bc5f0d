"""Data sets → manifests: one file a source, each with its ``Options``, ``load`` and default split.

make_manifest("listfile", "manifest.parquet", path="train.txt", root="/data/coco", n_query=500)
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import fields
from types import ModuleType
from typing import Any

from hashnet.data.manifest import Manifest
from hashnet.data.protocols import Protocol, split
from hashnet.data.rows import SourceRows
from hashnet.data.writer import append_rows, write_manifest
from hashnet.errors import ConfigError, DataError
from hashnet.io import config

SOURCES = {  # name → what it reads, for --help
    "digits": "scikit-learn's 1,797 handwritten digits; nothing to download",
    "synthetic": "drawn JPEG pictures, any number of classes and images",
    "imagefolder": "ROOT/CLASS/picture.jpg, or ROOT/train/CLASS/… and ROOT/val/CLASS/…, or one flat folder",
    "listfile": "the public hashing lists: path 0 1 0 … (or path class_id), one list or one for each split",
    "parquet": "picture bytes (plain, or a struct with bytes and path) or feature vectors",
    "webdataset": "tars of KEY.jpg with KEY.cls or KEY.json",
    "npy": "features in an .npy or .npz file, with labels",
    "imagenet100": "100 classes of ILSVRC's folders, the paper's protocol",
    "nuswide": "NUS-WIDE's concept files, 81 or the 21 most frequent",
    "coco": "MS COCO's instances JSON, 80 classes",
    "cifar10": "CIFAR-10's binary version",
}


def source_module(name: str) -> ModuleType:
    """The module of a source, or DataError that names the nearest one."""
    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise DataError(f"there is no data source {name!r}; {hint}There are: {', '.join(SOURCES)}")
    return importlib.import_module(f"hashnet.data.sources.{name}")


def make_manifest(
    name: str, out: str, *, overwrite: bool = False, show_progress: bool = False, **options: Any
) -> Manifest:
    """Reads a source, splits it and writes the manifest ``out``; nothing is left behind on an error.

    ``options`` are the source's (see its ``Options``) and the protocol's (``n_query``, ``n_train``,
    ``seed``, ``zero_shot``, …, see ``Protocol``).
    """
    rows, protocol, resolved = load_rows(name, out, **options)
    flags = split(protocol, rows.n, rows.labels, rows.n_classes, rows.names, rows.fixed)
    source = {"name": name, "options": resolved, **rows.about}
    return write_manifest(out, rows, flags, source=source, overwrite=overwrite, show_progress=show_progress)


def append_to(manifest: Manifest, name: str, *, show_progress: bool = False, **options: Any) -> Manifest:
    """Reads a source and adds its rows to a manifest; they go into the database unless options say else."""
    if all(options.get(k) in (None, []) for k in _PROTOCOL - {"seed"}):  # a seed alone asks for no draw
        options["all_in"] = ["database"]
    rows, protocol, resolved = load_rows(name, manifest.uri, defaults=False, **options)
    flags = split(protocol, rows.n, rows.labels, rows.n_classes, rows.names, rows.fixed)
    source = {"name": name, "options": resolved, **rows.about}
    return append_rows(manifest, rows, flags, source=source, show_progress=show_progress)


def load_rows(
    name: str, out: str | None = None, defaults: bool = True, **options: Any
) -> tuple[SourceRows, Protocol, dict[str, Any]]:
    """A source's rows, the protocol that was asked for with the source's defaults, and all options."""
    module = source_module(name)
    own = {field.name for field in fields(module.Options)}
    unknown = [word for word in options if word not in own | _PROTOCOL]
    if unknown:
        near = difflib.get_close_matches(unknown[0], own | _PROTOCOL, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(sorted(own | _PROTOCOL))}"
        raise ConfigError(f"{name} has no option {unknown[0]!r}; {hint}")
    mine = config.from_dict(module.Options, {k: v for k, v in options.items() if k in own and v is not None})
    wishes = {k: v for k, v in options.items() if k in _PROTOCOL and v is not None}
    usual = getattr(module, "DEFAULTS", {}) if defaults else {}
    for wish, value in (usual(mine) if callable(usual) else usual).items():
        # Whoever says n_train does not want the default train_per_class, too. And the paper's counts
        # are for the plain protocol: only a number per class means the same in the zero-shot one.
        said = any(_role(wish) == _role(other) for other in wishes)
        if not said and ("zero_shot" not in wishes or wish == "train_per_class"):
            wishes[wish] = value
    protocol = config.from_dict(Protocol, wishes)
    rows = module.load(mine, out) if getattr(module, "WRITES", False) else module.load(mine)
    if rows.n == 0:
        raise DataError(f"{name} found no image or feature; check the path and the options")
    resolved = config.to_dict(mine) | config.to_dict(protocol)
    return rows, protocol, {k: v for k, v in resolved.items() if v not in (None, "", [])}


_PROTOCOL = {field.name for field in fields(Protocol)}


def _role(option: str) -> str:
    return {"query_per_class": "n_query", "train_per_class": "n_train"}.get(option, option)
