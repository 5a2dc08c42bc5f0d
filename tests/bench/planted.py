"""Planted duplicates of real pictures: our codes beside pHash and dHash of the package imagehash.

    python tests/bench/planted.py FOLDER [--originals 400] [--fit 1000]

FOLDER holds pictures (JPEG). Some become originals, each with five copies: recompressed (JPEG, quality 30),
resized to half, cropped by 5 % (2.5 % off each side), greyscale, mirrored. Others fit ITQ on features of
EfficientNet-Lite0, without labels. One JSON row per method and kind of copy: precision and recall by Hamming
radius among the originals and the copies of that kind; a pair is true when both come from one original.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from PIL import Image, ImageOps

import hashnet
from hashnet.baselines import ITQ

RADII = (0, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32)


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
    parser.add_argument("--originals", type=int, default=400)
    parser.add_argument("--fit", type=int, default=1000)
    given = parser.parse_args()
    paths = sorted(given.folder.glob("*.jpg"))
    chosen = np.random.default_rng(0).permutation(len(paths))
    originals = [paths[i].read_bytes() for i in chosen[: given.originals]]
    others = [paths[i].read_bytes() for i in chosen[given.originals : given.originals + given.fit]]
    sets = {"original": originals}
    for kind, change in COPIES.items():
        sets[kind] = [change(Image.open(io.BytesIO(data)).convert("RGB")) for data in originals]
    for method, codes, rate in (*perceptual(sets), *learned(sets, others)):
        for kind in COPIES:
            row = {"case": f"{method}, {kind}", "method": method, "kind": kind, "pictures_per_s": rate}
            print(json.dumps(row | score(codes["original"], codes[kind])), flush=True)


def perceptual(sets: dict[str, list[bytes]]):  # type: ignore[no-untyped-def]
    """64-bit pHash and dHash."""
    import imagehash

    for name, function in (("pHash", imagehash.phash), ("dHash", imagehash.dhash)):
        started, codes = time.perf_counter(), {}
        for kind, pictures in sets.items():
            bits = [function(Image.open(io.BytesIO(data))).hash.ravel() for data in pictures]
            codes[kind] = np.packbits(bits, axis=1)
        yield name, codes, round(sum(map(len, sets.values())) / (time.perf_counter() - started))


def learned(sets: dict[str, list[bytes]], others: list[bytes]):  # type: ignore[no-untyped-def]
    """ITQ codes of 64, 128 and 256 bits of EfficientNet-Lite0 features."""
    from hashnet.models.bundle import save_bundle
    from hashnet.models.hash_model import build_model

    with tempfile.TemporaryDirectory() as folder:
        save_bundle(folder, build_model("lite0", 64, weights="pretrained"))
        encoder = hashnet.Encoder.load(folder)
        started = time.perf_counter()
        features = {kind: encoder.features(pictures) for kind, pictures in sets.items()}
        rate = round(sum(map(len, sets.values())) / (time.perf_counter() - started))
        fit_on = encoder.features(others)
    for n_bits in (64, 128, 256):
        model = ITQ(n_bits=n_bits, seed=0).fit(fit_on)
        yield (
            f"hashnet {n_bits} bits",
            {kind: model.encode(values) for kind, values in features.items()},
            rate,
        )


def score(originals: np.ndarray, copies: np.ndarray) -> dict[str, list[float] | list[int]]:
    """Precision and recall of the pairs that near_duplicates finds, at each radius."""
    n = len(originals)
    found = hashnet.near_duplicates(np.concatenate([originals, copies]), RADII[-1])
    true = found.b - found.a == n
    precision, recall = [], []
    for radius in RADII:
        near = found.distances <= radius
        precision.append(round(float(true[near].mean()), 4) if near.any() else 1.0)
        recall.append(round(float((true & near).sum() / n), 4))
    return {"radii": list(RADII), "precision": precision, "recall": recall}


if __name__ == "__main__":
    main()
