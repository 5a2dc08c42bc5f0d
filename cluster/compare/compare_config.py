"""CompareConfig: the keys of a comparison on top of those of training."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from hashnet.codes import check_n_bits
from hashnet.comparison import GROUPS, PAPER_K, expand_methods
from hashnet.errors import ConfigError
from hashnet.io import Renamed, key
from hashnet.run import Run
from hashnet.training import EXECUTION_KEYS, TrainConfig

# Keys that may differ when a comparison is resumed: what to add, or how to work. What a cell was made from is
# checked cell by cell.
MAY_CHANGE = (
    *EXECUTION_KEYS, "methods", "bits", "seeds", "k", "paper", "tune", "tune_bits", "settings", "zero_shot",
    "zero_shot_manifest", "zero_shot_methods", "cpus_per_cell", "variant", "n_bits", "seed", "validation",
)  # fmt: skip
# Keys that would turn every method's network into one and the same variant → the methods that differ by them.
METHOD_KEYS = {"class_weights": "hashnet,hashnet-w", "continuous": "hashnet,hashnet+c"}


@dataclass(frozen=True)
class CompareConfig(TrainConfig):
    RENAMED: ClassVar = {
        **TrainConfig.RENAMED,
        "engine": Renamed("compile", {"auto": None, "cuda": None, "cpu-eager": False, "cpu-compiled": True}),
        "features": Renamed("features", {"auto": None}),  # older versions saved "auto"
    }

    manifest: str | None = key(None, "the data: a manifest made by `hashnet dataset`", path=True)
    methods: list[str] = key(["all"], f"names, or the groups {', '.join(GROUPS)}")
    bits: list[int] = key([16, 32, 48, 64], "code lengths", check=check_n_bits)
    seeds: list[int] = key([0], "one repetition per seed; several give mean ± deviation", low=0)
    k: int | None = key(None, "depth of MAP; none: the paper's for its data sets, else 5000", low=1)
    paper: str | None = key(
        None, "show the paper's numbers on this data set too; none: by the manifest's source",
        choices=tuple(PAPER_K),
    )  # fmt: skip
    tune: bool = key(
        False, "first choose each method's settings on a fifth of the training rows, never on queries"
    )
    tune_bits: list[int] | None = key(
        None, "tune at these code lengths only, others take the nearest one's settings; none: at all of them",
        check=check_n_bits,
    )  # fmt: skip
    settings: str | None = key(
        None, "tuned.json of another comparison or a sweep: use its settings and tune nothing", path=True
    )
    zero_shot: float = key(0.25, "share of classes unseen in training for Table 2; 0: no Table 2", low=0)
    zero_shot_manifest: str | None = key(
        None, "instead: a manifest made with the zero-shot protocol", path=True
    )
    zero_shot_methods: list[str] = key(["hashnet", "dhn"], "methods of Table 2")
    features: str | None = key(
        None, "what shallow methods learn from; none: pixels where weights=random, else backbone features",
        choices=("backbone", "pixels"),
    )  # fmt: skip
    compile: bool | None = key(
        None, "on the CPU: true compiles the backbone that makes those features, false runs it as it is; "
        "none: fused convolutions",
    )  # fmt: skip
    cpus_per_cell: int = key(1, "CPUs of one cell's task", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        empty = [name for name in ("bits", "seeds") if not getattr(self, name)]
        mistakes = [f"{name} is empty: there is nothing to compare" for name in empty]
        if self.schedule == "plain":
            mistakes.append("schedule=plain is another method: use methods=hashnet-sgn instead")
        mistakes += [
            f"{name} distinguishes methods: use methods={instead} instead"
            for name, instead in METHOD_KEYS.items()
            if getattr(self, name) is not None
        ]
        if mistakes:
            raise ConfigError(mistakes)
        expand_methods(self.methods)
        expand_methods(self.zero_shot_methods)

    @property
    def features_from(self) -> str:
        """``backbone`` or ``pixels``."""
        return self.features or ("pixels" if self.weights == "random" else "backbone")

    def train_config(self) -> TrainConfig:
        """The part of this configuration that deep cells are trained with."""
        names = [field.name for field in dataclasses.fields(TrainConfig)]
        values = {name: getattr(self, name) for name in names}
        return TrainConfig(**values | {"cache": self.cache or Run(self.run).cache})  # one for all cells
