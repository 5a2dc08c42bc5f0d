"""How encoding grows with workers of one core each, and the rate of each of its stages on one core.

    python tests/bench/scaling.py [--images 2880] [--rounds 2] [--backbone alexnet] [--gpu-rate 2000]

``encode``: `ray job submit` of encode_db to a cluster with one and with two nodes, each bound to one
core, JPEGs of 500 x 375; the rate is taken between the first and the last shard's commit, so that
starting actors does not count. Its limit: one and two plain processes that decode and encode. Rounds of
one and two in turns; the ratio is that of the sums. The stages, in one process on one core:
fetch + decode, forward, gathering and committing codes, and what a chunk of pixels costs on its way from
one node to another. From these rates comes the estimate for 8, 32 and 128 GPU nodes, put between the
marks in docs/scaling.md. What a GPU does in a second cannot be measured without one: ``--gpu-rate``
assumes it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from encoding import N_FILES, make_pictures
from tables import put_between

from cluster.encode.pipeline import chunk_rows
from tests.support.local_cluster import LocalCluster, job_result

ENGINE = "cpu-eager"  # compiling would take longer than the runs
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
BEGIN, END = "<!-- scaling: begin -->", "<!-- scaling: end -->"
SHARD = 96  # pictures: three batches
NODES = (8, 32, 128)
CORES_A_GPU = 24  # ray_cluster.yaml: a CPU node of 16 cores for each GPU node of 8
IMAGENET = 1_281_167


def say(**row: Any) -> None:
    print(json.dumps({"bench": "scaling", **row}), flush=True)


def encode_rate(folder: Path, n_workers: int) -> float:
    """Pictures a second of ``n_workers`` nodes of one core, by when shards of one chunk were committed."""
    out = Path(tempfile.mkdtemp(dir=folder))
    with LocalCluster(object_store_mb=300) as cluster:
        cluster.add_node("head", cpus=0)
        for i in range(n_workers):
            cluster.add_node(f"node-{i + 1}", cpus=1, cores={i})
        words = [f"run={folder}", f"out={out}", "device=cpu", "compile=false", f"num_actors={n_workers}"]
        words += [f"rows_per_shard={SHARD}", f"chunk_rows={SHARD}"]
        done = cluster.submit(["python", "jobs/encode_db.py", *words], timeout_s=3600)
    if done.returncode:
        raise SystemExit(done.stdout)
    commits = sorted(path.stat().st_mtime for path in out.glob("codes-*.parquet"))
    return (len(commits) - 1) * SHARD / (commits[-1] - commits[0])


PLAIN = """
import os, sys, time
core, model, pictures, seconds = int(sys.argv[1]), sys.argv[2], sys.argv[3:-1], float(sys.argv[-1])
os.sched_setaffinity(0, {core})
import torch
from hashnet.encoding import Encoder
torch.set_num_threads(1)
encoder = Encoder.load(model, engine="cpu-eager")
files = [open(path, "rb").read() for path in pictures]
work = lambda: len(encoder.encode(encoder.preprocess.eval_many(files)[0]))
work()
print("ready", flush=True)
sys.stdin.readline()
done, started = 0, time.perf_counter()
while time.perf_counter() - started < seconds:
    done += work()
