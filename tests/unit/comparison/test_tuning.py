import json

import pytest

from hashnet.comparison.cell import CellInputs, CellResult, TrainedNetwork
from hashnet.comparison.tuning import TunedSettings, mean_over_seeds


def trial(lr, value, seed=0, method="hashnet", n_bits=16, J=None):
    """A trial; one without a value diverged."""
    made = CellInputs(method, n_bits, seed, {"lr": lr}, 100, 0.2, "0")
    if value is None:
        return CellResult("tune", made, error="diverged")
    return CellResult("tune", made, validation_map=value, training=TrainedNetwork(J=J, seconds=2.0))


def test_seeds_are_averaged_and_a_failed_one_counts():
    trials = [
        trial(1.0, 0.5, J=1.0),
        trial(1.0, 0.7, seed=1, J=2.0),
        trial(2.0, 0.9),
        trial(2.0, None, seed=1),
    ]
    one, two = mean_over_seeds(trials)
    assert (one.validation_map, one.J, one.n_seeds, one.seconds) == (pytest.approx(0.6), 1.5, 2, 2.0)
    assert (two.validation_map, two.error) == (None, "diverged")


def test_the_best_settings_are_chosen_for_each_method_and_length():
    trials = [trial(1.0, 0.5), trial(2.0, 0.6), trial(3.0, 0.6), trial(4.0, None)]
    trials += [trial(1.0, 0.9, n_bits=32), trial(2.0, 0.1, n_bits=32), trial(1.0, None, method="dhn")]
    tuned = TunedSettings.choose(mean_over_seeds(trials))
    assert tuned.settings == {"hashnet": {16: {"lr": 2.0}, 32: {"lr": 1.0}}, "dhn": {}}
    assert tuned.validation_map["hashnet"] == {16: 0.6, 32: 0.9}


def test_settings_of_other_lengths_are_the_nearest_ones(tmp_path):
    tuned = TunedSettings({"itq": {16: {"a": 1}, 48: {"a": 2}}}, {"itq": {16: 0.5, 48: 0.6}})
    assert [tuned.nearest("itq", n)["a"] for n in (8, 32, 40, 64)] == [1, 1, 2, 2]
    assert tuned.nearest("sh", 16) == {}
    tuned.save(str(tmp_path / "tuned.json"))
    assert TunedSettings.load(str(tmp_path / "tuned.json")) == tuned


def test_choices_made_before_stay():
    before = TunedSettings({"itq": {16: {"a": 1}}}, {"itq": {16: 0.5}})
    after = TunedSettings({"itq": {16: {"a": 2}, 32: {"a": 3}}, "sh": {16: {}}}, {"itq": {16: 0.6, 32: 0.7}})
    both = before.extended(after)
    assert both.settings == {"itq": {16: {"a": 1}, 32: {"a": 3}}, "sh": {16: {}}}
    assert both.validation_map == {"itq": {16: 0.5, 32: 0.7}}


def test_a_file_of_an_older_version_is_read(tmp_path):
    """A sweep wrote no validation_map."""
    old = {"kind": "tuned", "format_version": 1, "settings": {"dhn": {"48": {"lr": 0.01}}}}
    (tmp_path / "tuned.json").write_text(json.dumps(old))
    assert TunedSettings.load(str(tmp_path / "tuned.json")).nearest("dhn", 16) == {"lr": 0.01}
