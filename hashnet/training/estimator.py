"""HashNet on arrays or picture files, in this process: what ``jobs/train.py`` trains from a manifest.

model = hashnet.HashNet(n_bits=64).fit(X, y)
index = hashnet.BinaryIndex.from_arrays(model.encode(X))
hits = index.search(model.encode(queries), k=10)
"""

from __future__ import annotations

import os
import tempfile
from typing import Any, Self

import numpy as np

from hashnet.data import write_arrays
from hashnet.encoding import Encoder
from hashnet.errors import DataError, HashnetError
from hashnet.io import config as configs
from hashnet.io import counted
from hashnet.losses import AUTO
from hashnet.models import save_bundle
from hashnet.run import Run
from hashnet.training.diagnostics import StepProgress
from hashnet.training.loop import Callbacks
from hashnet.training.preparation import prepare
from hashnet.training.train_config import TrainConfig
from hashnet.training.trainer import TrainingSummary, train_run

PRETRAINED = {"backbone": "lite0", "weights": "pretrained", "freeze_backbone": True}  # for pictures


class HashNet:
    """Learns binary codes of the rows it is given and encodes further ones.

    ``settings`` are keys of ``jobs/train.py``. Without ``variant`` the method is chosen by what the data
    offers: with labels HashNet and a label term (continuous similarity where rows have several labels),
    without labels pairs of neighbouring rows. Pictures go through a frozen pretrained EfficientNet-Lite0
    unless ``backbone`` says otherwise. ``run`` keeps manifest, history and model in that folder, where
    ``hashnet inspect`` and the jobs find them; by default they are temporary.

    Learnt: ``encoder_`` (Encoder), ``summary_`` (TrainingSummary).
    """

    encoder_: Encoder
    summary_: TrainingSummary

    def __init__(self, n_bits: int = 64, *, seed: int = 0, run: str | None = None, **settings: Any) -> None:
        self.n_bits, self.seed, self.run = n_bits, seed, run
        self.settings = {"variant": AUTO, **settings}
        self._config("")  # an unknown key or a bad value is refused here

    def __repr__(self) -> str:
        """
        >>> HashNet(48, lr=0.02)
        HashNet(n_bits=48, seed=0, variant='auto', lr=0.02)
        """
        settings = {"n_bits": self.n_bits, "seed": self.seed, "run": self.run, **self.settings}
        words = ", ".join(f"{name}={value!r}" for name, value in settings.items() if value is not None)
        fitted = (
            f", fitted on {counted(self.summary_.train_rows, 'row')}" if hasattr(self, "summary_") else ""
        )
        return f"HashNet({words}){fitted}"

    def _config(self, run: str, **defaults: Any) -> TrainConfig:
        return configs.from_dict(
            TrainConfig, {"run": run, "n_bits": self.n_bits, "seed": self.seed, **defaults, **self.settings}
        )

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learns from feature rows (n, d) or paths of pictures, and labels y: class ids (n,), multi-hot, or
        class names, one or a list of them per row."""
        with tempfile.TemporaryDirectory() as scratch:
            run = self.run or os.path.join(scratch, "run")
            manifest = os.path.join(scratch, "manifest.parquet")
            rows = write_arrays(manifest, X, y)
            if len(rows) < 2:
                raise DataError(f"there is {counted(len(rows), 'row')} to learn from; give at least two")
            defaults = PRETRAINED if rows.modality == "image" and "backbone" not in self.settings else {}
            prepared = prepare(self._config(run, manifest=manifest, **defaults))
            if prepared.finished is not None:
                raise HashnetError(f"{run} holds a finished training; use another folder, or load its model")
            with StepProgress(at_most=prepared.config.patience > 0) as progress:
                summary = train_run(prepared.config, callbacks=Callbacks(step=progress.step))
            assert summary is not None  # there is one worker, the first
            self._bundle = Run(run).model.open()
        self.summary_ = summary
        self.encoder_ = Encoder(*self._bundle)
        return self

    def encode(self, X: Any) -> np.ndarray:
        """Packed codes, uint8 (n, n_bits // 8)."""
        return self._fitted().encode(X)

    def logits(self, X: Any) -> np.ndarray:
        """Logits z, float32 (n, n_bits), whose signs are the code: for ``index.search(logits=…)``."""
        return self._fitted().logits(X)

    def save(self, uri: str) -> None:
        """Writes the model bundle that ``hashnet.Encoder.load(uri)`` opens."""
        self._fitted()
        model, info = self._bundle
        save_bundle(uri, model, class_names=info.class_names, summary=info.summary)

    def _fitted(self) -> Encoder:
        if not hasattr(self, "encoder_"):
            raise HashnetError("this HashNet has learnt nothing yet; call fit(X, y) first")
        return self.encoder_
