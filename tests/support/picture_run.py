"""A run of a few small pictures with planted duplicates: a manifest and codes, no model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from hashnet.data import Manifest, make_manifest
from hashnet.run import Run
from hashnet.store import write_store

COPIES = {20: 0, 21: 0, 22: 5, 23: 7}  # copy → original; 21 is a bit away, 22 two bits, 23 has more pixels


def make_picture_run(folder: Path) -> Run:
    """24 pictures without labels, all in the database; 32-bit codes; rows 20 … 23 are copies."""
    rng = np.random.default_rng(0)
    pictures, codes = folder / "pictures", rng.integers(0, 256, (24, 4), dtype=np.uint8)
    pictures.mkdir(parents=True)
    for row in range(24):
        pixels = np.random.default_rng(COPIES.get(row, row)).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        side = 32 if row == 23 else 16
        Image.fromarray(pixels).resize((side, side)).save(pictures / f"{row:02d}.png")
        codes[row] = codes[COPIES.get(row, row)]
    codes[21, 0] ^= 1
    codes[22, 1] ^= 0b11
    (folder / "list.txt").write_text("".join(f"{row:02d}.png\n" for row in range(24)))
    run = Run(str(folder / "run"))
    make_manifest(
        "listfile", run.manifest.uri, path=str(folder / "list.txt"), root=str(pictures), n_query=0, n_train=5
    )
    assert len(Manifest.open(run.manifest.uri)) == 24
    write_store(run.codes.uri, codes, rows_per_shard=8)
    return run
