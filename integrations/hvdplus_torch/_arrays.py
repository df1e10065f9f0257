"""The array operations of a codec, on torch tensors of any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvdplus.arrays import RIDGE, SAMPLE, HostFunction, NumPyArray, Output, sample_rank
from hvdplus.memory import Pool

_PART = 2**16  # numbers that are looked at together

_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


class Pieces:
    """Flat fp32 tensors on the CPU that stand for one: gradients where autograd left them.

    Only host functions take them, and ``flat``, ``norm`` and ``all_finite`` of ``TorchArrays``.
    """

    dtype, device, is_cuda = torch.float32, torch.device("cpu"), False

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.tensors: list[torch.Tensor] = []
        self.clear()

    def clear(self) -> None:
        """Let go of all memory."""
        self.tensors = [torch.empty(0)] * len(self.sizes)

    def numel(self) -> int:
        """The number of elements of all pieces."""
        return sum(self.sizes)

    def element_size(self) -> int:
        """The bytes of an element."""
        return 4


class TorchArrays:
    """``hvdplus.arrays.Arrays`` for tensors on one device."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._pool = Pool()

    def zeros(self, size: int, dtype: str) -> torch.Tensor:
        """``size`` zeros."""
        if self.device.type == "cpu":
            return self._lent((size,), dtype).zero_()
        return torch.zeros(size, dtype=_DTYPES[dtype], device=self.device)

    def dtype(self, x: torch.Tensor) -> str:
        """The name of the dtype."""
        return dtype_name(x.dtype)

    def count(self, x: torch.Tensor) -> int:
        """The number of elements."""
        return x.numel()

    def nbytes(self, x: torch.Tensor) -> int:
        """The number of bytes."""
        return x.numel() * x.element_size()

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor with the same values."""
        return x.clone()

    def cast(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        """``x`` in ``dtype``."""
        return x.to(_DTYPES[dtype])

    def scaled(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """``x * factor``."""
        return x * factor

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """``x + y``."""
        return x + y

    def subtract(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """``x - y``."""
        return x - y

    def norm(self, x: torch.Tensor) -> float:
        """The Euclidean norm, part by part in the same memory: torch would make copies in fp64."""
        tensors = x.tensors if isinstance(x, Pieces) else [x.reshape(-1)]
        wide = torch.empty(_PART, dtype=torch.float64, device=x.device)
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for tensor in tensors:
            for part in tensor.split(_PART):
                numbers = wide[: part.numel()].copy_(part)
                total += numbers @ numbers
        return float(total.sqrt())

    def all_finite(self, x: torch.Tensor) -> bool:
        """Whether no element is infinite or NaN."""
        return all(map(_all_finite, x.tensors if isinstance(x, Pieces) else [x]))

    def where_finite(self, condition: torch.Tensor, then: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        """``then`` if all of ``condition`` is finite, else ``otherwise``; decided on the device, without waiting."""
        if condition.device.type == "cpu":
            return then if self.all_finite(condition) else otherwise
        return torch.where(torch.isfinite(condition).all(), then, otherwise)

    def rows(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """``x`` padded with zeros and cut into ``count`` equal rows."""
        return torch.nn.functional.pad(x, (0, -x.numel() % count)).view(count, -1)

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        """Rows, or pieces, behind one another."""
        return torch.cat(x.tensors) if isinstance(x, Pieces) else x.reshape(-1)

    def head(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """The first ``count`` elements."""
        return x[:count]

    def mean_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The mean over rows, each divided before it is added."""
        return (x * (1.0 / len(x))).sum(dim=0)

    def sum_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over rows."""
        return x.sum(dim=0)

    def to_bits(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        """Round to a 2-byte ``dtype`` and show the bits."""
        return x.to(_DTYPES[dtype]).view(torch.int16)

    def from_bits(self, x: torch.Tensor, dtype: str, into: str) -> torch.Tensor:
        """Read the bits of ``dtype``."""
        return x.view(_DTYPES[dtype]).to(_DTYPES[into])

    def padded(self, x: torch.Tensor, size: int) -> torch.Tensor:
        """``x`` with zeros behind it."""
        return x if x.numel() == size else torch.nn.functional.pad(x, (0, size - x.numel()))

    def shaped(self, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """``x`` in another shape."""
        return x.reshape(shape)

    def part(self, x: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """A part of the last axis."""
        return x[..., begin:end]

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tensors behind one another."""
        return torch.cat(list(parts), dim=-1)

    def to_bytes(self, x: torch.Tensor) -> torch.Tensor:
        """The memory as uint8."""
        return x.contiguous().view(torch.uint8)

    def from_bytes(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        """The memory as ``dtype``; what does not begin where such numbers may is copied first."""
        aligned = x.contiguous()
        if aligned.storage_offset() % _DTYPES[dtype].itemsize:
            aligned = aligned.clone()
        return aligned.view(_DTYPES[dtype])

    def shifted(self, x: torch.Tensor, amount: int) -> torch.Tensor:
        """``x + amount``."""
        return x + amount

    def times(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """``x * y``."""
        return x * y

    def over(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """``x / y``; what is divided by infinity is 0."""
        return x / torch.where(y == 0, torch.inf, y)

    def absolute(self, x: torch.Tensor) -> torch.Tensor:
        """``|x|``."""
        return x.abs()

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """To whole numbers, ties to even."""
        return x.round()

    def limited(self, x: torch.Tensor, most: float) -> torch.Tensor:
        """``x`` between two numbers."""
        return x.clamp(-most, most)

    def floored(self, x: torch.Tensor) -> torch.Tensor:
        """Down to whole numbers."""
        return x.floor()

    def at_least(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """1 where ``x >= y``."""
        return torch.ge(x, y).view(torch.uint8)

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """The largest ``|x|`` of every row."""
        largest: torch.Tensor = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True)
        return largest

    def average(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of every row."""
        return x.mean(dim=-1, keepdim=True, dtype=torch.float64).to(x.dtype)

    def packed(self, codes: torch.Tensor, bits: int) -> torch.Tensor:
        """Codes packed into bytes."""
        planes = codes.chunk(8 // bits, dim=-1)
        joined = planes[0]
        for i, plane in enumerate(planes[1:], start=1):
            joined = joined | plane << bits * i
        return joined

    def unpacked(self, x: torch.Tensor, bits: int) -> torch.Tensor:
        """Bytes taken apart into codes."""
        return torch.cat([x >> shift for shift in range(0, 8, bits)], dim=-1).bitwise_and_(2**bits - 1)

    def uniform(self, size: int, seed: int, step: int) -> torch.Tensor:
        """Numbers in [0, 1) from a generator of their own."""
        generator = torch.Generator(self.device).manual_seed(seed << 31 ^ step)
        return torch.rand(size, generator=generator, dtype=torch.float32, device=self.device)

    def from_host(self, make: Callable[[int], NumPyArray], step: int, size: int, dtype: str) -> torch.Tensor:
        """What Python makes, copied to the device without waiting for it."""
        made = torch.from_numpy(make(step)).to(_DTYPES[dtype])
        return made.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else made

    def take(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Some elements."""
        return x.index_select(0, places)

    def added_at(self, x: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """``x`` with values added."""
        return x.index_add_(0, places, values)

    def places_of_largest(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """Where the largest ones are; on the host, of equal ones the first."""
        size = x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
        if x.is_cuda:  # a number of candidates would have to be waited for
            return torch.topk(size, count, sorted=False).indices.sort().values
        candidates = _candidates(size, count)
        size = size if candidates is None else size[candidates]
        least = torch.topk(size, count, sorted=False).values.min()
        above, level = torch.nonzero(size > least).flatten(), torch.nonzero(size == least).flatten()
        found = torch.cat([above, level[: count - above.numel()]]).sort().values
        return found if candidates is None else candidates[found]

    def transposed(self, x: torch.Tensor) -> torch.Tensor:
        """Rows as columns."""
        return x.t()

    def matmul(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The product of two matrices."""
        return x @ y

    def orthonormal(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of length 1, times the inverse of the Cholesky factor of their products; no error is looked for."""
        rows = self.over(x, self.largest(x)).double()
        rows = self.over(rows, torch.linalg.vector_norm(rows, dim=-1, keepdim=True))
        ridge = torch.eye(len(rows), dtype=torch.float64, device=x.device) * RIDGE
        factor = torch.linalg.cholesky_ex(rows @ rows.t() + ridge).L
        found: torch.Tensor = torch.linalg.solve_triangular(factor, rows, upper=False)
        return found.to(x.dtype)

    def on_host(
        self,
        function: HostFunction,
        inputs: Sequence[torch.Tensor | int],
        outputs: Sequence[Output[torch.Tensor]],
    ) -> list[torch.Tensor]:
        """Lend the function the tensors' memory."""
        written = [self._lent(o.shape, o.dtype) if o.into is None else o.into for o in outputs]
        function(*map(_as_numpy, inputs), *map(_as_numpy, written))
        return written

    def _lent(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Return a new tensor; what is in it is anything."""
        if dtype == "bfloat16":
            return torch.empty(shape, dtype=torch.bfloat16)
        return torch.from_numpy(self._pool.lend(shape, dtype))

    def hosts(self, x: torch.Tensor) -> bool:
        """Whether host functions are the fastest way."""
        from hvdplus import kernels  # numba, which takes its time

        return x.dtype == torch.float32 and x.device.type == "cpu" and kernels.available()


def _all_finite(x: torch.Tensor) -> bool:
    """Look at the least and the largest, which takes no memory; they are NaN where there is one."""
    return not x.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(x))).all())


def _as_numpy(x: torch.Tensor | int) -> NumPyArray | list[NumPyArray] | int:
    if isinstance(x, int):
        return x
    return [piece.numpy() for piece in x.tensors] if isinstance(x, Pieces) else x.numpy()


def _candidates(size: torch.Tensor, count: int) -> torch.Tensor | None:
    """Return where numbers are that may be among the largest, rather more than ``count``; None for all."""
    stride, wanted = size.numel() // SAMPLE, sample_rank(size.numel(), count)
    if stride < 2 or not wanted:
        return None
    threshold = torch.topk(size[::stride], wanted, sorted=False).values.min()
    candidates = torch.nonzero(size >= threshold).flatten()
    return candidates if candidates.numel() >= count else None
