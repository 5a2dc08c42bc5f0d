"""TrainConfig: every setting of a training run, and what the unset ones become for each kind of backbone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from hashnet.codes import check_n_bits
from hashnet.data import NEIGHBOURS
from hashnet.errors import ConfigError, ModelError
from hashnet.io import REQUIRED, Renamed, key
from hashnet.labels import PAIR_WEIGHTS
from hashnet.losses import AUTO, METHODS, DeepMethod
from hashnet.training.schedule import (
    ANNEALING,
    BETA_GROWTH,
    BETA_REFRESH,
    N_STAGES,
    SCHEDULES,
    STAGE_LR_SCALE,
    STEP_FACTOR,
    ContinuationStage,
    plain,
    smooth,
    staged,
)

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class KindDefaults:
    """What unset keys become for one kind of backbone.

    A small training set gets more epochs: ``min_steps`` are the fewest of the first and of a later stage.
    ``max_steps`` are the most: a head on millions of vectors is done long before it has seen them 60 times.
    """

    lr: float
    dropout: float
    first_epochs: int
    stage_epochs: int
    min_steps: tuple[int, int]
    max_steps: tuple[int, int] = (1_000_000_000, 1_000_000_000)
    head_epochs: int | None = None
    noise: float = 0.0
    min_area: float = 0.0
    warmup: float = 0.0
    averaging: float = 0.0
    # What a comparison tries with tune=true, besides no rate: for alpha = 10 / n_bits, as ``lr`` is.
    lr_grid: tuple[float, ...] = ()


# Tuned on real data: vectors from a trained network; small networks from scratch; large ones with pretrained
# weights, whose layers must move little; large ones from scratch.
# fmt: off
KINDS: dict[str, KindDefaults] = {
    "features": KindDefaults(
        0.02, 0.0, first_epochs=120, stage_epochs=2, min_steps=(1000, 70), max_steps=(10_000, 400), noise=1.2,
        lr_grid=(0.01, 0.02, 0.04),
    ),
    "small": KindDefaults(
        0.003, 0.0, first_epochs=30, stage_epochs=2, min_steps=(600, 40), lr_grid=(0.001, 0.01)
    ),
    "pretrained": KindDefaults(
        0.003, 0.0, first_epochs=12, stage_epochs=1, min_steps=(90, 8), head_epochs=120, min_area=0.35,
        warmup=0.1, averaging=0.95,
        lr_grid=(1e-4, 3e-4, 1e-3),  # the paper's largest is 1e-3
    ),
    "scratch": KindDefaults(
        0.01, 0.0, first_epochs=60, stage_epochs=2, min_steps=(2000, 70), lr_grid=(0.003, 0.03)
    ),
}
# fmt: on

# Keys about how the work is done, which do not change the model: a run may be continued with other values.
EXECUTION_KEYS = (
    "run", "manifest", "num_workers", "min_workers", "cpus_per_worker", "device", "placement", "collective",
    "max_failures", "threads", "base_uri", "checkpoint_every", "log_every", "download", "cache", "chunk",
)  # fmt: skip
# Nor do these: what is measured at the end, and how many bad pictures (left out in any case) are too many.
MEASUREMENT_KEYS = ("measure_rows", "max_bad_fraction")


def _known_backbone(name: str) -> None:
    from hashnet.models import check_backbone  # imports torch: seconds that `--help` does without

    try:
        check_backbone(name)
    except ModelError as error:  # reported together with the other mistakes of a configuration
        raise ValueError(str(error)) from error


@dataclass(frozen=True)
class TrainConfig:
    RENAMED: ClassVar = {
        "standardise": Renamed("scaling"),
        "scaling": Renamed("scaling", {None: True, "one": True, "columns": True, "off": False}),
        "gpu": Renamed("device", {True: "cuda", False: "cpu", None: "auto"}),
        "batchnorm": Renamed("batchnorm", {"auto": None}),  # older versions saved "auto" and 0
        "cpus_per_worker": Renamed("cpus_per_worker", {0: None}),
    }

    run: str = key(REQUIRED, "run folder: a path on storage every node sees, or a URI", path=True)
    manifest: str | None = key(
        None, "the data: a manifest made by `hashnet dataset`; the run keeps a copy", path=True
    )
    dataset: str | None = key(
        None, "instead of a manifest: a data set that needs no download", choices=("digits", "synthetic")
    )
    base_uri: str | None = key(
        None, "folder that relative picture paths of the manifest start from", path=True
    )
    modality: str = key("image", "rows of the embedded data set", choices=("image", "features"))
    pairs: str | None = key(
        None,
        "learn from pairs instead of labels: Parquet or .csv with row_a, row_b, similar; or neighbours: rows "
        "near each other in the embedding are similar, pictures in that of a frozen pretrained backbone",
        path=(NEIGHBOURS,),
    )

    n_bits: int = key(48, "code length, a multiple of 8", check=check_n_bits)
    backbone: str | None = key(
        None, "features, small_cnn, lite0…lite2, any torchvision classification model, timm:NAME; "
        "none: features for vectors, small_cnn for pictures", check=_known_backbone,
    )  # fmt: skip
    weights: str = key(
        "random", "random, pretrained, or a file (.pth, .safetensors)", path=("random", "pretrained")
    )
    download: bool = key(False, "allow pretrained weights to be downloaded")
    hidden: int | None = key(
        None,
        "units of a hidden layer before the hash layer; 0: no such layer; none: for vectors and frozen "
        "backbones 512 where that is better on held-out rows, else 0",
        low=0,
    )
    dropout: float | None = key(None, "of the head's input; none: by kind of backbone", low=0, high=0.99)
    noise: float | None = key(
        None,
        "deviation of noise on vectors, whose typical deviation is 3; none: 1.2, or 0.4 where that is better "
        "on held-out rows",
        low=0,
    )
    resize: int | None = key(None, "shorter side of pictures; none: the backbone's", low=1)
    crop: int | None = key(None, "side of the square crop; none: the backbone's", low=1)
    flip: bool | None = key(None, "mirror training pictures at random; none: the backbone's choice")
    min_area: float | None = key(
        None,
        "training pictures are crops of random size, at least this share of the picture; 0: of fixed size; "
        "none: by kind of backbone",
        low=0,
        high=1,
    )
    average_flip: bool = key(
        False,
        "a picture's code is that of the mean of its features and its mirror image's: encoding and "
        "queries take twice as long",
    )
    start: str | None = key(
        None,
        "the hash layer's first weights: random, or itq, the rotated principal components that ITQ finds; "
        "none: itq for pairs=neighbours, else random",
        choices=("random", "itq"),
    )
    scaling: bool = key(
        True,
        "centre features on the training rows' mean and divide vectors by one number, the same in any basis",
    )
    freeze_backbone: bool = key(False, "train the hash layer alone, on centre crops")
    train_last: int | None = key(
        None,
        "pretrained backbones: train this many of the last blocks; what lies below them is computed once and "
        "kept in the cache; none: all blocks",
        low=1,
    )
    views: int = key(
        4, "train_last: augmented views of each picture that are kept, one of which an epoch sees", low=1
    )
    batchnorm: str | None = key(
        None, "running statistics; none: frozen unless weights=random", choices=("frozen", "train")
    )

    variant: str = key(
        "hashnet",
        "the method: its loss and head; sets class_weights, continuous, schedule; auto: hashnet with a label "
        "term where there are labels, and with continuous similarity where labelled rows have more than 1.1 "
        "labels on average; where there are none, hashnet with pairs=neighbours",
        choices=(AUTO, *METHODS),
    )
    class_weights: str | None = key(
        None, "pair weights from the whole training set, from the batch, or none", choices=PAIR_WEIGHTS
    )
    continuous: bool | None = key(None, "weigh similar pairs by the Jaccard similarity of their labels")
    alpha: float | None = key(None, "scale of the sigmoid; none: 10 / n_bits, for DHN 1", low=1e-9)
    threshold: float | None = key(
        None, "a pair is as likely similar as not where alpha <g_i, g_j> has this value; none: 0 as in the "
        "paper, 1.5 for hashnet+l, 3 for hashnet+c+l",
    )  # fmt: skip
    label_weight: float = key(0.1, "hashnet+l: weight of the label term beside the pair loss", low=0)
    quantisation: float = key(0.1, "weight of DHN's quantisation term", low=0)
    margin: float = key(1.0, "DNNH: margin of the triplets, in bits", low=0)
    epsilon: float = key(0.4, "DNNH: sigmoids within this of 0.5 are not rounded yet", low=0, high=0.5)

    schedule: str | None = key(None, "how beta grows", choices=SCHEDULES)
    stages: int = key(N_STAGES, "schedule=staged: stages with beta = 1, 2, 4, …", low=1, high=30)
    head_epochs: int | None = key(
        None,
        "pretrained backbones: epochs of the hash layer alone, on frozen features, before the stages",
        low=0,
    )
    first_epochs: int | None = key(None, "epochs of the first stage (of all, for smooth and plain)", low=1)
    stage_epochs: int | None = key(None, "epochs of each later stage", low=1)
    patience: int = key(
        0,
        "schedule=staged: end a stage after this many epochs without a lower loss or, with validation, "
        "without better MAP and precision within radius 2 of held-out rows (short epochs together); "
        "0: fixed length",
        low=0,
    )
    stage_lr_scale: float = key(
        STAGE_LR_SCALE, "the learning rate of later stages is this times lr / beta", low=0
    )
    beta_growth: float = key(BETA_GROWTH, "schedule=smooth: beta = sqrt(1 + this * step)", low=0)
    beta_refresh: int = key(BETA_REFRESH, "schedule=smooth: steps between changes of beta", low=1)

    lr: float | None = key(
        None,
        "learning rate of the backbone; none: found by a short search for vectors, else by kind of backbone",
        low=0,
    )
    head_lr_scale: float = key(10.0, "the hash layer's learning rate is this times lr", low=0)
    momentum: float = key(0.9, "of SGD", low=0, high=0.9999)
    weight_decay: float = key(5e-4, "of SGD", low=0)
    annealing: str = key("cosine", "of the learning rate inside a stage", choices=ANNEALING)
    step_size: int | None = key(
        None, "annealing=step: steps between changes of the rate; none: a third of a stage", low=1
    )
    step_factor: float = key(STEP_FACTOR, "annealing=step: what the rate is multiplied by", low=0, high=1)
    warmup: float | None = key(
        None,
        "share of the first stage's steps in which the learning rate grows; none: by kind of backbone",
        low=0,
        high=1,
    )
    averaging: float | None = key(
        None,
        "a stage ends with weights averaged over its steps, this being the decay per step; 0: with its last "
        "ones; none: by kind of backbone",
        low=0,
        high=0.99999,
    )
    batch_size: int = key(
        256, "rows per batch of all workers together; the loss covers all pairs in it", low=2
    )
    seed: int = key(0, "of initial weights, order of rows, augmentation and dropout", low=0)

    validation: float = key(0.0, "share of the training rows held out to measure MAP on", low=0, high=0.9)
    map_k: int = key(
        0, "measure MAP@map_k of queries against the database after each stage; 0: do not", low=0
    )
    measure_rows: int = key(
        2048, "database rows on which J, L and |g| are measured when training ends", low=0
    )
    max_bad_fraction: float = key(
        0.05,
        "share of unreadable pictures above which training stops; unless 0, a single one is tolerated",
        low=0,
        high=1,
    )

    num_workers: int = key(1, "data-parallel workers", low=1)
    min_workers: int | None = key(None, "elastic training: the fewest workers to continue with", low=1)
    cpus_per_worker: int | None = key(None, "none: an equal share of the free CPUs, at most 8", low=1)
    device: str = key(
        "auto", "of each worker; auto: cuda where the cluster has a GPU for each", choices=DEVICES
    )
    placement: str = key(
        "pack", "workers on few nodes, on many, or one per node", choices=("pack", "spread", "strict_spread")
    )
    collective: str | None = key(
        None, "communication of workers; none: nccl with GPUs, gloo without", choices=("gloo", "nccl")
    )
    max_failures: int = key(
        3,
        "how often lost workers are replaced; a spot node lost without notice to Ray counts as one; "
        "-1: no limit",
        low=-1,
    )
    threads: int | None = key(
        None, "threads per worker that decode pictures (none: as many as it has CPUs)", low=1
    )
    chunk: int | None = key(
        None,
        "pictures per worker that pass through the network at once; the gradient is that of the whole batch; "
        "none: what a gigabyte of activations, or a third of a GPU's free memory, has room for",
        low=1,
    )
    cache: str | None = key(
        None, "folder of backbone features, each computed once; none: RUN/cache", path=True
    )
    checkpoint_every: int = key(
        200,
        "steps between checkpoints, of which there is at least one per minute and one after each stage; "
        "0: only those after stages",
        low=0,
    )
    log_every: int = key(10, "steps between rows of the history", low=1)

    def __post_init__(self) -> None:
        mistakes = []
        if self.manifest is not None and self.dataset is not None:
            mistakes.append(f"give manifest or dataset, not both (got {self.manifest} and {self.dataset})")
        if self.min_workers is not None and self.min_workers > self.num_workers:
            mistakes.append(
                f"min_workers ({self.min_workers}) must not exceed num_workers ({self.num_workers})"
            )
        if self.batch_size < self.num_workers:
            mistakes.append(
                f"batch_size is {self.batch_size} for {self.num_workers} workers: each needs at least one row"
            )
        if self.train_last is not None and self.freeze_backbone:
            mistakes.append(
                f"train_last={self.train_last} trains blocks of the backbone, freeze_backbone=true none; "
                "leave one of them out"
            )
        if self.pairs is not None and self.continuous_on:
            mistakes.append(
                "continuous similarity needs labels; a pairs table has none (use variant=hashnet)"
            )
        if self.pairs is not None and self.method.labels_only:
            mistakes.append(f"variant={self.variant} learns from the labels of all rows; leave pairs out")
        if self.start == "itq" and (self.hidden or self.method.head != "linear"):
            mistakes.append("start=itq sets a linear hash layer on the features; leave hidden out")
        if mistakes:
            raise ConfigError(mistakes)

    @property
    def method(self) -> DeepMethod:
        """The variant's entry in METHODS; HashNet's where the variant is not chosen yet."""
        return METHODS["hashnet" if self.variant == AUTO else self.variant]

    @property
    def alpha_value(self) -> float | None:
        """``alpha``, or the method's; None: 10 / n_bits."""
        return self.method.alpha if self.alpha is None else self.alpha

    @property
    def threshold_value(self) -> float:
        """``threshold``, or the method's."""
        return self.method.threshold if self.threshold is None else self.threshold

    @property
    def lr_scale(self) -> float:
        """What default learning rates, found with alpha = 10 / n_bits, are multiplied by for another alpha.

        The gradient grows with alpha: DHN, whose alpha is 1, would diverge.
        """
        return min(1.0, 10 / (self.n_bits * (self.alpha_value or 10 / self.n_bits)))

    def _by_variant(self, name: str) -> Any:
        value = getattr(self, name)
        return self.method.defaults()[name] if value is None else value

    @property
    def continuous_on(self) -> bool:
        return bool(self._by_variant("continuous"))

    @property
    def pair_weights(self) -> str:
        return str(self._by_variant("class_weights"))

    def backbone_for(self, modality: str) -> str:
        """The backbone's name for data of that modality; ConfigError when it takes the other one."""
        name = self.backbone or ("features" if modality == "features" else "small_cnn")
        if (name == "features") != (modality == "features"):
            takes = "vectors" if name == "features" else "pictures"
            raise ConfigError(f"backbone={name} takes {takes}, but the manifest's modality is {modality}")
        if name == "features" and self.train_last is not None:
            raise ConfigError("train_last is for backbones of pictures; vectors have none: leave it out")
        return name

    def kind_for(self, modality: str) -> str:
        """The kind of backbone, a key of KINDS: ``features``, ``small``, ``pretrained`` or ``scratch``."""
        name = self.backbone_for(modality)
        if name in ("features", "small_cnn"):
            return {"features": "features", "small_cnn": "small"}[name]
        if self.freeze_backbone:  # what is trained is the hash layer, on vectors
            return "features"
        return "scratch" if self.weights == "random" else "pretrained"

    def resolved(self, modality: str, n_rows: int) -> TrainConfig:
        """The same configuration with every key set that depends on the backbone, the method or the rows.

        ``n_rows`` is the number of rows per epoch, held-out ones included. Noise and learning rate of a head
        on vectors, or on a frozen backbone before it learns, stay unset: see
        ``hashnet.training.recipe_search``.
        """
        kind = KINDS[self.kind_for(modality)]
        per_epoch = max(1, -(-n_rows // self.batch_size))  # steps; `check_data` refuses a set without rows
        defaults = self.method.defaults() | {
            "backbone": self.backbone_for(modality),
            "lr": None if kind is KINDS["features"] else kind.lr * self.lr_scale,
            "dropout": kind.dropout,
            "noise": None if kind in (KINDS["features"], KINDS["pretrained"]) else kind.noise,
            "min_area": kind.min_area,
            "warmup": kind.warmup,
            "averaging": kind.averaging,
            "head_epochs": kind.head_epochs,
            "first_epochs": _epochs(kind.first_epochs, per_epoch, kind.min_steps[0], kind.max_steps[0]),
            "stage_epochs": _epochs(kind.stage_epochs, per_epoch, kind.min_steps[1], kind.max_steps[1]),
        }
        unset = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        config = dataclasses.replace(self, **unset)
        if config.schedule != "staged" and self.first_epochs is None:  # as many epochs as all stages together
            later = (self.stages - 1) * int(config.stage_epochs or 0)
            config = dataclasses.replace(config, first_epochs=int(config.first_epochs or 0) + later)
        return config

    def make_stages(self) -> list[ContinuationStage]:
        """The stages of a resolved configuration."""
        first, later = int(self.first_epochs or 0), int(self.stage_epochs or 0)
        if self.schedule == "smooth":
            return smooth(first, self.beta_growth, self.beta_refresh)
        if self.schedule == "plain":
            return plain(first)
        return staged(self.stages, first, later, self.patience, self.stage_lr_scale)

    def fit_settings(self) -> FitSettings:
        """What the training loop needs of a resolved configuration."""
        train_batchnorm = self.batchnorm == "train" or (self.batchnorm is None and self.weights == "random")
        return FitSettings(
            lr=KINDS["features"].lr * self.lr_scale if self.lr is None else self.lr,
            head_lr_scale=self.head_lr_scale,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            annealing=self.annealing,
            step_size=self.step_size,
            step_factor=self.step_factor,
            batch_size=self.batch_size,
            seed=self.seed,
            train_batchnorm=train_batchnorm and not self.freeze_backbone,
            freeze_backbone=self.freeze_backbone,
            log_every=self.log_every,
            checkpoint_every=self.checkpoint_every,
            chunk=self.chunk,
            warmup=float(self.warmup or 0),
            averaging=float(self.averaging or 0),
        )


def _epochs(epochs: int, per_epoch: int, min_steps: int, max_steps: int) -> int:
    """``epochs``, or more for ``min_steps`` steps, or fewer for ``max_steps``; at least one."""
    return max(1, min(max(epochs, -(-min_steps // per_epoch)), max_steps // per_epoch))


@dataclass(frozen=True)
class FitSettings:
    """How the training loop optimises; the defaults are TrainConfig's.

    ``lr`` is the backbone's learning rate, the head's is ``head_lr_scale`` times it.
    """

    lr: float = KINDS["features"].lr
    head_lr_scale: float = TrainConfig.head_lr_scale
    momentum: float = TrainConfig.momentum
    weight_decay: float = TrainConfig.weight_decay
    annealing: str = TrainConfig.annealing
    step_size: int | None = TrainConfig.step_size
    step_factor: float = TrainConfig.step_factor
    batch_size: int = TrainConfig.batch_size
    seed: int = TrainConfig.seed
    log_every: int = 1
    min_improvement: float = 1e-3  # relative: an epoch that lowers J by less counts as stale
    train_batchnorm: bool = False  # False: running statistics do not change
    freeze_backbone: bool = False
    checkpoint_every: int = 0  # steps between checkpoints; 0: only after each stage
    prefetch: int = 2  # batches made ahead
    warmup: float = 0.0  # share of the first stage over which the learning rate grows
    averaging: float = 0.0  # decay per step of the averaged weights that a stage ends with; 0: not averaged
    chunk: int | None = None  # rows of one pass through the network; None: what memory has room for
