"""A list file of 1,000,000 rows → a manifest: rate, peak memory, and the ratio to merely reading the file.

    python tests/bench/manifest.py [--rows 1000000] [--labels 80]

Prints one JSON row per case. Peers: reading the same bytes in the same pieces, from the disk and from
the file cache; pyarrow's CSV reader on the same file; and the usual loop, ``line.split()`` per row.
Each case runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hashnet.data.sources import make_manifest
from hashnet.data.sources.listfile import CHUNK, read_list
from hashnet.io import storage

BLOCK = 50_000  # lines written at once
CASES = ("read from disk", "read from cache", "pyarrow csv", "python loop", "parse", "manifest")


def write_list(path: Path, rows: int, labels: int, seed: int = 0) -> None:
    """``train/000/00000000.jpg 0 1 0 …`` with three labels a line on average, or one class id."""
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        for start in range(0, rows, BLOCK):
            n = min(BLOCK, rows - start)
            names = [b"train/%03d/%08d.jpg" % (i % 1000, i) for i in range(start, start + n)]
            if labels == 1:
                tails = [b" %d" % c for c in rng.integers(0, 1000, n)]
            else:
                digits = np.full((n, 2 * labels), 32, dtype=np.uint8)  # spaces, then a digit each
                digits[:, 1::2] = 48 + (rng.random((n, labels)) < 3 / labels)
                tails = [row.tobytes() for row in digits]
            file.write(b"".join(name + tail + b"\n" for name, tail in zip(names, tails, strict=True)))


def read_only(path: str) -> int:
    """The peer: the file's bytes, nothing else."""
    total = 0
    with storage.open_input(path) as source:
        while chunk := source.read(CHUNK):
            total += len(chunk)
    return total


def read_csv(path: str, labels: int) -> None:
    """A peer: pyarrow's reader into columns."""
    names = ["path", *(f"label{i}" for i in range(labels))]
    kinds = {name: pa.int16() for name in names[1:]}
    pyarrow.csv.read_csv(
        path,
        read_options=pyarrow.csv.ReadOptions(column_names=names),
        parse_options=pyarrow.csv.ParseOptions(delimiter=" "),
        convert_options=pyarrow.csv.ConvertOptions(column_types=kinds),
    )


def loop(path: str) -> None:
    """A peer: what most hashing code does."""
    with open(path) as file:
        lines = file.readlines()
    rows = [(line.split()[0], np.array([int(word) for word in line.split()[1:]])) for line in lines]
    assert len(rows) == len(lines)


def forget(path: str) -> None:
    """Drops the file from the file cache, so that the next read is one from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def one(case: str, path: str, folder: str, labels: int) -> dict:
    """Runs one case here and measures it; all but the first with the file in the cache."""
    size = read_only(path)
    if case == "read from disk":
        forget(path)
    started = time.perf_counter()
    if case.startswith("read"):
        read_only(path)
    elif case == "pyarrow csv":
        read_csv(path, labels)
    elif case == "python loop":
        loop(path)
    elif case == "parse":
        read_list(path)
    else:
        make_manifest("listfile", f"{folder}/manifest.parquet", path=path, n_query=5_000, n_train=10_000)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "peak_bytes": peak, "file_bytes": size}


def main() -> None:
    parser = argparse.ArgumentParser(description="1,000,000 list rows → a manifest")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--labels", type=int, nargs="*", default=[80, 1])
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        case, path, folder, labels = arguments.one
        print(json.dumps(one(case, path, folder, int(labels))))
        return
    for labels in arguments.labels:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "list.txt"
            write_list(path, arguments.rows, labels)
            seconds: dict[str, float] = {}
            for case in CASES:
                words = [sys.executable, __file__, "--one", case, str(path), folder, str(labels)]
                found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
                seconds[case] = found["seconds"]
                row = {
                    "bench": "manifest",
                    "case": case,
                    "rows": arguments.rows,
                    "label_columns": labels,
                    "file_mb": round(found["file_bytes"] / 1e6, 1),
                    "seconds": round(found["seconds"], 3),
                    "rows_per_s": round(arguments.rows / found["seconds"]),
                    "mb_per_s": round(found["file_bytes"] / 1e6 / found["seconds"]),
                    "times_reading_from_disk": round(found["seconds"] / seconds[CASES[0]], 2),
                    "times_reading_from_cache": round(
                        found["seconds"] / seconds.get(CASES[1], found["seconds"]), 1
                    ),
                    "peak_mb": round(found["peak_bytes"] / 1e6),
                    "under_2_gb": found["peak_bytes"] < 2e9,
                }
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
