"""Resampling of a box of a picture to a square, bit for bit as Pillow 13's bilinear ``resize(box=…)``.

Integers with 22 fractional bits, along one axis, rounded to bytes, then along the other: every processor
gives the same pixels. Pillow works on one pixel at a time; here eight rows, or eight columns, lie in the
lanes of a register, and planes (3, size, size) come out, as networks take them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from hashnet.kernels.jit import compiled, read_vector

BITS = 22  # fractional bits of a weight
LANES = 8  # bytes that are summed up side by side


def resample(pixels: np.ndarray, box: tuple[float, float, float, float], size: int) -> np.ndarray:
    """uint8 (3, size, size): the box (left, top, right, bottom) of uint8 (height, width, 3), resized."""
    height, width, _ = pixels.shape
    if all(float(edge).is_integer() for edge in box) and box[2] - box[0] == size == box[3] - box[1]:
        x, y = int(box[0]), int(box[1])
        return np.ascontiguousarray(pixels[y : y + size, x : x + size].transpose(2, 0, 1))
    left, top, right, bottom = (np.float32(edge) for edge in box)  # as Pillow takes them
    # The axis that is resampled first rounds first. Pillow begins with the columns of a picture this tall.
    if height > size and height - size > 2 * (width - size):
        turned = np.ascontiguousarray(pixels.transpose(1, 0, 2))
        out = _resample(turned, top, bottom, left, right, size).transpose(0, 2, 1)
    else:
        out = _resample(np.ascontiguousarray(pixels), left, right, top, bottom, size)
    return np.ascontiguousarray(out[:, :size, :size])


@intrinsic
def _weighted_sum(typingctx, out, at, source, start, step, weights, first, n):  # type: ignore[no-untyped-def]
    """Writes to ``out[at : at + LANES]`` the rounded sum over k < n of weight k · source[start + k step:]."""
    lanes, sums = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(ir.IntType(32), LANES)

    def all_lanes(builder: Any, value: Any) -> Any:
        nothing = ir.Constant(sums, ir.Undefined)
        one = builder.insert_element(nothing, value, ir.IntType(32)(0))
        return builder.shuffle_vector(one, nothing, ir.Constant(sums, [0] * LANES))

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        out, at, source, start, step, weights, first, n = args
        weights = context.make_array(signature.args[5])(context, builder, weights).data
        total = cgutils.alloca_once_value(builder, ir.Constant(sums, [1 << (BITS - 1)] * LANES))
        with cgutils.for_range(builder, n) as loop:
            place = builder.add(start, builder.mul(loop.index, step))
            values = read_vector(context, builder, signature.args[2], source, place, lanes)
            weight = builder.load(builder.gep(weights, [builder.add(first, loop.index)]))
            product = builder.mul(builder.zext(values, sums), all_lanes(builder, weight))
            builder.store(builder.add(builder.load(total), product), total)
        # Weights add up to 1 within rounding, and 255.5 x 2^22 leaves room for that: no clipping.
        found = builder.trunc(builder.lshr(builder.load(total), ir.Constant(sums, [BITS] * LANES)), lanes)
        data = context.make_array(signature.args[0])(context, builder, out).data
        pointer = builder.bitcast(builder.gep(data, [at]), lanes.as_pointer())
        builder.store(found, pointer, align=1)
        return context.get_dummy_value()

    kinds = (out, types.intp, source, types.intp, types.intp, weights, types.intp, types.intp)
    return types.none(*kinds), codegen


@njit(inline="always")
def _weights(n_pixels, first, last, size):  # type: ignore[no-untyped-def]
    """(start, count, weights (size, most)): which source pixels each resized one is the mean of.

    Resized pixel i lies at ``first + (i + 0.5) scale``; a source pixel there weighs 1 - distance / scale.
    """
    scale = np.float64(last - first) / size  # the difference in float32
    reach = max(scale, 1.0)
    start, count = np.empty(size, np.int64), np.empty(size, np.int64)
    weights = np.zeros((size, int(np.ceil(reach)) * 2 + 1), np.int32)
    shares = np.empty(weights.shape[1], np.float64)
    for i in range(size):
        centre = first + (i + 0.5) * scale
        low = max(int(centre - reach + 0.5), 0)
        n, total = min(int(centre + reach + 0.5), n_pixels) - low, 0.0
        for k in range(n):
            shares[k] = max(1.0 - abs((k + low - centre + 0.5) * (1.0 / reach)), 0.0)
            total += shares[k]
        for k in range(n):
            share = shares[k] / total if total != 0.0 else shares[k]
            weights[i, k] = int(0.5 + share * (1 << BITS))
        start[i], count[i] = low, n
    return start, count, weights


@compiled
def _resample(pixels, left, right, top, bottom, size):  # type: ignore[no-untyped-def]
    """uint8 (3, size, size rounded up to LANES), of which the first ``size`` columns count."""
    height, width = pixels.shape[0], pixels.shape[1]
    x_start, x_count, x_weights = _weights(width, left, right, size)
    y_start, y_count, y_weights = _weights(height, top, bottom, size)
    x0, y0 = x_start[0], y_start[0]
    n_values = 3 * (x_start[size - 1] + x_count[size - 1] - x0)  # of a row of the box
    n_rows = y_start[size - 1] + y_count[size - 1] - y0
    padded = (size + LANES - 1) // LANES * LANES

    # Along the rows. Eight rows of the box become words: byte i of a word is row i's value. The words of one
    # channel are then summed up for each resized column, and taken apart into rows (channel, row, column).
    narrow = np.zeros(3 * (n_rows + LANES) * padded, np.uint8)
    words, sums = np.zeros(n_values, np.uint64), np.zeros(3 * padded, np.uint64)
    word_bytes, sum_bytes = words.view(np.uint8), sums.view(np.uint8)
    values = pixels.reshape(-1)
    flat_x, flat_y = x_weights.reshape(-1), y_weights.reshape(-1)
    x_most, y_most = x_weights.shape[1], y_weights.shape[1]
    for block in range(0, n_rows, LANES):
        words[:] = 0
        for lane in range(min(LANES, n_rows - block)):
            row = values[((y0 + block + lane) * width + x0) * 3 :][:n_values]
            for j in range(n_values):
                words[j] |= np.uint64(row[j]) << np.uint64(8 * lane)
        for x in range(size):
            for channel in range(3):
                start = ((x_start[x] - x0) * 3 + channel) * LANES
                at = (channel * padded + x) * LANES
                _weighted_sum(sum_bytes, at, word_bytes, start, 3 * LANES, flat_x, x * x_most, x_count[x])
        for channel in range(3):
            of_channel = sums[channel * padded :][:padded]
            for lane in range(LANES):
                line = narrow[(channel * (n_rows + LANES) + block + lane) * padded :][:padded]
                for x in range(padded):
                    line[x] = np.uint8(of_channel[x] >> np.uint64(8 * lane))

    # Along the columns, eight of them at a time.
    out = np.empty((3, size, padded), np.uint8)
    flat = out.reshape(-1)
    for channel in range(3):
        for y in range(size):
            start = (channel * (n_rows + LANES) + y_start[y] - y0) * padded
            at = (channel * size + y) * padded
            for x in range(0, padded, LANES):
                _weighted_sum(flat, at + x, narrow, start + x, padded, flat_y, y * y_most, y_count[y])
    return out
