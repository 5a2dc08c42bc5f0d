"""The tables and figures of README.md and docs/, made from the rows of the benchmarks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class View:
    """One table: which rows it shows, and of each which fields.

    ``cases`` must match a row's whole case; its group, where it has one, is what is shown of it.
    ``title`` may name fields of the first row.
    """

    title: str
    bench: str
    cases: str
    columns: dict[str, str]  # heading → field
    needs: str = "case"  # a field without which a row is not shown
    page: str = "performance"  # or peers, in docs/
    note: str = ""  # what stands under the title: settings of the peers, and the command


@dataclass(frozen=True)
class Line:
    """One line of the README's table: the least and the greatest figure of the rows it covers."""

    what: str
    bench: str
    cases: str
    ratio: str  # the field that holds our rate over the peer's
    peer: str
    figure: str  # the field with our own rate
    unit: str


@dataclass(frozen=True)
class Figure:
    """A figure inside a sentence: the least and the greatest value of the rows it covers."""

    bench: str
    cases: str
    field: str
    where: Row = field(default_factory=dict)  # what else the rows must have
    inverse: bool = False  # theirs over ours, where the row has ours over theirs


SUMMARY = (  # one line for each thing a user waits for; the rest is in docs/
    Line(
        "exact search, 64 bits, k from 10 to 5,000, batches from 1 to 1,024",
        "index", "exact 64 bits, .*", "ratio", "FAISS's IndexBinaryFlat, the same ids",
        "queries_per_s", "queries/s",
    ),
    Line(
        "exact search, 512 to 3,072 bits, batches from 1 to 1,024", "index",
        "exact (?:512|1024|3072) bits, .*", "ratio", "FAISS's IndexBinaryFlat, the same ids",
        "queries_per_s", "queries/s",
    ),
    Line(
        "asymmetric search (the query keeps real values), 64 bits, k = 10, batches from 1 to 1,024", "index",
        "asymmetric 64 bits, k = 10, .*", "ratio", "the fastest of numpy and FAISS's exact indexes",
        "queries_per_s", "queries/s",
    ),
    Line(
        "search with a new condition that 0.01 % to 100 % of the rows meet",
        "index", "filtered to .*", "ratio",
        "FAISS with an IDSelector, the same ids", "queries_per_s", "queries/s",
    ),
    Line(
        "the 10 nearest vectors, rescored, one query at a time", "index", "rescored .*, batch 1",
        "over_qdrant", "qdrant-edge with the same oversampling", "queries_per_s", "queries/s",
    ),
    Line(
        "`ivf`, k = 100, recall from 0.95", "index", "ivf .*", "of_faiss_ivf",
        "FAISS's IVF with the same lists", "queries_per_s", "queries/s",
    ),
    Line(
        "all near-duplicate pairs within 0, 2 and 4 bits", "dedup", "all pairs .*", "ratio",
        "FAISS's range_search, extrapolated", "seconds", "s",
    ),
    Line(
        "serving single codes, 1 to 64 connections", "serving", "json, one code", "ratio_of_bare_app",
        "a bare uvicorn app", "requests_per_s", "requests/s",
    ),
    Line(
        "encoding pictures, AlexNet and lite0", "encoding", "pipeline", "ratio_to_data_loader",
        "a DataLoader loop", "rate", "pictures/s",
    ),
    Line(
        "training a hash layer on vectors", "training", "features.*", "ratio",
        "a plain torch loop", "rows_per_s", "rows/s",
    ),
)  # fmt: skip


