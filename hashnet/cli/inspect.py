"""``hashnet inspect PATH``: what a path holds, one artefact, a pairs table or a whole run.

Each artefact describes and verifies itself (``hashnet.io.Artefact``), from JSON and bytes alone, so
neither torch nor faiss is loaded.

    found = inspect("runs/demo/codes")
    found.kind, found.facts, found.lineage, found.problems      # no problem: it is sound
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from hashnet.data import ManifestArtefact, PairTable, check_pictures
from hashnet.dedup import DuplicatesArtefact
from hashnet.errors import FormatError, HashnetError
from hashnet.index import IndexArtefact
from hashnet.io import Artefact, Description, config, counted, storage
from hashnet.metrics import NeighbourArtefact, ReportArtefact
from hashnet.models import ModelArtefact
from hashnet.run import Run
from hashnet.store import CodesArtefact, read_quarantine, read_records

if TYPE_CHECKING:
    from hashnet.comparison import CellResult

COMPARISON_FILES = ("comparison.html", "tables.json")  # in RUN/report, written last
BAD_ROWS = 20  # named in the output; RUN/codes/_quarantine has all

EXAMPLES = """
examples:
  hashnet inspect manifest.parquet
  hashnet inspect manifest.parquet --pictures 1000      reads and decodes the first 1,000 pictures, too
  hashnet inspect runs/demo                             every stage of a run
  hashnet inspect runs/demo/codes --json

