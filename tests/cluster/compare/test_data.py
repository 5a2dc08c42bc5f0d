"""Pictures as rows of numbers for shallow methods; no Ray is started."""

import numpy as np
import pytest
from PIL import Image

from cluster.compare.compare_config import CompareConfig
from cluster.compare.data import shallow_features
from hashnet.data.sources import make_manifest
from hashnet.io import config as configs

SIDE = 16


@pytest.fixture
def compared(tmp_path):
    """Features of 1,100 queries (two blocks), 4 training and 4 database pictures, some coloured."""

    def features(coloured: dict[str, range], broken: str | None = None):
        rng = np.random.default_rng(0)
        for split, n in (("train", 4), ("query", 1100), ("database", 4)):
            (tmp_path / split).mkdir()
            for i in range(n):
                grey = rng.integers(0, 256, (SIDE, SIDE, 1), dtype=np.uint8).repeat(3, axis=2)
                if i in coloured.get(split, ()):
                    grey[..., 0] = 255 - grey[..., 0]
                Image.fromarray(grey).save(tmp_path / split / f"{i:04d}.png", compress_level=0)
            names = "".join(f"{split}/{i:04d}.png 0\n" for i in range(n))
            (tmp_path / f"{split}.txt").write_text(names)
        if broken is not None:
            (tmp_path / broken).write_bytes(b"no picture")
        manifest = make_manifest("listfile", str(tmp_path / "m"), path=str(tmp_path))
        values = {"run": str(tmp_path / "run"), "manifest": manifest.uri, "backbone": "small_cnn"}
        values |= {"resize": SIDE, "crop": SIDE, "features": "pixels", "scaling": False, "zero_shot": 0}
        config = configs.from_dict(CompareConfig, values)
        return shallow_features(config, manifest, str(tmp_path / "run"))

    return features


@pytest.mark.parametrize(
    "coloured", [{"query": range(1)}, {"query": range(1099, 1100)}, {"database": range(4)}]
)
def test_one_coloured_picture_gives_all_of_them_three_channels(compared, coloured):
    found = compared(coloured)
    for split, n in (("train", 4), ("query", 1100), ("database", 4)):
        X, y, _ = getattr(found, split)
        assert X.shape == (n, 3 * SIDE * SIDE)
        assert X.dtype == np.float32
        assert len(y) == n
        by_channel = X.reshape(n, 3, -1)
        grey = (by_channel == by_channel[:, :1]).all(axis=(1, 2))
        assert np.flatnonzero(~grey).tolist() == list(coloured.get(split, ()))


def test_grey_pictures_have_one_channel_and_broken_ones_no_row(compared):
    found = compared({}, broken="query/0007.png")
    assert [getattr(found, s)[0].shape for s in ("train", "query", "database")] == [
        (4, SIDE * SIDE), (1099, SIDE * SIDE), (4, SIDE * SIDE)
    ]  # fmt: skip
    assert len(found.query.labels) == 1099
    assert len(found.query.row_ids) == 1099