VIEWS = (
    View(
        "Exact search of {rows:,} codes of 64 bits, the same ids as FAISS's",
        "index",
        "exact 64 bits, (.*)",
        {
            "× IndexBinaryFlat": "ratio",
            "× a bare xor + popcount loop": "of_bare_loop",
            "× usearch": "over_usearch",
            "case": "case",
            "queries/s": "queries_per_s",
            "FAISS's": "faiss_queries_per_s",
            "ms per batch": "latency_ms",
        },
        page="peers",
        note=(
            "FAISS on all cores, usearch with a thread per core. `python tests/bench/index.py --only exact`"
        ),
    ),
    View(
        "Exact search of long codes, k = 10, the same ids as FAISS's",
        "index",
        "exact (512|1024|3072) bits, k = 10, .*",
        {
            "× IndexBinaryFlat": "ratio",
            "× numkong, distances alone": "over_numkong",
            "bits": "case",
            "codes": "rows",
            "batch": "batch",
            "queries/s": "queries_per_s",
            "FAISS's": "faiss_queries_per_s",
        },
        page="peers",
        note=(
            "numkong computes packed distances on all cores and selects nothing. `… index.py --only exact`"
        ),
    ),
    View(
        "Asymmetric search: logits against {rows:,} codes of 64 bits, the same scores as the exact peers",
        "index",
        "asymmetric 64 bits, (.*)",
        {
            "× the best exact peer": "ratio",
            "× numpy": "over_numpy",
            "× IndexFlatIP": "over_faiss",
            "× IndexPQ": "over_pq",
            "× IndexPQFastScan": "over_fast_scan",
            "its recall": "fast_scan_recall",
            "case": "case",
            "queries/s": "queries_per_s",
            "ms per batch": "latency_ms",
        },
        page="peers",
        note=(
            "numpy: matrix product of 32 queries and argpartition. IndexFlatIP has ±1 as floats. IndexPQ "
            "has all patterns of 8 signs as centroids, so its sums are exact; IndexPQFastScan, of 4 "
            "signs, rounds them to bytes and is approximate. `… index.py --only asymmetric`"
        ),
    ),
    View(
        "Search among the rows of {rows:,} that meet a condition, 64 bits, k = 10, the same ids as FAISS's",
        "index",
        "filtered to (.*), 64 bits, k = 10, batch .*",
        {
            "× FAISS": "ratio",
            "× LanceDB": "over_lancedb",
            "× pgvector": "over_pgvector",
            "rows that meet it": "case",
            "batch": "batch",
            "queries/s": "queries_per_s",
            "× FAISS, repeated": "repeated_ratio",
            "queries/s, repeated": "repeated_queries_per_s",
            "`ivf`": "ivf_queries_per_s",
            "its recall": "ivf_recall",
        },
        page="peers",
        note=(
            "A new condition: ours evaluates it, FAISS's IndexBinaryFlat gets an IDSelectorBitmap made for "
            "the search, LanceDB (prefilter) and pgvector, exact and one query at a time, use their index "
            "on the column. A repeated one: ours has kept its rows, FAISS its bitmap; `ivf` is of repeated "
            "ones. `… index.py --only filtered`"
        ),
    ),
    View(
        "The 10 nearest of {rows:,} vectors by cosine: codes, then vectors",
        "index",
        "rescored .* values, (.*), batch .*",
        {
            "× qdrant-edge": "over_qdrant",
            "× IndexFlatIP": "ratio",
            "candidates per result": "case",
            "batch": "batch",
            "queries/s": "queries_per_s",
            "recall": "recall",
            "qdrant-edge's queries/s": "qdrant_queries_per_s",
            "its recall": "qdrant_recall",
            "IndexFlatIP's queries/s": "faiss_queries_per_s",
        },
        page="peers",
        note=(
            "256 values and their 256 signs, ours as float16 on disk. qdrant-edge: binary quantisation in"
            " memory, a graph, rescoring with the same oversampling. IndexFlatIP: float32, exact. `… "
            "index.py --only rescored`"
        ),
    ),
    View(
        "Memory of an engine after 1,024 searches",
        "index",
        "memory, (.*)",
        {"rows and engine": "case", "MB": "memory_mb"},
        needs="memory_mb",
        page="peers",
        note="What a process grows by, mapped files included. `… index.py --only memory,rescored`",
    ),
    View(
        "Other kinds of index, 64 bits, batches of 1,024",
        "index",
        "((?:ivf|multihash|hnsw).*), batch 1024",
        {
            "× IndexBinaryFlat": "ratio",
            "× FAISS's IVF": "of_faiss_ivf",
            "× our flat": "over_our_flat",
            "kind": "case",
            "codes": "rows",
            "recall": "recall",
            "queries/s": "queries_per_s",
        },
        page="peers",
        note=(
            "FAISS's IVF has the same lists and nprobe; recall counts hits that are no farther than the "
            "true k-th. `… index.py --only approximate`"
        ),
    ),
    View(
        "An index in two slices (Ray actors) of one core each",
        "index",
        "2 slices of one core each, (.*)",
        {
            "× one index on two cores": "ratio_to_one_index_on_two_cores",
            "case": "case",
            "queries/s": "queries_per_s",
            "ms more than one index": "asking_slices_ms",
        },
    ),
    View(
        "Evaluation against {rows:,} codes of 64 bits",
        "evaluate",
        "(.*against.*)",
        {
            "×": "ratio",
            "what, against what": "case",
            "ours, 10⁹ pairs/s": "ours_gpairs_s",
            "ours, ms per query": "ours_ms_a_query",
            "theirs": "usual_ms_a_query",
        },
    ),
    View(
        "All pairs of near-duplicates among {rows:,} codes of 64 bits; FAISS's times are extrapolated",
        "dedup",
        "all pairs within (.*)",
        {
            "× IndexBinaryFlat": "ratio",
            "× IndexBinaryMultiHash": "over_multihash",
            "within": "case",
            "pairs": "pairs",
            "seconds": "seconds",
            "FAISS flat, s": "faiss_flat_s",
        },
        page="peers",
        note=(
            "`IndexBinaryMultiHash` with 4 x 16 bits and as few flips as are exact. `python "
            "tests/bench/dedup.py --only join`"
        ),
    ),
    View(
        "Clusters of near-duplicates among {rows:,} codes of 64 bits, beside Lance's",
        "dedup",
        "clusters beside Lance, (.*)",
        {
            "× Lance": "ratio",
            "within": "case",
            "clusters": "clusters",
            "processor s": "cpu_s",
            "Lance's": "lance_cpu_s",
            "same sizes": "same_sizes",
        },
        needs="ratio",
        page="peers",
        note="Its `hamming_clustering_for_sample` compares all pairs. `… dedup.py --only lance`",
    ),
    View(
        "All pairs of near-duplicates among {rows:,} codes of 64 bits, in one process",
        "dedup",
        "many codes, (.*)",
        {"within": "case", "pairs": "pairs", "seconds": "seconds", "peak MB": "peak_mb"},
    ),
    View(
        "Every metric of {queries:,} queries against {rows:,} codes, all of it in one process",
        "evaluate",
        "every metric, full scale, (.*)",
        {"case": "case", "MAP@": "k", "seconds": "seconds", "peak MB, the data included": "peak_mb"},
    ),
    View(
        "Encoding pictures of 500 × 375, decoded and through the network",
        "encoding",
        "pipeline",
        {
            "× a tight loop without Ray": "ratio_to_tight_loop",
            "× a DataLoader loop": "ratio_to_data_loader",
            "× Daft": "ratio_to_daft",
            "network": "backbone",
            "images/s": "rate",
            "and with start-up": "rate_with_start",
        },
        needs="backbone",
    ),
    View(
        "Pictures of 500 × 375 per second on one core and on two, through {backbone}",
        "encoding",
        "one core and two, (.*)",
        {
            "by": "case",
            "decoding alone, 1 core": "decode_1",
            "2 cores": "decode_2",
            "the whole way to codes, 1 core": "whole_1",
            "on 2 cores": "whole_2",
        },
    ),
    View(
        "Encoding vectors",
        "encoding",
        "pipeline",
        {
            "× a bare loop": "ratio_to_bare_loop",
            "dimensions": "n_features",
            "rows/s": "rate",
            "and with start-up": "rate_with_start",
        },
        needs="n_features",
    ),
    View(
        "Peak memory (PSS) of an encode job and its Ray",
        "encoding_memory",
        "(.*)",
        {"× that of a tenth of the rows": "ratio", "what": "case", "rows": "rows", "peak MB": "peak_pss_mb"},
    ),
    View(
        "Training",
        "training",
        "(.*)",
        {
            "× a plain torch loop": "ratio",
            "case": "case",
            "rows/s": "rows_per_s",
            "the loop's": "peer_rows_per_s",
            "ms more per step": "overhead_ms",
        },
    ),
    View(
        "Fitting the baselines, 10,000 rows of 4,096 dimensions, 64 bits",
        "baselines",
        r"fit (\S+) .*",
        {
            "× faiss.ITQTransform": "ratio",
            "method": "case",
            "seconds": "fit_s",
            "encodes, rows/s": "encode_rows_per_s",
        },
        page="peers",
        note="`python tests/bench/baselines.py`",
    ),
    View(
        "Serving 1,281,167 codes of 64 bits, k = {k}",
        "serving",
        "(json, one code|arrow.*)",
        {
            "× the bare app": "ratio_of_bare_app",
            "× the bare index": "ratio_of_bare_index",
            "server": "server",
            "connections": "connections",
            "requests": "case",
            "requests/s": "requests_per_s",
            "queries/s": "queries_per_s",
            "p50 ms": "p50_ms",
            "p99 ms": "p99_ms",
            "errors": "errors",
            "wrong answers": "wrong_answers",
        },
        page="peers",
        note=(
            "wrk on the same cores; the bare app is fifteen lines of FastAPI around the same index. "
            "`python tests/bench/serving.py`"
        ),
    ),
    View(
        "Peers of the server with their own clients, the same codes, k = {k}",
        "serving",
        "peer, one code",
        {
            "peer": "server",
            "connections": "connections",
            "requests/s": "requests_per_s",
            "p50 ms": "p50_ms",
            "p99 ms": "p99_ms",
            "recall": "recall",
        },
        page="peers",
        note=(
            "Connections are threads; pgvector over its socket, the others in the asking process. Recall "
            "is by distance. `… serving.py --only peers`"
        ),
    ),
    View(
        "A list of {rows:,} lines into a manifest",
        "manifest",
        "(.*)",
        {
            "× the time of reading the file from disk": "times_reading_from_disk",
            "what": "case",
            "label columns": "label_columns",
            "seconds": "seconds",
            "peak MB": "peak_mb",
        },
    ),
)

