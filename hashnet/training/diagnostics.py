"""Diagnostics: how binary and how good codes are (J, L, |g|, bits, MAP), and warnings when they collapse."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from hashnet.codes import bit_balance, dead_bits, distinct, pack_signs
from hashnet.data import Manifest
from hashnet.encoding import BackboneFeatures
from hashnet.io import Progress
from hashnet.losses import LabelSimilarity, Loss, make_loss
from hashnet.models import BatchedInference, HashModel, relax
from hashnet.training.checkpoints import StepRecord
from hashnet.training.inputs import ArraySource, ImageSource, InputSource, open_rows, picture_reader
from hashnet.training.train_config import TrainConfig

BALL_WEIGHT = 0.3  # of precision within radius 2, beside MAP
BINS = 100  # of |g| in [0, 1], as in the paper's histogram
BATCH_ROWS = 256
BINARY = 0.99  # an entry with |g| above this counts as binary
NEAR = 0.97  # a loss above this share of guessing's means that relaxed codes are still near 0
FAR_ABOVE = 1.1
MIN_ROWS = 50  # on fewer rows, equal bits prove nothing
SMOOTHED = 20  # rows of the history that progress shows the mean of
MANY_DEAD = 0.25  # share of dead bits that counts as a failure


class StepProgress:
    """Shows the steps of a training with rate and time left, from the first step on.

    J and L are means of the last rows: those of a single batch jump. ``at_most``: stages may end before their
    last step.
    """

    def __init__(self, at_most: bool = False) -> None:
        self.at_most = at_most
        self._shown: Progress | None = None
        self._last: deque[tuple[float, float]] = deque(maxlen=SMOOTHED)  # J and L

    def step(self, row: StepRecord) -> int:
        """Shows this row of the history; returns how many steps it adds."""
        if self._shown is None:
            self._shown = Progress(row.total_steps, "steps", "train", done=row.step, at_most=self.at_most)
        self._shown.total = row.total_steps
        new = max(row.step + 1 - self._shown.done, 0)  # steps since the last row
        self._last.append((row.J, row.L))
        j, binary = np.mean(self._last, axis=0)
        self._shown.update(
            new,
            epoch=row.epoch + 1,
            beta=f"{row.beta:g}",
            lr=f"{row.lr:.2g}",
            J=f"{j:.4f}",
            L=f"{binary:.4f}",
            rows_per_s=f"{row.rows_per_s:.0f}",
        )
        return new

    def close(self, finished: bool = True) -> None:
        if self._shown is not None:
            self._shown.close(finished=finished)

    def __enter__(self) -> StepProgress:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self.close(finished=kind is None)


@dataclass(frozen=True)
class CodeDiagnostics:
    """Figures of the codes of many rows of a split at one beta; J and L are None where there is no loss.

    ``histogram`` counts |g| = |tanh(beta z)| in 100 bins of [0, 1], ``binary_share`` is the share above 0.99.
    """

    rows: int
    n_bits: int
    classes: int | None
    beta: float
    J: float | None
    L: float | None
    quantisation: float
    binary_share: float
    histogram: list[int]
    distinct: int
    dead_bits: int
    bit_balance: list[float]  # share of ones per bit
    entropy: float
    split: str = ""


@dataclass(frozen=True)
class BatchDiagnostics:
    """Figures of the codes of one batch (see ``hashnet.training.checkpoints``)."""

    quantisation: float
    distinct: int
    balance: float
    entropy: float

    @classmethod
    def of(cls, logits: torch.Tensor, beta: float) -> BatchDiagnostics:
        """Figures of logits (n, n_bits)."""
        logits = logits.detach()
        codes = pack_signs(logits)
        ones = bit_balance(codes)
        return cls(
            quantisation=float((1 - relax(logits, beta).abs()).mean()),
            distinct=distinct(codes),
            balance=float(np.maximum(ones, 1 - ones).max()),
            entropy=float(bit_entropy(ones).mean()),
        )


def logits_of(
    model: HashModel,
    source: InputSource,
    device: str | torch.device = "cpu",
    features: BackboneFeatures | None = None,
) -> tuple[torch.Tensor, np.ndarray]:
    """Logits float32 (n, n_bits) on the CPU, and bool (n,): usable rows with finite logits.

    Pictures of a run pass through ``features``, which computes each once. Without it, the next batch is
    decoded while one is computed.
    """
    rows = np.arange(len(source))
    with Progress(len(rows), "rows", "measuring the model") as progress:
        if features is not None:
            assert isinstance(source, ImageSource)
            values, usable = features(source.row_ids, picture_reader(source, rows), progress.update)
            logits = torch.from_numpy(features.logits(values))
        else:
            usable = np.zeros(len(rows), dtype=bool)

            def read(start: int, stop: int) -> torch.Tensor:
                inputs, usable[start:stop] = source.batch(rows[start:stop], epoch=0)
                return inputs

            infer = BatchedInference(model, batch_rows=BATCH_ROWS, device=device)
            with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as pool:
                ahead = None if isinstance(source, ArraySource) else pool.submit
                logits = infer(read, len(rows), progress.update, ahead)
    return logits, usable & logits.isfinite().all(dim=1).numpy()


def measure(
    logits: torch.Tensor, beta: float, loss: Loss | None = None, classes: int | None = None
) -> CodeDiagnostics:
    """Figures of logits (n, n_bits); ``loss`` was made for exactly these rows, in this order."""
    rows = torch.arange(len(logits))
    valid = torch.ones(len(logits), dtype=torch.bool)
    relaxed = relax(logits, beta).abs()
    codes = pack_signs(logits)
    ones = bit_balance(codes)
    counts, _ = np.histogram(relaxed.numpy(), bins=BINS, range=(0, 1))
    return CodeDiagnostics(
        rows=len(logits),
        n_bits=int(logits.shape[1]),
        classes=classes,
        beta=beta,
        J=float(loss(logits, rows, valid, beta)) if loss else None,
        L=float(loss(logits, rows, valid, math.inf)) if loss else None,
        quantisation=float((1 - relaxed).mean()),
        binary_share=float((relaxed > BINARY).float().mean()),
        histogram=counts.tolist(),
        distinct=distinct(codes),
        dead_bits=int(dead_bits(ones).sum()),
        bit_balance=[round(float(share), 6) for share in ones],
        entropy=float(bit_entropy(ones).mean()),
    )


def bit_entropy(ones: np.ndarray) -> np.ndarray:
    """Entropy in bits of positions that are 1 with these shares."""
    p = np.clip(ones, 1e-12, 1 - 1e-12)
    return -(p * np.log2(p) + (1 - p) * np.log2(1 - p))


def measure_database(
    config: TrainConfig,
    model: HashModel,
    manifest: Manifest,
    beta: float,
    device: str | torch.device,
    features: BackboneFeatures | None = None,
) -> CodeDiagnostics:
    """Figures of a sample of database rows at the last finite beta; of training rows if none is usable."""
    for split in ("database", "train"):
        chosen = _sample(manifest.count(split), config.measure_rows or 1, config.seed)
        rows = open_rows(manifest, split, model, config, positions=chosen, lenient=True)
        logits, usable = logits_of(model, rows.source, device, features)
        if usable.any():
            break
    labels = rows.labels[usable] if rows.labels is not None else None
    loss, classes = None, None
    if labels is not None:
        classes = int(labels.any(axis=0).sum())
        if config.pairs is None and len(labels) > 1 and config.variant != "cnnh":
            known = LabelSimilarity(labels)
            if known.counts.n_similar and known.counts.n_dissimilar:
                loss = make_loss(config, known, trained=False)
    measured = measure(logits[torch.from_numpy(usable)], beta, loss, classes)
    return dataclasses.replace(measured, split=split)


def _sample(n_rows: int, n: int, seed: int) -> np.ndarray:
    """At most ``n`` positions, ascending, drawn with a seed."""
    if n_rows <= n:
        return np.arange(n_rows)
    return np.sort(np.random.default_rng([seed, n_rows]).choice(n_rows, n, replace=False))


def split_map(
    config: TrainConfig,
    model: HashModel,
    manifest: Manifest,
    device: str | torch.device,
    features: BackboneFeatures | None = None,
) -> float | None:
    """MAP@map_k (`retrieved`, 0 for a query without a hit) of the queries against the database.

    None where one of the two has no usable row.
    """
    from hashnet.metrics import evaluate

    query = _codes(config, model, manifest, "query", None, device, features)
    database = _codes(config, model, manifest, "database", None, device, features)
    if not (len(query[0]) and len(database[0])):
        return None
    return float(evaluate(*query, *database, config.map_k).map)


@dataclass(frozen=True)
class HeldOutScore:
    """How well codes of held-out rows retrieve: ``value`` is MAP plus a share of precision within radius 2.

    MAP alone would sacrifice precision within the radius. ``ap`` is the average precision of every row as a
    query: each half of the rows searches the other.
    """

    value: float
    ap: np.ndarray

    @property
    def map(self) -> float:
        return float(self.ap.mean())

    @classmethod
    def of(cls, codes: np.ndarray, labels: np.ndarray) -> HeldOutScore:
        """The score of codes uint8 (n, n_bits / 8) with labels (n, n_classes); 0 for fewer than four rows."""
        from hashnet.metrics import evaluate, validation_k

        if len(codes) < 4:
            return cls(0.0, np.zeros(len(codes)))
        one, other = (codes[::2], labels[::2]), (codes[1::2], labels[1::2])
        k = validation_k(len(codes))
        reports = [evaluate(*one, *other, k), evaluate(*other, *one, k)]
        ap = np.concatenate([report.ap for report in reports])
        ball = float(np.mean([report.precision_within(2) for report in reports]))
        return cls(float(ap.mean()) + BALL_WEIGHT * ball, ap)

    def standard_error(self, other: HeldOutScore) -> float:
        """Of the difference of the two MAPs, over the same rows."""
        return float((self.ap - other.ap).std() / max(len(self.ap), 1) ** 0.5)


def held_out_score(
    model: HashModel, source: InputSource, labels: np.ndarray, device: str | torch.device
) -> HeldOutScore:
    """The score of a model's codes of held-out rows; rows that are unusable or have no label are left out."""
    logits, usable = logits_of(model, source, device=device)
    good = usable & labels.any(axis=1)
    return HeldOutScore.of(pack_signs(logits[torch.from_numpy(good)]), labels[good])


