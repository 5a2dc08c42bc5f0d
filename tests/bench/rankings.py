"""MAP and neighbour recall of four rankings of the same items: Hamming, asymmetric, rescored, float.

    python tests/bench/rankings.py FEATURES.npz [--bits 16,32,48,64] [--k 5000] [--oversample 1,4,16]

The file has train_, query_ and database_ features (n, d) and labels (multi-hot), and may have a ``scale``
that the features are multiplied by. Prints one JSON row per code length: MAP@k with 95 % intervals, and the
share of a query's 10 nearest vectors (cosine, exact) among 10 rescored results.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hashnet import HashNet
from hashnet.labels import LabelSets
from hashnet.metrics import ScoreShard, evaluate
from hashnet.metrics.bootstrap import interval
from hashnet.metrics.measures import average_precision
from hashnet.store import Vectors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("features")
    parser.add_argument("--bits", default="16,32,48,64")
    parser.add_argument("--k", type=int, default=5000)
    parser.add_argument("--oversample", default="1,4,16")
    arguments = parser.parse_args()
    data = np.load(arguments.features, allow_pickle=False)
    scale = float(data["scale"]) if "scale" in data.files else 1.0
    sets = {
        name: data[f"{name}_features"].astype(np.float32) * scale for name in ("train", "query", "database")
    }
    labels = {name: data[f"{name}_labels"] for name in sets}
    vectors = Vectors.of_arrays(np.arange(len(sets["database"])), sets["database"])  # float16
    cosine = vectors.scores(
        sets["query"],
        np.broadcast_to(np.arange(len(vectors)), (len(sets["query"]), len(vectors))).copy(),
        "cosine",
    )
    shard = ScoreShard.build(np.zeros((len(vectors), 1), np.uint8), LabelSets.of(labels["database"]))
    place_of = np.empty(len(vectors), dtype=np.int64)  # the shard keeps its items by tie hash
    place_of[_order(shard)] = np.arange(len(vectors))
    nearest = np.argsort(-cosine, axis=1, kind="stable")[:, :10]
    for n_bits in map(int, arguments.bits.split(",")):
        model = HashNet(n_bits, seed=0).fit(sets["train"], labels["train"])
        logits, codes = model.logits(sets["query"]), model.encode(sets["database"])
        queries = model.encode(sets["query"])
        report = evaluate(
            queries, labels["query"], codes, labels["database"], arguments.k, query_logits=logits
        )
        distances = np.stack([np.bitwise_count(codes ^ code).sum(axis=1, dtype=np.int32) for code in queries])
        by_distance = np.argsort(distances, axis=1, kind="stable")
        row = {
            "n_bits": n_bits,
            "k": arguments.k,
            "hamming": [report.map, *report.map_interval],
            "asymmetric": [report.map_asymmetric, *(report.map_asymmetric_interval or ())],
        }
        wanted = LabelSets.of(labels["query"])
        for name, candidates in (("rescored", by_distance[:, : arguments.k]), ("float", by_distance)):
            scores = np.take_along_axis(cosine, candidates, axis=1)
            order = np.lexsort((place_of[candidates], -scores), axis=1)[:, : arguments.k]
            found = np.take_along_axis(candidates, order, axis=1)
            ranking = shard.ranking(place_of[found], np.take_along_axis(scores, order, axis=1), wanted)
            ap = average_precision(ranking.relevance(), np.zeros(len(found), np.int64), arguments.k)[0]
            row[name] = [float(ap.mean()), *interval(ap, 0)]
        for oversample in map(int, arguments.oversample.split(",")):
            candidates = by_distance[:, : 10 * oversample]
            hits = [len(np.intersect1d(a, b)) for a, b in zip(candidates, nearest, strict=True)]
            row[f"recall@10, oversample {oversample}"] = sum(hits) / nearest.size
        print(json.dumps({name: _rounded(value) for name, value in row.items()}), flush=True)


def _order(shard: ScoreShard) -> np.ndarray:
    """The row that lies at each place of a shard of rows 0 … n - 1."""
    from hashnet.metrics import tie_hash

    return np.argsort(tie_hash(np.arange(len(shard.hashes))))


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 4)
    return [round(float(v), 4) for v in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
