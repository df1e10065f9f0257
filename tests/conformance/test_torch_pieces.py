"""Gradients that stay where autograd left them: the same bits as for one flat tensor, and means in their place."""

import numpy as np
import pytest
import torch

from hvdplus import codecs
from hvdplus.codecs import ErrorFeedback
from hvdplus.testing import Wire, lockstep
from hvdplus_torch._arrays import Pieces, TorchArrays

pytest.importorskip("numba")

SPECS = ["int8", "int4", "ternary", "onebit", "fp16", "bf16", "topk:0.1", "randomk:0.1", "powersgd:2"]
SHAPES = [(17, 31), (1,), (0,), (64, 64), (5,), (3000, 3), (2, 2)]  # they begin and end anywhere in blocks and tiles
SIZES = tuple(int(np.prod(shape)) for shape in SHAPES)
COUNT = sum(SIZES)
MATRICES = [(17, 31), (64, 64), (3000, 3)]


def in_pieces(x, sizes=SIZES):
    pieces = Pieces(sizes)
    pieces.tensors = [part.clone() for part in x.split(pieces.sizes)]
    return pieces


class Copying(TorchArrays):
    """`lockstep` copies what it is given."""

    def copy(self, x):
        return in_pieces(torch.cat(x.tensors), x.sizes) if isinstance(x, Pieces) else super().copy(x)


def wrapped(spec):
    codec = codecs.make(spec)
    return ErrorFeedback(codec) if codec.lossy else codec


def path(spec, steps, lay, shapes):
    """The means of all steps, and what is kept after the last."""
    arrays = Copying()
    sites = Wire(steps.shape[1], halves=False, read=torch.Tensor.numpy, lend=torch.from_numpy).sites(arrays)
    for site in sites:
        site.keep_sent, site.shapes = False, tuple(shapes)
    means = []
    for inputs in steps:
        outcomes = lockstep(wrapped(spec), [lay(x) for x in inputs], sites=sites)
        means += [outcome.mean for outcome in outcomes]
    kept = [cell.read() for site in sites for _, cell in sorted(site.cells.items())]
    return means, kept


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("spec", SPECS)
def test_pieces_give_the_bits_of_a_flat_tensor(spec, ranks):
    assert codecs.reads_pieces(wrapped(spec))
    shapes = MATRICES if spec == "powersgd:2" else SHAPES
    sizes = [int(np.prod(shape)) for shape in shapes]
    steps = torch.randn(3, ranks, sum(sizes), generator=torch.Generator().manual_seed(1))
    flat, kept = path(spec, steps, torch.clone, shapes)
    means, kept_too = path(spec, steps, lambda x: in_pieces(x, sizes), shapes)
    assert all(isinstance(mean, Pieces) for mean in means)
    for mine, theirs in zip([torch.cat(mean.tensors) for mean in means] + kept_too, flat + kept, strict=True):
        np.testing.assert_array_equal(mine.numpy().view(np.int32), theirs.numpy().view(np.int32))


def test_who_cannot_read_pieces():
    whole = ErrorFeedback(codecs.make("fp16")), ErrorFeedback(codecs.make("int8:512,rounding=stochastic"))
    assert not any(map(codecs.reads_pieces, (*whole, codecs.make("exact"), codecs.make("onebit"), object())))


def test_pieces_behind_one_another():
    x = torch.arange(float(COUNT))
    arrays, pieces = TorchArrays(), in_pieces(x)
    assert torch.equal(arrays.flat(pieces), x)
    assert (arrays.count(pieces), arrays.nbytes(pieces), arrays.dtype(pieces)) == (COUNT, 4 * COUNT, "float32")
    pieces.clear()
    assert sum(map(torch.numel, pieces.tensors)) == 0
