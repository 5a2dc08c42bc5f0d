"""A writer that is killed in every single write of the commit protocol: what a reader and the next run find.

Run as a script it is that experiment: each write of a story is once the last one of a process of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from hashnet import CodeStore
from hashnet.errors import FormatError
from hashnet.io import storage
from hashnet.io.arrow import binary_column
from hashnet.store import (
    PlannedPart,
    StorePlan,
    StoreWriter,
    read_plan,
    read_quarantine,
    read_records,
    repair_range,
)

SHORT = StorePlan("codes", 16, rows_per_shard=4, parts=(PlannedPart("part-00000", "aa", 6),))
LONG = replace(SHORT, parts=(*SHORT.parts, PlannedPart("part-00001", "bb", 2)))
ROWS = {"codes-00000": [0, 1, 3], "codes-00001": [4, 5], "codes-00002": [6, 7]}  # row 2 is bad at first
LISTS = [[0, 1, 3, 4, 5], [0, 1, 3, 4, 5, 6, 7], [0, 1, 3, 4, 5, 6, 7, 2]]  # what a reader may see, in turn


def rows_of(ids: list[int]) -> pa.Table:
    codes = binary_column(np.array([[i, 255 - i] for i in ids], np.uint8))
    uris = [f"{i}.jpg" for i in ids]
    return pa.table(
        {"row_id": ids, "uri": uris, "labels": pa.nulls(len(ids), pa.list_(pa.int32())), "code": codes}
    )


def story(folder: str) -> None:
    """Shards and a list; a part more and a longer list; a mended row and the last. Goes on where it is."""
    for plan in (SHORT, LONG):
        found = read_plan(folder)
        if found is not None and len(found.parts) > len(plan.parts):
            continue
        StoreWriter(folder, plan).begin()
        done = read_records(folder)
        for shard in plan.ranges():
            if shard.name not in done:
                bad = pa.table({"row_id": [2], "uri": ["2.jpg"], "reason": ["corrupt"]})
                ours = bad if shard.name == "codes-00000" else None
                StoreWriter(folder, plan).commit(shard, rows_of(ROWS[shard.name]), ours)
        StoreWriter(folder, plan).finish()
    if read_quarantine(folder, read_records(folder)).num_rows:
        StoreWriter(folder, LONG).commit(repair_range(LONG, 0, 1), rows_of([2]), repair=True)
        StoreWriter(folder, LONG).finish()


def die_at(step: int) -> None:
    """From here on this process dies by SIGKILL in its write number ``step``, half a file written."""
    left = itertools.count(step, -1)

    def write(uri: str, data: bytes) -> None:
        with storage.open_output(uri) as sink:
            sink.write(data[: len(data) // 2])
            sink.flush()
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            sink.write(data[len(data) // 2 :])

    storage.write_bytes = write


def look(folder: str) -> None:
    """What a reader finds is nothing, or one of the lists, and every shard it names is whole."""
    try:
        store = CodeStore.open(folder)
    except FormatError:
        return
    store.verify()
    ids = store.ids().tolist()
    assert ids in LISTS, ids
    assert store.codes()[:, 0].tolist() == ids


def in_child(*steps: Callable[[], None]) -> int:
    """The exit code of a process that takes these steps; minus the signal where one ended it."""
    child = os.fork()
    if child == 0:
        for step in steps:
            step()  # an exception ends in the traceback and code 1 of a script
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def experiment(base: Path) -> int:
    """How many writes the story has; each was once the last."""
    assert in_child(lambda: story(str(base / "whole"))) == 0
    wanted = files_of(base / "whole")
    for step in itertools.count():
        folder = str(base / f"killed-{step}")
        code = in_child(lambda step=step: die_at(step), lambda folder=folder: story(folder))
        if code == 0:
            return step
        assert code == -signal.SIGKILL
        again = in_child(lambda folder=folder: look(folder), lambda folder=folder: story(folder))
        assert again == 0, f"after step {step}"
        assert files_of(Path(folder)) == wanted, f"after step {step}"
    raise AssertionError("a story has an end")


def test_killed_in_every_write_a_reader_sees_a_whole_list_and_the_next_run_ends_the_same(tmp_path, python):
    done = subprocess.run([python, __file__, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # 17 files are written: 2 plans, 4 shards with a record each, 1 quarantine, 3 lists, 3 _SUCCESS
    assert json.loads(done.stdout) == 2 + 4 * 2 + 1 + 3 + 3


if __name__ == "__main__":
    storage._flush = lambda path: None  # what a killed process wrote is there; flushing is for power cuts
    rows_of([0])  # pyarrow's first table imports pandas: once here, not in every child
    print(json.dumps(experiment(Path(sys.argv[1]))))
