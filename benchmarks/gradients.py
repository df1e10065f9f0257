"""The gradients that are exchanged: shapes of known networks, and fresh values for every step without computing any."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Shape: TypeAlias = tuple[int, ...]
Values: TypeAlias = npt.NDArray[np.float32]

NOISE = 1 << 22  # random numbers kept; longer gradients repeat them from another place on


def count(shapes: Sequence[Shape]) -> int:
    """Return how many numbers gradients of these shapes have."""
    return sum(_size(shape) for shape in shapes)


def resnet50() -> list[Shape]:
    """Return the shapes of ResNet-50's parameters for 1,000 classes, first layer first (arXiv:1512.03385, table 1).

    >>> len(resnet50()), count(resnet50())
    (161, 25557032)
    """
    shapes = [*_convolution(3, 64, 7)]
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            shapes += _bottleneck(inputs, width, project=block == 0)
            inputs = 4 * width
    return [*shapes, (1000, inputs), (1000,)]


def gpt2() -> list[Shape]:
    """Return the shapes of GPT-2's smallest model: 12 layers, width 768, output layer tied to the embedding.

    >>> len(gpt2()), count(gpt2())
    (148, 124439808)
    """
    width = 768
    shapes: list[Shape] = [(50257, width), (1024, width)]
    for _ in range(12):
        shapes += _norm(width) + _dense(width, 3 * width) + _dense(width, width)
        shapes += _norm(width) + _dense(width, 4 * width) + _dense(4 * width, width)
    return shapes + _norm(width)


def tiny() -> list[Shape]:
    """Return shapes so small that nothing but programs and libraries takes memory."""
    return [(64, 64), (64,)]


WORK: dict[str, Callable[[], list[Shape]]] = {"resnet50": resnet50, "gpt2": gpt2, "tiny": tiny}


class Gradients:
    """Hands out one rank's gradients, step by step: normal noise, each tensor with a scale of its own.

    All contenders get the same numbers on the same rank in the same step. The arrays are new in every step, as after a
    real backward pass, so that whoever gets them may keep them.
    """

    def __init__(self, shapes: Sequence[Shape], rank: int) -> None:
        self.shapes = list(shapes)
        self._rank = rank
        self._noise = np.random.default_rng(rank).standard_normal(NOISE, np.float32)

    def fresh(self, step: int) -> list[Values]:
        """Return the gradients of a step, in the order of the shapes."""
        random = np.random.default_rng((self._rank, step))
        return [self._one(shape, random) for shape in self.shapes]

    def _one(self, shape: Shape, random: np.random.Generator) -> Values:
        scale = np.float32(1.0 / np.sqrt(_size(shape[1:])))
        flat = np.empty(_size(shape), np.float32)
        for part in _parts(flat):
            start = random.integers(0, NOISE - len(part) + 1)
            np.multiply(self._noise[start : start + len(part)], scale, out=part)
        return flat.reshape(shape)


def _parts(flat: Values) -> Iterator[Values]:
    length = NOISE // 2
    for start in range(0, len(flat), length):
        yield flat[start : start + length]


def fingerprint(means: Sequence[npt.NDArray[Any]]) -> list[float]:
    """Return the sum and the sum of squares of all numbers: the same on two ranks whose means have the same bits.

    >>> fingerprint([np.float32([1, 2]), np.float32([[3]])])
    [6.0, 14.0]
    """
    total, squares = 0.0, 0.0
    for mean in means:
        wide = mean.reshape(-1).astype(np.float64)
        total, squares = total + float(wide.sum()), squares + float(wide @ wide)
    return [total, squares]


def _size(shape: Shape) -> int:
    return int(np.prod(shape))


def _norm(width: int) -> list[Shape]:
    return [(width,), (width,)]


def _dense(inputs: int, outputs: int) -> list[Shape]:
    return [(inputs, outputs), (outputs,)]


def _convolution(inputs: int, outputs: int, kernel: int) -> list[Shape]:
    """A convolution without bias, and the batch normalisation behind it."""
    return [(outputs, inputs, kernel, kernel), *_norm(outputs)]


def _bottleneck(inputs: int, width: int, project: bool) -> list[Shape]:
    shapes = _convolution(inputs, width, 1) + _convolution(width, width, 3) + _convolution(width, 4 * width, 1)
    return shapes + _convolution(inputs, 4 * width, 1) if project else shapes
