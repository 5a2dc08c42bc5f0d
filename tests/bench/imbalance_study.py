"""Which of HashNet's three ideas help, and when: alpha, pair weights and continuation at four imbalances.

    python tests/bench/imbalance_study.py FOLDER [--seconds 500]

{alpha 1, 10/K} x {pair weights, none} x {staged, plain} at 2, 10, 55 and 100 dissimilar pairs per similar
one, 16 and 48 bits, five seeds: 320 trainings, and 512 to choose rates by and to check, some 30 minutes on
one core. Each is kept in FOLDER/cells when it is done: the same command goes on where an earlier one stopped,
``--seconds`` stops it early, and the page, FOLDER/study.html, is drawn from whatever is there.

The data are vectors: C balanced classes, so that there are C - 1 dissimilar pairs per similar one. All arms
have the same rows, batches, first weights and number of steps; a cosine takes the learning rate to 0. Each
arm has its own rate: the best of seven by MAP at that code length, on other queries and with another seed
than those that are reported. One more training per arm, twice as long, shows whether they have converged.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from imbalance_page import write_page

from hashnet.codes import pack_signs
from hashnet.losses import LabelSimilarity, PairwiseLoss
from hashnet.metrics import evaluate
from hashnet.models import build_model
from hashnet.training import FitSettings, fit, plain, staged, standardise

IMBALANCES, BITS, SEEDS = (2, 10, 55, 100), (16, 48), (0, 1, 2, 3, 4)
WIDTH, BATCH = 64, 128
# Deviation of the classes' centres, beside noise of 1 in every column: it keeps MAP away from 0 and from 1.
SPREAD = {2: 0.3, 10: 0.45, 55: 0.75, 100: 0.85}
N_TRAIN, N_QUERY, N_CHOOSE, N_DATABASE, K = 2048, 500, 300, 4000, 1000
FIRST, LATER, STAGES = 40, 3, 10  # epochs of 16 steps: 640 steps, then nine stages of 48
RATES, RATE_SEED = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0), 99  # times the default of the arm's alpha
NOISE = 1.0


@dataclass(frozen=True)
class Arm:
    """One combination of the three ideas."""

    adaptive: bool  # alpha = 10 / n_bits, else 1
    weighted: bool
    continued: bool  # beta = 1, 2, 4, … 512, else 1

    @property
    def name(self) -> str:
        alpha = "10/K" if self.adaptive else "1"
        weights, schedule = "weights" if self.weighted else "none", "staged" if self.continued else "plain"
        return f"alpha {alpha}, {weights}, {schedule}"


ARMS = [Arm(*choice) for choice in itertools.product((False, True), repeat=3)]


@dataclass(frozen=True)
class Data:
    """Rows and class ids by part: train, query, choose (queries that the rate is chosen by), database."""

    rows: dict[str, np.ndarray]
    classes: dict[str, np.ndarray]

    @classmethod
    def draw(cls, imbalance: int) -> Data:
        n_classes = imbalance + 1
        rng = np.random.default_rng([2017, imbalance])
        centres = SPREAD[imbalance] * rng.normal(size=(n_classes, WIDTH))
        rows, classes = {}, {}
        for part, n in (
            ("train", N_TRAIN),
            ("query", N_QUERY),
            ("choose", N_CHOOSE),
            ("database", N_DATABASE),
        ):
            ids = rng.permutation(np.arange(n) % n_classes)
            rows[part] = (centres[ids] + rng.normal(size=(n, WIDTH))).astype(np.float32)
            classes[part] = ids
        return cls(rows, classes)


@dataclass(frozen=True)
class Cell:
    """A training's figures; ``ap`` and ``in_ball`` are per query."""

    arm: Arm
    imbalance: int
    n_bits: int
    seed: int
    rate: float
    J: float  # of the arm's own loss on the database, at its last beta
    L: float
    j_common: float  # of one loss for all arms: alpha = 10 / K, with weights
    l_common: float
    seconds: float
    ap: list[float]
    in_ball: list[float]
    longer: float | None = None  # MAP of twice as many steps minus MAP, with the seed the rate was chosen by


