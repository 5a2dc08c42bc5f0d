"""A small run with pictures, codes, history and model summary, made without training."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pytest

import hashnet
from hashnet.codes import pack_signs

CLASSES = ("cat & dog", "<script>alert(1)</script>", "bird", "a class with a very long name indeed")
DATABASE, QUERY = 4, 2


def picture(c: int, seed: int) -> bytes:
    from PIL import Image

    rng = np.random.default_rng(seed)
    colour = np.array([(200, 80, 60), (60, 160, 90), (70, 90, 200), (210, 190, 60)][c])
    pixels = np.clip(colour + rng.normal(0, 30, (40, 50, 3)), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def near_codes(classes: np.ndarray, n_bits: int, rng: np.random.Generator) -> np.ndarray:
    """Codes around one centre per class."""
    centres = rng.normal(size=(len(CLASSES), n_bits))
    return pack_signs(centres[classes] + rng.normal(0, 1.1, (len(classes), n_bits)))


@pytest.fixture(scope="session")
def reports():
    """Reports of two code lengths on the same classes."""
    rng = np.random.default_rng(0)
    query_classes, classes = rng.integers(0, 4, 30), rng.integers(0, 4, 400)
    made = []
    for n_bits in (16, 32):
        codes = near_codes(np.concatenate([query_classes, classes]), n_bits, rng)
        made.append(
            hashnet.evaluate(codes[:30], query_classes, codes[30:], classes, k=100, class_names=CLASSES)
        )
    return made


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run folder: manifest with pictures inside, codes, codes-query, a model with a history."""
    import torch

    from hashnet.data.writer import SourceRows, write_manifest
    from hashnet.models.bundle import save_bundle
    from hashnet.models.hash_model import build_model
    from hashnet.store import write_store
    from hashnet.training.checkpoints import History, StepRecord, write_history

    folder = tmp_path_factory.mktemp("report") / "run"
    rng = np.random.default_rng(0)
    n = 240
    classes = rng.integers(0, 4, n)
    table = pa.table({"image": pa.array([picture(c, i) for i, c in enumerate(classes)], pa.binary())})
    labels = pa.array([[int(c)] for c in classes], pa.list_(pa.int32()))
    flags = np.where(np.arange(n) % 8 == 0, QUERY, DATABASE).astype(np.uint8)
    rows = SourceRows(
        n, lambda a, b: table[a:b], labels=labels, n_classes=4, class_names=CLASSES, inline=True
    )
    write_manifest(str(folder / "manifest.parquet"), rows, flags)
    codes = near_codes(classes, 16, rng)
    for name, flag in (("codes", DATABASE), ("codes-query", QUERY)):
        some = np.flatnonzero(flags == flag)
        write_store(str(folder / name), codes[some], ids=some, labels=classes[some], n_classes=4)
    torch.manual_seed(0)
    relaxed = np.abs(np.tanh(rng.normal(0, 4, 5000)))
    measured = {"histogram": np.histogram(relaxed, 100, (0, 1))[0].tolist(), "binary_share": 0.5, "beta": 4.0}
    summary = {"measured": measured, "warnings": ["bit 3 is dead; train longer"]}
    save_bundle(str(folder / "model"), build_model("small_cnn", 16), summary=summary)
    history = History()
    for step in range(300):
        stage = step // 100
        loss = 0.7 * np.exp(-step / 80) + 0.05
        binary = loss + 0.02 if step % 3 == 0 else np.nan  # L is not measured at every step
        history.add(StepRecord(step, step, stage, beta=2.0**stage, J=loss, L=binary))
    write_history(str(folder / "model"), history)
    return folder
