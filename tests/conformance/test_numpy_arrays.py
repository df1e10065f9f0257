"""The reference, by the common cases and against independent conversions."""

from __future__ import annotations

import struct
import warnings

import numpy as np
import pytest
from arrays_cases import ALL_BITS, REFERENCE, ArraysCases, fp16_edges, nan_payloads, random_floats, same, specials, ties


class TestNumPyArrays(ArraysCases):
    arrays = REFERENCE


def rounded_to_bfloat16(values):
    """Round in float64 arithmetic: to the nearest multiple of a bfloat16's last place, ties to the even one."""
    wide = values.astype(np.float64)
    exponent = np.frexp(wide)[1]
    place = np.ldexp(1.0, np.maximum(exponent - 8, -133))  # 8 bits of precision; 2**-133 is the smallest subnormal
    with np.errstate(invalid="ignore", over="ignore"):
        nearest = np.where(np.isinf(wide), wide, np.rint(wide / place) * place)
        return np.copysign(nearest, wide).astype(np.float32)


@pytest.mark.parametrize("values", [specials("float32"), ties("bfloat16"), fp16_edges(), random_floats()])
def test_bfloat16_is_rounded_as_arithmetic_says(values):
    values = values[~np.isnan(values)]
    actual = REFERENCE.from_bits(REFERENCE.to_bits(values, "bfloat16"), "bfloat16", "float32")
    same(actual, rounded_to_bfloat16(values))


def test_bfloat16_is_the_upper_half_of_float32():
    assert REFERENCE.to_bits(np.array([1.0, -2.0], np.float32), "bfloat16").view(np.uint16).tolist() == [0x3F80, 0xC000]
    assert REFERENCE.from_bits(ALL_BITS[0x3F80:0x3F81], "bfloat16", "float32").tolist() == [1.0]


def test_a_nan_keeps_its_sign_and_is_quiet():
    values = nan_payloads()
    bits = REFERENCE.to_bits(values, "bfloat16").view(np.uint16)
    assert ((bits >> 15) == (values.view(np.uint32) >> 31)).all()
    assert (bits & 0x7FC0 == 0x7FC0).all()


def test_float16_is_that_of_struct():
    values = [x for x in [*ties("float16").tolist(), *fp16_edges().tolist()] if abs(x) < 65520]
    expected = [struct.unpack("<h", struct.pack("<e", x))[0] for x in values]
    assert REFERENCE.to_bits(np.array(values, np.float32), "float16").tolist() == expected


def test_a_cast_to_the_own_dtype_copies_nothing():
    values = np.ones(3, np.float32)
    assert REFERENCE.cast(values, "float32") is values


def test_overflow_makes_no_noise():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        huge = np.array([3e38, np.inf, np.nan], np.float32)
        for dtype in ("float16", "bfloat16"):
            REFERENCE.from_bits(REFERENCE.to_bits(huge, dtype), dtype, "float32")
        REFERENCE.cast(huge, "float16")
        REFERENCE.subtract(huge, huge)
        REFERENCE.mean_rows(np.array([[np.inf], [-np.inf]], np.float32))
        REFERENCE.add(np.array([np.inf], np.float32), np.array([-np.inf], np.float32))
        REFERENCE.scaled(huge, 4.0)
        REFERENCE.add(huge, huge)
