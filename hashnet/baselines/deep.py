"""DHN, DNNH and CNNH as estimators on arrays: the networks that ``variant=dhn``, ``dnnh`` and ``cnnh`` train.

Loss, head and defaults are those of ``hashnet.losses.METHODS`` and ``TrainConfig``, the training loop is
HashNet's; here they only get the contract of the baselines. They take feature rows (n, d) or uint8 pictures
(n, 3, h, w).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from hashnet.baselines.base import Baseline, features_array
from hashnet.errors import ConfigError, DataError
from hashnet.io import check_whole, storage
from hashnet.losses import METHODS, CNNHLoss, LabelSimilarity, Loss, make_loss
from hashnet.models import BatchedInference, as_tensor, build_model, load_bundle, save_bundle
from hashnet.training import KINDS, Callbacks, TrainConfig, fit, standardise

BATCH_ROWS = 256  # rows encoded at once, padded: in one shape a row's code does not depend on other rows


@dataclass(kw_only=True, eq=False)
class DeepBaseline(Baseline):
    """A network trained with SGD; subclasses give ``name`` and the settings of their own.

    ``lr`` is the backbone's learning rate, the hash layer's is ``head_lr_scale`` times it. ``backbone`` None
    is ``features`` for rows and ``small_cnn`` for pictures. ``history_`` is the mean loss of each epoch.
    """

    labels = "required"

    backbone: str | None = None
    hidden: int | None = None
    dropout: float = KINDS["features"].dropout
    noise: float = KINDS["features"].noise
    lr: float | None = None
    head_lr_scale: float = TrainConfig.head_lr_scale
    weight_decay: float = TrainConfig.weight_decay
    epochs: int = 48
    batch_size: int = TrainConfig.batch_size

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("batch_size", self.batch_size, 2)  # pairs need two
        if self.lr is None:
            self.lr = KINDS["features"].lr * self._config().lr_scale

    def _config(self) -> TrainConfig:
        """The configuration that trains the same method from files."""
        settings = {name: value for name, value in self.params().items() if name != "epochs"}
        return TrainConfig(
            run="",
            variant=self.name,
            first_epochs=self.epochs,
            schedule=METHODS[self.name].schedule,
            log_every=1_000_000_000,  # no row per step: history_ has one number per epoch
            checkpoint_every=0,
            **settings,
        )

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learns from rows X (n, d) or pictures X uint8 (n, 3, h, w), and labels y (ids or multi-hot)."""
        X = features_array(X)
        if X.ndim != 4:
            return super().fit(X, y)
        X, targets = self._labelled(check_pictures(X), y)
        assert targets is not None
        self.mean_, self.columns_ = np.zeros(0), np.zeros(0, dtype=np.int64)  # pictures have no columns
        self.history_ = []
        self._train(X, targets)
        return self

    def _fit(self, X: np.ndarray, y: np.ndarray | None, rng: np.random.Generator) -> None:
        assert y is not None
        self._train(X.astype(np.float32), y)

    def _train(self, X: np.ndarray, y: np.ndarray) -> None:
        pictures = X.ndim == 4
        config = self._config()
        backbone = self.backbone or ("small_cnn" if pictures else "features")
        if (backbone == "features") == pictures:
            raise ConfigError(
                f"backbone={backbone} takes {'rows (n, d)' if pictures else 'pictures (n, 3, h, w)'}, got "
                f"{X.shape}; leave backbone out"
            )
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
            torch.manual_seed(self.seed)
            self.model_ = build_model(
                backbone,
                self.n_bits,
                n_features=None if pictures else X.shape[1],
                hidden=self.hidden,
                hidden_norm=bool(self.hidden),
                dropout=self.dropout,
                noise=0.0 if pictures else self.noise,
                head=METHODS[self.name].head,
                **({"crop": X.shape[2], "resize": X.shape[2]} if pictures else {}),
            )
            standardise(self.model_, X, seed=self.seed)
            loss = make_loss(config, LabelSimilarity(y))
            epochs: list[float] = []
            follow = Callbacks(epoch=lambda record: epochs.append(record.J))
            fit(self.model_, X, loss, config.make_stages(), config.fit_settings(), callbacks=follow)
        self._keep(loss, epochs)

    def _keep(self, loss: Loss, epochs: list[float]) -> None:
        self.history_ = epochs

    def logits(self, X: Any) -> np.ndarray:
        """The network's outputs, whose signs are the code, float64 (n, n_bits)."""
        X = features_array(X)
        self._check_fitted()
        if self.model_.modality == "features":
            return super().logits(X)
        return self._logits(check_pictures(X))

    def _logits(self, X: np.ndarray) -> np.ndarray:
        rows = X if X.dtype == np.uint8 else X.astype(np.float32)
        infer = BatchedInference(self.model_, batch_rows=BATCH_ROWS, pad=True)
        return infer(lambda start, stop: as_tensor(rows[start:stop]), len(rows)).double().numpy()

    def save(self, uri: str) -> None:
        """Writes ``baseline.json``, ``state.safetensors`` and the network as a bundle in ``model``."""
        self._check_fitted()
        save_bundle(storage.join(uri, "model"), self.model_, summary={"method": self.name})
        super().save(uri)

    def _state(self) -> dict[str, Any]:
        return {name: value for name, value in super()._state().items() if name != "model_"}

    def _restore(self, uri: str) -> None:
        self.model_, _ = load_bundle(storage.join(uri, "model"))


@dataclass(kw_only=True, eq=False)
class DHN(DeepBaseline):
    """Deep hashing network (Zhu, Long, Wang & Cao, AAAI 2016).

    Unweighted pairwise cross-entropy on g = tanh(z), plus ``quantisation`` * mean log cosh(|g| - 1).
    """

    name = "dhn"

    quantisation: float = TrainConfig.quantisation
    alpha: float | None = TrainConfig.alpha


@dataclass(kw_only=True, eq=False)
class DNNH(DeepBaseline):
    """Simultaneous feature learning and hash coding (Lai, Pan, Liu & Yan, CVPR 2015).

    Divide and encode: 50 units per bit, each slice gives one bit; triplet hinge on almost binary codes.
    ``margin`` counts bits; sigmoids within ``epsilon`` of 0.5 are left as they are, others are rounded.
    """

    name = "dnnh"

    margin: float = TrainConfig.margin
    epsilon: float = TrainConfig.epsilon


class CNNH(DeepBaseline):
    """Supervised hashing via image representation learning (Xia, Pan, Lai, Liu & Yan, AAAI 2014).

    Codes H of the training rows that reproduce their similarity, then a network that regresses H.
    ``history_`` is the first stage's objective |S - H H^T / n_bits|^2, which never increases; ``losses_`` the
    mean squared difference of each epoch of the second.
    """

    name = "cnnh"
    monotone = True

    losses_: list[float]

    def _keep(self, loss: Loss, epochs: list[float]) -> None:
        assert isinstance(loss, CNNHLoss)
        self.history_, self.losses_ = loss.history, epochs


def check_pictures(X: np.ndarray) -> np.ndarray:
    """``X`` when it is uint8 (n, 3, h, w); one picture may be (3, h, w)."""
    X = X[None] if X.ndim == 3 else X
    if X.ndim != 4 or X.shape[1] != 3 or X.dtype != np.uint8:
        raise DataError(f"pictures must be uint8 with shape (n, 3, h, w), got {X.dtype} {X.shape}")
    return X
