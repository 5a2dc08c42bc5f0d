"""Planted duplicates of real pictures: our codes beside pHash and dHash of the package imagehash.

    python tests/bench/planted.py FOLDER [--originals 250] [--fit 500] [--cache FEATURES.npz]

FOLDER holds pictures (JPEG). Some become originals, each with five copies: recompressed (JPEG, quality 30),
resized to half, cropped by 5 % (2.5 % off each side), greyscale, mirrored. Others train codes on features of
EfficientNet-Lite0, without labels: ITQ, and HashNet from neighbours, which starts at ITQ. One JSON row per
method and kind of copy: precision and recall by Hamming radius among the originals and the copies of that
kind; a pair is true when both come from one original. ``confirmed`` keeps the pairs within radius 32 whose
vectors have a cosine of at least 0.9. The features are kept in --cache, as they take nearly all of the time.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from PIL import Image, ImageOps

import hashnet
from hashnet.baselines import ITQ
from hashnet.dedup import NearPairs
from hashnet.dedup.confirm import cosine

RADII = (0, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32)
Sets = dict[str, list[bytes]]


def jpeg(picture: Image.Image, quality: int = 90) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def cropped(picture: Image.Image) -> Image.Image:
    x, y = round(picture.width * 0.025), round(picture.height * 0.025)
    return picture.crop((x, y, picture.width - x, picture.height - y))


COPIES = {
    "recompressed": lambda picture: jpeg(picture, 30),
    "resized": lambda picture: jpeg(picture.resize((picture.width // 2, picture.height // 2))),
    "cropped 5 %": lambda picture: jpeg(cropped(picture)),
    "greyscale": lambda picture: jpeg(ImageOps.grayscale(picture)),
    "mirrored": lambda picture: jpeg(ImageOps.mirror(picture)),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--originals", type=int, default=250)
    parser.add_argument("--fit", type=int, default=500)
    parser.add_argument("--cache", type=Path)
    given = parser.parse_args()
    paths = sorted(given.folder.glob("*.jpg"))
    chosen = np.random.default_rng(0).permutation(len(paths))
    originals = [paths[i].read_bytes() for i in chosen[: given.originals]]
    others = [paths[i].read_bytes() for i in chosen[given.originals : given.originals + given.fit]]
    sets: Sets = {"original": originals}
    for kind, change in COPIES.items():
        sets[kind] = [change(Image.open(io.BytesIO(data)).convert("RGB")) for data in originals]
    for method, codes, rate in perceptual(sets):
        tell(method, codes, rate)
    features, rate = features_of({**sets, "fit": others}, given.cache)
    for method, codes in learned(features):
        tell(method, codes, rate, features)


def tell(
    method: str, codes: dict[str, np.ndarray], rate: float, features: dict[str, np.ndarray] | None = None
) -> None:
    for kind in COPIES:
        row = {"case": f"{method}, {kind}", "method": method, "kind": kind, "pictures_per_s": rate}
        row |= score(codes["original"], codes[kind])
        if features is not None:
            row["confirmed"] = confirmed(codes, features, kind)
        print(json.dumps(row), flush=True)


def perceptual(sets: Sets) -> Iterator[tuple[str, dict[str, np.ndarray], float]]:
    """64-bit pHash and dHash."""
    import imagehash

    for name, function in (("pHash", imagehash.phash), ("dHash", imagehash.dhash)):
        started, codes = time.process_time(), {}
        for kind, pictures in sets.items():
            bits = [function(Image.open(io.BytesIO(data))).hash.ravel() for data in pictures]
            codes[kind] = np.packbits(bits, axis=1)
        yield name, codes, round(sum(map(len, sets.values())) / (time.process_time() - started))


def features_of(sets: Sets, cache: Path | None) -> tuple[dict[str, np.ndarray], float]:
    """EfficientNet-Lite0 features of every set, and pictures per CPU second."""
    if cache is not None and cache.exists():
        with np.load(cache) as kept:
            values = {name: kept[name] for name in kept.files}
        if all(len(values[kind]) == len(pictures) for kind, pictures in sets.items()):
            return values, float(values["rate"])
    from hashnet.models.bundle import save_bundle
    from hashnet.models.hash_model import build_model

    with tempfile.TemporaryDirectory() as folder:
        save_bundle(folder, build_model("lite0", 64, weights="pretrained"))
        encoder = hashnet.Encoder.load(folder)
        started = time.process_time()
        features = {kind: encoder.features(pictures) for kind, pictures in sets.items()}
        rate = round(sum(map(len, sets.values())) / (time.process_time() - started))
    if cache is not None:
        np.savez(cache, rate=rate, **features)
    return features, rate


def learned(features: dict[str, np.ndarray]) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Codes of those features, learned from the set "fit"."""
    rows = {kind: values for kind, values in features.items() if kind not in ("fit", "rate")}
    for n_bits in (64, 128, 256):
        model = ITQ(n_bits=n_bits, seed=0).fit(features["fit"])
        yield f"ITQ {n_bits} bits", {kind: model.encode(values) for kind, values in rows.items()}
    encoder = from_neighbours(features["fit"], 64)
    yield "HashNet from neighbours 64 bits", {kind: encoder.encode(values) for kind, values in rows.items()}


def from_neighbours(vectors: np.ndarray, n_bits: int) -> hashnet.Encoder:
    from hashnet.data import make_manifest
    from hashnet.training import TrainConfig, prepare, train_run

    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/x.npy", vectors)
        made = make_manifest(
            "npy", f"{folder}/m", path=f"{folder}/x.npy", n_query=8, n_train=len(vectors) - 8
        )
        config = TrainConfig(
            run=f"{folder}/run", manifest=made.uri, variant="auto", n_bits=n_bits, device="cpu"
        )
        train_run(prepare(config).config)
        return hashnet.Encoder.load(f"{folder}/run/model")


def pairs_of(originals: np.ndarray, copies: np.ndarray, radius: int) -> NearPairs:
    return hashnet.near_duplicates(np.concatenate([originals, copies]), radius, max_pairs=10**7)


def score(originals: np.ndarray, copies: np.ndarray) -> dict[str, list[float] | list[int]]:
    """Precision and recall within each radius of all pairs of originals and copies of one kind."""
    n = len(originals)
    pairs = pairs_of(originals, copies, RADII[-1])
    true = (pairs.a % n) == (pairs.b % n)
    precision, recall = [], []
    for radius in RADII:
        inside = pairs.distances <= radius
        hits = int((true & inside).sum())
        precision.append(round(hits / max(int(inside.sum()), 1), 4) if inside.any() else 1.0)
        recall.append(round(hits / n, 4))
    return {"radius": list(RADII), "precision": precision, "recall": recall}


def confirmed(codes: dict[str, np.ndarray], features: dict[str, np.ndarray], kind: str) -> dict[str, float]:
    """Precision and recall of the pairs within the largest radius whose vectors agree, too."""
    n = len(codes["original"])
    pairs = pairs_of(codes["original"], codes[kind], RADII[-1])
    vectors = np.concatenate([features["original"], features[kind]])
    vectors = vectors - vectors.mean(axis=0)
    kept = cosine(vectors[pairs.a], vectors[pairs.b]) >= 0.9
    hits = int((kept & (pairs.a % n == pairs.b % n)).sum())
    return {"precision": round(hits / max(int(kept.sum()), 1), 4), "recall": round(hits / n, 4)}


if __name__ == "__main__":
    main()
