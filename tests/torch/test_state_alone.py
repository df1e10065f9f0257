"""Checkpoints and loss scaling on one rank: what is in them, what is said, and what is left alone."""

import logging

import pytest
import torch

import hvdplus
import hvdplus.torch as hvd
from hvdplus_torch import _scaler


@pytest.fixture(autouse=True, scope="module")
def session():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVDPLUS_ENGINE", "local")
        hvd.init()
        yield
        hvd.shutdown()


def make(**fields):
    torch.manual_seed(0)
    net = torch.nn.Linear(40, 40)
    return net, hvdplus.wrap(torch.optim.SGD(net.parameters(), lr=0.1), strategy="onebit", **fields)


def step(net, opt):
    net(torch.ones(2, 40)).sum().backward()
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_state_of_one_rank(accumulate):
    net, opt = make(accumulate=accumulate)
    for _ in range(2 * accumulate):
        step(net, opt)
    found = opt.state_dict()["hvdplus"]
    assert found == {"format": 1, "rank": 0, "size": 1, "exchanges": 2, "updates": 2, "ranks": {0: {}}}
    assert (opt.hvdplus.residuals(), opt.hvdplus.residual_norm()) == ({}, 0)
    opt.hvdplus.consolidate()
    assert opt.state_dict()["hvdplus"] == found
    _, again = make(accumulate=accumulate)
    again.load_state_dict(opt.state_dict())
    assert again.state_dict()["hvdplus"] == found


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_rank_has_no_use_for_the_residuals_of_several(caplog, accumulate):
    net, opt = make(accumulate=accumulate)
    state = opt.state_dict()
    ranks = {rank: {"residual": {"weight": torch.ones(40, 40)}} for rank in range(2)}
    state["hvdplus"] = {**state["hvdplus"], "size": 2, "ranks": ranks}
    state["hvdplus"]["ranks"][0]["residual"]["group0.param0"] = torch.ones(40, 40)
    with caplog.at_level(logging.WARNING, "hvdplus"):
        opt.load_state_dict(state)
    assert sum("dropped" in line for line in caplog.messages) == 1
    step(net, opt)
    assert opt.hvdplus.residuals() == {}


def test_a_state_of_another_format_is_refused_before_anything_is_loaded():
    _, opt = make()
    state = opt.state_dict()
    state["param_groups"][0]["lr"], state["hvdplus"]["format"] = 7.0, 9
    with pytest.raises(hvdplus.StrategyError, match=r"has format 9, and this version of hvdplus reads 1; load it"):
        opt.load_state_dict(state)
    assert opt.param_groups[0]["lr"] == 0.1


def test_a_half_filled_window_is_not_saved_and_that_is_said_once(caplog):
    net, opt = make(accumulate=2)
    with caplog.at_level(logging.WARNING, "hvdplus"):
        opt.state_dict()
        step(net, opt)
        opt.state_dict()
        opt.state_dict()
    assert [line for line in caplog.messages if "half-filled" in line] == [
        "rank 0: state_dict() came after micro-batch 1 of accumulate=2; a half-filled window is not in it."
    ]


def scale_seen(loss):
    """What an optimizer would learn of the scale in the backward pass of ``loss``."""
    seen = []
    guard = _scaler.ScalerGuard(torch.optim.SGD([torch.zeros(1)], lr=0.1))

    def note(grad):
        guard.listen()
        seen.append(guard.scale())

    p = torch.zeros(2, requires_grad=True)
    p.register_hook(note)
    try:
        loss(p).backward()
    except ZeroDivisionError:
        seen.append("failed")
    return seen


def test_a_scaler_is_heard_in_the_backward_of_its_loss_only():
    one, two = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 4.0))
    assert scale_seen(lambda p: p.sum()) == [1.0]
    assert scale_seen(lambda p: one.scale(p.sum())) == [8.0]
    assert scale_seen(lambda p: two.scale(p.sum()) / 3) == [4.0]
    assert scale_seen(lambda p: p.sum()) == [1.0]
    assert scale_seen(lambda p: one.scale(p.sum()).detach() + p.sum()) == [1.0]
    assert scale_seen(lambda p: torch.amp.GradScaler("cpu", enabled=False).scale(p.sum())) == [1.0]


def test_a_scaler_takes_every_structure_that_it_took():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for structure in (list, tuple, iter):
        assert scale_seen(lambda p, structure=structure: next(iter(scaler.scale(structure([p.sum()]))))) == [8.0]
    assert isinstance(scaler.scale((torch.ones(1),)), tuple)
    assert scaler.scale([torch.ones(1), [torch.ones(1)]]) == [8.0, [8.0]]


def test_a_backward_that_failed_is_not_taken_for_the_next():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def failing(p):
        middle = p * 1.0
        middle.register_hook(lambda grad: 1 / 0)
        return scaler.scale(middle.sum())

    assert scale_seen(failing) == ["failed"]
    assert scale_seen(lambda p: p.sum()) == [1.0]