ONE_CODE = "json, one code"
OF_PEER = "peer, one code"
FIGURES = {  # name between the marks in a document, <!-- =NAME -->…<!-- / --> → what stands there
    "exact": Figure("index", "exact 64 bits, .*", "ratio"),
    "exact-usearch": Figure("index", "exact 64 bits, .*", "over_usearch"),
    "exact-long-single": Figure("index", "exact (?:512|1024|3072) bits, k = 10, batch 1", "ratio"),
    "ivf": Figure("index", "ivf .*", "of_faiss_ivf"),
    "pgvector-filtered": Figure(
        "index", "filtered to 0.01%, 64 bits, k = 10, batch 1", "over_pgvector", inverse=True
    ),
    "qdrant-rescored": Figure("index", "rescored .*, batch 1", "over_qdrant", inverse=True),
    "lance-clusters": Figure("dedup", "clusters beside Lance, .*", "ratio"),
    "served": Figure("serving", ONE_CODE, "requests_per_s", {"server": "hashnet serve", "connections": 1}),
    "pgvector": Figure("serving", OF_PEER, "requests_per_s", {"server": "pgvector", "connections": 1}),
    "lancedb": Figure("serving", OF_PEER, "requests_per_s", {"server": "LanceDB flat", "connections": 1}),
    "lancedb-ivf": Figure(
        "serving", OF_PEER, "requests_per_s", {"server": "LanceDB IVF_FLAT", "connections": 1}
    ),
    "qdrant": Figure("serving", OF_PEER, "requests_per_s", {"server": "qdrant-edge", "connections": 1}),
    "qdrant-recall": Figure("serving", OF_PEER, "recall", {"server": "qdrant-edge", "connections": 1}),
    "arrow": Figure("serving", "arrow, 1024 codes", "ratio_of_bare_index", {"server": "hashnet serve"}),
    "arrow-ray": Figure("serving", "arrow, 1024 codes", "ratio_of_bare_index", {"server": "ray serve"}),
}
SERVERS = {  # as a row has it → as docs/serve.md does
    "bare app": "a bare uvicorn app around the same index",
    "hashnet serve": "`hashnet serve`",
    "ray serve": "Ray Serve",
}


