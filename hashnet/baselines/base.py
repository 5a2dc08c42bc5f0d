"""The contract of every baseline: ``fit(X, y=None) → self``, ``encode(X) → packed codes``, save, load.

A method's file holds only what its paper describes: ``_fit`` learns from centred rows, ``_logits`` gives the
values whose signs are the code. Everything else (checks, centring, blocks, seeds, files) is here.

- Constructor arguments are the paper's hyper-parameters, kept under their own names: fields of a dataclass.
- Learnt state ends in ``_``: arrays, numbers or lists of numbers, so that it is saved without pickle.
- ``history_`` holds the objective per iteration (empty where a method has none).
- Every random choice comes from ``seed``: the same data and seed give the same codes.

Constant columns carry no information: they are left out with one BaselineWarning. So are a few rows that are
more than 100 times as large as others.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

import numpy as np
import safetensors.numpy

from hashnet.codes import check_n_bits, pack_signs
from hashnet.data import ordinary_rows, varying_columns
from hashnet.errors import CodeError, DataError, FormatError
from hashnet.io import as_array, check_whole, storage
from hashnet.labels import as_multi_hot, count_pairs

FORMAT_VERSION = 1
BLOCK_ROWS = 4096  # rows encoded at once: 4096 x 4096 float64 are 128 MB


class BaselineWarning(UserWarning):
    """A method departed from its settings because the data left it no choice."""


def warn(message: str) -> None:
    """Issues one BaselineWarning that points at the line which called into this package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__")).startswith(__package__):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, BaselineWarning, stacklevel=level)


