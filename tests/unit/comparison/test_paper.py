import pytest

from hashnet.comparison.methods import TABLE_METHODS
from hashnet.comparison.paper import BITS, PAPER_K, reported_map


@pytest.mark.parametrize("dataset", PAPER_K)
@pytest.mark.parametrize("table", [1, 3])
def test_every_number_is_there(table, dataset):
    for method in TABLE_METHODS[table]:
        for n_bits in BITS:
            assert 0 < reported_map(table, method, dataset, n_bits) < 1


def test_some_numbers_by_hand():
    assert reported_map(1, "hashnet", "imagenet100", 16) == 0.5059
    assert reported_map(1, "lsh", "coco", 64) == 0.5849
    assert reported_map(2, "dhn", "imagenet100", 64) == 0.5342
    assert reported_map(3, "hashnet-sgn", "nuswide", 32) == 0.6770


@pytest.mark.parametrize(
    ("table", "method", "dataset", "n_bits"),
    [
        (1, "hashnet", None, 16),
        (1, "hashnet", "digits", 16),
        (1, "hashnet", "coco", 24),
        (2, "itq", "coco", 16),
    ],
)
def test_nothing_is_made_up(table, method, dataset, n_bits):
    assert reported_map(table, method, dataset, n_bits) is None
