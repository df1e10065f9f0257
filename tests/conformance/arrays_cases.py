"""What every implementation of ``hvdplus.arrays.Arrays`` must do; subclass it in three lines."""

from __future__ import annotations

import numpy as np
import pytest

from hvdplus.arrays import NumPyArrays

REFERENCE = NumPyArrays()
FLOATS = ["float16", "float32", "float64"]
HALVES = ["float16", "bfloat16"]
ALL_BITS = np.arange(2**16, dtype=np.uint16).view(np.int16)


def specials(dtype: str) -> np.ndarray:
    """Zeros of both signs, infinities, NaN, the largest, the smallest, and subnormal numbers."""
    info = np.finfo(dtype)
    small, tiny = info.smallest_subnormal, info.tiny
    values = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, info.max, -info.max, tiny, -tiny, small, -small, tiny / 2]
    return np.array(values, dtype)


def nan_payloads() -> np.ndarray:
    """fp32 NaNs of which rounding or cutting the bits would make an infinity, a zero or a number."""
    bits = [0x7F800001, 0x7F80FFFF, 0x7FFFFFFF, 0x7FFFFFFE, 0x7FC00000, 0x7FFF8000, 0xFF800001, 0xFFFFFFFF, 0xFFFF8000]
    return np.array(bits, np.uint32).view(np.float32)


def ties(dtype: str) -> np.ndarray:
    """fp32 numbers half-way between two of ``dtype``, their neighbours on both sides, and both signs."""
    lost = {"float16": 13, "bfloat16": 16}[dtype]
    kept = np.concatenate([[0x3F800000], np.random.default_rng(0).integers(0x38800000, 0x477F0000, 500)])
    middle = (kept.astype(np.uint32) >> lost << lost) | (1 << (lost - 1))
    values = np.concatenate([middle - 1, middle, middle + 1]).astype(np.uint32).view(np.float32)
    return np.concatenate([values, -values])


def fp16_edges() -> np.ndarray:
    """fp32 numbers around the largest fp16, and at and around the ties between its subnormal numbers."""
    step = 2.0**-24
    values = [
        65504,
        65519.996,
        65520,
        65536,
        1e5,
        step,
        step / 2,
        step * 0.5000001,
        step * 1.5,
        step * 2.5,
        2**-14,
        6e-5,
    ]
    return np.array([*values, *(-value for value in values)], np.float32)


def random_floats() -> np.ndarray:
    """fp32 numbers of random bits: every exponent, NaN and subnormal numbers among them."""
    return np.random.default_rng(1).integers(0, 2**32, 200_001, np.uint32).view(np.float32)


def same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Bits for numbers (so -0 is not 0), anything that is NaN for NaN."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    nan = np.isnan(expected) if expected.dtype.kind == "f" else np.zeros(expected.shape, bool)
    assert (np.isnan(actual) == nan).all() if nan.any() else True
    unsigned = f"u{expected.dtype.itemsize}"
    wrong = (actual.view(unsigned) != expected.view(unsigned)) & ~nan
    assert not wrong.any(), (actual[wrong][:5], expected[wrong][:5])


