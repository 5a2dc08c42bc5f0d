"""``hashnet query PICTURE --url URL`` searches on a server, ``--run RUN`` in a run's folder without one."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hashnet.codes import pack_signs
from hashnet.errors import BadImage, DataError, IndexMismatch, LineageMismatch
from hashnet.results import SearchResult
from hashnet.run import Run

if TYPE_CHECKING:
    from hashnet.store import ItemLookup

EXAMPLES = """
examples:
  hashnet query cat.jpg --url http://127.0.0.1:8000 -k 10
  hashnet query cat.jpg --run runs/demo --radius 2
  hashnet query features.npy --run runs/demo          rows of an array, for models that take features
  hashnet query codes.npy --run runs/demo             uint8 rows of n_bits / 8 bytes, with or without a model
  hashnet query --id 17 --url http://127.0.0.1:8000   by an item of the index, or --key cat.jpg
  hashnet query cat.jpg --run runs/demo --rescore     where the database was encoded with its features

The token that a server requires is taken from HASHNET_TOKEN."""


def configure(parser: argparse.ArgumentParser, words: list[str]) -> None:
    parser.set_defaults(run=run)
    parser.epilog = EXAMPLES
    parser.add_argument(
        "queries", metavar="PICTURE", nargs="*", help="picture files, or one .npy file of features or codes"
    )
    parser.add_argument(
        "--id", dest="ids", type=int, action="append", metavar="ID", help="search by an indexed item"
    )
    parser.add_argument(
        "--key", dest="keys", action="append", metavar="KEY", help="search by the indexed item with this key"
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", metavar="URL", help="a server, as hashnet serve prints it")
    where.add_argument(
        "--run",
        dest="folder",
        metavar="RUN",
        help="a run's folder with index/; pictures and features need model/, too",
    )
    how_many = parser.add_mutually_exclusive_group()
    how_many.add_argument(
        "-k", type=int, default=None, metavar="N", help="number of nearest items (default 10)"
    )
    how_many.add_argument(
        "--radius", type=int, default=None, metavar="BITS", help="every item within this many bits"
    )
    parser.add_argument(
        "--label", action="append", metavar="LABEL", help="only items with this label (id or name)"
    )
    parser.add_argument(
        "--where", metavar="CONDITION", help="only items whose columns satisfy it: 'year >= 2020'"
    )
    parser.add_argument(
        "--columns", metavar="NAME,…", type=lambda text: text.split(","), help="columns to show with each hit"
    )
    parser.add_argument(
        "--ranking",
        choices=("hamming", "asymmetric"),
        default="hamming",
        help="asymmetric: by the query's logits against the codes; finer than bits",
    )
    parser.add_argument(
        "--rescore",
        action="store_true",
        help="order the nearest by their stored vectors and the query's own, where the index has vectors",
    )
    parser.add_argument(
        "--oversample",
        type=float,
        metavar="N",
        help="candidates per hit, with --rescore (default 4, or what the index was tuned to) or "
        "--ranking asymmetric",
    )
    parser.add_argument(
        "--exclude-self", action="store_true", help="leave the item of --id or --key out of its own hits"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


@dataclass(frozen=True)
class Search:
    """What to search for: pictures, features, codes, or indexed items by ids or keys; ``k`` or ``radius``."""

    queries: Any
    ids: np.ndarray | None
    keys: list[str] | None
    k: int
    radius: int | None
    labels: list[str] | None
    ranking: str = "hamming"
    where: str | None = None
    columns: list[str] | None = None
    rescore: str | None = None  # "features"
    oversample: float | None = None
    exclude_self: bool = False


@dataclass(frozen=True)
class Hit:
    """One line of the output."""

    id: int
    distance: int
    labels: list[str]
    uri: str | None
    key: str | None = None
    score: float | None = None
    columns: dict[str, Any] | None = None


def run(arguments: argparse.Namespace) -> int:
    """Prints the hits of each query, nearest first."""
    if sum(map(bool, (arguments.queries, arguments.ids, arguments.keys))) != 1:
        raise DataError("give pictures (or a .npy file), --id or --key, one of them")
    indexed = arguments.ids or arguments.keys
    if arguments.ranking == "asymmetric" and (indexed or arguments.radius is not None):
        raise DataError("--ranking asymmetric is for the -k nearest of pictures or features")
    if arguments.rescore and arguments.radius is not None:
        raise DataError("--rescore is for the -k nearest, not for a radius")
    if arguments.oversample is not None and not arguments.rescore and arguments.ranking != "asymmetric":
        raise DataError("--oversample is for --rescore or --ranking asymmetric")
    if arguments.oversample is not None and not arguments.oversample >= 1:
        raise IndexMismatch(f"--oversample must be at least 1, got {arguments.oversample:g}")
    if arguments.exclude_self and not indexed:
        raise DataError("--exclude-self is for --id and --key; other queries are not items of the index")
    if arguments.k is not None and arguments.k < 1:
        raise IndexMismatch(f"-k must be at least 1, got {arguments.k}")
    search = Search(
        queries=None if indexed else read_queries(arguments.queries),
        ids=_ids(arguments.ids) if arguments.ids else None,
        keys=arguments.keys,
        k=arguments.k or 10,
        radius=arguments.radius,
        labels=arguments.label,
        ranking=arguments.ranking,
        where=arguments.where,
        # each hit has its uri, whether or not the index has that column
        columns=[name for name in arguments.columns or [] if name != "uri"] or None,
        rescore="features" if arguments.rescore else None,
        oversample=arguments.oversample,
        exclude_self=arguments.exclude_self,
    )
    source = _Server(arguments.url) if arguments.url else _Run(arguments.folder)
    names = [f"id {id_}" for id_ in arguments.ids or []] or arguments.keys or list(arguments.queries)
    found = source.search(search)
    rows = found.per_query() if isinstance(found, SearchResult) else found
    if len(names) == 1 and len(rows) > 1:
        names = [f"{names[0]} row {i}" for i in range(len(rows))]
    results = [(name, _hits(source, row, arguments.columns)) for name, row in zip(names, rows, strict=True)]
    if arguments.json:
        listed = [{"query": name, "hits": [asdict(hit) for hit in hits]} for name, hits in results]
        found_in = next((row.version for row in rows), None)
        print(json.dumps({"version": found_in, "results": listed}, default=str))
    else:
        _print(results, within_radius=search.radius is not None)
    return 0


def _hits(source: _Server | _Run, row: SearchResult, columns: list[str] | None) -> list[Hit]:
    scores = [None] * len(row) if row.scores is None else [round(float(score), 6) for score in row.scores]
    found = [{}] * len(row) if row.columns is None else row.columns.to_pylist()
    hits = []
    for id_, distance, score, values in zip(row.ids, row.distances, scores, found, strict=True):
        hit = source.hit(int(id_), int(distance))
        values = values | {"uri": hit.uri}
        shown = None if columns is None else {name: values[name] for name in columns}
        hits.append(replace(hit, score=score, columns=shown))
    return hits


def _print(results: list[tuple[str, list[Hit]]], within_radius: bool) -> None:
    for name, hits in results:
        hint = "; nothing is that near, try a larger --radius" if within_radius and not hits else ""
        print(f"{name}: {len(hits)} hits{hint}")
        if hits:
            score = "" if hits[0].score is None else f"  {'score':>9}"
            print(f"rank  bits{score}  {'id':>10}  {'labels':<24}  key/uri")
        for place, hit in enumerate(hits, 1):
            bits = f"{hit.distance:4}" + ("" if hit.score is None else f"  {hit.score:9.4f}")
            named = hit.uri if hit.key in (None, hit.uri) else f"{hit.key}  {hit.uri or ''}".rstrip()
            line = f"{place:4}  {bits}  {hit.id:>10}  {', '.join(hit.labels) or '-':<24}  {named or '-'}"
            print(line + "".join(f"  {name}={value}" for name, value in (hit.columns or {}).items()))


def read_queries(paths: list[str]) -> Any:
    """Paths of pictures as they are, or the rows of a .npy file: uint8 as they are, others float32."""
    if any(path.endswith(".npy") for path in paths):
        if len(paths) > 1:
            raise DataError("give one .npy file, or pictures")
        try:
            rows = np.load(paths[0], allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"cannot read {paths[0]}: {error}") from error
        if not isinstance(rows, np.ndarray):
            raise DataError(f"{paths[0]} holds several arrays; save the one of features or codes as .npy")
        if rows.size == 0:
            raise DataError(f"{paths[0]} holds no row")
        return rows.astype(np.float32) if rows.dtype.kind in "fiu" and rows.dtype != np.uint8 else rows
    for path in paths:
        if not os.path.isfile(path):
            raise DataError(f"{path} is not a file; give the path of a picture")
    return list(paths)


def codes_or_features(queries: Any, n_bits: int, takes_features: bool) -> Any:
    """Rows of uint8 that are as wide as a code, or that no model takes, stay codes; others are features."""
    if not isinstance(queries, np.ndarray) or queries.dtype != np.uint8:
        return queries
    if queries.shape[-1:] == (n_bits // 8,) or not takes_features:
        return np.atleast_2d(queries)
    return queries.astype(np.float32)


def _with_codes(search: Search, n_bits: int, takes_features: bool) -> Search:
    """The search with its rows as codes or as features; what codes lack is refused."""
    queries = codes_or_features(search.queries, n_bits, takes_features)
    if isinstance(queries, np.ndarray) and queries.dtype == np.uint8:
        if search.rescore is not None:
            raise DataError("--rescore needs vectors of the queries, which codes lack; leave it out")
        if search.ranking == "asymmetric":
            raise DataError(
                "--ranking asymmetric needs logits of the queries, which codes lack; leave it out"
            )
    return replace(search, queries=queries)


def _ids(ids: list[int]) -> np.ndarray:
    try:
        return np.asarray(ids, dtype=np.int64)
    except OverflowError as error:
        raise IndexMismatch(f"--id must fit into int64, got {max(ids, key=abs)}") from error


class _Server:
    """Searches over HTTP."""

    def __init__(self, url: str) -> None:
        from hashnet.client import Client

        self.client = Client(url, retry_s=2)  # a person is waiting

    def search(self, search: Search) -> SearchResult | list[SearchResult]:
        if isinstance(search.queries, np.ndarray):
            info = self.client.info()
            search = _with_codes(search, info["n_bits"], "features" in info["accepts"])
        names = ("ids", "keys", "labels", "exclude_self", "where", "columns")
        how = {name: getattr(search, name) for name in names}
        if search.radius is not None:
            return self.client.search_radius(search.queries, search.radius, **how)
        how |= {name: getattr(search, name) for name in ("ranking", "rescore", "oversample")}
        return self.client.search(search.queries, search.k, **how)

    def hit(self, id_: int, distance: int) -> Hit:
        item = self.client.item(id_)
        labels = item["label_names"] or [str(label) for label in item["labels"] or []]
        return Hit(id_, distance, labels, item["uri"], (item["columns"] or {}).get("key"))


class _Run:
    """Searches a run's folder, with its index and, where that is needed, its model in this process."""

    def __init__(self, run: str) -> None:
        self.run = Run(run)
        self.run.check_folder()
        self.index = self.run.index.open()
        self.class_names: list[str] | None = None
        self.items: ItemLookup | None = None

    def search(self, search: Search) -> SearchResult | list[SearchResult]:
        search = _with_codes(search, self.index.n_bits, self.run.model.begun())
        vectors: dict[str, Any] = {}
        ids = search.ids if search.keys is None else self.index.ids_of(search.keys)
        if ids is not None:
            codes = self.index.codes(ids)
            if search.rescore:
                vectors = {"features": self.index.features(ids)}
        elif isinstance(search.queries, np.ndarray) and search.queries.dtype == np.uint8:
            codes = search.queries
        else:
            if search.rescore:
                self._check_vectors()
            # torch beside faiss in one process would bring two OpenMP runtimes to one search: encode first.
            logits, features = self._encode(search.queries, search.rescore is not None)
            codes = pack_signs(logits)
            vectors = {} if features is None else {"features": features}
        self._open_items()
        how: dict[str, Any] = {"where": self._where(search), "columns": search.columns}
        how["exclude_self"] = ids if search.exclude_self else None
        if search.radius is not None:
            return self.index.search_radius(codes, search.radius, **how)
        how |= {"k": search.k, "rescore": search.rescore, "oversample": search.oversample}
        if search.ranking == "asymmetric":
            return self.index.search(logits=logits, **how, **vectors)
        return self.index.search(codes, **how, **vectors)

    def _where(self, search: Search) -> dict[str, Any] | None:
        """The filter by labels and by a condition, with class ids for names."""
        from hashnet.index import with_class_ids

        where: dict[str, Any] = {}
        if search.labels is not None:
            where["labels"] = [self._class_id(label) for label in search.labels]
        if search.where is not None:
            where["condition"] = with_class_ids(search.where, self.class_names)
        return where or None

    def _check_vectors(self) -> None:
        made_with = self.index.features_model
        if self.index.n_features is not None and made_with != self.index.lineage.get("model_sha256"):
            raise LineageMismatch(
                f"the vectors of {self.run.index.uri} are of model {made_with}, not of the run's: "
                "--rescore has no vector of the query to compare them with"
            )

    def hit(self, id_: int, distance: int) -> Hit:
        item = self.items.item(id_) if self.items is not None else None
        labels = (item.labels if item is not None else None) or []
        names = self.class_names
        shown = [str(label) if names is None else names[label] for label in labels]
        schema = self.index.schema
        own = [] if schema is None else [name for name in ("key", "uri") if name in schema.names]
        found = self.index.columns([id_], own).to_pylist()[0] if own else {}
        uri = item.uri if item is not None else found.get("uri")
        return Hit(id_, distance, shown, uri, found.get("key"))

    def _encode(self, queries: Any, features: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """(logits, the backbone's features if requested) of the queries."""
        from hashnet.encoding import Encoder

        if not self.run.model.begun():
            raise DataError(
                f"{self.run.uri} has codes without a model; search with codes (.npy), --id or --key"
            )
        model = self.run.model.uri
        encoder = Encoder.load(model, engine="cpu-eager", batch_rows=4)
        made_with = self.index.lineage.get("model_sha256")
        if made_with != encoder.model_sha256:
            raise LineageMismatch(
                f"{self.run.index.uri} was made with model {made_with}, {model} is {encoder.model_sha256}; "
                "encode the database and build the index with this model"
            )
        self.class_names = encoder.info.class_names
        if encoder.modality == "features" and isinstance(queries, list):
            raise DataError(
                f"{self.run.uri} is a run of vectors, so {queries[0]} cannot be a query; give a .npy file of "
                "rows, or --id for an item of the index"
            )
        try:
            return encoder.logits(queries), encoder.features(queries) if features else None
        except BadImage as error:
            raise DataError(f"cannot use {error.detail}") from error

    def _open_items(self) -> None:
        from hashnet.store import ItemLookup

        if self.run.codes.exists():
            store = self.run.codes.open()
            self.items = ItemLookup(store)
            self.class_names = list(store.class_names) if store.class_names is not None else self.class_names
        if self.run.manifest.exists():
            names = self.run.manifest.open(verify=False).class_names
            self.class_names = list(names) if names is not None else self.class_names

    def _class_id(self, label: str) -> int:
        names = self.class_names or []
        if label in names:
            return names.index(label)
        if label.isascii() and label.isdigit():
            return int(label)
        if not names and self.index.describe()["n_classes"] is None:
            raise IndexMismatch(f"the index has no labels, so none can be {label!r}; leave --label out")
        raise IndexMismatch(
            f"there is no label {label!r}; there are {', '.join(names[:8]) or 'numbers only'}"
        )
