"""The ten nearest items of the same queries by several methods."""

from __future__ import annotations

import numpy as np

from hashnet.comparison import TITLES
from hashnet.data import Manifest, ManifestArtefact
from hashnet.reports.comparison.results import Entries, Entry
from hashnet.reports.examples import Example, Neighbour, Pictures, make_examples, nearest_items, pick_queries

MOST_METHODS = 6  # those with the highest MAP


def side_by_side(entries: Entries, manifest: str | None, base_uri: str | None = None) -> list[Example]:
    """For the best, median and worst query each method's nearest items, at the longest code, first seed.

    Empty where the manifest is gone, or where an older version made the cells, without row ids.
    """
    if not entries or manifest is None or not ManifestArtefact(manifest).exists():
        return []
    opened = Manifest.open(manifest, verify=False)
    longest = max(n_bits for _, n_bits in entries)
    shown = sorted((e for (_, n), e in entries.items() if n == longest), key=Entry.mean, reverse=True)
    found = [(TITLES[e.method], e.reports[0], e.cells[0].codes()) for e in shown[:MOST_METHODS]]
    if any("database_ids" not in arrays for *_, arrays in found):
        return []
    query_ids = found[0][2]["query_ids"]  # methods that could not read a picture have fewer queries
    found = [one for one in found if np.array_equal(one[2]["query_ids"], query_ids)]
    picked = pick_queries(np.mean([report.ap for _, report, _ in found], axis=0), each=1)
    rows = [row for _, row in picked]
    labels = _labels(opened, "query", query_ids[rows])
    asked = [Neighbour(int(i), 0, True, own) for i, own in zip(query_ids[rows], labels, strict=True)]
    names = list(opened.class_names) if opened.class_names else None
    pictures = Pictures(opened, names, base_uri)
    by_method = []
    for title, report, arrays in found:
        ids = arrays["database_ids"]
        block = (ids, arrays["database"], _labels(opened, "database", ids))
        near = nearest_items([block], arrays["query"][rows], labels, report.seed)
        kinds = [(f"{title}, {kind}", float(report.ap[row])) for kind, row in picked]
        by_method.append(make_examples(kinds, asked, near, pictures))
    return [example for of_query in zip(*by_method, strict=True) for example in of_query]


def _labels(manifest: Manifest, split: str, ids: np.ndarray) -> np.ndarray:
    """Multi-hot labels of rows of a split, whose row ids ascend."""
    labels = manifest.labels(split)
    assert labels is not None
    return labels[np.searchsorted(manifest.row_ids(split), ids)]
