"""The PyTorch adapter in one process: one rank is the plain optimizer, and what is refused is refused in a sentence."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import hvdplus
import hvdplus.torch as hvd
from hvdplus import horovod_arguments


@pytest.fixture(autouse=True, scope="module")
def session():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVDPLUS_ENGINE", "local")
        hvd.init()
        yield
        hvd.shutdown()


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))


def train(wrapped, accumulate=1, steps=4, codec="exact"):
    net = model()
    opt = torch.optim.AdamW(net.parameters(), lr=0.1)
    if wrapped:
        opt = hvdplus.wrap(opt, model=net, strategy=codec, accumulate=accumulate)
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(accumulate * 2, 5, generator=g)
        if wrapped:
            for part in x.chunk(accumulate):
                net(part).square().mean().backward()
                opt.step()
                opt.zero_grad()
        else:
            net(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


@pytest.mark.parametrize("codec", ["exact", "fp16", "bf16"])
def test_one_rank_is_the_plain_optimizer_exactly(codec):
    assert torch.equal(train(False), train(True, codec=codec))


def test_one_rank_with_accumulation_is_the_whole_batch():
    assert torch.allclose(train(False, 3), train(True, 3), atol=1e-6)


def test_wrapping_returns_the_same_object_and_hooks_nothing():
    net = model()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    assert hvdplus.wrap(opt) is opt
    assert all(not p._post_accumulate_grad_hooks for p in net.parameters())
    assert opt.hvdplus.ready
    assert repr(opt.hvdplus).startswith("<hvdplus: Strategy(codec='exact'")
    assert set(opt.hvdplus.stats()) == {
        "steps", "collectives", "bytes_dense", "bytes_sent", "seconds_encode", "seconds_wait", "relative_error",
    }  # fmt: skip


def test_a_wrapped_optimizer_that_is_dropped_is_collected():
    net = model()
    opt = hvdplus.wrap(torch.optim.SGD(net.parameters(), lr=0.1), accumulate=2)
    gone = weakref.ref(opt)
    del opt
    gc.collect()
    assert gone() is None
    net(torch.ones(1, 5)).sum().backward()
    assert net[0].weight.grad is not None, "its hooks do nothing any more"


def test_inside_a_window_there_is_no_gradient_to_clip_or_unscale():
    p = torch.nn.Parameter(torch.zeros(2))
    opt = hvdplus.wrap(torch.optim.SGD([p], lr=1.0), accumulate=2)
    p.sum().backward()
    assert p.grad is None
    assert torch.nn.utils.clip_grad_norm_([p], 1e-9) == 0
    opt.step()
    opt.zero_grad()
    p.sum().backward()
    assert torch.equal(p.grad, torch.ones(2))


def test_model_zero_grad_in_place_of_the_optimizers():
    net, reference = model(), model()
    opt = hvdplus.wrap(torch.optim.SGD(net.parameters(), lr=0.1), accumulate=2)
    ref = torch.optim.SGD(reference.parameters(), lr=0.1)
    x = torch.randn(4, 5)
    for _ in range(2):
        for part in x.chunk(2):
            net.zero_grad()
            net(part).square().mean().backward()
            opt.step()
        ref.zero_grad()
        reference(x).square().mean().backward()
        ref.step()
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)


def test_pickle_and_deepcopy_of_a_wrapped_optimizer_and_its_model():
    net = model()
    opt = hvdplus.wrap(torch.optim.SGD(net.parameters(), lr=0.1), accumulate=2)
    for copied in (pickle.loads(pickle.dumps(opt)), copy.deepcopy(opt)):
        assert type(copied) is torch.optim.SGD
    for twin in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        twin(torch.ones(1, 5)).sum().backward()
        assert twin[0].weight.grad is not None


def bad(match, make):
    with pytest.raises(hvdplus.StrategyError, match=match) as caught:
        make()
    text = str(caught.value)
    assert text.endswith((".", "?"))
    assert "\n" not in text


def sgd(params=None):
    return torch.optim.SGD(params or model().parameters(), lr=0.1)


def test_bad_input_gets_one_sentence():
    net = model()
    pairs = list(net.named_parameters())
    bad(r"is a builtins.object, not an optimizer", lambda: hvdplus.wrap(object()))
    bad(r"is a Linear, not a torch.optim.Optimizer", lambda: hvd.wrap(torch.nn.Linear(1, 1)))
    bad(r"wrapped already", lambda: hvdplus.wrap(hvdplus.wrap(sgd())))
    bad(r"codec 'fp61' is unknown; known are .*did you mean 'fp16'", lambda: hvdplus.wrap(sgd(), strategy="fp61"))
    bad(r"accumulate=0 must be a whole number of at least 1", lambda: hvdplus.wrap(sgd(), accumulate=0))
    bad(r"'acumulate' is no field", lambda: hvdplus.wrap(sgd(), acumulate=2))
    bad(r"named_parameters has '0.weight' more than once", lambda: hvd.DistributedOptimizer(sgd(), pairs + pairs[:1]))
    bad(
        r"named_parameters lacks 3 parameter\(s\) of the optimizer, of shapes",
        lambda: hvd.DistributedOptimizer(sgd(list(net.parameters())), pairs[:1]),
    )
    bad(r"must be \(name, parameter\) pairs", lambda: hvd.DistributedOptimizer(sgd(), net.parameters()))
    bad(r"op=Adasum combines updates", lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Adasum))
    bad(r"op=17 must be Average or Sum", lambda: hvd.DistributedOptimizer(sgd(), op=17))
    bad(r"gradient_predivide_factor=2.0 needs op=Average", predivided_sum)
    bad(r"num_groups=-1 must be 0 or more", lambda: hvd.DistributedOptimizer(sgd(), num_groups=-1))
    bad(r"backward_passes_per_step=0 must", lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0))
    bad(
        r"compression=Mine is not known here", lambda: hvd.DistributedOptimizer(sgd(), compression=type("Mine", (), {}))
    )
    bad(r"asks for codec='fp16' and strategy for codec='bf16'", two_codecs)
    bad(r"is not initialised; run one forward pass", lazy)
    bad(r"params is a int; pass model.state_dict", lambda: hvd.broadcast_parameters(3))


def predivided_sum():
    hvd.DistributedOptimizer(sgd(), op=hvd.Sum, gradient_predivide_factor=2.0)


def two_codecs():
    hvd.DistributedOptimizer(sgd(), compression=hvd.Compression.fp16, strategy="bf16")


def lazy():
    net = torch.nn.LazyLinear(3)
    hvdplus.wrap(torch.optim.SGD(net.parameters(), lr=0.1))


def test_names_may_be_a_generator_and_more_than_the_optimizer_has():
    net = model()
    opt = hvd.DistributedOptimizer(sgd(list(net[0].parameters())), named_parameters=net.named_parameters())
    assert set(opt._parameter_names.values()) == {"0.weight", "0.bias"}


def test_the_numbers_of_horovods_reductions_are_horovods():
    horovod = pytest.importorskip("horovod.torch")
    for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product"):
        assert getattr(horovod_arguments, name) == getattr(horovod, name)


def test_before_init_there_is_no_rank():
    hvd.shutdown()
    try:
        assert not hvd.is_initialized()
        with pytest.raises(hvdplus.LaunchError, match=r"call hvdplus.torch.init\(\) first"):
            hvd.rank()
    finally:
        hvd.init()


def test_collectives_of_one_rank():
    x = torch.arange(3.0)
    assert torch.equal(hvd.allreduce(x), x)
    assert torch.equal(hvd.allgather(x), x)
    assert torch.equal(hvd.broadcast(x, 0), x)
    assert hvd.broadcast_object({"a": 1}) == {"a": 1}
    assert hvd.allgather_object(3) == [3]
    assert torch.equal(hvd.reducescatter(x, op=hvd.Sum), x)
    with pytest.raises(hvdplus.StrategyError, match="op=3 needs engine 'horovod'"):
        hvd.allreduce(x, op=hvd.Min)
    with pytest.raises(hvdplus.LaunchError, match=r"join\(\) needs engine 'horovod'"):
        hvd.join()


@pytest.mark.parametrize(
    ("visible", "local_rank", "expected"),
    [
        (0, 3, "cpu"),
        (4, 3, "cuda:3"),
        (1, 3, "cuda:0"),  # each task sees only its own device
        (2, 3, "cuda:1"),  # more ranks than devices share them
    ],
)
def test_the_device_goes_by_local_rank_among_the_visible(monkeypatch, visible, local_rank, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr("hvdplus_torch._session.local_rank", lambda: local_rank)
    assert hvd.device() == torch.device(expected)
