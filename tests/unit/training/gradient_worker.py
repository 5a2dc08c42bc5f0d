"""One process of a group, started by test_batches.py: python gradient_worker.py FOLDER RANK WORLDS.

For each world size in WORLDS (such as 4,2) the first so many ranks train each case for two steps together;
rank 0 writes the gradients of the last step and the weights after it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import distributed

from hashnet.losses.pairwise import LabelSimilarity, PairwiseLoss
from hashnet.models.hash_model import HashModel, build_model
from hashnet.training.batches import world
from hashnet.training.frozen_backbone import standardise
from hashnet.training.loop import fit
from hashnet.training.schedule import plain
from hashnet.training.train_config import FitSettings

CASES = ("features", "dropout", "small_cnn", "chunks")
ROWS, BATCH = 21, 11  # nothing divides evenly: batches of 11 and 10 rows


def train(case: str) -> HashModel:
    """Two steps in float64 on seeded data; ``case`` picks the model."""
    torch.manual_seed(5)
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 3, ROWS)
    if case in ("small_cnn", "chunks"):
        inputs = rng.integers(0, 256, (ROWS, 3, 8, 8), dtype=np.uint8)
        model = build_model("small_cnn", 16)
    else:
        inputs = rng.normal(size=(ROWS, 12))
        model = build_model(
            "features", 16, n_features=12, hidden=9, dropout=0.5 if case == "dropout" else 0.0
        )
    loss = PairwiseLoss(LabelSimilarity(labels), 16)
    model = model.double()
    if world()[0] == 0 and case == "features":  # the others learn it from worker 0
        standardise(model, inputs)
    chunk = 2 if case == "chunks" else None
    fit(model, inputs, loss, plain(1), FitSettings(batch_size=BATCH, lr=0.05, seed=3, chunk=chunk))
    return model


def outcome(model: HashModel) -> dict[str, torch.Tensor]:
    found = {f"grad.{name}": p.grad for name, p in model.named_parameters()}
    return found | {f"weight.{name}": p.detach() for name, p in model.named_parameters()}


if __name__ == "__main__":
    folder, rank, worlds = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    for size in map(int, worlds.split(",")):
        if rank >= size:
            break
        init = f"file://{folder}/{size}.init"
        distributed.init_process_group("gloo", init_method=init, rank=rank, world_size=size)
        for case in CASES:
            model = train(case)
            if rank == 0:
                torch.save(outcome(model), folder / f"{case}-{size}.pt")
        distributed.destroy_process_group()
