"""A machine that holds a slice is lost: the slice is rebuilt on another one, results stay complete."""

import subprocess
import textwrap

import numpy as np
import pytest

from hashnet.store.code_store import write_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SEARCHING = textwrap.dedent(
    """
    import sys
    import numpy as np
    from cluster.serve import ShardedIndex
    from hashnet import BinaryIndex, CodeStore, errors

    store = CodeStore.open(sys.argv[1])
    queries = store.codes()[:20]
    expected = BinaryIndex.build(store).search(queries, 30)
    with ShardedIndex(store, 2, num_cpus=1) as index:
        assert index.search(queries, 30) == expected
        print("READY", flush=True)
        assert sys.stdin.readline() == "node killed\\n"
        try:
            whole = index.search(queries, 30, on_missing="raise") == expected
            print("TOLD" if whole else "WRONG", flush=True)
        except errors.ClusterError as error:
            print("TOLD", error, flush=True)
        try:
            index.search(queries, 30, timeout_s=3)
            print("NOT MISSED", flush=True)
        except errors.ClusterError as error:
            print("MISSED", error, flush=True)
        assert sys.stdin.readline() == "node added\\n"
        print("WHOLE" if index.search(queries, 30, timeout_s=120) == expected else "WRONG", flush=True)
    """
)


def test_a_lost_node(new_cluster, python, repo, tmp_path):
    rng = np.random.default_rng(0)
    write_store(str(tmp_path / "codes"), rng.integers(0, 256, (5000, 8), dtype=np.uint8), rows_per_shard=500)
    cluster = new_cluster()
    cluster.add_node("head", cpus=0)
    cluster.add_node("one", cpus=1)
    cluster.add_node("two", cpus=1)
    env = cluster.env | {"RAY_ADDRESS": cluster.address, "PYTHONPATH": str(repo)}
    driver = subprocess.Popen(
        [python, "-c", SEARCHING, str(tmp_path / "codes")],
        cwd=repo,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def answer(*words):
        for line in driver.stdout:
            if line.startswith(("READY", "TOLD", "MISSED", "NOT MISSED", "WHOLE", "WRONG")):
                assert line.startswith(words), line
                return line
        raise AssertionError(f"the driver ended before it said {words}")

    try:
        answer("READY")
        cluster.kill_node("two")
        print("node killed", file=driver.stdin, flush=True)
        answer("TOLD")
        assert "slice" in answer("MISSED")
        cluster.add_node("three", cpus=1)
        print("node added", file=driver.stdin, flush=True)
        answer("WHOLE")
        assert driver.wait(60) == 0
    finally:
        driver.kill()
        driver.wait()