@dataclass(eq=False)
class Baseline(ABC):
    """One published method. Its fields are settings; subclasses give ``name``, ``_fit`` and ``_logits``."""

    name: ClassVar[str]  # its title in tables is the same in upper case
    labels: ClassVar[Literal["ignored", "optional", "required"]] = "ignored"
    grid: ClassVar[dict[str, list[Any]]] = {}  # settings worth trying on a validation part
    monotone: ClassVar[bool] = False  # whether the paper guarantees that the objective never increases

    n_bits: int = 48
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        self.n_bits = check_n_bits(self.n_bits)
        self.seed = check_whole("seed", self.seed, 0)

    # -- public methods -------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learns from rows X (n, d) and, where the method uses them, labels y (class ids or multi-hot)."""
        X, targets = self._in_proportion(*self._labelled(finite(as_rows(X)), y))
        if len(X) < 2:
            raise DataError(f"{self.name} needs at least 2 rows to learn from, got {len(X)}")
        varying = varying_columns(X)
        if not varying.all():
            warn(f"{self.name}: {(~varying).sum()} of {X.shape[1]} columns are constant and are left out")
        self.columns_ = np.flatnonzero(varying)
        self.mean_ = X.mean(axis=0)  # float64 (d,)
        self.history_: list[float] = []
        self._fit(self._centre(X), targets, np.random.default_rng(self.seed))
        return self

    def encode(self, X: Any) -> np.ndarray:
        """Packed codes, uint8 (n, n_bits // 8), of rows X (n, d); one row may be 1-D."""
        return pack_signs(self.logits(X))

    def logits(self, X: Any) -> np.ndarray:
        """The values whose signs are the code, float64 (n, n_bits)."""
        self._check_fitted()
        X = as_rows(X, min_rows=0)
        if X.shape[1] != len(self.mean_):
            raise DataError(
                f"{self.name} was fitted on {len(self.mean_)} columns, got {X.shape[1]}; "
                "encode with features of the backbone it was fitted on"
            )
        values = np.empty((len(X), self.n_bits))
        for start in range(0, len(X), BLOCK_ROWS):
            block = finite(X[start : start + BLOCK_ROWS], start)
            values[start : start + BLOCK_ROWS] = self._logits(self._centre(block))
        return values

    def params(self) -> dict[str, Any]:
        """The constructor's current arguments: ``type(self)(**self.params())`` is an unfitted copy."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: v.item() if isinstance(v, np.generic) else v for name, v in values.items()}  # for JSON

    def save(self, uri: str) -> None:
        """Writes a folder: ``baseline.json`` (settings, numbers) and ``state.safetensors`` (arrays)."""
        self._check_fitted()
        state = self._state()
        arrays = {name: np.ascontiguousarray(v) for name, v in state.items() if isinstance(v, np.ndarray)}
        storage.write_bytes(storage.join(uri, "state.safetensors"), safetensors.numpy.save(arrays))
        about = {
            "kind": "baseline",
            "format_version": FORMAT_VERSION,
            "method": self.name,
            "params": self.params(),
            "state": {name: value for name, value in state.items() if name not in arrays},
        }
        storage.write_json(storage.join(uri, "baseline.json"), about)

    @classmethod
    def load(cls, uri: str) -> Self:
        """The fitted method that ``save`` wrote; ``Baseline.load`` loads any, ``ITQ.load`` an ITQ only."""
        from hashnet.baselines import REGISTRY

        where = storage.join(uri, "baseline.json")
        about = storage.check_format(storage.read_json(where), where, "baseline", FORMAT_VERSION)
        found = REGISTRY.get(about["method"])
        if found is None or not issubclass(found, cls):
            raise FormatError(f"{uri} holds {about['method']!r}, not {getattr(cls, 'name', 'a baseline')!r}")
        fitted = found(**about["params"])
        arrays = safetensors.numpy.load(storage.read_bytes(storage.join(uri, "state.safetensors")))
        for name, value in (about["state"] | arrays).items():
            setattr(fitted, name, value)
        fitted._restore(uri)
        return fitted

    # -- what a subclass implements ---------------------------------------------------------------------

    @abstractmethod
    def _fit(self, X: np.ndarray, y: np.ndarray | None, rng: np.random.Generator) -> None:
        """Learns from centred rows X, float64 (n, d), and multi-hot y, uint8 (n, n_classes) or None."""

    @abstractmethod
    def _logits(self, X: np.ndarray) -> np.ndarray:
        """float64 (n, n_bits) of centred rows X, float64 (n, d)."""

    def _state(self) -> dict[str, Any]:
        """Learnt state by name: arrays, and what JSON holds."""
        return {name: value for name, value in vars(self).items() if name.endswith("_")}

    def _restore(self, uri: str) -> None:  # noqa: B027 - most methods have no files of their own
        """Loads what a method keeps in files of its own."""

    # -- checks ----------------------------------------------------------------------------------

    def _centre(self, X: np.ndarray) -> np.ndarray:
        if len(self.columns_) == len(self.mean_):
            return X - self.mean_
        return X[:, self.columns_] - self.mean_[self.columns_]

    def _check_fitted(self) -> None:
        if not hasattr(self, "history_"):
            raise DataError(f"{self.name} is not fitted yet: call fit(X) first")

    def _labelled(self, X: np.ndarray, y: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """X and multi-hot y (None where labels play no part), rows without a label left out."""
        targets = self._check_labels(y, len(X))
        if targets is None or (labelled := targets.any(axis=1)).all():
            return X, targets
        warn(f"{self.name}: {(~labelled).sum()} of {len(X)} rows have no label and are left out")
        return X[labelled], targets[labelled]

    def _in_proportion(
        self, X: np.ndarray, targets: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """X and its labels without rows that are out of all proportion."""
        ordinary = ordinary_rows(X)
        if ordinary.all():
            return X, targets
        n_out = (~ordinary).sum()
        warn(f"{self.name}: {n_out} of {len(X)} rows are over 100 times as large as the median; left out")
        return X[ordinary], None if targets is None else targets[ordinary]

    def _check_labels(self, y: Any, n_rows: int) -> np.ndarray | None:
        if self.labels == "ignored":
            return None
        if y is None:
            if self.labels == "required":
                raise DataError(f"{self.name} is supervised: fit(X, y) needs labels, multi-hot or class ids")
            return None
        y = as_multi_hot(y)
        if len(y) != n_rows:
            raise DataError(f"{n_rows} rows but {len(y)} rows of labels")
        pairs = count_pairs(y)
        if pairs.n_dissimilar == 0:
            raise DataError(f"{self.name}: all {n_rows} rows share a label; at least two classes are needed")
        if pairs.n_similar == 0:
            raise DataError(f"{self.name}: no two of the {n_rows} rows share a label, nothing to learn from")
        return y


class Projection(Baseline):
    """A method whose bits are the signs of projections on directions that it learns or draws."""

    directions_: np.ndarray  # (d, n_bits)

    def _logits(self, X: np.ndarray) -> np.ndarray:
        return X @ self.directions_


def as_rows(X: Any, min_rows: int = 1) -> np.ndarray:
    """Numbers (n, d) of anything array-like, not copied where they are an array already."""
    X = features_array(X)
    if X.dtype.kind not in "fiub":
        raise DataError(f"features must be numbers, got {X.dtype}")
    if X.ndim == 1:
        X = X[None, :]
    if X.ndim != 2 or X.shape[1] == 0:
        raise DataError(f"features must have shape (n, d), got {X.shape}")
    if len(X) < min_rows:
        raise DataError("there are no rows")
    return X


def features_array(X: Any) -> np.ndarray:
    """``X`` as an array; DataError when its rows differ in length."""
    try:
        return as_array(X, "features")
    except CodeError as error:
        raise DataError(str(error)) from error


def finite(X: np.ndarray, first: int = 0) -> np.ndarray:
    """float64 of rows X, the rows from ``first`` on; raises DataError that names the first bad one."""
    X = X.astype(np.float64, copy=False)
    good = np.isfinite(X).all(axis=1)
    if not good.all():
        bad = first + good.argmin()
        raise DataError(f"{(~good).sum()} rows hold NaN or infinity, the first is row {bad}")
    return X
