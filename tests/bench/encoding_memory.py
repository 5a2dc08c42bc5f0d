"""Memory and time of encoding at scale, the object store capped at 1 GB.

    python tests/bench/encoding_memory.py [--rows 1300000] [--images 100000]

Prints one JSON row per case: feature rows (64 values) and small pictures, a tenth of them and all of them,
each in a process of its own. ``peak_pss_mb`` is the peak of the summed proportional set size of that
process and all it starts: driver, Ray and workers. It must hardly grow with the database.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hashnet.data.sources import make_manifest
from hashnet.data.writer import SourceRows, write_manifest
from hashnet.models.bundle import save_bundle
from hashnet.models.hash_model import build_model

N_FEATURES, N_BITS = 64, 64


def make_features(folder: Path, rows: int) -> None:
    """Random feature rows in a manifest, and a random model for them."""

    def payload(start: int, stop: int) -> pa.Table:
        values = np.random.default_rng(start).normal(size=(stop - start, N_FEATURES)).astype(np.float32)
        column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), N_FEATURES)
        return pa.table({"uri": pa.nulls(stop - start, pa.string()), "feature": column})

    table = SourceRows(rows, payload, modality="features", n_features=N_FEATURES)
    write_manifest(str(folder / "manifest.parquet"), table, np.full(rows, 4, np.uint8))
    torch.manual_seed(0)
    save_bundle(str(folder / "model"), build_model("features", N_BITS, n_features=N_FEATURES))


def make_pictures(folder: Path, n_images: int) -> None:
    """Drawn pictures of 32 x 32 in tars, and a random model for them."""
    about = {"n_images": n_images, "side": 32, "n_query": 10, "n_train": 100, "store": "tar"}
    make_manifest("synthetic", str(folder / "manifest.parquet"), **about)
    torch.manual_seed(0)
    save_bundle(str(folder / "model"), build_model("small_cnn", 48))


def peak_memory(folder: Path) -> dict[str, float]:
    """Peak of the summed PSS of this process and everything below it while the job runs."""
    from cluster.encode.job import EncodeConfig, encode_database
    from cluster.runtime import connection

    peak, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.3):
            total = 0
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
                try:
                    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
                    total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
                except (OSError, StopIteration):  # it ended meanwhile
                    continue
            peak = max(peak, total)

    connection.connect(object_store_memory=1_000_000_000)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    started = time.perf_counter()
    result = encode_database(EncodeConfig(run=str(folder), device="cpu", compile=False))
    seconds = time.perf_counter() - started
    stop.set()
    watcher.join()
    return {"rows": result["rows"], "seconds": round(seconds, 1), "peak_pss_mb": round(peak / 1e6)}


def alone(folder: Path) -> dict[str, Any]:
    """The measurement in a process of its own."""
    words = [sys.executable, __file__, "--folder", str(folder)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_300_000)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        print(json.dumps(peak_memory(options.folder)))
        return
    with tempfile.TemporaryDirectory(prefix="hashnet-bench-") as name:
        for case, make, most in (
            ("features", make_features, options.rows),
            ("pictures", make_pictures, options.images),
        ):
            peaks = []
            for n in (most // 10, most):
                make(Path(name) / f"{case}-{n}", n)
                row = alone(Path(name) / f"{case}-{n}")
                peaks.append(row["peak_pss_mb"])
                if len(peaks) > 1:
                    row["ratio"] = round(peaks[1] / peaks[0], 3)
                print(json.dumps({"case": case, **row}), flush=True)


if __name__ == "__main__":
    main()
