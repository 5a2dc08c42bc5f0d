"""``hashnet dataset NAME … --out PATH``, and ``append``, ``codes``, ``drop-duplicates``, ``neighbours``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import typing
from typing import Any

from hashnet.data import (
    EXISTING,
    NEIGHBOURS,
    SOURCES,
    Manifest,
    Protocol,
    append_source,
    copy_without,
    feature_matrix,
    make_manifest,
    neighbour_pairs,
    notes,
    source_options,
    unreadable_warning,
)
from hashnet.errors import DataError
from hashnet.io import REQUIRED, config
from hashnet.store import CodesOptions, import_codes

CODES = "make a code store of existing binary embeddings: numpy or Parquet, also of sentence-transformers"

EXAMPLES = """
examples:
  hashnet dataset digits --out manifest.parquet
  hashnet dataset listfile lists/ --root /data/coco --out manifest.parquet
  hashnet dataset imagefolder /data/pets --n-query 500 --n-train 5000 --out manifest.parquet
  hashnet dataset synthetic --n-images 100000 --n-classes 100 --out manifest.parquet
  hashnet dataset append manifest.parquet imagefolder /data/more-pets
  hashnet dataset codes embeddings.parquet --key url --columns year,city --out runs/mine/codes
  hashnet dataset drop-duplicates runs/demo/manifest.parquet runs/demo/duplicates --out clean.parquet
  hashnet dataset neighbours manifest.parquet --out pairs.parquet
  hashnet dataset NAME --help            lists every option of a source

