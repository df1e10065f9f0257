"""The state cells of the torch backend: a variable's own memory is never taken for a spare one."""

import pytest
import torch

from hvdplus_keras._eager import _KerasCell


class Variable:
    """What a Keras variable on the torch backend is to a cell."""

    def __init__(self, value):
        self.value = torch.nn.Parameter(torch.tensor(value), requires_grad=False)

    def assign(self, value):
        self.value.copy_(value)


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_step_that_was_not_finite_leaves_no_way_into_the_variable(scale, end):
    cell = _KerasCell(Variable([1.0, 2.0]), lambda: scale)
    for _ in range(2):  # the residual stays as it was: what was read is what is written
        cell.write(cell.read())
        getattr(cell, end)()
        if cell.spare is not None:
            cell.spare.fill_(torch.nan)  # where the next encoding writes
    assert (cell.read() / scale).tolist() == [1.0, 2.0]


def test_what_was_written_becomes_the_value_and_its_memory_a_spare():
    cell = _KerasCell(Variable([1.0, 2.0]), lambda: 2.0)
    written = torch.tensor([6.0, 8.0])
    cell.write(written)
    assert cell.staged is written
    cell.commit()
    assert (cell.read().tolist(), cell.spare is written) == ([6.0, 8.0], True)
