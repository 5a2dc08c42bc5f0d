"""Connected components against scipy; links connect what pairs connect."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components as scipy_components

from hashnet.dedup.artefact import representatives
from hashnet.dedup.pairs import CodeJoin, CodeSet, connected_components


def scipy_clusters(a, b) -> dict[int, int]:
    """Id → smallest id of its component, by scipy."""
    ids = np.unique(np.concatenate([a, b]))
    rows, columns = np.searchsorted(ids, a), np.searchsorted(ids, b)
    graph = coo_array((np.ones(len(a)), (rows, columns)), shape=(len(ids), len(ids)))
    _, component = scipy_components(graph, directed=False)
    smallest = {c: int(ids[component == c].min()) for c in np.unique(component)}
    return {int(i): smallest[c] for i, c in zip(ids, component, strict=True)}


@pytest.mark.parametrize("n_edges", [1, 50, 300, 2000])
def test_components_are_scipy_s(n_edges):
    rng = np.random.default_rng(n_edges)
    a, b = rng.integers(0, 1000, (2, n_edges)) * 13 + 5
    ids, clusters = connected_components(a, b)
    assert dict(zip(ids.tolist(), clusters.tolist(), strict=True)) == scipy_clusters(a, b)


def test_nothing_has_no_component():
    ids, clusters = connected_components(np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert len(ids) == len(clusters) == 0


@pytest.mark.parametrize("radius", [0, 1, 3])
def test_links_connect_what_the_pairs_connect(clustered, slow, radius):
    codes = clustered(400, 32)
    items = CodeSet.of(codes)
    pairs = np.array([pair[:2] for pair in slow(codes, radius)]).T
    wanted = scipy_clusters(*pairs)
    a, b = CodeJoin.within(items, radius).links()
    assert len(a) == len(wanted) - len(set(wanted.values()))  # a forest
    ids, clusters = connected_components(a, b)
    assert dict(zip(ids.tolist(), clusters.tolist(), strict=True)) == wanted
    # two halves, joined with themselves and with each other
    halves = [CodeSet(items.ids[part], items.codes[part]) for part in (slice(0, 170), slice(170, 400))]
    joins = [CodeJoin.within(half, radius) for half in halves] + [CodeJoin.between(*halves, radius)]
    a, b = (np.concatenate(side) for side in zip(*(found.links() for found in joins), strict=True))
    ids, clusters = connected_components(a, b)
    assert dict(zip(ids.tolist(), clusters.tolist(), strict=True)) == wanted


def test_the_representative_has_most_and_then_the_smallest_id():
    ids, clusters = np.array([2, 3, 4, 8, 9]), np.array([2, 2, 2, 8, 8])
    assert representatives(ids, clusters, None).tolist() == [2, 2, 2, 8, 8]
    assert representatives(ids, clusters, np.array([1.0, 5, 5, np.nan, 0])).tolist() == [3, 3, 3, 9, 9]
