"""The dress rehearsal: 1,281,167 pictures of 32 px through the jobs, submitted to a cluster on loopback.

    python tests/bench/scale.py [--images 1281167] [--folder .bench/scale] [--nodes 2] [--no-docs]

Draws the pictures into tars once, trains a small network on some of them, then submits encode_db,
build_index and evaluate with `ray job submit` to Ray nodes of one core each. Prints one JSON row a
stage: seconds, and the peak of the summed proportional set size (PSS) of all of the cluster's
processes, drivers included, its object stores counted once. At the end every database row must be
in the codes exactly once. The rows also become the table between the marks in docs/scaling.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from tables import number, put_between

from tests.support.local_cluster import LocalCluster, follow, job_result

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
BEGIN, END = "<!-- scale: begin -->", "<!-- scale: end -->"
IMAGENET = 1_281_167  # pictures in the training set of ILSVRC 2012
N_QUERY = 1_000


class PeakMemory(threading.Thread):
    """The highest sum of PSS over all processes below ``pids``, sampled every two seconds."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(daemon=True)
        self.pids, self.peak, self._stop_it = pids, 0, threading.Event()

    def run(self) -> None:
        while not self._stop_it.wait(2.0):
            self.peak = max(self.peak, sum(map(_pss, _family(self.pids))))

    def stop(self) -> int:
        self._stop_it.set()
        self.join()
        return self.peak


def _family(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            found += [pid, *(child.pid for child in process.children(recursive=True))]
        except psutil.NoSuchProcess:
            continue
    return found


def _pss(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:")), 0)


def make_pictures(folder: Path, n_images: int) -> tuple[str, float]:
    """The manifest, drawn now or found; and the seconds drawing took."""
    from hashnet.data.sources import make_manifest

    manifest = folder / "manifest.parquet"
    started = time.monotonic()
    if not manifest.exists():
        shutil.rmtree(folder / "images", ignore_errors=True)
        make_manifest(
            "synthetic",
            str(manifest),
            n_images=n_images + N_QUERY,
            n_classes=100,
            side=32,
            store="tar",
            images=str(folder / "images"),
            n_query=N_QUERY,
            n_train=5_000,
        )
    return str(manifest), time.monotonic() - started


def check_exactly_once(run: str, n_images: int) -> dict[str, Any]:
    """Compares the ids in the codes with the database rows of the manifest."""
    import hashnet

    expected = hashnet.Manifest.open(f"{run}/manifest.parquet").row_ids("database")
    found = hashnet.CodeStore.open(f"{run}/codes").ids()
    assert len(expected) == n_images
    return {
        "database_rows": len(expected),
        "rows": len(found),
        "exactly_once": bool(np.array_equal(np.sort(found), np.sort(expected))),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rehearsal as Markdown."""
    check = rows[-1]
    lines = ["| stage | seconds | peak memory | result |", "|---|---|---|---|"]
    told = {
        "encode_db": ("rows", "bad_rows", "shards", "rows_per_s"),
        "build_index": ("rows",),
        "evaluate": ("n_queries", "map", "chance"),
    }
    for row in rows[:-1]:
        result = row.get("result", {})
        facts = ", ".join(f"{key} {number(result[key])}" for key in told.get(row["case"], ()))
        peak = f"{row['peak_pss_mb']:,} MB" if "peak_pss_mb" in row else ""
        lines.append(f"| {row['case']} | {row['seconds']:,.0f} | {peak} | {facts} |")
    once = "every row exactly once" if check["exactly_once"] else "NOT every row exactly once"
    lines += ["", f"{check['rows']:,} of {check['database_rows']:,} database rows are in the codes: {once}."]
    return "\n".join(lines)


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--images", type=int, default=IMAGENET)
    words.add_argument("--folder", type=Path, default=Path(".bench/scale"))
    words.add_argument("--nodes", type=int, default=2, help="Ray nodes of one core each, beside the head")
    words.add_argument("--no-docs", action="store_true", help="leave docs/scaling.md as it is")
    given = words.parse_args()
    folder = given.folder.resolve() / str(given.images)
    folder.mkdir(parents=True, exist_ok=True)
    run = str(folder / "run")
    shutil.rmtree(run, ignore_errors=True)
    rows = []

    def say(**row: Any) -> None:
        rows.append({"bench": "scale", "images": given.images, "nodes": given.nodes, **row})
        print(json.dumps(rows[-1]), flush=True)

    manifest, seconds = make_pictures(folder, given.images)
    say(case="draw pictures", seconds=round(seconds, 1))
    training = ["backbone=small_cnn", "resize=32", "crop=32", "first_epochs=2", "stage_epochs=1", "stages=3"]
    jobs = {
        "train": ["train.py", f"manifest={manifest}", "n_bits=64", "measure_rows=0", *training],
        "encode_db": ["encode_db.py"],
        "build_index": ["build_index.py", "kind=flat"],
        "evaluate": ["evaluate.py", "k=1000"],
    }
    with LocalCluster(object_store_mb=500) as cluster:
        cluster.add_node("head", cpus=0)
        for i in range(given.nodes):
            cluster.add_node(f"node-{i + 1}", cpus=1)
        for name, (script, *settings) in jobs.items():
            memory = PeakMemory([process.pid for process in cluster.nodes.values()])
            memory.start()
            started = time.monotonic()
            job = cluster.start_job(["python", f"jobs/{script}", f"run={run}", *settings])
            log = follow(job, sys.stderr)
            seconds = time.monotonic() - started
            if job.returncode != 0:
                raise SystemExit(f"{name} failed with exit code {job.returncode}")
            result = job_result(log)
            scalars = {key: value for key, value in result.items() if isinstance(value, (int, float, str))}
            say(case=name, seconds=round(seconds, 1), peak_pss_mb=memory.stop() >> 20, result=scalars)
    once = check_exactly_once(run, given.images)
    say(case="check", **once)
    (given.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if given.images == IMAGENET and not given.no_docs:
        put_between(GUIDE, BEGIN, END, table(rows))
    raise SystemExit(0 if once["exactly_once"] else 1)


if __name__ == "__main__":
    main()
