"""What a path holds: a manifest, model, code store, index, report, pairs table, or a whole run.

Everything is read from the small JSON files the artefacts describe themselves with, so neither torch
nor faiss is loaded; then the files they list are compared with the sha256 that was recorded.

    found = inspect("runs/demo/codes")
    found.kind, found.facts, found.lineage, found.problems      # no problem: it is sound
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hashnet.codes import dead_bits
from hashnet.errors import FormatError, HashnetError
from hashnet.io import storage

ENOUGH = 1_000  # rows below which a bit may be constant by chance
FEW_CODES = 0.01  # fewer different codes than this share of the rows: the codes have collapsed


@dataclass(frozen=True)
class Finding:
    """What was found. ``facts`` and ``lineage`` are plain values, ``problems`` sentences."""

    uri: str
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    lineage: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    parts: list[Finding] = field(default_factory=list)  # of a run

    @property
    def sound(self) -> bool:
        return not self.problems and all(part.sound for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def inspect(uri: str, pictures: int = 0) -> Finding:
    """What ``uri`` holds. ``pictures`` of a manifest are decoded on the way (-1: all of them).

    FormatError when it is nothing of ours.
    """
    uri = str(uri)
    if not storage.exists(uri):
        raise FormatError(f"{uri} does not exist; check the path")
    try:
        return _look(uri, pictures)
    except (KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{uri} is damaged ({type(error).__name__}: {error}); make it again") from error


def _look(uri: str, pictures: int) -> Finding:
    if storage.is_folder(uri):
        names = set(storage.list_names(uri))
        for marker, reader in _FOLDERS.items():
            if marker in names:
                return reader(uri, pictures)
        if "config.yaml" in names or len(names & set(_STAGES)) >= 2:
            return _run(uri, pictures)
    elif storage.name_of(uri).endswith(".json"):
        return _any_json(uri)
    elif storage.name_of(uri).endswith((".parquet", ".csv")):
        return _table(uri)
    raise FormatError(
        f"{uri} is nothing of hashnet's: no manifest, model, codes, index, report, pairs table or run"
    )


def _manifest(uri: str, pictures: int) -> Finding:
    from hashnet.data import Manifest, check_pictures

    manifest = Manifest.open(uri)
    problems = _problems(manifest.verify)
    facts: dict[str, Any] = {
        "modality": manifest.modality,
        "n_classes": manifest.n_classes,
        "n_features": manifest.n_features,
        "parts": len(manifest.parts),
        "sha256": manifest.sha256,
    }
    if not problems:
        facts |= manifest.summary().to_dict()
        if pictures and manifest.modality == "image":
            found = check_pictures(manifest, None if pictures < 0 else pictures)
            facts["pictures"] = found.to_dict()
            if found.bad:
                problems.append(found.sentence)
    return Finding(uri, "manifest", facts, {"source": manifest.source}, problems)


def _model(uri: str, pictures: int) -> Finding:
    about = _read(uri, "model.json", "model")
    facts = {name: about.get(name) for name in ("n_bits", "modality", "sha256", "class_names", "summary")}
    facts["backbone"] = about.get("arguments", {}).get("backbone")
    facts["n_classes"] = len(facts.pop("class_names") or ()) or None
    lineage = {name: about.get(name) for name in ("preprocess", "preprocess_version")}
    listed = [("model.safetensors", about.get("weights_sha256"))]
    return Finding(uri, "model", facts, lineage, list(_wrong_files(uri, listed)))


def _codes(uri: str, pictures: int) -> Finding:
    names = storage.list_names(uri)
    if "_SUCCESS" not in names:
        done = len([n for n in storage.list_names(storage.join(uri, "_records")) if n.endswith(".json")])
        sentence = f"encoding is not finished: {done} shards are; run jobs/encode_db.py again to continue"
        return Finding(uri, "codes", {"shards": done}, {}, [sentence])
    about = _read(uri, "manifest.json", None)
    facts: dict[str, Any] = {name: about.get(name) for name in ("rows", "bad_rows", "n_classes", "sha256")}
    facts["n_bits" if about["kind"] == "codes" else "n_features"] = about.get("width")
    facts["shards"] = len(about["shards"])
    statistics = about.get("statistics") or {}
    facts |= {name: value for name, value in statistics.items() if not isinstance(value, list)}
    listed = [(f"{s['name']}.parquet", s["sha256"]) for s in about["shards"]]
    refused = [s for s in about["shards"] if s.get("quarantine_sha256")]
    listed += [(f"_quarantine/{s['name']}.parquet", s["quarantine_sha256"]) for s in refused]
    problems = list(_wrong_files(uri, listed))
    problems += _code_health(about.get("rows", 0), statistics)
    return Finding(uri, about["kind"], facts, dict(about.get("lineage", {})), problems)


def _code_health(rows: int, statistics: dict[str, Any]) -> list[str]:
    """Dead bits and collapsed codes: the two ways in which codes are useless though nothing failed."""
    problems = []
    shares = statistics.get("bit_balance") or []
    if rows >= ENOUGH and len(dead := np.flatnonzero(dead_bits(shares))):
        problems.append(
            f"{len(dead)} of {len(shares)} bits are the same in nearly all rows, the first is bit {dead[0]}"
        )
    different = statistics.get("distinct_codes")
    if different is not None and rows >= ENOUGH and different < FEW_CODES * min(rows, 10_000):
        problems.append(f"only {different:,} different codes for {rows:,} rows: training has collapsed")
    return problems


def _index(uri: str, pictures: int) -> Finding:
    about = _read(uri, "index.json", "index")
    facts = {
        n: about.get(n) for n in ("index_kind", "n_bits", "n_classes", "rows", "version", "options", "tuned")
    }
    listed = [(entry["file"], entry["sha256"]) for entry in _entries(about.get("segments", []))]
    problems = list(_wrong_files(uri, listed))
    if about.get("sha256") != storage.seal(about):
        problems.insert(0, "index.json was changed: it is not what its own sha256 says")
    return Finding(uri, "index", facts, dict(about.get("lineage", {})), problems)


def _report(uri: str, pictures: int) -> Finding:
    return dataclasses.replace(_any_json(storage.join(uri, "report.json")), uri=uri)


def _any_json(uri: str) -> Finding:
    """A JSON artefact by its own words: every plain value in it."""
    about = storage.read_json(uri)
    if not isinstance(about, dict) or "kind" not in about:
        raise FormatError(f"{uri} is nothing of hashnet's: it does not say its kind")
    plain = (str, int, float, bool, type(None))
    facts = {k: v for k, v in about.items() if isinstance(v, plain) and k not in ("kind", "format_version")}
    return Finding(uri, str(about["kind"]), facts, dict(about.get("lineage") or {}))


def _table(uri: str) -> Finding:
    from hashnet.data import PairTable

    if storage.name_of(uri).endswith(".parquet"):
        try:
            with storage.open_input(uri) as source:
                names = pq.ParquetFile(source).schema_arrow.names
        except pa.ArrowInvalid as error:
            raise FormatError(f"{uri} is not Parquet: {error}") from error
        if not set(PairTable.COLUMNS) <= set(names):
            raise FormatError(f"{uri} is Parquet with {', '.join(names)}, nothing of hashnet's by itself")
    counts = PairTable.open(uri).counts()
    return Finding(uri, "pairs", {"pairs": counts.n_pairs, "similar": counts.n_similar})


def _run(uri: str, pictures: int) -> Finding:
    """Each stage's artefact, and whether they were made for each other."""
    names = storage.list_names(uri)
    parts, problems = [], []
    for name in _STAGES:
        if name in names:
            try:
                parts.append(inspect(storage.join(uri, name), pictures))
            except HashnetError as error:
                problems.append(f"{name}: {error}")
    by_kind = {part.kind: part for part in parts}
    model = by_kind["model"].facts.get("sha256") if "model" in by_kind else None
    for part in parts:
        made_with = part.lineage.get("model_sha256")
        if model and made_with and made_with != model:
            problems.append(
                f"{storage.name_of(part.uri)} was made with model {made_with[:12]}…, the run's model is "
                f"{model[:12]}…; make it again"
            )
    return Finding(uri, "run", {"stages": [storage.name_of(part.uri) for part in parts]}, {}, problems, parts)


