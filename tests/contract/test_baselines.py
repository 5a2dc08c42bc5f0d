"""One contract over the registry: what every baseline promises, tested alike."""

import json
import warnings
from contextlib import contextmanager

import numpy as np
import pytest

from hashnet import baselines
from hashnet.baselines import REGISTRY
from hashnet.baselines.base import Baseline, BaselineWarning
from hashnet.codes import hamming_distances
from hashnet.errors import CodeError, ConfigError, DataError, FormatError
from hashnet.metrics import evaluate

N_BITS = 16
SMALL = {  # settings that make a method quick on the toy set; the rest stay at their defaults
    "ksh": {"n_iterations": 20, "n_anchors": 40},
    "cnnh": {"epochs": 8, "batch_size": 32},
    "dnnh": {"epochs": 8, "batch_size": 32},
    "dhn": {"epochs": 8, "batch_size": 32},
}


@contextmanager
def baseline_warnings(action="always"):
    """Those issued inside the block, or none of them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action, BaselineWarning)
        yield caught


def make(name, n_bits=N_BITS, **settings):
    return REGISTRY[name](n_bits=n_bits, **{"seed": 3, **SMALL.get(name, {}), **settings})


def toy_set(n=240, d=24, n_classes=4, seed=0):
    """Clusters in a few of many dimensions: features (n, d), class ids (n,)."""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % n_classes
    centres = np.random.default_rng(99).normal(size=(n_classes, d)) * 2
    return centres[y] + rng.normal(size=(n, d)), y


@pytest.fixture(scope="module")
def fitted():
    """Each method fitted once on the toy set, on demand."""
    X, y = toy_set()
    done = {}

    def get(name):
        if name not in done:
            with baseline_warnings("ignore"):
                done[name] = make(name).fit(X, y)
        return done[name]

    return get


@pytest.fixture(params=REGISTRY)
def name(request):
    return request.param


@pytest.mark.filterwarnings("ignore::hashnet.baselines.BaselineWarning")
class TestContract:
    def test_the_registry_name_is_the_class_s_own(self, name):
        assert REGISTRY[name].name == name
        assert getattr(baselines, REGISTRY[name].__name__) is REGISTRY[name]

    def test_fit_returns_self_and_learns_state_ending_in_an_underscore(self, name):
        X, y = toy_set(n=120)
        method = make(name)
        before = set(vars(method))
        assert method.fit(X, y) is method
        assert all(attribute.endswith("_") for attribute in set(vars(method)) - before)

    def test_codes_are_packed_uint8_of_the_right_width(self, name, fitted):
        codes = fitted(name).encode(toy_set(n=10)[0])
        assert codes.dtype == np.uint8
        assert codes.shape == (10, N_BITS // 8)
        assert fitted(name).encode(np.empty((0, 24))).shape == (0, N_BITS // 8)

    def test_the_same_seed_gives_the_same_codes(self, name, fitted):
        X, y = toy_set()
        assert np.array_equal(make(name).fit(X, y).encode(X), fitted(name).encode(X))

    def test_a_single_row_gets_the_code_it_has_in_a_batch(self, name, fitted):
        X, _ = toy_set(n=20, seed=5)
        batch = fitted(name).encode(X)
        for i in range(len(X)):
            assert np.array_equal(fitted(name).encode(X[i])[0], batch[i])

    def test_saving_and_loading_keeps_codes_settings_and_history(self, name, fitted, tmp_path):
        X, _ = toy_set(seed=6)
        fitted(name).save(str(tmp_path / "method"))
        for load in (Baseline.load, REGISTRY[name].load):
            again = load(str(tmp_path / "method"))
            assert type(again) is REGISTRY[name]
            assert again.params() == fitted(name).params()
            assert again.history_ == fitted(name).history_
            assert np.array_equal(again.encode(X), fitted(name).encode(X))
        other = next(n for n in REGISTRY if n != name)
        with pytest.raises(FormatError, match=name):
            REGISTRY[other].load(str(tmp_path / "method"))

    def test_it_beats_random_codes_on_rows_it_has_not_seen(self, name, fitted):
        X, y = toy_set()
        X_new, y_new = toy_set(n=80, seed=1)
        learnt = hits_among_nearest(fitted(name).encode(X_new), y_new, fitted(name).encode(X), y)
        rng = np.random.default_rng(0)
        random = hits_among_nearest(
            rng.integers(0, 256, size=(80, 2), dtype=np.uint8),
            y_new,
            rng.integers(0, 256, size=(240, 2), dtype=np.uint8),
            y,
        )
        assert random < 0.4
        assert learnt > random + 0.2

    def test_the_objective_never_increases_where_that_is_promised(self, name, fitted):
        history = fitted(name).history_
        assert all(isinstance(value, float) for value in history)
        if REGISTRY[name].monotone:
            assert len(history) >= 2
            assert np.diff(history).max() <= 1e-9 * abs(history[0])

    def test_fitting_changes_neither_features_nor_labels(self, name):
        X, y = toy_set(n=80)
        X_before, y_before = X.copy(), y.copy()
        make(name).fit(X, y).encode(X)
        assert np.array_equal(X, X_before)
        assert np.array_equal(y, y_before)

    def test_float32_and_whole_numbers_are_taken(self, name):
        X, y = toy_set(n=80)
        for kind in (np.float32, np.int16):
            assert make(name).fit((X * 10).astype(kind), y).encode((X * 10).astype(kind)).shape == (80, 2)

    def test_numbers_of_numpy_are_settings_too(self, name):
        settings = make(name, n_bits=np.int64(16), seed=np.int64(3)).params()
        assert json.loads(json.dumps(settings)) == make(name).params()

    def test_two_different_fits_of_one_object_do_not_mix(self, name, fitted):
        X, y = toy_set()
        again = make(name).fit(X[:100] * 3 + 1, y[:100]).fit(X, y)
        assert np.array_equal(again.encode(X), fitted(name).encode(X))


@pytest.mark.filterwarnings("ignore::hashnet.baselines.BaselineWarning")
def test_a_rotation_of_the_features_changes_map_no_more_than_another_seed_does(name):
    """``sign`` keeps columns, so it is the one method that depends on the basis by its definition.

    The mean over three seeds may move by the largest difference of two seeds, and by 0.02 where the seed
    changes nothing: then rounding alone decides which of equally good directions come first, and the AP of
    80 queries, whose deviation is about 0.2, has a mean with a standard error of 0.02.
    """
    if name == "sign":
        return
    (X, y), (new, wanted) = toy_set(), toy_set(n=80, seed=1)
    X, new = X * np.linspace(3, 0.5, 24), new * np.linspace(3, 0.5, 24)  # columns of unequal variance
    rotation = np.linalg.qr(np.random.default_rng(8).normal(size=(24, 24)))[0]
    maps = np.zeros((2, 3))
    for basis, R in enumerate((np.eye(24), rotation)):
        for at, seed in enumerate((3, 4, 5)):
            method = make(name, seed=seed).fit(X @ R, y)
            report = evaluate(method.encode(new @ R), wanted, method.encode(X @ R), y, k=240)
            maps[basis, at] = report.map
    plain, turned = maps
    assert abs(turned.mean() - plain.mean()) <= max(np.ptp(plain), np.ptp(turned), 0.02)


class TestBadInput:
    @pytest.mark.filterwarnings("ignore::hashnet.baselines.BaselineWarning")
    def test_labels_are_needed_by_the_supervised(self, name):
        if REGISTRY[name].labels == "required":
            with pytest.raises(DataError, match="supervised"):
                make(name).fit(toy_set(n=60)[0])
        else:
            assert make(name).fit(toy_set(n=60)[0]).encode(toy_set(n=60)[0]).shape == (60, 2)

    def test_a_single_class_is_refused_by_those_who_use_labels(self, name):
        if REGISTRY[name].labels != "ignored":
            with pytest.raises(DataError, match="at least two classes"):
                make(name).fit(toy_set(n=60)[0], np.zeros(60, dtype=int))

    def test_labels_without_a_similar_pair_are_refused(self, name):
        if REGISTRY[name].labels != "ignored":
            with pytest.raises(DataError, match="share a label"):
                make(name).fit(toy_set(n=60)[0], np.arange(60))

    def test_a_wrong_number_of_labels_is_refused(self, name):
        if REGISTRY[name].labels != "ignored":
            with pytest.raises(DataError, match="60 rows but 59"):
                make(name).fit(toy_set(n=60)[0], toy_set(n=59)[1])

    def test_rows_without_a_label_are_left_out_with_one_warning(self, name):
        if REGISTRY[name].labels == "ignored":
            return
        X, y = toy_set(n=120)
        multi_hot = np.eye(4, dtype=np.uint8)[y]
        multi_hot[:7] = 0
        with baseline_warnings() as caught:
            fitted = make(name).fit(X, multi_hot)
        assert sum("7 of 120 rows have no label" in str(w.message) for w in caught) == 1
        with baseline_warnings("ignore"):
            assert np.array_equal(fitted.encode(X), make(name).fit(X[7:], multi_hot[7:]).encode(X))

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    @pytest.mark.filterwarnings("ignore::hashnet.baselines.BaselineWarning")
    def test_nan_and_infinity_are_refused_with_the_row(self, name, bad, fitted):
        X, y = toy_set(n=60)
        X[41, 3] = bad
        with pytest.raises(DataError, match="row 41"):
            make(name).fit(X, y)
        with pytest.raises(DataError, match="row 41"):
            fitted(name).encode(X)

    def test_rows_of_different_lengths_are_refused(self, name, fitted):
        with pytest.raises(
            DataError, match="features are not an array: their rows differ in length; give rows of"
        ):
            make(name).fit([[1.0, 2.0], [3.0]], [0, 1])
        with pytest.raises(DataError, match="differ in length"):
            fitted(name).encode([[1.0, 2.0], [3.0]])

    def test_constant_columns_are_left_out_with_one_warning(self, name):
        X, y = toy_set(n=120)
        wider = np.insert(X, [0, 5], 7.0, axis=1)
        with baseline_warnings() as caught:
            fitted = make(name).fit(wider, y)
        mine = [w for w in caught if "2 of 26 columns are constant" in str(w.message)]
        assert len(mine) == 1
        assert mine[0].filename == __file__
        with baseline_warnings("ignore"):
            assert np.array_equal(fitted.encode(wider), make(name).fit(X, y).encode(X))

    def test_nothing_but_constant_columns_is_refused(self, name):
        with pytest.raises(DataError, match="constant"):
            make(name).fit(np.ones((60, 5)), toy_set(n=60)[1])

    def test_a_row_out_of_all_proportion_is_left_out_with_one_warning(self, name):
        X, y = toy_set(n=120)
        larger = np.insert(X, 41, X[41] * 1e5, axis=0)
        with baseline_warnings() as caught:
            fitted = make(name).fit(larger, np.insert(y, 41, y[41]))
        assert sum("1 of 121 rows are over 100 times as large" in str(w.message) for w in caught) == 1
        with baseline_warnings("ignore"):
            assert np.array_equal(fitted.encode(X), make(name).fit(X, y).encode(X))

    def test_other_columns_than_fitted_are_refused_with_both_numbers(self, name, fitted):
        with pytest.raises(DataError, match=r"24 columns, got 23"):
            fitted(name).encode(np.ones((2, 23)))

    def test_encoding_before_fitting_is_refused(self, name):
        with pytest.raises(DataError, match="not fitted"):
            make(name).encode(np.ones((2, 24)))

    def test_one_row_is_refused(self, name):
        with pytest.raises(DataError):
            make(name).fit(np.ones((1, 24)), np.array([0]))

    def test_a_code_length_that_is_no_multiple_of_eight_is_refused(self, name):
        with pytest.raises(CodeError, match="multiple of 8, got 50"):
            make(name, n_bits=50)

    def test_a_seed_that_is_no_whole_number_is_refused(self, name):
        for seed in (-1, 0.5, True):
            with pytest.raises(ConfigError, match=f"seed must be a whole number of at least 0, got {seed}"):
                make(name, seed=seed)

    def test_more_bits_than_dimensions_or_classes_work_and_say_so(self, name):
        X, y = toy_set(n=120, d=6)
        with baseline_warnings() as caught:
            codes = make(name, n_bits=32).fit(X, y).encode(X)
        assert codes.shape == (120, 4)
        assert len(np.unique(codes, axis=0)) > 4
        if name in ("itq", "itq-cca"):
            assert sum("for 32 bits" in str(w.message) for w in caught) == 1


def hits_among_nearest(query_codes, query_y, codes, y, k=10):
    """Mean share of the query's class among its k nearest codes."""
    nearest = np.argsort(hamming_distances(query_codes, codes), axis=1, kind="stable")[:, :k]
    return float((y[nearest] == query_y[:, None]).mean())


def test_a_foreign_folder_is_refused(tmp_path):
    (tmp_path / "baseline.json").write_text('{"kind": "index", "format_version": 1}')
    with pytest.raises(FormatError, match="not a hashnet baseline"):
        Baseline.load(str(tmp_path))
