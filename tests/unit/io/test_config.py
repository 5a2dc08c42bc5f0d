"""Configurations: files, overrides, every mistake at once."""

from dataclasses import FrozenInstanceError, dataclass
from typing import ClassVar

import pytest
import yaml

from hashnet.codes import check_n_bits
from hashnet.errors import ConfigError
from hashnet.io import config
from hashnet.io.config import REQUIRED, key
from hashnet.training.train_config import TrainConfig


@dataclass(frozen=True)
class Settings:
    run: str = key(REQUIRED, "run folder")
    n_bits: int = key(48, "code length", check=check_n_bits)
    rate: float = key(0.1, "learning rate", low=0)
    kind: str = key("flat", "index kind", choices=("flat", "ivf"))
    methods: list[str] = key(["all"], "which methods")
    bits: list[int] = key([16, 32], "code lengths")
    fast: bool = key(False, "skip the slow part")
    limit: int | None = key(None, "rows at most")

    def __post_init__(self) -> None:
        if self.fast and self.limit:
            raise ConfigError("fast=true has no limit")


def test_defaults_file_and_overrides_in_that_order(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("run: a\nrate: 1e-3\nbits: [8, 16]\nn_bits: 16\n")
    settings = config.load(Settings, str(path), ["n_bits=64", "fast=yes", "methods=itq,lsh", "limit=none"])
    assert settings == Settings("a", 64, 0.001, "flat", ["itq", "lsh"], [8, 16], True, None)
    with pytest.raises(FrozenInstanceError):
        settings.run = "b"


def test_every_mistake_is_reported_at_once():
    words = [
        "n_bit=64",
        "n_bits=50",
        "rate=-1",
        "kind=flatt",
        "fast=maybe",
        "limit=many",
        "bits=8,x",
        "verbose",
    ]
    with pytest.raises(ConfigError) as caught:
        config.load(Settings, None, words)
    text = str(caught.value)
    for sentence in [
        "unknown key 'n_bit'; did you mean 'n_bits'?",
        "n_bits must be a multiple of 8, got 50",
        "rate: must be at least 0, got -1",
        "kind: must be one of flat, ivf, got 'flatt' (did you mean flat?)",
        "fast: must be true or false, got 'maybe'",
        "limit: must be whole number | none, got 'many'",
        "bits: must be a whole number, got 'x'",
        "'verbose' is not key=value",
        "run is required: run folder",
    ]:
        assert sentence in text
    assert len(caught.value.mistakes) == 9


@pytest.mark.parametrize(
    "value", ["inf", "-inf", "nan", "1e999", float("inf"), float("nan"), pytest.param(10**400, id="huge")]
)
def test_numbers_must_be_finite(value):
    with pytest.raises(ConfigError, match="rate: must be a finite number, got"):
        config.from_dict(Settings, {"run": "a", "rate": value})
    with pytest.raises(ConfigError, match=r"lr: must be number \| none, got"):
        config.load(TrainConfig, None, ["run=a", f"lr={value}"])


def test_rules_across_keys():
    with pytest.raises(ConfigError, match="fast=true has no limit"):
        config.load(Settings, None, ["run=a", "fast=true", "limit=3"])


@pytest.mark.parametrize(
    ("text", "sentence"), [("a: [", "not YAML"), ("- 1", "key: value"), ("\xff", "unknown key")]
)
def test_bad_files_are_named(tmp_path, text, sentence):
    path = tmp_path / "bad.yaml"
    path.write_text(text if text != "\xff" else "zzz: 1")
    with pytest.raises(ConfigError, match=sentence):
        config.load(Settings, str(path), ["run=a"])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        config.load(Settings, str(tmp_path / "nothing.yaml"), ["run=a"])


def test_what_is_saved_loads_again(tmp_path):
    settings = config.load(Settings, None, ["run=ü", "limit=3", "bits=8"])
    config.save(settings, str(tmp_path / "config.yaml"))
    assert config.load(Settings, str(tmp_path / "config.yaml")) == settings
    assert config.from_dict(Settings, config.to_dict(settings)) == settings
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["n_bits"] == 48


def test_paths_are_named_and_made_absolute_and_words_are_left_alone(tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class Files:
        run: str = key(REQUIRED, "run folder", path=True)
        model: str = key("auto", "a folder, or auto", path=True)
        weights: str = key("random", "a file or a word", path=("random", "pretrained"))
        beside: list[str] = key([], "other runs", path=True)
        name: str = key("x", "not a path")

    monkeypatch.chdir(tmp_path)
    words = Files("s3://b/r", weights="pretrained", name="y")
    assert config.paths(words) == {"run": "s3://b/r"}
    assert config.with_absolute_paths(words) == words
    files = Files("r", "none", "w.pth", ["a", "/b"])
    assert config.paths(files) == {"run": "r", "weights": "w.pth", "beside": ["a", "/b"]}
    expected = Files(f"{tmp_path}/r", "none", f"{tmp_path}/w.pth", [f"{tmp_path}/a", "/b"])
    assert config.with_absolute_paths(files) == expected


def test_lost_workers_may_be_replaced_without_end():
    assert config.load(TrainConfig, None, ["run=/r", "max_failures=-1"]).max_failures == -1
    with pytest.raises(ConfigError, match="max_failures: must be at least -1, got -2"):
        config.load(TrainConfig, None, ["run=/r", "max_failures=-2"])


def test_help_lists_every_key_with_type_default_and_meaning():
    text = config.describe(Settings)
    for line in [
        ("run", "text", "(required)", "run folder"),
        ("bits", "list of whole number", "16,32", "code lengths"),
        ("kind", "text", "flat", "index kind [flat | ivf]"),
        ("limit", "whole number | none", "none", "rows at most"),
        ("fast", "true/false", "false", "skip"),
    ]:
        (found,) = [row for row in text.splitlines() if row.split()[0] == line[0]]
        assert all(part in found for part in line)


@dataclass(frozen=True)
class Renaming:
    RENAMED: ClassVar = {"gpu": config.Renamed("device", {True: "cuda", False: "cpu", None: "auto"})}
    device: str = key("auto", "where it runs", choices=("auto", "cpu", "cuda"))


@pytest.mark.parametrize(
    ("given", "instead"), [("gpu=true", "device=cuda"), ("gpu=none", "device=auto"), ("gpu=2", "device=2")]
)
def test_an_old_key_is_refused_and_the_new_one_named(given, instead):
    with pytest.raises(ConfigError, match=f"gpu is now called device: write {instead}"):
        config.load(Renaming, None, [given])


def test_a_file_that_an_older_version_saved_is_read(tmp_path):
    (tmp_path / "config.yaml").write_text("gpu: false\n")
    assert config.load(Renaming, str(tmp_path / "config.yaml"), saved=True).device == "cpu"
    with pytest.raises(ConfigError, match="write device=cpu"):
        config.load(Renaming, str(tmp_path / "config.yaml"))
