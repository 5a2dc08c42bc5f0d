"""write_trec: a ranking and its relevance judgements as text files that trec_eval and ir_measures read.

    run.txt      query Q0 item rank score tag       the first k items of each query, best first
    qrels.txt    query 0 item 1                     every relevant item of each query

Programs that read a run order it by score alone and break ties as they like, so the score is the negative
rank: every program sees the order that ``hashnet.evaluate`` measures, ties included.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hashnet.io import storage
from hashnet.kernels import HASH_BITS, hash_bits
from hashnet.labels import LabelSets
from hashnet.metrics.evaluation import check_inputs, check_labels, ids_or_places
from hashnet.metrics.measures import query_block_size
from hashnet.metrics.shard import Shard, tie_hash

RUN_FILE, QRELS_FILE = "run.txt", "qrels.txt"


def write_trec(
    folder: str,
    query_codes: Any,
    query_labels: Any,
    database_codes: Any,
    database_labels: Any,
    k: int | None = 1000,
    *,
    query_ids: Any = None,
    database_ids: Any = None,
    seed: int = 0,
) -> None:
    """Writes ``run.txt`` and ``qrels.txt`` into ``folder``, a path or URI; arguments as of ``evaluate``.

    Ids default to 0 … n - 1. Queries are written in blocks: memory holds the database and one block.
    """
    query_codes, database_codes, k = check_inputs(
        query_codes, query_labels, database_codes, database_labels, k
    )
    queries, database = check_labels(query_labels, database_labels)
    names = ids_or_places(query_ids, len(query_codes), "query ids")
    ids = ids_or_places(database_ids, len(database_codes), "database ids")
    shard = Shard.build(database_codes, database, ids, seed)
    n_hash = hash_bits(database_codes.shape[1] * 8)
    hashes = tie_hash(ids, seed) >> np.uint64(HASH_BITS - n_hash)
    by_hash = np.argsort(hashes)
    members = _members(database)
    step = query_block_size(k)
    with (
        storage.open_output(storage.join(folder, RUN_FILE)) as run,
        storage.open_output(storage.join(folder, QRELS_FILE)) as qrels,
    ):
        for first in range(0, len(names), step):
            last = min(first + step, len(names))
            labels = queries.rows(first, last)
            keys = shard.count(query_codes[first:last], labels, k).keys
            # A key is distance | hash of the row id | relevant: the hash leads back to the row.
            found = (keys >> np.uint64(1)) & np.uint64(2**n_hash - 1)
            ranked = ids[by_hash[np.searchsorted(hashes, found, sorter=by_hash)]]  # (last - first, k)
            for place, name in enumerate(names[first:last].tolist()):
                items = enumerate(ranked[place].tolist(), start=1)
                run.write("".join(f"{name} Q0 {item} {r} {-r} hashnet\n" for r, item in items).encode())
                classes = labels.classes[labels.start[place] : labels.start[place + 1]]
                relevant = ids[np.unique(np.concatenate([members[c] for c in classes]))].tolist()
                qrels.write("".join(f"{name} 0 {item} 1\n" for item in relevant).encode())


def _members(labels: LabelSets) -> list[np.ndarray]:
    """The rows that carry each class, int64 arrays in ascending order."""
    rows = np.repeat(np.arange(len(labels)), labels.per_row)
    order = np.argsort(labels.classes, kind="stable")
    ends = np.cumsum(np.bincount(labels.classes, minlength=labels.n_classes))[:-1]
    return np.split(rows[order], ends)
