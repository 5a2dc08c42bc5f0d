"""Small files of somebody's own, as sources find them, and what a manifest made of them."""

from __future__ import annotations

import io
import tarfile

import numpy as np
from PIL import Image

from hashnet.data import Manifest, make_manifest


def jpeg(colour: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (12, 10), (colour, 0, 255 - colour)).save(file, "JPEG")
    return file.getvalue()


def rows_of(manifest: Manifest, *columns: str) -> list[tuple]:
    table = manifest.read(columns=list(columns))
    return list(zip(*(table[name].to_pylist() for name in columns), strict=True))


def folders(root, *names: str) -> str:
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(jpeg(i))
    return str(root)


def tar_of(path, members: list[tuple[str, bytes]], mode: str = "w", kind: int = tarfile.USTAR_FORMAT) -> None:
    with tarfile.open(path, mode, format=kind) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def clustered_vectors(folder, n_classes: int) -> Manifest:
    """A manifest of 400 vectors around one centre per class: 60 queries, 200 of the others for training."""
    rng = np.random.default_rng(0)
    y = np.arange(400) % n_classes
    X = (rng.normal(size=(n_classes, 12))[y] * 2 + rng.normal(size=(400, 12))).astype(np.float32)
    np.savez(folder / "toy.npz", features=X, labels=y)
    return make_manifest("npy", str(folder / "toy"), path=str(folder / "toy.npz"), n_query=60, n_train=200)