_STAGES = ("manifest.parquet", "model", "codes", "index", "report")
_FOLDERS: dict[str, Callable[[str, int], Finding]] = {  # the file that marks a folder → its reader
    "_manifest.json": _manifest,
    "model.json": _model,
    "_plan.json": _codes,
    "index.json": _index,
    "report.json": _report,
}


def _read(uri: str, name: str, kind: str | None) -> dict[str, Any]:
    where = storage.join(uri, name)
    about = storage.read_json(where)
    if kind is None:
        kind = str(about.get("kind")) if isinstance(about, dict) else "file"
    return storage.check_format(about, where, kind, 1)


def _entries(value: Any) -> Iterator[dict[str, Any]]:
    """Every {file, sha256} anywhere inside."""
    if isinstance(value, dict):
        if "file" in value and "sha256" in value:
            yield value
        for inner in value.values():
            yield from _entries(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _entries(inner)


def _wrong_files(uri: str, listed: list[tuple[str, str | None]]) -> Iterator[str]:
    """A sentence for each listed file that is missing or whose sha256 differs."""
    for name, recorded in listed:
        where = storage.join(uri, name)
        if not storage.exists(where):
            yield f"{name} is missing"
        elif recorded is not None and (found := storage.sha256_of(where)) != recorded:
            yield f"{name} is damaged: its sha256 is {found[:12]}…, recorded is {recorded[:12]}…"


def _problems(check: Callable[[], None]) -> list[str]:
    try:
        check()
    except HashnetError as error:
        return [str(error)]
    return []