class ArraysCases:
    """``arrays`` is under test; ``lend`` turns a NumPy array into its kind, ``read`` turns it back."""

    arrays = REFERENCE

    @staticmethod
    def lend(array):
        return array.copy()

    @staticmethod
    def read(array):
        return np.asarray(array)

    def check(self, name, *operands, **others):
        """Compare one operation with the reference's, bit by bit."""
        actual = getattr(self.arrays, name)(*map(self._lent, operands), **others)
        with np.errstate(all="ignore"):
            expected = getattr(REFERENCE, name)(*operands, **others)
        same(self.read(actual), expected)

    def _lent(self, operand):
        return self.lend(operand) if isinstance(operand, np.ndarray) else operand

    @pytest.mark.parametrize("dtype", [*FLOATS, "int16", "uint8"])
    @pytest.mark.parametrize("size", [0, 1, 7])
    def test_zeros(self, dtype, size):
        zeros = self.arrays.zeros(size, dtype)
        same(self.read(zeros), np.zeros(size, dtype))
        assert self.arrays.dtype(zeros) == dtype
        assert self.arrays.count(zeros) == size
        assert self.arrays.nbytes(zeros) == size * np.dtype(dtype).itemsize

    def test_count_and_nbytes_of_rows(self):
        rows = self.lend(np.zeros((2, 3), np.float32))
        assert (self.arrays.count(rows), self.arrays.nbytes(rows)) == (6, 24)

    def test_a_copy_is_not_the_original(self):
        original = self.lend(np.ones(3, np.float32))
        copy = self.arrays.copy(original)
        try:
            original[0] = 5
        except TypeError:  # arrays that cannot be written into
            return
        assert self.read(copy).tolist() == [1, 1, 1]

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_a_copy_is_equal(self, dtype):
        self.check("copy", specials(dtype))

    @pytest.mark.parametrize("into", FLOATS)
    def test_cast_from_float32(self, into):
        for values in (specials("float32"), nan_payloads(), ties("float16"), fp16_edges(), random_floats()):
            self.check("cast", values, dtype=into)

    @pytest.mark.parametrize("dtype", ["float16", "float64"])
    def test_cast_to_float32(self, dtype):
        self.check("cast", specials(dtype), dtype="float32")
        self.check("cast", np.array([], dtype), dtype="float32")

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("factor", [0.5, 4.0, 1.0, -2.0])
    def test_scaled_by_a_power_of_two(self, dtype, factor):
        self.check("scaled", specials(dtype), factor=factor)
        self.check("scaled", np.array([], dtype), factor=factor)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_scaled_by_any_number(self, dtype):
        values = np.linspace(-3, 3, 101).astype(dtype)
        actual = self.read(self.arrays.scaled(self.lend(values), 1 / 3))
        assert actual.dtype == dtype
        np.testing.assert_allclose(actual, values / np.asarray(3, dtype), rtol=2 * np.finfo(dtype).eps)

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("name", ["add", "subtract"])
    def test_add_and_subtract(self, dtype, name):
        values = specials(dtype)
        for other in (values, values[::-1].copy(), -values):
            self.check(name, values, other)
        self.check(name, values[:0], values[:0])

    @pytest.mark.parametrize(
        ("dtype", "values"), [("float16", [3e4, 4e4]), ("float32", [3e38, 3e38, 1.0]), ("float32", [])]
    )
    def test_norm_neither_overflows_nor_fails(self, dtype, values):
        expected = float(np.sqrt(np.sum(np.array(values, dtype).astype(np.float64) ** 2)))
        norm = self.arrays.norm(self.lend(np.array(values, dtype)))
        assert isinstance(norm, float)
        assert norm == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_all_finite(self, dtype):
        limit = np.finfo(dtype).max
        assert self.arrays.all_finite(self.lend(np.array([0, limit, -limit], dtype)))
        assert self.arrays.all_finite(self.lend(np.array([], dtype)))
        for bad in (np.inf, -np.inf, np.nan):
            assert not self.arrays.all_finite(self.lend(np.array([0, limit, bad], dtype)))
            assert not self.arrays.all_finite(self.lend(np.array([bad], dtype)))

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("bad", [0.0, np.inf, -np.inf, np.nan])
    def test_where_finite_takes_one_or_the_other_as_it_is(self, dtype, bad):
        condition = np.array([0, bad, 1], dtype)
        self.check("where_finite", condition, specials(dtype), -specials(dtype))

    @pytest.mark.parametrize("dtype", ["float32", "float16", "int16", "uint8"])
    @pytest.mark.parametrize("count", [1, 2, 3, 4])
    @pytest.mark.parametrize("size", [1, 2, 5, 12, 13])
    def test_rows(self, dtype, count, size):
        values = np.arange(1, size + 1).astype(dtype)
        rows = self.arrays.rows(self.lend(values), count)
        assert tuple(rows.shape) == (count, -(-size // count))
        self.check("rows", values, count=count)
        flat = self.arrays.flat(rows)
        assert self.read(self.arrays.head(flat, size)).tolist() == values.tolist()
        assert self.read(flat)[size:].tolist() == [0] * (-size % count)

    def test_rows_of_nothing(self):
        self.check("rows", np.zeros(0, np.float32), count=4)

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    @pytest.mark.parametrize("ranks", [1, 2, 4, 8])
    def test_mean_of_rows(self, dtype, ranks):
        rows = np.random.default_rng(2).normal(size=(ranks, 33)).astype(dtype)
        mean = self.read(self.arrays.mean_rows(self.lend(rows)))
        assert mean.dtype == dtype
        np.testing.assert_allclose(mean, rows.astype(np.float64).mean(axis=0), rtol=1e-6, atol=1e-6)

    def test_mean_of_rows_does_not_overflow_where_the_mean_does_not(self):
        rows = np.full((4, 2), 3e38, np.float32)
        assert self.read(self.arrays.mean_rows(self.lend(rows))).tolist() == rows[0].tolist()

    @pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
    def test_mean_of_rows_shows_what_is_not_finite(self, bad):
        rows = np.zeros((3, 2), np.float32)
        rows[1, 1] = bad
        assert np.isfinite(self.read(self.arrays.mean_rows(self.lend(rows)))).tolist() == [True, False]

    @pytest.mark.parametrize("dtype", HALVES)
    def test_every_half_is_read(self, dtype):
        for into in ("float32", "float64"):
            self.check("from_bits", ALL_BITS, dtype=dtype, into=into)

    @pytest.mark.parametrize("dtype", HALVES)
    def test_every_half_comes_back(self, dtype):
        values = self.arrays.from_bits(self.lend(ALL_BITS), dtype, "float32")
        bits = self.read(self.arrays.to_bits(values, dtype))
        number = ~np.isnan(self.read(values))
        assert bits.dtype == np.int16
        assert (bits == ALL_BITS)[number].all()
        again = self.read(self.arrays.from_bits(self.arrays.to_bits(values, dtype), dtype, "float32"))
        assert np.isnan(again[~number]).all()

    @pytest.mark.parametrize("dtype", HALVES)
    def test_bits_are_rounded_to_nearest_even(self, dtype):
        for values in (specials("float32"), ties(dtype), fp16_edges(), random_floats()):
            number = values[~np.isnan(values)]
            self.check("to_bits", number, dtype=dtype)

    @pytest.mark.parametrize("dtype", HALVES)
    def test_no_nan_becomes_a_number(self, dtype):
        bits = self.arrays.to_bits(self.lend(nan_payloads()), dtype)
        assert np.isnan(self.read(self.arrays.from_bits(bits, dtype, "float32"))).all()

    @pytest.mark.parametrize("dtype", HALVES)
    def test_bits_of_rows_and_of_nothing(self, dtype):
        rows = np.linspace(-1, 1, 12).astype(np.float32).reshape(3, 4)
        self.check("to_bits", rows, dtype=dtype)
        self.check("from_bits", REFERENCE.to_bits(rows, dtype), dtype=dtype, into="float32")
        self.check("to_bits", rows[0, :0].copy(), dtype=dtype)

    def test_bits_of_float16_itself_are_its_own(self):
        values = ALL_BITS.view(np.float16)
        bits = self.read(self.arrays.to_bits(self.lend(values), "float16"))
        assert (bits == ALL_BITS)[~np.isnan(values)].all()

    def test_bits_of_float64(self):
        self.check("to_bits", np.linspace(-7e4, 7e4, 1001), dtype="float16")
        self.check("to_bits", np.linspace(-7e4, 7e4, 1001), dtype="bfloat16")

    @pytest.mark.parametrize("dtype", [*FLOATS, "uint8", "int32"])
    @pytest.mark.parametrize("size", [5, 6, 12])
    def test_padded_is_followed_by_zeros(self, dtype, size):
        self.check("padded", np.arange(1, 6).astype(dtype), size=size)
        self.check("padded", np.zeros(0, dtype), size=size)

    @pytest.mark.parametrize("dtype", ["float32", "uint8"])
    def test_shapes_parts_and_what_they_join_to(self, dtype):
        values = np.arange(24).astype(dtype)
        for shape in ((4, 6), (2, -1), (24, 1), (-1,)):
            self.check("shaped", values, shape=shape)
        rows = values.reshape(4, 6)
        for begin, end in ((0, 2), (2, 5), (5, 6), (3, 3)):
            self.check("part", values, begin, end)
            self.check("part", rows, begin, end)
        parts = [rows[:, :1].copy(), rows[:, 1:4].copy(), rows[:, 4:].copy()]
        same(self.read(self.arrays.joined([self.lend(part) for part in parts])), rows)
        same(self.read(self.arrays.joined([self.lend(values[:0]), self.lend(values)])), values)

    @pytest.mark.parametrize("dtype", ["float32", "int16", "int32"])
    def test_bytes(self, dtype):
        values = np.random.default_rng(3).integers(0, 256, (3, 8), np.uint8).view(dtype)
        self.check("to_bytes", values)
        self.check("from_bytes", values.view(np.uint8), dtype=dtype)
        row = np.random.default_rng(4).integers(0, 256, 13, np.uint8)  # a part that begins at an odd place
        part = self.arrays.part(self.lend(row), 1, 13)
        assert self.read(self.arrays.from_bytes(part, dtype)).tobytes() == row[1:].tobytes()
        part = self.arrays.part(self.lend(row.repeat(2).reshape(2, 13)), 1, 13)  # rows with gaps between them
        assert self.read(self.arrays.from_bytes(part, dtype)).tobytes() == row.repeat(2).reshape(2, 13)[:, 1:].tobytes()

    @pytest.mark.parametrize(("dtype", "amount"), [("float32", -1), ("float32", 128), ("float64", 3), ("uint8", 1)])
    def test_shifted(self, dtype, amount):
        self.check("shifted", np.arange(9).astype(dtype), amount=amount)

    @pytest.mark.parametrize("name", ["times", "over", "at_least"])
    def test_what_takes_a_column_for_a_row(self, name):
        values = specials("float32")
        column = np.array([[0.0], [2.0], [np.inf], [np.nan], [-0.0]], np.float32)
        self.check(name, values, values[::-1].copy())
        self.check(name, np.stack([values] * 5), column)

    def test_what_is_divided_by_nothing_is_nothing(self):
        quotient = self.read(
            self.arrays.over(self.lend(np.array([1.0, 0.0], np.float32)), self.lend(np.zeros(1, np.float32)))
        )
        assert quotient.tolist() == [0, 0]

    @pytest.mark.parametrize("name", ["absolute", "rounded", "floored"])
    def test_one_by_one(self, name):
        for values in (specials("float32"), np.linspace(-4, 4, 33).astype(np.float32), random_floats()):
            self.check(name, values)

    @pytest.mark.parametrize("name", ["largest", "average"])
    def test_one_number_a_row(self, name):
        normal = np.random.default_rng(5).normal(size=(40, 33)).astype(np.float32)
        for values in (normal, normal[0], -np.ones((2, 1), np.float32), np.stack([[np.nan, 1], [np.inf, 2]])):
            self.check(name, values.astype(np.float32))

    @pytest.mark.parametrize("bits", [1, 2, 4, 8])
    def test_codes_are_packed_in_planes_the_first_lowest(self, bits):
        codes = np.random.default_rng(6).integers(0, 2**bits, (7, 24), np.uint8)
        packed, width = self.arrays.packed(self.lend(codes), bits), 24 * bits // 8
        expected = [
            [sum(int(row[plane * width + k]) << plane * bits for plane in range(8 // bits)) for k in range(width)]
            for row in codes
        ]
        same(self.read(packed), np.array(expected, np.uint8))
        same(self.read(self.arrays.unpacked(packed, bits)), codes)
        every = np.arange(256, dtype=np.uint8)
        same(self.read(self.arrays.packed(self.arrays.unpacked(self.lend(every), bits), bits)), every)

    def test_uniform(self):
        draw = lambda *key: self.read(self.arrays.uniform(10_000, *key))  # noqa: E731
        first = draw(7, 3)
        assert first.dtype == np.float32 and first.min() >= 0 and first.max() < 1
        assert abs(first.mean() - 0.5) < 0.02 and abs(first.std() - 12**-0.5) < 0.02
        same(draw(7, 3), first)
        assert (draw(7, 4) != first).any() and (draw(8, 3) != first).any() and (draw(2**32 - 1, 10**9) != first).any()

    @pytest.mark.parametrize("dtype", ["int64", "float32"])
    def test_from_host(self, dtype):
        made = self.arrays.from_host(lambda step: np.arange(4) + step, 3, 4, dtype)
        same(self.read(made), np.arange(3, 7).astype(dtype))

    def test_take_and_add(self):
        places = np.array([1, 2, 13], np.int64)
        self.check("take", specials("float32"), places)
        self.check("added_at", specials("float32"), places, np.array([1.5, 2, np.nan], np.float32))

    @pytest.mark.parametrize("size", [1, 2, 100, 70_000, 300_001])
    def test_places_of_largest(self, size):
        values = np.random.default_rng(size).normal(size=size).astype(np.float32)
        for count in {1, max(size // 100, 1), max(size // 2, 1), size}:
            expected = np.sort(np.argsort(-np.abs(values), kind="stable")[:count])
            places = self.read(self.arrays.places_of_largest(self.lend(values), count))
            same(places, expected)

    def test_places_of_largest_where_a_sample_tells_nothing(self):
        period = np.zeros(300_000, np.float32)
        period[::4] = np.linspace(1, 2, 75_000)  # all that a sample with that stride sees
        late = np.zeros(300_000, np.float32)
        late[-50:] = np.arange(1, 51)
        for values in (period, np.roll(period, 1), late, -late):
            for count in (50, 3000):
                found = self.read(self.arrays.places_of_largest(self.lend(values), count))
                assert len(found) == count and (np.diff(found) > 0).all()
                same(np.sort(np.abs(values[found])), np.sort(np.abs(values))[-count:])

    @pytest.mark.parametrize("size", [7, 200_000])
    def test_what_is_not_finite_is_the_largest(self, size):
        values = np.linspace(1, 2, size, dtype=np.float32)
        values[[1, 3, 5]] = [np.nan, -np.inf, np.inf]
        values[0] = np.finfo(np.float32).max
        assert self.read(self.arrays.places_of_largest(self.lend(values), 3)).tolist() == [1, 3, 5]
        assert self.read(self.arrays.places_of_largest(self.lend(values), 4)).tolist() == [0, 1, 3, 5]

    def test_products_of_matrices(self):
        generator = np.random.default_rng(7)
        x, y = generator.normal(size=(3, 50)).astype(np.float32), generator.normal(size=(50, 4)).astype(np.float32)
        product = self.arrays.matmul(self.lend(x), self.lend(y))
        np.testing.assert_allclose(self.read(product), x.astype(np.float64) @ y, rtol=1e-4, atol=1e-5)
        product = self.arrays.matmul(self.lend(y), self.arrays.transposed(self.lend(y)))
        np.testing.assert_allclose(self.read(product), y.astype(np.float64) @ y.T, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
    def test_orthonormal_rows_span_the_same(self, scale):
        rows = np.random.default_rng(8).normal(size=(4, 30)) * [[1], [1e-5], [1e4], [1]]
        rows[3] = rows[0] + 1e-2 * rows[3]
        found = self.read(self.arrays.orthonormal(self.lend((rows[:3] * scale).astype(np.float32))))
        np.testing.assert_allclose(found @ found.T, np.eye(3), atol=1e-5)
        if scale == 1:
            found = self.read(self.arrays.orthonormal(self.lend(rows.astype(np.float32))))
            np.testing.assert_allclose(found @ found.T, np.eye(4), atol=1e-5)
            np.testing.assert_allclose(rows @ found.T @ found, rows, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("rank", [0, 1, 3])
    def test_orthonormal_rows_of_less_than_full_rank(self, rank):
        generator = np.random.default_rng(9)
        rows = (generator.normal(size=(6, rank)) @ generator.normal(size=(rank, 20))).astype(np.float32)
        found = self.read(self.arrays.orthonormal(self.lend(rows))).astype(np.float64)
        assert np.isfinite(found).all()
        assert np.linalg.eigvalsh(found.T @ found).max() < 1 + 1e-5  # a projection, or less
        np.testing.assert_allclose(rows @ found.T @ found, rows, atol=1e-4)
        more_than_there_is_room_for = generator.normal(size=(5, 3)).astype(np.float32)
        found = self.read(self.arrays.orthonormal(self.lend(more_than_there_is_room_for))).astype(np.float64)
        assert np.linalg.eigvalsh(found.T @ found).max() < 1 + 1e-5
