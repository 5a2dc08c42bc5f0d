"""Runs every benchmark and puts the figures into README.md and three pages of docs/.

    python tests/bench/run.py [NAME …] [--no-readme]

Each benchmark is a script beside this one that prints one JSON row per case. The rows are kept in
.bench/rows.jsonl (those of benchmarks that did not run this time, or failed, stay), and what stands between
the marks of the documents is made from them. The name `none` runs nothing and draws the tables again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hashnet.io import duration
from tests.bench.peers import versions
from tests.bench.tables import put_between, put_figures, served, summary, tables

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
ROWS = REPO / ".bench" / "rows.jsonl"
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
COMMANDS = {  # benchmark → what it is started with, in the order of the table
    "index": [[]],
    "evaluate": [[]],
    "dedup": [[]],
    "encoding": [
        ["pictures", "--backbone", "alexnet"],
        ["pictures", "--backbone", "lite0"],
        ["features"],
        ["cores"],
    ],
    "encoding_memory": [[]],
    "training": [[]],
    "baselines": [[]],
    "serving": [[]],
    "manifest": [[]],
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(COMMANDS), metavar="NAME")
    parser.add_argument("--no-readme", action="store_true", help="leave the documents as they are")
    given = parser.parse_args()
    given.names = [] if given.names == ["none"] else given.names
    unknown = [name for name in given.names if name not in COMMANDS]
    if unknown:
        parser.error(f"no benchmark called {', '.join(unknown)}; there are {', '.join(COMMANDS)}")
    kept, failed, about = _read(), [], {"machine": _machine(), "versions": versions()}
    for name in given.names:
        rows, codes, started = [], [], time.monotonic()
        for arguments in COMMANDS[name]:
            print(f"bench: {name} {' '.join(arguments)}".rstrip(), file=sys.stderr, flush=True)
            made, code = _run(name, arguments)
            rows += [row | about for row in made]
            codes.append(code)
        print(f"bench: {name} took {duration(time.monotonic() - started)}", file=sys.stderr, flush=True)
        if any(codes):  # what was measured before stays
            failed.append(f"{name} (exit codes {codes})")
            continue
        kept = [row for row in kept if row["bench"] != name] + rows
        _write(kept)
    if not given.no_readme:
        put_between(REPO / "README.md", BEGIN, END, summary(kept))
        for page in ("performance", "peers"):
            put_between(REPO / "docs" / f"{page}.md", BEGIN, END, tables(kept, page))
        if serving := served(kept):
            put_between(REPO / "docs" / "serve.md", BEGIN, END, serving)
        for name in ("README.md", "docs/serve.md"):
            put_figures(REPO / name, kept)
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


def _machine() -> str:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        text = info.read_text()
        models = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
        wide = (
            "AVX-512" if " avx512_vpopcntdq" in text else "AVX2" if " avx2" in text else ""
        )  # population counts
        name = " ".join(filter(None, [models[0] if models else name, f"({wide})" if wide else ""]))
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{os.cpu_count()} cores of {name}, {gpu}"


if __name__ == "__main__":
    sys.exit(main())
