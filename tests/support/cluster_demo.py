"""`make cluster-demo`: a real cluster of three Ray nodes on loopback, and four jobs submitted to it.

Starts a head without CPUs and two nodes with one CPU each, with token authentication on; submits
train, encode_db, build_index and evaluate one after another, just as the README prints them; takes
down what it started, also after Ctrl-C or a failure.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from hashnet.io import duration
from tests.support.local_cluster import LocalCluster, follow, job_result

NODES = {"head": {"cpus": 0}, "node-1": {"cpus": 1}, "node-2": {"cpus": 1}}


def jobs(run: str) -> dict[str, list[str]]:
    """The four commands of a run, in order."""
    return {
        "train": [
            *("python", "jobs/train.py", "--config", "jobs/configs/digits.yaml"),
            *(f"run={run}", "n_bits=48", "num_workers=2"),
        ],
        "encode_db": ["python", "jobs/encode_db.py", f"run={run}"],
        "build_index": ["python", "jobs/build_index.py", f"run={run}", "kind=flat"],
        "evaluate": ["python", "jobs/evaluate.py", f"run={run}", "k=1000"],
    }


def main(run: str) -> int:
    """0 when all four jobs succeeded, else the exit code of the first that did not."""
    rows = []
    try:
        with LocalCluster() as cluster:
            for name, options in NODES.items():
                cluster.add_node(name, **options)
                print(f"cluster-demo: {name} is up ({options['cpus']} CPUs)", flush=True)
            print(f"cluster-demo: dashboard at {cluster.env['RAY_API_SERVER_ADDRESS']}, token on", flush=True)
            for name, command in jobs(run).items():
                print(f"\n$ ray job submit --working-dir . -- {' '.join(command)}", flush=True)
                started = time.monotonic()
                process = cluster.start_job(command)
                log = follow(process)
                if process.returncode != 0:
                    print(f"cluster-demo: {name} failed with exit code {process.returncode}", file=sys.stderr)
                    return process.returncode
                rows.append((name, time.monotonic() - started, job_result(log)))
    except KeyboardInterrupt:
        print("\ncluster-demo: stopped; the cluster is down, the run goes on where it was next time")
        return 130
    print("\ncluster-demo: all four jobs succeeded, the cluster is down")
    for name, seconds, result in rows:
        shown = {key: value for key, value in result.items() if isinstance(value, (int, float, str))}
        facts = ", ".join(f"{key} {value}" for key, value in list(shown.items())[:6])
        print(f"  {name.ljust(12)}{duration(seconds).rjust(8)}  {facts}")
    print(f"  run: {run}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(str(Path(sys.argv[1]).resolve())))