def train(data: Data, arm: Arm, n_bits: int, seed: int, rate: float, part: str, times: int = 1) -> Cell:
    """The cell of a training of ``times`` as many epochs, measured on the queries of ``part``."""
    started = time.process_time()
    torch.manual_seed(seed)
    model = build_model("features", n_bits, n_features=WIDTH, noise=NOISE)
    standardise(model, data.rows["train"])
    alpha = 10 / n_bits if arm.adaptive else 1.0
    weights = "global" if arm.weighted else "none"
    loss = PairwiseLoss(LabelSimilarity(data.classes["train"]), n_bits, alpha=alpha, weights=weights)
    # the gradient grows with alpha, and the step on z with it
    lr = FitSettings().lr * rate * 10 / n_bits / alpha
    first, later = times * FIRST, times * LATER
    stages = staged(STAGES, first, later) if arm.continued else plain(first + (STAGES - 1) * later)
    fit(model, data.rows["train"], loss, stages, FitSettings(lr=lr, seed=seed, batch_size=BATCH))
    with torch.no_grad():
        z = {name: model(torch.from_numpy(data.rows[name])) for name in (part, "database")}
    own, common = (
        PairwiseLoss(LabelSimilarity(data.classes["database"]), n_bits, alpha=a, weights=w)
        for a, w in ((alpha, weights), (10 / n_bits, "global"))
    )
    losses = [
        _loss(one, z["database"], beta) for one in (own, common) for beta in (stages[-1].beta, math.inf)
    ]
    codes = {name: pack_signs(logits) for name, logits in z.items()}
    report = evaluate(codes[part], data.classes[part], codes["database"], data.classes["database"], K)
    return Cell(
        arm, data_imbalance(data), n_bits, seed, rate, *losses,
        seconds=time.process_time() - started,
        ap=[round(value, 5) for value in report.ap],
        in_ball=_in_ball(z[part], data.classes[part], z["database"], data.classes["database"]),
    )  # fmt: skip


def data_imbalance(data: Data) -> int:
    return int(data.classes["database"].max())


def _loss(loss: PairwiseLoss, logits: torch.Tensor, beta: float, rows: int = 2000) -> float:
    at = torch.arange(min(rows, len(logits)))
    return float(loss(logits[at], at, torch.ones(len(at), dtype=torch.bool), beta))


def _in_ball(zq: torch.Tensor, yq: np.ndarray, zd: torch.Tensor, yd: np.ndarray) -> list[float]:
    """Precision within Hamming radius 2 of each query; 0 for an empty ball."""
    hq, hd = (np.where(z.numpy() >= 0, 1, -1).astype(np.float32) for z in (zq, zd))
    inside = (hq.shape[1] - hq @ hd.T) / 2 <= 2
    hits = (inside & (yq[:, None] == yd[None])).sum(axis=1)
    return [round(float(value), 5) for value in hits / np.maximum(inside.sum(axis=1), 1)]


class Study:
    """The cells in a folder; a cell made with other settings is not read."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        self.folder = folder / "cells"
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = [
            WIDTH,
            BATCH,
            SPREAD,
            N_TRAIN,
            N_QUERY,
            N_CHOOSE,
            N_DATABASE,
            K,
            FIRST,
            LATER,
            STAGES,
            NOISE,
        ]
        self.version = hashlib.sha256(json.dumps([settings, RATES]).encode()).hexdigest()[:12]

    def cell(
        self, data: Data, arm: Arm, imbalance: int, n_bits: int, seed: int, rate: float, times: int = 1
    ) -> Cell:
        choosing = seed == RATE_SEED
        name = f"{imbalance}-{n_bits}-{ARMS.index(arm)}-{seed}" + (f"-{rate:g}-{times}" if choosing else "")
        path = self.folder / f"{self.version}-{name}.json"
        if not path.exists():
            if time.monotonic() > self.until:
                raise TimeoutError
            made = train(data, arm, n_bits, seed, rate, "choose" if choosing else "query", times)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(dataclasses.asdict(made)))
            temporary.rename(path)
        values = json.loads(path.read_text())
        return Cell(**{**values, "arm": Arm(**values["arm"])})

    def run(self) -> tuple[list[Cell], bool]:
        """(cells, whether all are there)."""
        cells: list[Cell] = []
        try:
            for imbalance, n_bits in itertools.product(IMBALANCES, BITS):
                data = Data.draw(imbalance)
                for arm in ARMS:
                    cells += self.seeds(data, arm, imbalance, n_bits)
        except TimeoutError:
            return cells, False
        return cells, True

    def seeds(self, data: Data, arm: Arm, imbalance: int, n_bits: int) -> list[Cell]:
        """An arm's cells at its best rate, one per seed."""
        at = (data, arm, imbalance, n_bits)
        chosen = {rate: float(np.mean(self.cell(*at, RATE_SEED, rate).ap)) for rate in RATES}
        best = max(RATES, key=lambda rate: chosen[rate])
        longer = float(np.mean(self.cell(*at, RATE_SEED, best, times=2).ap)) - chosen[best]
        cells = [dataclasses.replace(self.cell(*at, seed, best), longer=longer) for seed in SEEDS]
        print(
            f"{imbalance}:1, {n_bits} bits, {arm.name}: MAP {np.mean([cell.ap for cell in cells]):.4f}, "
            f"rate x {best:g}, twice the steps {longer:+.4f}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        return cells


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="stop after this long, to go on later"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    cells, done = Study(given.folder, given.seconds).run()
    total = len(ARMS) * len(IMBALANCES) * len(BITS) * len(SEEDS)
    print(f"{len(cells)} of {total} trainings are there", file=sys.stderr)
    if cells:
        print(json.dumps({"page": str(write_page(given.folder, cells, total)), "cells": len(cells)}))
    return 0 if done else 3


if __name__ == "__main__":
    sys.exit(main())
