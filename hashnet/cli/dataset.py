"""``hashnet dataset NAME … --out PATH`` and ``hashnet dataset append MANIFEST NAME …``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import typing
from typing import Any

from hashnet.data import (
    SOURCES,
    Manifest,
    Protocol,
    append_source,
    make_manifest,
    source_options,
    unreadable_warning,
)
from hashnet.io import REQUIRED

EXAMPLES = """
examples:
  hashnet dataset digits --out manifest.parquet
  hashnet dataset listfile lists/ --root /data/coco --out manifest.parquet
  hashnet dataset imagefolder /data/pets --n-query 500 --n-train 5000 --out manifest.parquet
  hashnet dataset synthetic --n-images 100000 --n-classes 100 --out manifest.parquet
  hashnet dataset append manifest.parquet imagefolder /data/more-pets
  hashnet dataset NAME --help            lists every option of a source

Paths may be URIs (s3://, gs://, hdfs://). Training images are drawn from the database, queries are
never in it; the same --seed gives the same draw."""


def configure(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Adds one subcommand per source, with the options of the source and of ``Protocol``."""
    parser.epilog = EXAMPLES
    names = parser.add_subparsers(dest="source", metavar="NAME", required=True)
    requested = next((word for word in words if not word.startswith("-")), "")
    for name, meaning in SOURCES.items():
        source = names.add_parser(name, help=meaning, description=meaning)
        if name == requested:
            _add_options(source, name)
            source.add_argument("--out", required=True, metavar="PATH", help="the manifest to make, a folder")
            source.add_argument("--overwrite", action="store_true", help="replace an existing manifest")
            source.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    append = names.add_parser("append", help="add the rows of a source to a manifest as a new part")
    if requested == "append":
        append.add_argument("manifest", metavar="MANIFEST", help="the manifest to add to")
        sources = append.add_subparsers(dest="appended", metavar="NAME", required=True)
        for name, meaning in SOURCES.items():
            source = sources.add_parser(name, help=meaning, description=meaning)
            if name in words:
                _add_options(source, name)
                source.add_argument(
                    "--json", action="store_true", help="print the summary as one JSON object"
                )


def run(arguments: argparse.Namespace) -> int:
    """Makes or extends the manifest and prints what is in it."""
    given = vars(arguments)
    name = given["appended"] if given["source"] == "append" else given["source"]
    known = {field.name for field in _fields(name)}
    options = {word: value for word, value in given.items() if word in known and value is not None}
    if given["source"] == "append":
        manifest = append_source(Manifest.open(given["manifest"]), name, show_progress=True, **options)
    else:
        manifest = make_manifest(
            name, given["out"], overwrite=given["overwrite"], show_progress=True, **options
        )
    summary = manifest.summary()
    if given["json"]:
        print(json.dumps({"manifest": manifest.uri, "sha256": manifest.sha256, **summary.to_dict()}))
    else:
        print(summary.text(manifest))
    if warning := unreadable_warning(manifest):
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def _fields(name: str) -> list[dataclasses.Field]:
    """The options of a source and of the protocol, each once (both may have a seed)."""
    own = dataclasses.fields(source_options(name))
    mine = {field.name for field in own}
    return [*own, *(field for field in dataclasses.fields(Protocol) if field.name not in mine)]


def _add_options(parser: argparse.ArgumentParser, name: str) -> None:
    options = source_options(name)
    hints = {**typing.get_type_hints(Protocol), **typing.get_type_hints(options)}
    own = {field.name for field in dataclasses.fields(options)}
    about = parser.add_argument_group(f"options of {name}")
    protocol = parser.add_argument_group("which rows are queries, database and training set")
    for field in _fields(name):
        meaning = field.metadata["meaning"].replace("%", "%%")
        if field.name == "path":
            optional = {} if field.default is REQUIRED else {"nargs": "?"}
            parser.add_argument("path", metavar="PATH", help=meaning, **optional)  # type: ignore[arg-type]
            continue
        group = about if field.name in own else protocol
        flag = f"--{field.name.replace('_', '-')}"
        shown = "" if field.default in (None, dataclasses.MISSING, "") else f" (default {field.default})"
        if hints[field.name] is bool:
            group.add_argument(flag, action="store_true", default=None, help=meaning)
        else:
            group.add_argument(flag, help=meaning + shown, **_reading(field, hints[field.name]))


def _reading(field: dataclasses.Field, hint: Any) -> dict[str, Any]:
    """How argparse reads one option; the source checks the values."""
    choices = field.metadata.get("choices")
    if typing.get_origin(hint) is list:
        metavar = "|".join(choices) if choices else "A,B,…"
        return {"type": lambda text: [word for word in text.split(",") if word], "metavar": metavar}
    if choices:
        return {"choices": choices}
    kinds = [kind for kind in (typing.get_args(hint) or (hint,)) if kind is not type(None)]
    return {"metavar": {int: "N", float: "X"}.get(kinds[0], "TEXT")}