print(done / (time.perf_counter() - started))
"""


def plain_rate(folder: Path, n_processes: int) -> float:
    """The limit: processes of one core each that decode and encode in a loop, without Ray or files."""
    pictures = [str(folder / f"{i:04d}.jpg") for i in range(64)]
    command = [sys.executable, "-c", PLAIN]
    started = [
        subprocess.Popen(
            [*command, str(core), str(folder / "model"), *pictures, "20"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[2],
        )
        for core in range(n_processes)
    ]  # fmt: skip
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()  # ready
    for process in started:  # all loops run at the same time
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return sum(float(process.communicate()[0]) for process in started)


def per_second(work: Callable[[], int], at_least_s: float = 5.0) -> float:
    """Units per second: ``work`` does some and says how many."""
    work()
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < at_least_s:
        done += work()
    return done / (time.perf_counter() - started)


def stage_rates(folder: Path) -> dict[str, float]:
    """Decode, forward and commit, each alone on one core; what the estimate is made from."""
    import torch

    from hashnet.encoding.encoder import Encoder
    from hashnet.encoding.worker import ShardCollector, Target
    from hashnet.io.arrow import binary_column
    from hashnet.store import PlannedPart, StorePlan

    os.sched_setaffinity(0, {0})
    torch.set_num_threads(1)
    encoder = Encoder.load(str(folder / "model"), engine=ENGINE)
    assert encoder.preprocess is not None
    files = [(folder / f"{i:04d}.jpg").read_bytes() for i in range(64)]
    rates = {
        "decode": round(per_second(lambda: len(encoder.preprocess.eval_many(files)[0])), 1),
        "jpeg_bytes": round(float(np.mean([len(data) for data in files]))),
        "pixel_bytes": 3 * encoder.preprocess.crop**2,
        "chunk_rows": chunk_rows(encoder.preprocess, encoder.batch_rows),
    }
    sizes = {name: value for name, value in rates.items() if name != "decode"}
    say(case="decode, one core", images_per_s=rates["decode"], **sizes)
    pixels = encoder.preprocess.eval_many(files)[0]
    say(case="forward, one core", images_per_s=round(per_second(lambda: len(encoder.encode(pixels))), 1))

    rows = 1 << 20
    plan = StorePlan("codes", 64, 8192, (PlannedPart("part-00000", "ab", rows),), lineage={"engine": ENGINE})
    shards = list(plan.ranges())
    codes = binary_column(np.random.default_rng(0).integers(0, 256, (8192, 8), dtype=np.uint8))
    collector = ShardCollector([Target(tempfile.mkdtemp(dir=folder), plan)], shards)
    waiting = iter(shards)

    def commit() -> int:
        shard = next(waiting, None)
        if shard is None:
            return 0
        first = shard.start
        ids = np.arange(first, first + 8192)
        for start in range(0, 8192, 256):  # as chunks of 256 pictures arrive
            part = slice(start, start + 256)
            collector.add(
                pa.table(
                    {
                        "shard": [shard.name] * 256,
                        "row_id": ids[part],
                        "uri": [f"s3://bucket/train/n01440764/{i:09d}.jpg" for i in ids[part]],
                        "labels": pa.array([[int(i) % 1000] for i in ids[part]], pa.list_(pa.int32())),
                        "reason": pa.nulls(256, pa.string()),
                        "code": codes[part],
                    }
                )
            )
        return 8192

    rates["commit"] = round(per_second(commit, 3.0))
    say(case="gather and commit, one core", rows_per_s=rates["commit"])
    return rates


TRANSFER = """
import json, sys, time
import numpy as np
sys.path.insert(0, ".")
from cluster.runtime import capacity, connection
connection.connect()
import ray
workers = [n.id for n in capacity.nodes() if not n.is_head]
@ray.remote(num_cpus=0.1)
def make(n): return [ray.put(np.zeros(n, np.uint8)) for _ in range(8)]
@ray.remote(num_cpus=0.1)
def take(refs): return sum(ray.get(r).nbytes for r in refs)
at = lambda node: {"label_selector": {"ray.io/node-id": node}}
n = 32 << 20
ray.get(take.options(**at(workers[1])).remote(ray.get(make.options(**at(workers[0])).remote(n))))
refs = ray.get(make.options(**at(workers[0])).remote(n))
started = time.perf_counter()
total = ray.get(take.options(**at(workers[1])).remote(refs))
seconds = time.perf_counter() - started
@ray.remote(num_cpus=1)
def nothing(): return 0
ray.get([nothing.remote() for _ in range(100)])
begun = time.perf_counter()
ray.get([nothing.remote() for _ in range(2000)])
rate = 2000 / (time.perf_counter() - begun)
ray.shutdown()
print(json.dumps({"mb_per_s": round(total / seconds / 1e6), "tasks_per_s": round(rate)}))
"""


def transfer_rate() -> dict[str, float]:
    """Chunks of 32 MB from one node's object store to another's (loopback), and bare tasks per second."""
    with LocalCluster(object_store_mb=1000) as cluster:
        cluster.add_node("head", cpus=0)
        for i in range(2):
            cluster.add_node(f"node-{i + 1}", cpus=1, cores={i})
        code = cluster.folder / "code"
        code.mkdir()
        (code / "transfer.py").write_text(TRANSFER)
        shutil.copytree(Path(__file__).resolve().parents[2] / "cluster", code / "cluster")
        shutil.copytree(Path(__file__).resolve().parents[2] / "hashnet", code / "hashnet")
        done = cluster.submit(["python", "transfer.py"], working_dir=str(code), timeout_s=300)
    if done.returncode:
        raise SystemExit(done.stdout)
    found = job_result(done.stdout)
    rates = {name: found[name] for name in ("mb_per_s", "tasks_per_s")}
    say(case="node to node, one core each", **rates)
    return rates


def estimate(rates: dict[str, float], gpu_rate: float, n_gpus: int) -> dict[str, Any]:
    """What ``n_gpus`` nodes could do by stage, in pictures per second; the least of them is the limit."""
    stages = {
        "forward": n_gpus * gpu_rate,
        "decode": n_gpus * CORES_A_GPU * rates["decode"],
        "pixels between nodes": n_gpus * rates["mb_per_s"] * 1e6 / rates["pixel_bytes"],
        "scheduling": rates["tasks_per_s"] * rates["chunk_rows"] / 2,  # a chunk is decoded, then encoded
        "gather and commit": n_gpus * rates["commit"],  # one committer per node
    }
    limit = min(stages, key=lambda name: stages[name])
    rate = stages[limit]
    return {
        "n_gpus": n_gpus,
        "limit": limit,
        "images_per_s": round(rate),
        "imagenet_s": round(IMAGENET / rate),
        "read_mb_per_s": round(rate * rates["jpeg_bytes"] / 1e6),
        "object_store_mb_per_s": round(rate * rates["pixel_bytes"] / 1e6),
        "object_store_mb_per_s_a_gpu": round(rate * rates["pixel_bytes"] / 1e6 / n_gpus),
        **{f"could_{name.replace(' ', '_')}": round(value) for name, value in stages.items()},
    }


def table(rates: dict[str, float], gpu_rate: float, ratio: float, limit: float) -> str:
    """The estimate as Markdown, with what it was made from."""
    rows = [estimate(rates, gpu_rate, n) for n in NODES]
    lines = [
        f"Measured: two workers of one core each, on a machine that the head and the driver share with them, "
        f"encode {ratio:.2f} times as fast as one (two plain loops without Ray {limit:.2f} times); one core "
        f"decodes {rates['decode']:,.0f} pictures/s and gathers and commits {rates['commit']:,.0f} codes/s; "
        f"{rates['mb_per_s']:,.0f} MB/s go from one node's object store to another's (over loopback), "
        f"{rates['tasks_per_s']:,.0f} tasks/s are scheduled. "
        f"Assumed, not measured: a GPU encodes {gpu_rate:,.0f} pictures/s.",
        "",
        "| GPU nodes | pictures/s | limit | 1,281,167 pictures | read from storage | through object stores |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['n_gpus']} | {row['images_per_s']:,} | {row['limit']} | {row['imagenet_s']:,} s "
            f"| {row['read_mb_per_s']:,} MB/s | {row['object_store_mb_per_s']:,} MB/s, "
            f"{row['object_store_mb_per_s_a_gpu']:,} per GPU node |"
        )
    return "\n".join(lines)


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--images", type=int, default=2880)
    words.add_argument("--rounds", type=int, default=2)
    words.add_argument("--backbone", default="alexnet")
    words.add_argument("--gpu-rate", type=float, default=2000, help="pictures per second of one GPU, assumed")
    words.add_argument("--no-docs", action="store_true", help="leave docs/scaling.md as it is")
    given = words.parse_args()
    with tempfile.TemporaryDirectory(prefix="hn-scaling-") as place:
        folder = Path(place)
        make_pictures(folder, max(given.images, N_FILES), given.backbone, ENGINE)
        about = {"backbone": given.backbone, "engine": ENGINE, "images": given.images}
        found: dict[str, list[float]] = {"ours 1": [], "ours 2": [], "plain 1": [], "plain 2": []}
        for n in (1, 2) * given.rounds:  # one and two in turns: other load of the machine meets both
            found[f"ours {n}"].append(round(encode_rate(folder, n), 1))
            found[f"plain {n}"].append(round(plain_rate(folder, n), 1))
        for n in (1, 2):
            name = f"encode, {n} worker{'s' * (n > 1)} of one core"
            rates = {"images_per_s": found[f"ours {n}"], "plain_images_per_s": found[f"plain {n}"]}
            say(case=name, **rates, **about)
        ratio, limit = (sum(found[f"{who} 2"]) / sum(found[f"{who} 1"]) for who in ("ours", "plain"))
        say(case="encode, 2 workers against 1", ratio=round(ratio, 3), limit=round(limit, 3), **about)
        stages = transfer_rate() | stage_rates(folder)
    for n_gpus in NODES:
        about = {"assumed_gpu_images_per_s": given.gpu_rate}
        say(case=f"estimate for {n_gpus} GPU nodes", **about, **estimate(stages, given.gpu_rate, n_gpus))
    if not given.no_docs:
        put_between(GUIDE, BEGIN, END, table(stages, given.gpu_rate, ratio, limit))


if __name__ == "__main__":
    main()
