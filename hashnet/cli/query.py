"""``hashnet query PICTURE --url URL`` asks a server; ``--run RUN`` searches a run's folder without one."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import numpy as np

from hashnet.errors import BadImage, DataError, IndexMismatch, LineageMismatch
from hashnet.results import SearchResult
from hashnet.run import Run

EXAMPLES = """
examples:
  hashnet query cat.jpg --url http://127.0.0.1:8000 -k 10
  hashnet query cat.jpg --run runs/demo --radius 2
  hashnet query features.npy --run runs/demo          rows of an array, for models that take features
  hashnet query --id 17 --url http://127.0.0.1:8000   by an item of the index

A server that wants a token gets the one in HASHNET_TOKEN."""


def configure(parser: argparse.ArgumentParser, words: list[str]) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "queries", metavar="PICTURE", nargs="*", help="picture files, or one .npy file of features"
    )
    parser.add_argument(
        "--id", dest="ids", type=int, action="append", metavar="ID", help="ask by an indexed item"
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", metavar="URL", help="a server, as jobs/serve.py prints it")
    where.add_argument("--run", dest="folder", metavar="RUN", help="a run's folder with model/ and index/")
    how_many = parser.add_mutually_exclusive_group()
    how_many.add_argument(
        "-k", type=int, default=None, metavar="N", help="how many nearest items (default 10)"
    )
    how_many.add_argument(
        "--radius", type=int, default=None, metavar="BITS", help="every item within so many bits"
    )
    parser.add_argument(
        "--label", action="append", metavar="LABEL", help="only items with this label (id or name)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints the hits of each query, nearest first."""
    if bool(arguments.queries) == bool(arguments.ids):
        raise DataError("give pictures (or a .npy file), or --id, not both and not neither")
    asked = {"radius": arguments.radius} if arguments.radius is not None else {"k": arguments.k or 10}
    if arguments.k is not None and arguments.k < 1:
        raise IndexMismatch(f"-k must be at least 1, got {arguments.k}")
    source = _Server(arguments.url) if arguments.url else _Run(arguments.folder)
    names = [f"id {id_}" for id_ in arguments.ids or []] or list(arguments.queries)
    hits = source.search(_given(arguments), asked, arguments.label)
    if len(names) == 1 and len(hits) > 1:
        names = [f"{names[0]} row {i}" for i in range(len(hits))]
    version = next((hit.version for hit in hits), None)
    answers: list[dict[str, Any]] = [
        {
            "query": name,
            "hits": [
                _row(source.item(int(id_)), int(d)) for id_, d in zip(hit.ids, hit.distances, strict=True)
            ],
        }
        for name, hit in zip(names, hits, strict=True)
    ]
    if arguments.json:
        print(json.dumps({"version": version, "results": answers}))
        return 0
    for answer in answers:
        print(f"{answer['query']}: {len(answer['hits'])} hits")
        for place, row in enumerate(answer["hits"], 1):
            labels = ", ".join(row["labels"]) or "-"
            bits = f"{row['distance']:3} bit{' ' if row['distance'] == 1 else 's'}"
            print(f"{place:4}  {bits}  {row['id']:>10}  {labels:<24}  {row['uri'] or '-'}")
    return 0


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.ids:
        return {"ids": _ids(arguments.ids)}
    if any(name.endswith(".npy") for name in arguments.queries):
        if len(arguments.queries) > 1:
            raise DataError("give one .npy file, or pictures")
        try:
            features = np.load(arguments.queries[0], allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"cannot read {arguments.queries[0]}: {error}") from error
        if not isinstance(features, np.ndarray):
            raise DataError(f"{arguments.queries[0]} holds several arrays; save the one of features as .npy")
        if features.size == 0:
            raise DataError(f"{arguments.queries[0]} holds no row")
        return {"queries": features.astype(np.float32) if features.dtype.kind in "fiu" else features}
    for name in arguments.queries:
        if not os.path.isfile(name):
            raise DataError(f"{name} is not a file; give the path of a picture")
    return {"queries": list(arguments.queries)}


