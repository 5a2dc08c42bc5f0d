"""A small run made without Ray, for tests of what comes after encoding: digits, a model, an index."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np

N_BITS = 64


def make_model(uri: str, n_features: int | None = None, seed: int = 0) -> str:
    """An untrained model bundle, for pictures or for features; returns its sha256."""
    import torch

    from hashnet.models.bundle import save_bundle
    from hashnet.models.hash_model import build_model

    torch.manual_seed(seed)
    backbone = "small_cnn" if n_features is None else "features"
    model = build_model(backbone, n_bits=N_BITS, **({} if n_features is None else {"n_features": n_features}))
    return save_bundle(uri, model, class_names=list("0123456789"))


def make_run(folder: Path | str, modality: str = "image", kind: str = "flat") -> str:
    """RUN with manifest.parquet, model/, codes/, codes-query/ and index/ of 400 digits; returns its path."""
    shutil.copytree(_made_run(modality, kind), folder, dirs_exist_ok=True)
    return str(folder)


@functools.cache
def _made_run(modality: str, kind: str) -> str:
    """A run that others are copies of."""
    from hashnet import BinaryIndex, Encoder
    from hashnet.data.columns import feature_matrix
    from hashnet.data.fetch import fetch_images
    from hashnet.data.sources import make_manifest
    from hashnet.store import write_store

    folder = tempfile.mkdtemp(prefix="hashnet-small-run-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    run = f"{folder}/run"
    manifest = make_manifest(
        "digits", f"{run}/manifest.parquet", modality=modality, n_query=1397, n_train=100
    )
    make_model(f"{run}/model", manifest.n_features)
    encoder = Encoder.load(f"{run}/model", engine="cpu-eager", batch_rows=4 if modality == "image" else None)
    stores = {}
    for split, name, n in (("database", "codes", 400), ("query", "codes-query", 100)):
        rows = manifest.read(split).slice(0, n)
        stores[split] = write_store(
            f"{run}/{name}",
            encoder.encode(fetch_images(rows) if modality == "image" else feature_matrix(rows)),
            ids=rows["row_id"].to_numpy(),
            labels=manifest.labels(split)[:n],
            uris=rows["uri"].to_pylist(),
            n_classes=manifest.n_classes,
            rows_per_shard=150,
            lineage=encoder.lineage,
        )
    BinaryIndex.build(stores["database"], kind=kind).save(f"{run}/index")
    return run


def with_features(folder: Path, modality: str = "image") -> str:
    """A run whose index has the vectors of its model, as ``encode_db output=codes,features`` makes them."""
    from hashnet import BinaryIndex, CodeStore, Encoder
    from hashnet.data import Manifest
    from hashnet.data.columns import feature_matrix
    from hashnet.data.fetch import fetch_images
    from hashnet.store import write_features

    run = make_run(folder, modality)
    rows = Manifest.open(f"{run}/manifest.parquet").read("database").slice(0, 400)
    encoder = Encoder.load(f"{run}/model", engine="cpu-eager", batch_rows=4)
    vectors = encoder.features(fetch_images(rows) if modality == "image" else feature_matrix(rows))
    store = CodeStore.open(f"{run}/codes")
    index = BinaryIndex.build(store)
    index.attach_features(write_features(f"{run}/features", vectors, store, lineage=encoder.lineage))
    index.save(f"{run}/index")
    return run


def some_codes(n: int, n_bits: int = N_BITS, seed: int = 0) -> np.ndarray:
    """uint8 (n, n_bits // 8), random."""
    return np.random.default_rng(seed).integers(0, 256, (n, n_bits // 8), dtype=np.uint8)