The exit code is 0 when everything is sound, 1 when something is damaged, missing or does not fit."""


def configure(parser: argparse.ArgumentParser, words: list[str]) -> None:
    parser.set_defaults(run=run)
    parser.epilog = EXAMPLES
    parser.add_argument("path", metavar="PATH", help="a folder or file, local or a URI")
    parser.add_argument(
        "--pictures",
        type=int,
        default=0,
        metavar="N",
        help="decode the first N pictures of a manifest (-1: all)",
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    found = inspect(arguments.path, pictures=arguments.pictures)
    print(json.dumps(found.to_dict()) if arguments.json else "\n".join(_lines(found)))
    return 0 if found.sound else 1


def _lines(found: Description) -> list[str]:
    """The verdict, then the details."""
    verdict = "sound" if found.sound else f"NOT sound: {counted(_n_problems(found), 'problem')}"
    return [verdict, *_details(found)]


def _n_problems(found: Description) -> int:
    return len(found.problems) + sum(map(_n_problems, found.parts))


def _details(found: Description, indent: str = "") -> list[str]:
    lines = [f"{indent}{found.uri}: {found.kind}"]
    lines += _values(found.facts, indent + "  ")
    if found.lineage:
        lines.append(f"{indent}  made from")
        lines += _values(found.lineage, indent + "    ")
    for part in found.parts:
        lines += _details(part, indent + "  ")
    return lines + [f"{indent}  PROBLEM: {problem}" for problem in found.problems]


def _values(values: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for name, value in values.items():
        if value is None or value in ({}, []):
            continue
        if isinstance(value, dict):
            lines += [f"{indent}{name}", *_values(value, indent + "  ")]
        elif isinstance(value, list) and isinstance(value[0], dict):
            lines.append(f"{indent}{name}: {len(value)}, see --json")
        elif isinstance(value, list):
            shown = ", ".join(str(item) for item in value[:8]) + (", …" if len(value) > 8 else "")
            lines.append(f"{indent}{name}: {shown}")
        else:
            lines.append(f"{indent}{name}: {_shown(value)}")
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def inspect(uri: str, pictures: int = 0) -> Description:
    """What ``uri`` holds. ``pictures`` of a manifest are decoded on the way (-1: all of them).

    FormatError if hashnet did not write it.
    """
    uri = str(uri)
    if not storage.exists(uri):
        raise FormatError(f"{uri} does not exist; check the path")
    if artefact := _artefact_at(uri):
        return _inspected(artefact, pictures)
    if storage.is_folder(uri):
        if _is_run(Run(uri)):
            return _run(Run(uri), pictures)
    elif storage.name_of(uri).endswith((".parquet", ".csv")):
        return _pairs(uri)
    raise FormatError(
        f"{uri} was not written by hashnet: no manifest, model, codes, index, report, pairs table or run"
    )


def _artefact_at(uri: str) -> Artefact | None:
    """The artefact whose folder or header file this is."""
    kinds = (
        ManifestArtefact,
        ModelArtefact,
        IndexArtefact,
        ReportArtefact,
        NeighbourArtefact,
        DuplicatesArtefact,
    )
    for artefact in (kind(uri) for kind in kinds):
        if artefact.exists():
            return artefact
        if storage.name_of(uri) == artefact.header_file:
            return type(artefact)(storage.parent_folder(uri))
    codes = CodesArtefact(uri)
    return codes if codes.begun() else None


def _is_run(run: Run) -> bool:
    there = (storage.exists(uri) for uri in (run.config, run.cells))
    return any(there) or sum(storage.exists(a.uri) for a in run.artefacts()) >= 2


def _inspected(artefact: Artefact, pictures: int) -> Description:
    """A description with whatever is wrong, a header that cannot be read included."""
    try:
        description, problems = artefact.describe(), artefact.verify()
    except HashnetError as error:
        return Description(artefact.uri, artefact.kind, problems=[str(error)])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        damage = f"{artefact.header_uri} is damaged ({type(error).__name__}: {error}); {artefact.made_by}"
        return Description(artefact.uri, artefact.kind, problems=[damage])
    if isinstance(artefact, CodesArtefact):
        description.facts.update(_bad_rows(artefact))
    if isinstance(artefact, ManifestArtefact) and pictures and not problems:
        manifest = artefact.open()
        if manifest.modality == "image":
            found = check_pictures(manifest, None if pictures < 0 else pictures)
            description.facts["pictures"] = found.to_dict()
            problems += [found.sentence] if found.bad else []
    return dataclasses.replace(description, problems=problems)


def _run(run: Run, pictures: int) -> Description:
    """Each artefact of a run, the optional ones too, and whether they were made for each other."""
    every = [*run.artefacts(), *run.further_artefacts()]
    compared = storage.exists(run.cells)
    # RUN/report may be the comparison's alone, which has no header
    others = {run.report.uri} if compared and not run.report.exists() else set()
    there = [one for one in every if storage.exists(one.uri) and one.uri not in others]
    parts = [_inspected(one, pictures) for one in there]
    parts += [_comparison(run)] if compared else []
    problems = _config_problems(run)
    model = next((part.facts.get("sha256") for part in parts if part.kind == "model"), None)
    for part in parts:
        made_with = part.lineage.get("model_sha256")
        if model and made_with and made_with != model:
            problems.append(
                f"{storage.name_of(part.uri)} was made with model {made_with[:12]}…, the run's model is "
                f"{model[:12]}…; make it again"
            )
    stages = [storage.name_of(part.uri) for part in parts]
    return Description(run.uri, "run", {"stages": stages}, {}, problems, parts)


def _comparison(run: Run) -> Description:
    """The cells of a comparison by part, and its report."""
    from hashnet.comparison import CellResult

    names = {
        part: storage.list_names(storage.join(run.cells, part)) for part in storage.list_names(run.cells)
    }
    found = {(part, name): _cell(run.cell(part, name)) for part in names for name in names[part]}
    done = {place: cell for place, cell in found.items() if isinstance(cell, CellResult)}
    problems = [cell for cell in found.values() if isinstance(cell, str)]
    left = ["/".join(place) for place, cell in found.items() if cell is None]
    again = "run the same jobs/compare.py again, which goes on from here"
    if left:
        problems.append(f"{counted(len(left), 'cell')} not finished, {left[0]} is the first; {again}")
    missing = [name for name in COMPARISON_FILES if not storage.exists(storage.join(run.report.uri, name))]
    if missing and not run.report.exists():
        problems.append(f"{run.report.uri} has no {' and no '.join(missing)}; {again}")
    inputs = [cell.made_from for cell in done.values()]
    facts = {
        "methods": sorted({one.method for one in inputs}),
        "bits": sorted({one.n_bits for one in inputs}),
        "seeds": sorted({one.seed for one in inputs}),
        "cells": {
            part: f"{sum(place[0] == part for place in done):,} of {len(names[part]):,} finished"
            for part in names
        },
        "page": None if missing else storage.join(run.report.uri, COMPARISON_FILES[0]),
    }
    return Description(run.cells, "comparison", facts, {}, problems)


def _cell(folder: str) -> CellResult | str | None:
    """A cell that is finished and whole, or what is wrong with it; None where it is not finished."""
    from hashnet.comparison import read_cell

    try:
        cell = read_cell(folder)
        if cell is not None and cell.codes_sha256 is not None:
            cell.codes()
        return cell
    except HashnetError as error:
        return str(error)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return f"{folder} is damaged ({type(error).__name__}: {error}); remove it to run this cell again"


def _bad_rows(codes: CodesArtefact) -> dict[str, Any]:
    """The quarantined rows of a store by id, the first of many, with their reasons."""
    try:
        bad = read_quarantine(codes.uri, read_records(codes.uri))
    except HashnetError:  # damaged: ``verify`` says so
        return {}
    if not len(bad):
        return {}
    first = bad.slice(0, BAD_ROWS).to_pylist()
    named = {f"row {row['row_id']}": f"{row['reason']}: {row['uri']}" for row in first}
    more = {"more": len(bad) - len(first)} if len(bad) > len(first) else {}
    return {"quarantine": named | more}


def _config_problems(run: Run) -> list[str]:
    try:
        if storage.exists(run.config):
            config.check_saved(run.config)
    except HashnetError as error:
        return [str(error)]
    return []


def _pairs(uri: str) -> Description:
    if storage.name_of(uri).endswith(".parquet"):
        try:
            with storage.open_input(uri) as source:
                names = pq.ParquetFile(source).schema_arrow.names
        except pa.ArrowInvalid as error:
            raise FormatError(f"{uri} is not Parquet: {error}") from error
        if not set(PairTable.COLUMNS) <= set(names):
            raise FormatError(f"{uri} is Parquet with {', '.join(names)}, not a hashnet artefact")
    counts = PairTable.open(uri).counts()
    return Description(uri, "pairs", {"pairs": counts.n_pairs, "similar": counts.n_similar})
