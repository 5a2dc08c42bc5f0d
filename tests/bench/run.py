"""Runs every benchmark and puts the performance table into the README.

    python tests/bench/run.py [NAME …] [--no-readme]

Each benchmark is a script beside this one that prints one JSON row a case. The rows are kept in
.bench/rows.jsonl (those of benchmarks that did not run this time stay), and the table between the two
marks in README.md is made from them: ratios first, then the case, then its figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
ROWS = REPO / ".bench" / "rows.jsonl"
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
COMMANDS = {  # benchmark → what it is started with, in the order of the table
    "index": [[]],
    "evaluate": [[]],
    "encoding": [
        ["pictures", "--backbone", "alexnet"],
        ["pictures", "--backbone", "lite0"],
        ["features"],
    ],
    "encoding_memory": [[]],
    "training": [[]],
    "baselines": [[]],
    "serving": [[]],
    "manifest": [[]],
}
PEERS = {  # what a row's ``ratio`` is to, where its case does not say it
    "index": ", IndexBinaryFlat",
    "training": ", plain torch loop",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(COMMANDS), metavar="NAME")
    parser.add_argument("--no-readme", action="store_true", help="leave the README as it is")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in COMMANDS]
    if unknown:
        parser.error(f"no benchmark called {', '.join(unknown)}; there are {', '.join(COMMANDS)}")
    kept = [row for row in _read() if row["bench"] not in given.names]
    failed = []
    for name in given.names:
        for arguments in COMMANDS[name]:
            print(f"bench: {name} {' '.join(arguments)}".rstrip(), file=sys.stderr, flush=True)
            rows, code = _run(name, arguments)
            kept += rows
            if code:
                failed.append(f"{name} {' '.join(arguments)} (exit code {code})")
        _write(kept)
    if not given.no_readme:
        put_between(REPO / "README.md", BEGIN, END, table(kept))
    for line in failed:
        print(f"bench: failed: {line}", file=sys.stderr)
    return 1 if failed else 0


def _run(name: str, arguments: list[str]) -> tuple[list[dict[str, Any]], int]:
    """The rows a benchmark printed, shown as they come, and its exit code."""
    rows = []
    command = [sys.executable, str(HERE / f"{name}.py"), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPO) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                rows.append({"bench": name, **json.loads(line)})
    return rows, process.returncode


def _read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def _write(rows: list[dict[str, Any]]) -> None:
    ROWS.parent.mkdir(exist_ok=True)
    order = list(COMMANDS)
    rows.sort(key=lambda row: order.index(row["bench"]))
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one line a row that is shown, ratios first."""
    lines = [
        f"Measured on {_machine()} with `make bench`. A ratio is our rate over the peer's in the same run.",
        "Other code lengths than 64 bits and the peers' own rows are left out; "
        "`make bench` writes all of them to `.bench/rows.jsonl`.",
        "",
        "| ratio | benchmark, peer | case | figures |",
        "|---|---|---|---|",
    ]
    for row in filter(_shown, rows):
        ratios = _ratios(row)
        rest = {
            n: v for n, v in row.items() if n not in ratios and n not in ("bench", "case") and v is not None
        }
        shown = "<br>".join(f"{_number(value)}{_to(name)}" for name, value in ratios.items())
        figures = ", ".join(f"{name.replace('_', ' ')} {_number(value)}" for name, value in rest.items())
        where = row["bench"] + (PEERS.get(row["bench"], "") if "ratio" in ratios else "")
        lines.append(f"| {shown or '–'} | {where} | {row.get('case', '')} | {figures} |")
    return "\n".join(lines)


def _ratios(row: dict[str, Any]) -> dict[str, float]:
    numbers = {name: value for name, value in row.items() if isinstance(value, (int, float))}
    return {name: value for name, value in numbers.items() if name.startswith("ratio")}


def _shown(row: dict[str, Any]) -> bool:
    """Rows with a ratio or a peak of memory, and of the many code lengths one."""
    other_length = re.match(r"exact (?!64 bits)", row.get("case", ""))
    return not other_length and bool(_ratios(row) or any(name.startswith("peak") for name in row))


def _to(name: str) -> str:
    return " " + name.removeprefix("ratio_").replace("_", " ") if name != "ratio" else ""


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _machine() -> str:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        name = models[0] if models else name
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{os.cpu_count()} cores of {name}, {gpu}"


def put_between(path: Path, begin: str, end: str, text: str) -> None:
    """Replaces what stands between two marks of a file."""
    before, found, rest = path.read_text().partition(begin)
    _, ending, after = rest.partition(end)
    if not found or not ending:
        raise SystemExit(f"{path.name} lacks the marks {begin} and {end}")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


if __name__ == "__main__":
    sys.exit(main())
