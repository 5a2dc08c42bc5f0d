import pytest

from hashnet.baselines import REGISTRY
from hashnet.comparison.methods import (
    BITS,
    DEEP,
    FULL_NAMES,
    GROUPS,
    PAPER_K,
    PQ,
    SHALLOW,
    TABLE_METHODS,
    TITLES,
    UNLABELLED,
    VECTOR_METHODS,
    candidates,
    expand_methods,
    reported_map,
)
from hashnet.errors import ConfigError
from hashnet.losses.methods import METHODS
from hashnet.training.train_config import KINDS, TrainConfig


def test_every_baseline_and_every_variant_has_its_place():
    assert {*SHALLOW, *VECTOR_METHODS} == {*set(REGISTRY) - set(DEEP), PQ}
    assert set(DEEP) == set(METHODS)
    assert set(TITLES) == {*SHALLOW, *VECTOR_METHODS, *DEEP}
    assert set(UNLABELLED) <= set(TITLES)


def test_every_title_is_spelled_out():
    assert list(FULL_NAMES) == list(TITLES)


def test_tables_name_known_methods_in_one_order():
    for names in TABLE_METHODS.values():
        assert list(names) == [name for name in TITLES if name in names]


def test_all_mistakes_in_names_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        expand_methods(["hashnett", "itq", "ithq"])
    assert len(error.value.mistakes) == 2
    assert "did you mean hashnet?" in error.value.mistakes[0]


def test_no_method_is_an_error():
    with pytest.raises(ConfigError, match="at least one"):
        expand_methods([])


def test_candidates_are_every_combination_and_fit_the_constructors():
    for name in SHALLOW:
        for settings in candidates(name):
            assert REGISTRY[name](16, **settings).params().items() >= settings.items()
    assert len(candidates("dnnh", (0.01, 0.02))) == 3 * 3
    assert {"unscaled_lr": 0.02, "margin": 4.0} in candidates("dnnh", (0.01, 0.02))


@pytest.mark.parametrize("kind", KINDS.values())
def test_the_default_rate_is_among_the_candidates_once(kind):
    for name in DEEP:
        rates = [settings.get("unscaled_lr") for settings in candidates(name, kind.lr_grid)]
        assert rates[0] is None
        assert len(set(rates)) == 1 + len(kind.lr_grid)
        # where no rate means a fixed one, that one is not tried twice; for vectors it means a search
        assert kind.lr not in rates or kind is KINDS["features"]


def test_networks_have_the_same_budget():
    def epochs(name):
        config = TrainConfig(run="/r", variant=name).resolved("features", 10_000)
        return sum(stage.epochs for stage in config.make_stages())

    assert len({epochs(name) for name in DEEP}) == 1
    assert not any("epochs" in setting for name in DEEP for setting in METHODS[name].grid)
    lrs = KINDS["features"].lr_grid
    assert {len(candidates(name, lrs)) for name in GROUPS["ablation"]} == {8}
    assert len(candidates("dhn", lrs)) >= 6


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
