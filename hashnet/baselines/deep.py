"""What the three deep baselines share: HashNet's own network and training loop, with their loss and head.

They take feature rows (n, d) or uint8 pictures (n, 3, h, w). ``history_`` is the mean loss of each epoch
(CNNH: see there). On a cluster and from files the same methods are ``variant=dhn``, ``dnnh`` and ``cnnh`` of
``jobs/train.py``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Self

import numpy as np
import torch

from hashnet.baselines.base import Baseline, features_array
from hashnet.errors import ConfigError, DataError
from hashnet.io import check_whole, storage
from hashnet.losses import Loss
from hashnet.models import HashModel, build_model, load_bundle, save_bundle
from hashnet.training import FitSettings, fit, plain, standardise

# rows encoded at once; the last block is padded: one shape, so a row's code never depends on others
BLOCK = 256


class DeepBaseline(Baseline):
    """A network trained with SGD. Subclasses give ``_loss`` and, where it is not linear, ``head``.

    ``lr`` is the backbone's learning rate, the hash layer's is ``head_lr_scale`` times it. ``backbone``
    None means ``features`` for rows and ``small_cnn`` for pictures.
    """

    labels = "required"
    head: ClassVar[str] = "linear"

    model_: HashModel

    def __init__(
        self,
        n_bits: int = 48,
        *,
        seed: int = 0,
        backbone: str | None = None,
        hidden: int | None = None,
        dropout: float = 0.5,
        lr: float = 0.01,
        head_lr_scale: float = 10.0,
        weight_decay: float = 5e-4,
        epochs: int = 48,
        batch_size: int = 256,
    ) -> None:
        super().__init__(n_bits, seed=seed)
        self.backbone, self.hidden, self.dropout = backbone, hidden, dropout
        self.lr, self.head_lr_scale, self.weight_decay = lr, head_lr_scale, weight_decay
        self.epochs, self.batch_size = epochs, check_whole("batch_size", batch_size, 2)  # pairs need two

    @abstractmethod
    def _loss(self, y: np.ndarray) -> Loss:
        """The loss for a training set with multi-hot labels y (n, n_classes)."""

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
                hidden=None if pictures else self.hidden,
                dropout=self.dropout,
                head=self.head,
                **({"crop": X.shape[2], "resize": X.shape[2]} if pictures else {}),
            )
            standardise(self.model_, X, seed=self.seed)
            settings = FitSettings(
                lr=self.lr,
                head_lr_scale=self.head_lr_scale,
                weight_decay=self.weight_decay,
                batch_size=self.batch_size,
                seed=self.seed,
                train_batchnorm=pictures,
                log_every=1_000_000_000,  # no row a step: history_ has one number an epoch
            )
            epochs: list[float] = []
            fit(
                self.model_,
                X,
                self._loss(y),
                plain(self.epochs),
                settings,
                on_epoch=lambda record: epochs.append(float(record["J"])),
            )
        self._keep(epochs)

    def _keep(self, epochs: list[float]) -> None:
        self.history_ = epochs

    def logits(self, X: Any) -> np.ndarray:
        """The network's outputs, whose signs are the code, float64 (n, n_bits)."""
        X = features_array(X)
        self._check_fitted()
        if self.model_.modality == "features":
            return super().logits(X)
        return self._logits(check_pictures(X))

    @torch.no_grad()
    def _logits(self, X: np.ndarray) -> np.ndarray:
        values = np.empty((len(X), self.n_bits))
        for start in range(0, len(X), BLOCK):
            block = X[start : start + BLOCK]
            padded = np.zeros((BLOCK, *X.shape[1:]), dtype=np.uint8 if X.dtype == np.uint8 else np.float32)
            padded[: len(block)] = block
            values[start : start + BLOCK] = self.model_(torch.from_numpy(padded))[: len(block)].numpy()
        return values

    def save(self, uri: str) -> None:
        """Writes ``baseline.json``, ``state.safetensors`` and the network as a bundle in ``model``."""
        self._check_fitted()
        save_bundle(storage.join(uri, "model"), self.model_, summary={"method": self.name})
        super().save(uri)

    def _state(self) -> dict[str, Any]:
        return {name: value for name, value in super()._state().items() if name != "model_"}

    def _restore(self, uri: str) -> None:
        self.model_, _ = load_bundle(storage.join(uri, "model"))


def check_pictures(X: np.ndarray) -> np.ndarray:
    """``X`` when it is uint8 (n, 3, h, w); one picture may come as (3, h, w)."""
    X = X[None] if X.ndim == 3 else X
    if X.ndim != 4 or X.shape[1] != 3 or X.dtype != np.uint8:
        raise DataError(f"pictures must be uint8 with shape (n, 3, h, w), got {X.dtype} {X.shape}")
    return X