def held_out_map(
    config: TrainConfig,
    model: HashModel,
    manifest: Manifest,
    held: np.ndarray,
    device: str | torch.device,
    features: BackboneFeatures | None = None,
) -> float | None:
    """Validation MAP (see ``hashnet.metrics.validation_map``) of the held-out training rows."""
    from hashnet.metrics import validation_map

    return validation_map(*_codes(config, model, manifest, "train", held, device, features))


def _codes(
    config: TrainConfig,
    model: HashModel,
    manifest: Manifest,
    split: str,
    positions: np.ndarray | None,
    device: str | torch.device,
    features: BackboneFeatures | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes and multi-hot labels of the usable rows of a split."""
    rows = open_rows(manifest, split, model, config, positions=positions, lenient=True)
    logits, usable = logits_of(model, rows.source, device, features)
    assert rows.labels is not None
    return pack_signs(logits[torch.from_numpy(usable)]), rows.labels[usable]


def explain_loss(j: float, step: int, guessing: float = math.log(2)) -> str | None:
    """A warning when the loss shows that nothing is learnt; ``guessing`` is the loss of codes of 0."""
    if not math.isfinite(j) or j < NEAR * guessing:
        return None
    if j > FAR_ABOVE * guessing:
        return (
            f"the loss is {j:.3f} at step {step}, worse than guessing ({guessing:.3f}): codes of different "
            "classes run together; use a smaller lr or head_lr_scale, or a larger batch_size"
        )
    return (
        f"nothing is learnt so far: the loss is {j:.3f} at step {step}, and {guessing:.3f} means codes "
        "near 0; raise lr, train longer, and check that features are standardised and labels fit their rows"
    )


def explain_codes(measured: CodeDiagnostics) -> list[str]:
    """Warnings about codes that have collapsed, measured on many rows."""
    found = []
    rows, distinct, classes = measured.rows, measured.distinct, measured.classes or 2
    if rows > classes and distinct < min(classes, rows):
        found.append(
            f"only {distinct} different codes on {rows:,} rows of {classes} classes: classes share a code; "
            "use a smaller lr or more bits, a longer first stage, or class_weights=global for rare pairs"
        )
    n_bits, dead = measured.n_bits, measured.dead_bits
    if rows >= MIN_ROWS and dead >= max(1, MANY_DEAD * n_bits):
        found.append(
            f"{dead} of {n_bits} bits are equal on nearly all rows and carry no information: use a "
            "smaller lr, fewer bits, or class_weights=global"
        )
    return found
