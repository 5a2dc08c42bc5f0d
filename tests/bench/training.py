"""Training on Ray Train beside a plain torch loop in one process, on the same cores.

    python tests/bench/training.py [alexnet] [features] [--rounds 2]

One JSON row per case. Both sides train the same model on the same pictures or vectors, with the same batch,
decoding included, and with two threads in all: ``alexnet`` with two workers of one, ``features`` with one
worker of two, as a head on vectors is trained (its row has the time of two workers, too). The plain loop
keeps no history and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cluster.train import train
from hashnet.data.manifest import Manifest
from hashnet.data.sources import make_manifest
from hashnet.models.hash_model import build_model
from hashnet.training.checkpoints import read_history
from hashnet.training.frozen_backbone import standardise
from hashnet.training.inputs import open_rows, prefetch
from hashnet.training.train_config import TrainConfig

THREADS, N_BITS = 2, 48
CASES = {
    "alexnet": {"backbone": "alexnet", "batch_size": 256, "steps": 4, "skip": 1, "workers": 2, "log": 1},
    "features": {
        "backbone": "features",
        "batch_size": 256,
        "steps": 400,
        "skip": 50,
        "workers": 1,
        "log": 10,
    },
}


def make_data(case: str, folder: Path) -> str:
    """A manifest with 1,024 pictures of 256 px, or with 10,240 vectors of 1,280 numbers."""
    uri = str(folder / f"{case}.parquet")
    if case == "alexnet":
        make_manifest("synthetic", uri, n_images=1124, side=256, n_query=100, n_train=1024)
        return uri
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 20, 11_240)
    vectors = rng.normal(size=(20, 1280))[labels] + 2 * rng.normal(size=(11_240, 1280))
    np.savez(folder / "x.npz", features=vectors.astype(np.float32), labels=labels)
    make_manifest("npy", uri, path=str(folder / "x.npz"), n_query=1000, n_train=10_240)
    return uri


def config_of(case: str, manifest: str, run: str, **options) -> TrainConfig:
    about = CASES[case]
    rows = Manifest.open(manifest).count("train")
    epochs = -(-about["steps"] * about["batch_size"] // rows)
    return TrainConfig(
        run=run, manifest=manifest, n_bits=N_BITS, backbone=about["backbone"], batch_size=about["batch_size"],
        schedule="plain", first_epochs=epochs, dropout=0.0, noise=0.0, lr=0.001, hidden=0, measure_rows=1,
        checkpoint_every=0, log_every=about["log"], threads=1,
        scaling=case == "features", **options,
    )  # fmt: skip


def by_ray(case: str, manifest: str, folder: Path, workers: int) -> float:
    """Rows per second: the median over steps, the first ones left out."""
    run = str(folder / f"run-{time.monotonic_ns()}")
    config = config_of(case, manifest, run, num_workers=workers, cpus_per_worker=THREADS // workers)
    with contextlib.redirect_stderr(io.StringIO()):
        train(config)
    about = CASES[case]
    rates = read_history(f"{run}/model").steps["rows_per_s"][about["skip"] // about["log"] :]
    return statistics.median(rates)


def by_hand(case: str, manifest: str) -> float:
    """The same in one process: what one would write without this project."""
    torch.set_num_threads(THREADS)
    config = config_of(case, manifest, "unused").resolved(Manifest.open(manifest).modality, 1024)
    torch.manual_seed(0)
    model = build_model(str(config.backbone), N_BITS, n_features=Manifest.open(manifest).n_features)
    rows = open_rows(Manifest.open(manifest), "train", model, config, train=True)
    if case == "features":
        standardise(model, rows.source)
    else:
        model.to(memory_format=torch.channels_last)  # as ours
    optimiser = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=5e-4)
    labels = torch.from_numpy(rows.labels).float()
    order = np.random.default_rng(0).permutation(len(rows))
    batch, steps, skip = config.batch_size, CASES[case]["steps"], CASES[case]["skip"]
    model.train()

    def make(step: int):
        chosen = np.roll(order, -step * batch)[:batch]
        inputs = rows.source.batch(chosen, 0)[0]
        return chosen, inputs if case == "features" else inputs.contiguous(memory_format=torch.channels_last)

    rates, last = [], time.monotonic()
    for step, (chosen, inputs) in enumerate(prefetch(make, range(steps), 2)):
        g, y = torch.tanh(model(inputs)), labels[torch.from_numpy(chosen)]
        similar = (y @ y.T > 0).float()
        inner = 10 / N_BITS * g @ g.T
        losses = (functional.softplus(inner) - similar * inner) * (1 - torch.eye(batch))
        loss = losses.sum() / (batch * (batch - 1))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        loss.item()
        now = time.monotonic()
        if step >= skip:
            rates.append(batch / (now - last))
        last = now
    return statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; none: all")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side, one after the other")
    options = parser.parse_args()
    for case in options.cases or CASES:
        with tempfile.TemporaryDirectory() as name:
            manifest = make_data(case, Path(name))
            hand, ours, workers = [], [], CASES[case]["workers"]
            for _ in range(options.rounds):
                hand.append(by_hand(case, manifest))
                ours.append(by_ray(case, manifest, Path(name), workers))
            peer, mine = statistics.median(hand), statistics.median(ours)
            row = {
                "bench": "training",
                "case": f"{case}, batch {CASES[case]['batch_size']}, workers: {workers}",
                "rows_per_s": round(mine, 1),
                "peer": "plain torch loop, 1 process of 2 threads",
                "peer_rows_per_s": round(peer, 1),
                "ratio": round(mine / peer, 3),
            }
            if case == "features":
                two = by_ray(case, manifest, Path(name), workers=2)
                step_ms = 1000 * CASES[case]["batch_size"]
                row |= {
                    "step_ms": round(step_ms / mine, 2),
                    "step_ms_2_workers": round(step_ms / two, 2),
                    "peer_step_ms": round(step_ms / peer, 2),
                    "overhead_ms": round(step_ms / mine - step_ms / peer, 2),
                }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
