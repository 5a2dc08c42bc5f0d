"""``hashnet inspect PATH``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from hashnet.cli.inspection import inspect
from hashnet.io import Description

EXAMPLES = """
examples:
  hashnet inspect manifest.parquet
  hashnet inspect manifest.parquet --pictures 1000      reads and decodes the first 1,000 pictures, too
  hashnet inspect runs/demo                             every stage of a run
  hashnet inspect runs/demo/codes --json

The exit code is 0 when everything is sound, 1 when something is damaged, missing or does not fit."""


def configure(parser: argparse.ArgumentParser, words: list[str]) -> None:
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


def _lines(found: Description, indent: str = "") -> list[str]:
    lines = [f"{indent}{found.uri}: {found.kind}"]
    lines += _values(found.facts, indent + "  ")
    if found.lineage:
        lines.append(f"{indent}  made from")
        lines += _values(found.lineage, indent + "    ")
    for part in found.parts:
        lines += _lines(part, indent + "  ")
    lines += [f"{indent}  PROBLEM: {problem}" for problem in found.problems]
    if not indent:
        lines.append("sound" if found.sound else "NOT sound")
    return lines


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
