"""The bit convention against slow loops that share no code with it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hashnet import codes
from hashnet.errors import CodeError

WIDTHS = st.integers(1, 12).map(lambda n: 8 * n)


def packed_by_hand(row):
    """Bit 1 where the value is >= 0, most significant bit first, by string."""
    text = "".join("1" if value >= 0 else "0" for value in row)
    return [int(text[i : i + 8], 2) for i in range(0, len(text), 8)]


@st.composite
def real_matrices(draw):
    shape = (draw(st.integers(0, 6)), draw(WIDTHS))
    return draw(hnp.arrays(np.float32, shape, elements=st.floats(-2, 2, width=32)))


@given(real_matrices())
def test_packing_equals_the_loop(values):
    packed = codes.pack_signs(values)
    assert packed.dtype == np.uint8
    assert packed.shape == (len(values), values.shape[1] // 8)
    assert packed.tolist() == [packed_by_hand(row) for row in values]


@given(real_matrices())
def test_unpacking_gives_the_signs_back(values):
    signs = codes.unpack_codes(codes.pack_signs(values))
    assert signs.dtype == np.int8
    assert signs.tolist() == [[1 if value >= 0 else -1 for value in row] for row in values]


def test_zero_and_negative_zero_are_plus_one():
    assert codes.pack_signs(np.array([[0.0, -0.0] * 4])).tolist() == [[255]]


@given(st.data(), WIDTHS)
def test_distances_equal_the_loop(data, n_bits):
    rows = hnp.arrays(np.uint8, st.tuples(st.integers(0, 5), st.just(n_bits // 8)))
    a, b = data.draw(rows), data.draw(rows)
    expected = [
        [sum(bin(x ^ y).count("1") for x, y in zip(r, s, strict=True)) for s in b.tolist()]
        for r in a.tolist()
    ]
    found = codes.hamming_distances(a, b)
    assert found.shape == (len(a), len(b))
    assert found.tolist() == expected


@given(st.data(), WIDTHS)
def test_words_keep_the_distances(data, n_bits):
    pair = data.draw(hnp.arrays(np.uint8, (2, n_bits // 8)))
    a, b = codes.as_words(pair)
    assert sum(bin(int(x) ^ int(y)).count("1") for x, y in zip(a, b, strict=True)) == codes.hamming_distances(
        pair[:1], pair[1:]
    )


def test_torch_tensors_are_packed_like_arrays():
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).normal(size=(5, 24)).astype(np.float32)
    assert np.array_equal(
        codes.pack_signs(torch.tensor(values, requires_grad=True)), codes.pack_signs(values)
    )
    assert codes.pack_signs(torch.tensor(values, dtype=torch.bfloat16)).shape == (5, 3)
    tiny = torch.full((1, 8), -1e-60, dtype=torch.float64)  # -0 in single precision
    assert codes.pack_signs(tiny).tolist() == [[0]]
    for unsigned in (torch.bool, torch.uint8):
        with pytest.raises(CodeError, match="must be signed numbers"):
            codes.pack_signs(torch.zeros((1, 8), dtype=unsigned))


def test_health_numbers_by_hand():
    three = np.array([[0b11110000], [0b11110000], [0b00000001]], dtype=np.uint8)
    assert codes.distinct(three) == 2
    assert codes.bit_balance(three) == pytest.approx([2 / 3] * 4 + [0] * 3 + [1 / 3])
    assert codes.distinct(np.zeros((0, 2), np.uint8)) == 0


@pytest.mark.parametrize(
    ("n_bits", "sentence"),
    [
        (50, "multiple of 8, got 50; the nearest are 48 and 56"),
        (0, "between 8 and 4096"),
        (4104, "between"),
        (4.0, "whole"),
    ],
)
def test_code_lengths_are_checked(n_bits, sentence):
    with pytest.raises(CodeError, match=sentence):
        codes.check_n_bits(n_bits)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: codes.pack_signs(np.full((3, 8), np.nan)), "row 0 holds NaN"),
        (lambda: codes.pack_signs(np.ones((2, 8), bool)), "signed"),
        (lambda: codes.pack_signs(np.ones((2, 2, 8))), "shape"),
        (lambda: codes.unpack_codes(np.ones((2, 8))), "packed uint8"),
        (lambda: codes.check_codes(np.ones((2, 2, 8), np.uint8)), "shape"),
        (lambda: codes.check_codes(np.ones((2, 6), np.uint8), n_bits=64), "48 bits where 64 are needed"),
        (
            lambda: codes.hamming_distances(np.ones((1, 2), np.uint8), np.ones((1, 3), np.uint8)),
            "24 bits where 16",
        ),
    ],
)
def test_wrong_input_names_the_fix(call, sentence):
    with pytest.raises(CodeError, match=sentence):
        call()


def test_a_dead_bit_is_equal_on_all_but_one_row_in_a_thousand():
    ones = np.array([0, 1, 2, 1000, 1998, 1999, 2000, 3])  # of 2000 rows; 2 and 1998 are exactly one in 1000
    bits = np.arange(2000)[:, None] < ones
    dead = codes.dead_bits(codes.bit_balance(np.packbits(bits, axis=1)))
    assert dead.tolist() == [True, True, False, False, False, True, True, False]


@pytest.mark.parametrize("n_bytes", [1, 3, 8, 9, 128])
def test_the_count_of_few_codes_is_exact_whatever_the_blocks(n_bytes):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 4, size=(500, n_bytes), dtype=np.uint8)
    counter = codes.DistinctCounter()
    for start in range(0, 500, 37):
        counter.add(rows[start : start + 37])
    assert counter.exact
    assert counter.count == len({row.tobytes() for row in rows})


def test_the_count_of_many_codes_is_an_estimate():
    rows = np.arange(50_000, dtype=np.uint64).view(np.uint8).reshape(-1, 8)
    counter = codes.DistinctCounter(k=4096)
    for start in range(0, len(rows), 10_000):
        counter.add(rows[start : start + 10_000])
        counter.add(rows[start : start + 10_000])  # seen twice, counted once
    assert not counter.exact
    assert abs(counter.count - 50_000) < 0.06 * 50_000  # four standard errors of 1 / sqrt(4096)


def test_no_codes_are_none():
    counter = codes.DistinctCounter()
    counter.add(np.zeros((0, 8), dtype=np.uint8))
    assert (counter.count, counter.exact) == (0, True)