def figure(wanted: Figure, rows: list[Row]) -> str | None:
    """The figure as a document has it; None where no row was measured."""
    values = [
        1 / row[wanted.field] if wanted.inverse else row[wanted.field]
        for row in rows
        if row["bench"] == wanted.bench
        and re.fullmatch(wanted.cases, row["case"])
        and row.get(wanted.field)
        and wanted.where.items() <= row.items()
    ]
    return _span(values) if values else None


def put_figures(path: Path, rows: list[Row]) -> None:
    """Replaces the figures between ``<!-- =NAME -->`` and ``<!-- / -->``; those not measured stay."""

    def drawn(found: re.Match) -> str:
        if found["name"] not in FIGURES:
            raise SystemExit(f"{path.name} names the figure {found['name']}; there are {', '.join(FIGURES)}")
        return f"{found['mark']}{figure(FIGURES[found['name']], rows) or found['old']}<!-- / -->"

    text = path.read_text()
    path.write_text(re.sub(r"(?P<mark><!-- =(?P<name>[\w-]+) -->)(?P<old>.*?)<!-- / -->", drawn, text))


def served(rows: list[Row]) -> str:
    """Markdown: a line per server, a column per number of connections; empty where none was measured."""
    cells = {
        (row["server"], row["connections"]): row
        for row in rows
        if row["bench"] == "serving" and row["case"] == ONE_CODE
    }
    counts = sorted({connections for _, connections in cells})
    if not counts:
        return ""
    heads = [f"{n} connection{'s' if n > 1 else ''}" for n in counts]
    lines = [f"| requests/s, p50, p99 | {' | '.join(heads)} |", "|---" * (len(counts) + 1) + "|"]
    for server, name in SERVERS.items():
        shown = [
            f"{number(row['requests_per_s'])}/s, {number(row['p50_ms'])} ms, {number(row['p99_ms'])} ms"
            for row in (cells[server, n] for n in counts)
        ]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    for server in ("hashnet serve", "ray serve"):
        shown = [number(cells[server, n]["ratio_of_bare_app"]) for n in counts]
        lines.append(f"| {SERVERS[server]} / bare app | {' | '.join(shown)} |")
    return "\n".join(lines)


