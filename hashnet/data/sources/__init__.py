"""Data sets → manifests: one file a source, each with its ``Options``, ``load`` and default split.

make_manifest("listfile", "manifest.parquet", path="train.txt", root="/data/coco", n_query=500)
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import fields
from types import ModuleType
from typing import Any

from hashnet import config
from hashnet.data.manifest import Manifest
from hashnet.data.protocols import Protocol, split
from hashnet.data.rows import Rows
from hashnet.data.writer import write_manifest
from hashnet.errors import ConfigError, DataError

SOURCES = {  # name → what it reads, for --help
    "digits": "scikit-learn's 1,797 handwritten digits; nothing to download",
    "synthetic": "drawn JPEG pictures, any number of classes and images",
}


def source_module(name: str) -> ModuleType:
    """The module of a source, or DataError that names the nearest one."""
    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise DataError(f"there is no data source {name!r}; {hint}There are: {', '.join(SOURCES)}")
    return importlib.import_module(f"hashnet.data.sources.{name}")


def make_manifest(name: str, out: str, *, overwrite: bool = False, **options: Any) -> Manifest:
    """Reads a source, splits it and writes the manifest ``out``; nothing is left behind on an error.

    ``options`` are the source's (see its ``Options``) and the protocol's (``n_query``, ``n_train``,
    ``seed``, ``zero_shot``, …, see ``Protocol``).
    """
    rows, protocol = load_rows(name, out, **options)
    flags = split(protocol, rows.n, rows.labels, rows.n_classes, rows.names, rows.fixed)
    source = {"name": name, "options": _plain(options), **rows.about}
    return write_manifest(out, rows, flags, source=source, overwrite=overwrite)


def load_rows(name: str, out: str | None = None, **options: Any) -> tuple[Rows, Protocol]:
    """A source's rows and the protocol that was asked for, the source's defaults filled in."""
    module = source_module(name)
    own = {field.name for field in fields(module.Options)}
    asked = {field.name for field in fields(Protocol)}
    unknown = [word for word in options if word not in own | asked]
    if unknown:
        near = difflib.get_close_matches(unknown[0], own | asked, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(sorted(own | asked))}"
        raise ConfigError(f"{name} has no option {unknown[0]!r}; {hint}")
    mine = config.from_dict(module.Options, {k: v for k, v in options.items() if k in own})
    wishes = {k: v for k, v in options.items() if k in asked and v is not None}
    defaults = getattr(module, "DEFAULTS", {})
    if callable(defaults):
        defaults = defaults(mine)
    taken = {k.removesuffix("_per_class").removeprefix("n_") for k in wishes}  # train, query, …
    if "zero_shot" not in wishes:  # the paper's counts are for the plain protocol
        for k, v in defaults.items():
            if k.removesuffix("_per_class").removeprefix("n_") not in taken:
                wishes[k] = v
    protocol = config.from_dict(Protocol, wishes)
    rows = module.load(mine, out) if getattr(module, "WRITES", False) else module.load(mine)
    if rows.n == 0:
        raise DataError(f"{name} found no image or feature; check the path and the options")
    return rows, protocol


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {
        k: v if isinstance(v, (int, float, bool, list)) else str(v)
        for k, v in options.items()
        if v is not None
    }
