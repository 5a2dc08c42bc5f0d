"""TrainConfig: every setting of a training run, and what the unset ones become for each kind of backbone."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from hashnet.codes import check_n_bits
from hashnet.errors import ConfigError, ModelError
from hashnet.io import REQUIRED, Renamed, key
from hashnet.labels import PAIR_WEIGHTS
from hashnet.training.schedule import ANNEALING, SCHEDULES, Stage, plain, smooth, staged
from hashnet.training.settings import FitSettings

VARIANTS: dict[str, dict[str, Any]] = {  # Table 3 of the paper, and the deep methods it compares with
    "hashnet": {"class_weights": "global", "continuous": False, "schedule": "staged"},
    "hashnet+c": {"class_weights": "global", "continuous": True, "schedule": "staged"},
    "hashnet-w": {"class_weights": "none", "continuous": False, "schedule": "staged"},
    "hashnet-sgn": {"class_weights": "global", "continuous": False, "schedule": "plain"},
    "dhn": {"class_weights": "none", "continuous": False, "schedule": "plain"},
    "dnnh": {"class_weights": "none", "continuous": False, "schedule": "plain"},
    "cnnh": {"class_weights": "none", "continuous": False, "schedule": "plain"},
}

# Tuned on real data for each kind of backbone: vectors from a trained network; small networks from scratch;
# large ones with pretrained weights, whose layers must move little; large ones from scratch. A small training
# set is gone through more often: the first stage and the later ones have at least MIN_STEPS steps.
KINDS: dict[str, dict[str, Any]] = {
    "features": {"lr": 0.01, "dropout": 0.5, "first_epochs": 80, "stage_epochs": 2},
    "small": {"lr": 0.003, "dropout": 0.0, "first_epochs": 30, "stage_epochs": 2},
    "pretrained": {"lr": 0.003, "dropout": 0.5, "head_epochs": 60, "first_epochs": 8, "stage_epochs": 1},
    "scratch": {"lr": 0.01, "dropout": 0.0, "first_epochs": 60, "stage_epochs": 2},
}
DEVICES = ("auto", "cpu", "cuda")
MIN_STEPS = {"features": (1000, 70), "small": (600, 40), "pretrained": (60, 8), "scratch": (2000, 70)}

# Keys that say how the work is done, not what comes out: a run may go on with others.
HOW = (
    "run", "manifest", "num_workers", "min_workers", "cpus_per_worker", "device", "placement", "collective",
    "max_failures", "threads", "base_uri", "checkpoint_every", "log_every", "download",
)  # fmt: skip
# So do these, about what is measured afterwards and put up with: bad pictures are left out in any case.
PUT_UP_WITH = ("measure_rows", "max_bad_fraction")


def _known_backbone(name: str) -> None:
    from hashnet.models import check_backbone  # and torch with it: seconds that `--help` does without

    try:
        check_backbone(name)
    except ModelError as error:  # one of several mistakes of a configuration, all reported together
        raise ValueError(str(error)) from error


@dataclass(frozen=True)
class TrainConfig:
    RENAMED: ClassVar = {
        "gpu": Renamed("device", {True: "cuda", False: "cpu", None: "auto"}),
        "batchnorm": Renamed("batchnorm", {"auto": None}),  # older versions saved "auto" and 0
        "cpus_per_worker": Renamed("cpus_per_worker", {0: None}),
    }

    run: str = key(REQUIRED, "run folder: a path on storage every node sees, or a URI", path=True)
    manifest: str | None = key(
        None, "the data: a manifest made by `hashnet dataset`; the run keeps a copy", path=True
    )
    dataset: str | None = key(
        None, "instead of a manifest: data that needs no download", choices=("digits", "synthetic")
    )
    base_uri: str | None = key(
        None, "folder that relative picture paths of the manifest start from", path=True
    )
    modality: str = key("image", "of an embedded data set", choices=("image", "features"))
    pairs: str | None = key(
        None, "Parquet or .csv: row_a, row_b, similar; learn from these pairs, not from labels", path=True
    )

    n_bits: int = key(48, "code length, a multiple of 8", check=check_n_bits)
    backbone: str | None = key(
        None, "features, small_cnn, lite0…lite2, any torchvision classification model, timm:NAME; "
        "none: features for vectors, small_cnn for pictures", check=_known_backbone,
    )  # fmt: skip
    weights: str = key(
        "random", "random, pretrained, or a file (.pth, .safetensors)", path=("random", "pretrained")
    )
    download: bool = key(False, "whether pretrained weights may be fetched from the internet")
    hidden: int | None = key(None, "units of a hidden layer of the backbone `features`", low=1)
    dropout: float | None = key(
        None, "on what the hash layer sees; none: by kind of backbone", low=0, high=0.99
    )
    resize: int | None = key(None, "shorter side of pictures; none: what the backbone prefers", low=1)
    crop: int | None = key(None, "side of the square cut out; none: what the backbone prefers", low=1)
    flip: bool | None = key(None, "mirror training pictures; none: what the backbone prefers")
    standardise: bool = key(True, "keep the training features' mean and deviation in the model")
    freeze_backbone: bool = key(False, "train the hash layer alone, on centre crops")
    batchnorm: str | None = key(
        None, "running statistics; none: frozen unless weights=random", choices=("frozen", "train")
    )

    variant: str = key("hashnet", "sets class_weights, continuous and schedule", choices=tuple(VARIANTS))
    class_weights: str | None = key(
        None, "pair weights of the whole training set, of the batch, or none", choices=PAIR_WEIGHTS
    )
    continuous: bool | None = key(None, "weigh similar pairs by the Jaccard similarity of their labels")
    alpha: float | None = key(None, "scale of the sigmoid; none: 10 / n_bits", low=1e-9)
    quantisation: float = key(0.1, "weight of DHN's quantisation term", low=0)
    margin: float = key(1.0, "of DNNH's triplets, in bits", low=0)
    epsilon: float = key(0.4, "DNNH: sigmoids within this of 0.5 are not rounded yet", low=0, high=0.5)

    schedule: str | None = key(None, "how beta grows", choices=SCHEDULES)
    stages: int = key(10, "stages with finite beta = 1, 2, 4, … of schedule=staged", low=1, high=30)
    head_epochs: int | None = key(
        None,
        "pretrained backbones: epochs of the hash layer alone, on frozen features, before the stages",
        low=0,
    )
    first_epochs: int | None = key(None, "epochs of the first stage (of all, for smooth and plain)", low=1)
    stage_epochs: int | None = key(None, "epochs of each later stage", low=1)
    patience: int = key(
        0,
        "schedule=staged: end a stage after this many epochs without a lower loss; 0: fixed length",
        low=0,
    )
    stage_lr_scale: float = key(
        0.3, "the learning rate of later stages is this times lr / beta: they refine", low=0
    )
    beta_growth: float = key(0.005, "smooth: beta = sqrt(1 + this * step)", low=0)
    beta_refresh: int = key(200, "smooth: steps between changes of beta", low=1)

    lr: float | None = key(None, "learning rate of the backbone; none: by kind of backbone", low=0)
    head_lr_scale: float = key(10.0, "the hash layer's learning rate is this times lr", low=0)
    momentum: float = key(0.9, "of SGD", low=0, high=0.9999)
    weight_decay: float = key(5e-4, "of SGD", low=0)
    annealing: str = key("cosine", "of the learning rate inside a stage", choices=ANNEALING)
    batch_size: int = key(256, "rows of a batch over all workers; the pair matrix spans it", low=2)
    seed: int = key(0, "of weights, order, augmentation and dropout", low=0)

    validation: float = key(0.0, "share of the training rows held out and scored by MAP", low=0, high=0.9)
    map_k: int = key(0, "MAP of queries against the database at each stage's end, this deep; 0: none", low=0)
    measure_rows: int = key(2048, "database rows looked at for J, L and |g| when training ends", low=0)
    max_bad_fraction: float = key(
        0.05, "share of unreadable pictures that stops training; one is put up with unless 0", low=0, high=1
    )

    num_workers: int = key(1, "data-parallel workers", low=1)
    min_workers: int | None = key(None, "elastic: go on with as few as this", low=1)
    cpus_per_worker: int | None = key(None, "none: an equal share of the free CPUs, at most 8", low=1)
    device: str = key(
        "auto", "of each worker; auto: a GPU where the cluster has enough of them", choices=DEVICES
    )
    placement: str = key(
        "pack", "workers on few nodes, on many, or one a node", choices=("pack", "spread", "strict_spread")
    )
    collective: str | None = key(
        None, "how workers talk; none: nccl with GPUs, gloo without", choices=("gloo", "nccl")
    )
    max_failures: int = key(
        3,
        "times that lost workers are replaced before giving up; a spot node that goes without notice to Ray "
        "counts as one; -1: without end",
        low=-1,
    )
    threads: int = key(2, "threads a worker decodes pictures with", low=1)
    checkpoint_every: int = key(
        200, "steps between checkpoints, besides one at each stage's end; 0: only those", low=0
    )
    log_every: int = key(1, "steps between rows of the history", low=1)

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
        if self.pairs is not None and self.continuous_on:
            mistakes.append(
                "continuous similarity needs labels; a pairs table has none (use variant=hashnet)"
            )
        if self.pairs is not None and self.variant == "cnnh":
            mistakes.append("variant=cnnh factorises the similarity of all rows and needs labels, not pairs")
        if self.pairs is not None and self.validation:
            mistakes.append("validation is measured by labels; with a pairs table it is not possible")
        if mistakes:
            raise ConfigError(mistakes)

    def _by_variant(self, name: str) -> Any:
        value = getattr(self, name)
        return VARIANTS[self.variant][name] if value is None else value

    @property
    def continuous_on(self) -> bool:
        return bool(self._by_variant("continuous"))

    @property
    def guessing_loss(self) -> float | None:
        """The loss of relaxed codes of 0, which is guessing; None for squared differences and triplets."""
        if self.variant in ("cnnh", "dnnh"):
            return None
        return math.log(2) + (self.quantisation * math.log(math.cosh(1)) if self.variant == "dhn" else 0)

    @property
    def pair_weights(self) -> str:
        return str(self._by_variant("class_weights"))

    def backbone_for(self, modality: str) -> str:
        """The backbone's name for data of that modality; ConfigError when it takes the other one."""
        name = self.backbone or ("features" if modality == "features" else "small_cnn")
        if (name == "features") != (modality == "features"):
            takes = "vectors" if name == "features" else "pictures"
            raise ConfigError(f"backbone={name} takes {takes}, but the manifest's modality is {modality}")
        return name

    def kind_for(self, modality: str) -> str:
        """``features``, ``small``, ``pretrained`` or ``scratch``: what the defaults are chosen by."""
        name = self.backbone_for(modality)
        if name in ("features", "small_cnn"):
            return {"features": "features", "small_cnn": "small"}[name]
        if self.freeze_backbone:  # what is trained is the hash layer, on vectors
            return "features"
        return "scratch" if self.weights == "random" else "pretrained"

    def resolved(self, modality: str, n_rows: int) -> TrainConfig:
        """The same configuration with nothing left to choose by kind, variant or number of rows.

        ``n_rows`` are those there are for an epoch, held-out ones among them.
        """
        kind = self.kind_for(modality)
        defaults = {"backbone": self.backbone_for(modality), **KINDS[kind], **VARIANTS[self.variant]}
        per_epoch = max(1, -(-n_rows // self.batch_size))  # without rows: `check_data` says so
        for name, least in zip(("first_epochs", "stage_epochs"), MIN_STEPS[kind], strict=True):
            defaults[name] = max(defaults[name], -(-least // per_epoch))
        unset = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        config = dataclasses.replace(self, **unset)
        if config.schedule != "staged" and self.first_epochs is None:  # the same number of epochs in all
            later = (self.stages - 1) * int(config.stage_epochs or 0)
            config = dataclasses.replace(config, first_epochs=int(config.first_epochs or 0) + later)
        return config

    def make_stages(self) -> list[Stage]:
        """The stages of a resolved configuration."""
        first, later = int(self.first_epochs or 0), int(self.stage_epochs or 0)
        if self.schedule == "smooth":
            return smooth(first, self.beta_growth, self.beta_refresh)
        return (
            plain(first)
            if self.schedule == "plain"
            else staged(self.stages, first, later, self.patience, self.stage_lr_scale)
        )

    def fit_settings(self) -> FitSettings:
        """What the training loop needs of a resolved configuration."""
        train_batchnorm = self.batchnorm == "train" or (self.batchnorm is None and self.weights == "random")
        return FitSettings(
            lr=float(self.lr or 0),
            head_lr_scale=self.head_lr_scale,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            annealing=self.annealing,
            batch_size=self.batch_size,
            seed=self.seed,
            train_batchnorm=train_batchnorm and not self.freeze_backbone,
            freeze_backbone=self.freeze_backbone,
            log_every=self.log_every,
            checkpoint_every=self.checkpoint_every,
        )
