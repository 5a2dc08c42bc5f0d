"""Resampling against Pillow, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hashnet.kernels import resample


def by_pillow(pixels: np.ndarray, box: tuple[float, float, float, float], size: int) -> np.ndarray:
    square = Image.fromarray(pixels).resize((size, size), Image.Resampling.BILINEAR, box=box)
    return np.asarray(square).transpose(2, 0, 1)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 400), st.integers(1, 400), st.integers(1, 240), st.integers(0, 2**32 - 1), st.booleans()
)
def test_equals_pillow(height, width, size, seed, whole):
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    (left, right), (top, bottom) = np.sort(rng.uniform(0, width, 2)), np.sort(rng.uniform(0, height, 2))
    box = (0, 0, width, height) if whole else (left, top, right, bottom)
    assert np.array_equal(resample(pixels, box, size), by_pillow(pixels, box, size))


@pytest.mark.parametrize("value", [0, 1, 254, 255])
def test_one_colour_stays(value):
    """Weights that add up to a little more than 1 do not overflow a byte."""
    for size in (1, 7, 224, 227):
        pixels = np.full((301, 517, 3), value, np.uint8)
        assert (resample(pixels, (3.3, 2.2, 511.7, 300.9), size) == value).all()


def test_by_hand():
    """2 x 2 → 1 x 1 is the mean of all four; each channel on its own."""
    pixels = np.array([[[0, 10, 255], [4, 20, 255]], [[8, 30, 255], [12, 40, 255]]], dtype=np.uint8)
    assert resample(pixels, (0, 0, 2, 2), 1).ravel().tolist() == [6, 25, 255]


def test_a_box_of_the_final_size_is_cut_out():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    for box in ((3, 4, 19, 20), (3.5, 4, 19.5, 20), (0.0, 0.0, 16.0, 16.0)):
        assert np.array_equal(resample(pixels, box, 16), by_pillow(pixels, box, 16))


def test_takes_pixels_of_any_layout():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    box = (1.5, 2.5, 48, 39)
    assert np.array_equal(resample(pixels[:, ::-1], box, 16), by_pillow(pixels[:, ::-1].copy(), box, 16))