def summary(rows: list[Row]) -> str:
    """Markdown: one short table, a line for each thing that is compared."""
    lines = [
        f"Measured on {_machine(rows)}, with `make bench`; searches: 1,281,167 codes in 1,000 clusters. "
        "Above 1 ours is faster; both sides were measured in the same run.",
        "",
        "| × | against | what | ours |",
        "|---|---|---|---|",
    ]
    for line in SUMMARY:
        shown = [
            row
            for row in rows
            if row["bench"] == line.bench and re.fullmatch(line.cases, row["case"]) and line.ratio in row
        ]
        if shown:
            ratio, figure = (_span([row[field] for row in shown]) for field in (line.ratio, line.figure))
            lines.append(f"| {ratio} | {line.peer} | {line.what} | {figure} {line.unit} |")
    memory = [row["ratio"] for row in rows if row["bench"] == "encoding_memory" and "ratio" in row]
    if memory:
        lines += ["", f"Encoding ten times the rows takes {_span(memory)} times the memory."]
    return "\n".join(lines)


def _span(values: list[float]) -> str:
    least, most = number(min(values)), number(max(values))
    return least if least == most else f"{least} to {most}"


def _machine(rows: list[Row]) -> str:
    return " and ".join(sorted({row["machine"] for row in rows}))


def tables(rows: list[Row], page: str) -> str:
    """Markdown: the tables of a page's views that have rows, and on the peers' page their versions."""
    parts = [
        f"Measured on {_machine(rows)}, with `make bench`. `.bench/rows.jsonl` then has every row, "
        "these and those of other code lengths."
    ]
    versions = {f"{name} {number}" for row in rows for name, number in row.get("versions", {}).items()}
    if page == "peers" and versions:
        parts.append(f"Versions: {', '.join(sorted(versions))}.")
    for view in VIEWS:
        parts += _table(view, rows) if view.page == page else []
    return "\n\n".join(parts)


def _table(view: View, rows: list[Row]) -> list[str]:
    """The table, or nothing where no row is of this view; columns that all rows lack are left out."""
    shown = []
    for row in rows:
        match = re.fullmatch(view.cases, row.get("case", ""))
        if match and row["bench"] == view.bench and view.needs in row:
            shown.append(row | {"case": match[match.lastindex or 0]})
    if not shown:
        return []
    columns = {head: field for head, field in view.columns.items() if any(field in row for row in shown)}
    lines = [f"**{view.title.format(**shown[0])}**", "", *([view.note, ""] if view.note else [])]
    lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(number(row.get(field)) for field in columns.values())} |" for row in shown]
    return ["\n".join(lines)]


def number(value: Any) -> str:
    """Three digits of a float, thousands apart; a dash for what there is not."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def put_between(path: Path, begin: str, end: str, text: str) -> None:
    """Replaces what stands between two marks of a file."""
    before, found, rest = path.read_text().partition(begin)
    _, ending, after = rest.partition(end)
    if not found or not ending:
        raise SystemExit(f"{path.name} lacks the marks {begin} and {end}")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")