Paths may be URIs (s3://, gs://, hdfs://). Training images are drawn from the database, queries are
never in it; the same --seed gives the same draw."""


def configure(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Adds one subcommand per source, with the options of the source and of ``Protocol``."""
    parser.set_defaults(run=run)
    parser.epilog = EXAMPLES
    names = parser.add_subparsers(dest="source", metavar="NAME", required=True)
    requested = next((word for word in words if not word.startswith("-")), "")
    for name, meaning in SOURCES.items():
        source = names.add_parser(name, help=meaning, description=meaning)
        if name == requested:
            _add_options(source, name, source_options(name), Protocol)
            _add_output(source, "manifest")
    append = names.add_parser("append", help="add the rows of a source to a manifest as a new part")
    if requested == "append":
        append.add_argument("manifest", metavar="MANIFEST", help="the manifest to add to")
        sources = append.add_subparsers(dest="appended", metavar="NAME", required=True)
        for name, meaning in SOURCES.items():
            source = sources.add_parser(name, help=meaning, description=meaning)
            if name in words:
                _add_options(source, name, source_options(name), Protocol)
                source.add_argument(
                    "--existing",
                    choices=EXISTING,
                    default="refuse",
                    help="rows whose uri is in the manifest already: refuse them all, or skip these",
                )
                source.add_argument(
                    "--json", action="store_true", help="print the summary as one JSON object"
                )
    codes = names.add_parser("codes", help=CODES, description=CODES)
    if requested == "codes":
        _add_options(codes, "codes", CodesOptions)
        _add_output(codes, "code store")
    drop = names.add_parser(
        "drop-duplicates", help="copy a manifest without the rows that jobs/dedup.py would remove"
    )
    if requested == "drop-duplicates":
        drop.add_argument("manifest", metavar="MANIFEST", help="the manifest to copy")
        drop.add_argument("duplicates", metavar="DUPLICATES", help="RUN/duplicates or RUN/leakage")
        _add_output(drop, "manifest")
    near = names.add_parser("neighbours", help="a pairs table for training, from the vectors of a manifest")
    if requested == "neighbours":
        near.add_argument("manifest", metavar="MANIFEST", help="a manifest of vectors; labels are not used")
        near.add_argument("--out", required=True, metavar="PATH", help="the pairs table to write, Parquet")
        near.add_argument(
            "-k", type=int, default=10, help="neighbours that count as similar, where mutual (default 10)"
        )
        near.add_argument(
            "--radius", type=float, help="neighbours within this distance are similar, mutual or not"
        )


def _write_neighbours(given: dict[str, Any]) -> int:
    manifest = Manifest.open(given["manifest"])
    if manifest.modality != "features":
        raise DataError(
            f"{manifest.uri} holds pictures, and neighbours are those of vectors; jobs/train.py "
            "pairs=neighbours finds them with a pretrained backbone"
        )
    table = manifest.read("train", ["row_id", "feature"])
    pairs = neighbour_pairs(
        feature_matrix(table), table["row_id"].to_numpy(), given["k"], radius=given["radius"]
    )
    settings = {"split": "train", "k": given["k"], "radius": given["radius"]}
    pairs.save(given["out"], {"made_by": NEIGHBOURS, "manifest_sha256": manifest.sha256, **settings})
    counts = pairs.counts()
    print(f"{given['out']}: {counts.n_similar:,} similar and {counts.n_dissimilar:,} dissimilar pairs")
    return 0


def _add_output(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--out", required=True, metavar="PATH", help=f"the {what} to make, a folder")
    parser.add_argument("--overwrite", action="store_true", help=f"replace an existing {what}")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Makes or extends the manifest and prints what is in it."""
    given = vars(arguments)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hashnet.data").setLevel(logging.INFO)  # rows that were skipped
    if given["source"] == "drop-duplicates":
        manifest = drop_duplicates(given["manifest"], given["duplicates"], given["out"], given["overwrite"])
        return _print_summary(manifest, given["json"])
    if given["source"] == "neighbours":
        return _write_neighbours(given)
    if given["source"] == "codes":
        return _import_codes(given)
    name = given["appended"] if given["source"] == "append" else given["source"]
    options = _given_options(given, source_options(name), Protocol)
    if given["source"] == "append":
        manifest = append_source(
            Manifest.open(given["manifest"]),
            name,
            existing=given["existing"],
            show_progress=True,
            **options,
        )
    else:
        manifest = make_manifest(
            name, given["out"], overwrite=given["overwrite"], show_progress=True, **options
        )
    return _print_summary(manifest, given["json"])


def drop_duplicates(manifest: str, duplicates: str, out: str, overwrite: bool = False) -> Manifest:
    """The manifest ``out``: a copy without the rows that the duplicates would remove."""
    from hashnet.dedup import DuplicatesArtefact

    found = DuplicatesArtefact(duplicates).open()
    opened, removed = Manifest.open(manifest), found.removed()
    if len(removed) and removed[-1] >= len(opened):
        raise DataError(
            f"{duplicates} names row {removed[-1]:,}, but {manifest} has {len(opened):,} rows; "
            "give the manifest whose codes were compared"
        )
    source = {"name": "drop_duplicates", "removed": len(removed), "duplicates": found.lineage}
    return copy_without(opened, out, removed, source, overwrite)


def _import_codes(given: dict[str, Any]) -> int:
    options = config.from_dict(CodesOptions, _given_options(given, CodesOptions))
    store = import_codes(options, given["out"], given["overwrite"])
    about = {"codes": store.uri, "rows": len(store), "n_bits": store.n_bits, "n_classes": store.n_classes}
    if given["json"]:
        print(json.dumps(about | {"columns": store.columns, "sha256": store.sha256}))
    else:
        further = f", columns {', '.join(store.columns)}" if store.columns else ""
        print(f"{store.uri}: {len(store):,} codes of {store.n_bits} bits{further}\n  sha256 {store.sha256}")
    return 0


def _print_summary(manifest: Manifest, as_json: bool) -> int:
    summary = manifest.summary()
    if as_json:
        about = {"manifest": manifest.uri, "sha256": manifest.sha256, "notes": notes(manifest)}
        print(json.dumps({**about, **summary.to_dict()}))
    else:
        print(summary.text(manifest))
    if warning := unreadable_warning(manifest):
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def _fields(*options: type) -> list[dataclasses.Field]:
    """The options of a source and of the protocol, each once: the first wins (both may have a seed)."""
    found: dict[str, dataclasses.Field] = {}
    for one in options:
        for field in dataclasses.fields(one):
            found.setdefault(field.name, field)
    return list(found.values())


def _given_options(given: dict[str, Any], *options: type) -> dict[str, Any]:
    """The options that were given on the command line, by name."""
    names = [field.name for field in _fields(*options)]
    return {name: given[name] for name in names if given.get(name) is not None}


def _add_options(parser: argparse.ArgumentParser, name: str, *options: type) -> None:
    hints = {n: hint for one in reversed(options) for n, hint in typing.get_type_hints(one).items()}
    own = {field.name for field in dataclasses.fields(options[0])}
    about = parser.add_argument_group(f"options of {name}")
    protocol = parser.add_argument_group("which rows are queries, database and training set")
    for field in _fields(*options):
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