def _ids(ids: list[int]) -> np.ndarray:
    try:
        return np.asarray(ids, dtype=np.int64)
    except OverflowError as error:
        raise IndexMismatch(f"--id must fit into int64, got {max(ids, key=abs)}") from error


def _row(item: dict[str, Any] | None, distance: int) -> dict[str, Any]:
    item = item or {}
    labels = item.get("label_names") or [str(label) for label in item.get("labels") or []]
    return {"id": item.get("id"), "distance": distance, "labels": labels, "uri": item.get("uri")}


def _rows(hits: SearchResult | list[SearchResult]) -> list[SearchResult]:
    """One result a query, without unused slots."""
    if isinstance(hits, list):
        return hits
    used = hits.distances >= 0
    return [
        SearchResult(i[u], d[u], hits.version) for i, d, u in zip(hits.ids, hits.distances, used, strict=True)
    ]


class _Server:
    """Asks over HTTP."""

    def __init__(self, url: str) -> None:
        from hashnet.client import Client

        self.client = Client(url, retry_s=10)

    def search(
        self, given: dict[str, Any], asked: dict[str, int], labels: list[str] | None
    ) -> list[SearchResult]:
        find: Any = self.client.search_radius if "radius" in asked else self.client.search
        return _rows(find(**given, **asked, labels=labels))

    def item(self, id_: int) -> dict[str, Any] | None:
        return self.client.item(id_)


class _Run:
    """Loads model and index of a run here."""

    def __init__(self, run: str) -> None:
        self.run = Run(run)
        self.index = self.run.index.open()
        self.class_names: list[str] | None = None
        self._catalog: Any = None

    def search(
        self, given: dict[str, Any], asked: dict[str, int], labels: list[str] | None
    ) -> list[SearchResult]:
        if "ids" in given:
            codes = self.index.codes(given["ids"])
        else:
            # torch beside faiss in one process would bring two OpenMP runtimes to one search: encode first.
            codes = self._encode(given["queries"])
        self._open_catalog()
        where = None if labels is None else {"labels": [self._class_id(label) for label in labels]}
        find: Any = self.index.search_radius if "radius" in asked else self.index.search
        return _rows(find(codes, **asked, where=where))

    def item(self, id_: int) -> dict[str, Any] | None:
        found = self._catalog.item(id_) if self._catalog is not None else None
        if found is None:
            return {"id": id_}
        names = None
        if self.class_names is not None and found.labels is not None:
            names = [self.class_names[label] for label in found.labels]
        return {"id": id_, "uri": found.uri, "labels": found.labels, "label_names": names}

    def _encode(self, queries: Any) -> np.ndarray:
        from hashnet.encoding import Encoder

        model = self.run.model.uri
        encoder = Encoder.load(model, engine="cpu-eager", batch_rows=4)
        made_with = self.index.lineage.get("model_sha256")
        if made_with != encoder.model_sha256:
            raise LineageMismatch(
                f"{self.run.index.uri} was made with model {made_with}, {model} is {encoder.model_sha256}; "
                "encode the database and build the index with this model"
            )
        self.class_names = encoder.info.class_names
        try:
            return encoder.encode(queries)
        except BadImage as error:
            raise DataError(f"cannot use {', '.join(map(str, queries))}: {error}") from error

    def _open_catalog(self) -> None:
        from hashnet.store import ItemLookup

        if self.run.codes.exists():
            self._catalog = ItemLookup(self.run.codes.open())
        if self.run.manifest.exists():
            names = self.run.manifest.open(check=False).class_names
            self.class_names = list(names) if names is not None else self.class_names

    def _class_id(self, label: str) -> int:
        names = self.class_names or []
        if label in names:
            return names.index(label)
        if label.isascii() and label.isdigit():
            return int(label)
        raise IndexMismatch(f"no label {label!r} here; there are {', '.join(names[:8]) or 'only numbers'}")
