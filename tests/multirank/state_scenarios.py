"""What outlives a checkpoint, a change of layout and a change of scale; every function runs on every rank."""

import io

import torch
from lines import Lines
from torch.nn.functional import cross_entropy

import hvdplus
import hvdplus.torch as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
torch.set_num_threads(1)

CODECS = ("fp16", "int8", "int8:rounding=stochastic", "int4", "onebit", "topk:0.05", "randomk:0.05", "powersgd:2")
LOSSY = CODECS[1:]


def net():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 24), torch.nn.Tanh(), torch.nn.Linear(24, 24), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(24, 8))


def batch(step):
    """Points that only this rank sees."""
    g = torch.Generator().manual_seed(1000 * RANK + step)
    return torch.randn(8, 32, generator=g), torch.randint(0, 8, (8,), generator=g)


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01)


def wrapped(codec, make=momentum, **fields):
    model = net()
    fields = {"min_compress": 16, "bucket_bytes": 3000, **fields}  # some buckets with several parameters
    return model, hvdplus.wrap(make(model.parameters()), model=model, strategy=codec, **fields)


def train(model, opt, steps):
    """Make the updates ``steps`` (a range), all of their window's micro-batches each."""
    window = opt.hvdplus.strategy.accumulate
    for micro in range(steps.start * window, steps.stop * window):
        x, y = batch(micro)
        cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()


def saved(model, opt):
    """What is left of both after they were written to a file and read back."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(state, codec, make=momentum, **fields):
    model, opt = wrapped(codec, make, **fields)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["optimizer"])
    return model, opt


def bytes_of(model, opt):
    """Everything of a run, as bytes by name."""
    slots = {f"{i} {k}": v for i, slot in opt.state_dict()["state"].items() for k, v in slot.items()}
    everything = {**model.state_dict(), **slots, **opt.hvdplus.residuals()}
    return {name: torch.as_tensor(value).numpy().tobytes() for name, value in everything.items()}


def assert_residuals(opt, expected):
    found = opt.hvdplus.residuals()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found), found.keys()


def undelivered(opt):
    """What all ranks together have not delivered, by parameter; what was lost as a server counts for all of them."""
    total = {}
    for kept in hvd.allgather_object(opt.state_dict()["hvdplus"]["ranks"][RANK]):
        for name, residual in kept["residual"].items():
            total[name] = total.get(name, 0) + residual
        for name, entry in kept.get("server", {}).items():
            end = entry["begin"] + len(entry["values"])
            total[name].view(-1)[entry["begin"] : end] += SIZE * entry["values"]
    return total


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.allclose(found[name], expected[name], rtol=1e-5, atol=1e-7), name


def resume(codec, make, accumulate=1, **fields):
    """Break a run in the middle, each rank with a file of its own; it must not show."""
    fields["accumulate"] = accumulate
    model, opt = wrapped(codec, make, **fields)
    train(model, opt, range(5))
    state = saved(model, opt)
    assert codec == "fp16" or fields.get("warmup_steps", 0) > 5 or opt.hvdplus.residual_norm() > 0
    train(model, opt, range(5, 10))
    again, opt_again = resumed(state, codec, make, **fields)
    train(again, opt_again, range(5, 10))
    assert bytes_of(again, opt_again) == bytes_of(model, opt), (codec, make, fields)
    assert opt_again.hvdplus.stats()["steps"] == opt.hvdplus.stats()["steps"] == 10


def scenario_a_resumed_run_is_the_unbroken_one():
    for codec in CODECS if SIZE == 2 else ("int8", "int4", "powersgd:2"):  # more ranks have residuals as servers, too
        resume(codec, momentum)
        resume(codec, adamw, accumulate=2)


def scenario_warmup_is_not_made_twice():
    resume("onebit", adamw, warmup_steps=3)
    resume("randomk:0.05", momentum, accumulate=2, warmup_steps=7)


def scenario_a_state_loaded_in_the_middle_of_a_run():
    """The layout exists already, and its cells are those of steps that are taken back."""
    for codec in ("onebit", "powersgd:2"):
        model, opt = wrapped(codec)
        train(model, opt, range(3))
        state = saved(model, opt)
        train(model, opt, range(3, 6))
        expected = bytes_of(model, opt)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["optimizer"])
        train(model, opt, range(3, 6))
        assert bytes_of(model, opt) == expected, codec


def scenario_between_backward_and_step_the_exchange_is_made_anew():
    model, opt = wrapped("randomk:0.05")
    train(model, opt, range(3))
    x, y = batch(3)
    cross_entropy(model(x), y).backward()
    state = saved(model, opt)
    opt.step()
    opt.zero_grad()
    train(model, opt, range(4, 6))
    again, opt_again = resumed(state, "randomk:0.05")
    train(again, opt_again, range(3, 6))
    assert bytes_of(again, opt_again) == bytes_of(model, opt)


def scenario_a_plain_optimizer_reads_it_and_is_read():
    model, opt = wrapped("onebit")
    train(model, opt, range(2))
    state = saved(model, opt)
    plain_model = net()
    plain = momentum(plain_model.parameters())
    plain.load_state_dict(state["optimizer"])
    assert "hvdplus" not in plain.state_dict()
    assert opt.hvdplus.residual_norm() > 0
    opt.load_state_dict(plain.state_dict())
    assert opt.hvdplus.residual_norm() == 0
    train(model, opt, range(2, 3))
    assert opt.hvdplus.residual_norm() > 0


def scenario_what_is_in_a_state_dict_is_a_copy():
    model, opt = wrapped("onebit")
    train(model, opt, range(2))
    before = opt.state_dict()["hvdplus"]["ranks"][RANK]["residual"]
    kept = {name: tensor.clone() for name, tensor in before.items()}
    shapes = {name: p.shape for name, p in model.named_parameters() if p.numel() >= 16}
    assert {name: tensor.shape for name, tensor in kept.items()} == shapes
    train(model, opt, range(2, 6))
    assert all(torch.equal(before[name], kept[name]) for name in kept)
    opt.state_dict()["hvdplus"]["ranks"][RANK]["residual"]["0.weight"].fill_(7.0)
    opt.hvdplus.residuals()["0.weight"].fill_(7.0)
    assert (opt.hvdplus.residuals()["0.weight"] != 7.0).all()


def scenario_rank_zero_saves_for_all():
    for codec in ("int4", "powersgd:2"):
        model, opt = wrapped(codec)
        train(model, opt, range(3))
        opt.hvdplus.consolidate()
        state = hvd.broadcast_object(saved(model, opt), 0)
        assert sorted(state["optimizer"]["hvdplus"]["ranks"]) == list(range(SIZE))
        train(model, opt, range(3, 6))
        assert list(opt.state_dict()["hvdplus"]["ranks"]) == [RANK], "what the others had is out of date"
        with Lines() as lines:
            again, opt_again = resumed(state, codec)
        assert lines.of_all(hvd) == []
        assert sorted(opt_again.state_dict()["hvdplus"]["ranks"]) == list(range(SIZE))
        train(again, opt_again, range(3, 6))
        assert bytes_of(again, opt_again) == bytes_of(model, opt), codec


def scenario_rank_zero_saves_for_itself():
    model, opt = wrapped("powersgd:2")
    train(model, opt, range(3))
    state = hvd.broadcast_object(saved(model, opt), 0)
    expected = {name: residual if RANK == 0 else 0 * residual for name, residual in opt.hvdplus.residuals().items()}
    with Lines() as lines:
        again, opt_again = resumed(state, "powersgd:2")
    (line,) = lines.of_all(hvd)
    assert f"rank 0 of {SIZE} only" in line and "optimizer.hvdplus.consolidate()" in line
    assert_residuals(opt_again, expected)
    train(again, opt_again, range(3, 5))  # what all ranks must have in common, they have


def scenario_only_rank_zero_loads_and_broadcasts():
    """Horovod's ritual."""
    model, opt = wrapped("randomk:0.05")
    train(model, opt, range(3))
    opt.hvdplus.consolidate()
    state = saved(model, opt)
    train(model, opt, range(3, 5))
    again, opt_again = wrapped("randomk:0.05")
    if RANK == 0:
        again.load_state_dict(state["model"])
        opt_again.load_state_dict(state["optimizer"])
    hvd.broadcast_parameters(again.state_dict(), 0)
    hvd.broadcast_optimizer_state(opt_again, 0)
    train(again, opt_again, range(3, 5))
    assert bytes_of(again, opt_again) == bytes_of(model, opt)
    hvd.broadcast_optimizer_state(opt_again, 0)  # once more, with nothing new: nobody loses anything
    assert opt_again.hvdplus.residual_norm() > 0


def scenario_only_rank_zero_loads():
    """By names alone: the first step is rank 0's, with all that it has loaded."""
    model, opt = wrapped("randomk:0.05", warmup_steps=2)
    train(model, opt, range(3))
    state = saved(model, opt)
    again = net()
    opt_again = hvd.DistributedOptimizer(
        momentum(again.parameters()), again.named_parameters(), strategy=opt.hvdplus.strategy
    )
    if RANK == 0:
        again.load_state_dict(state["model"])
        opt_again.load_state_dict(state["optimizer"])
    train(again, opt_again, range(3, 6))
    assert opt_again.hvdplus.stats()["steps"] == 6
    opt_again.hvdplus.verify()


def scenario_another_number_of_ranks():
    """Twice as many ranks have saved: their sum is kept, and what they lost as servers counts for all of them."""
    model, opt = wrapped("int8")
    train(model, opt, range(2))
    opt.hvdplus.consolidate()
    state = hvd.broadcast_object(saved(model, opt), 0)["optimizer"]
    entry = state["hvdplus"]
    ranks = [entry["ranks"][i % SIZE] for i in range(2 * SIZE)]
    weight = ranks[0]["residual"]["0.weight"]
    total = sum(kept["residual"]["0.weight"] for kept in ranks)
    strides = list(model[0].weight.stride())
    for i, kept in enumerate(ranks):
        values = torch.full((3,), 2.0**-i)
        ranks[i] = {**kept, "server": {"0.weight": {"begin": 5 * i, "values": values, "layout": strides}}}
        total.view(-1)[5 * i : 5 * i + 3] += 2 * SIZE * values
    entry.update(size=2 * SIZE, ranks=dict(enumerate(ranks)))
    with Lines() as lines:
        opt.load_state_dict(state)
    (line,) = lines.of_all(hvd)
    assert f"{2 * SIZE} ranks" in line and f"loaded on {SIZE}" in line
    assert weight.shape == total.shape
    assert torch.allclose(opt.hvdplus.residuals()["0.weight"], total / SIZE, rtol=1e-6)
    train(model, opt, range(2, 4))
    opt.hvdplus.verify()


def scenario_residuals_follow_their_parameter_into_other_buckets():
    for codec, other_codec in (("topk:0.05", "randomk:0.2"), ("onebit", "int8")):
        model, opt = wrapped(codec)
        train(model, opt, range(3))
        state, expected, total = saved(model, opt), opt.hvdplus.residuals(), undelivered(opt)
        with Lines() as lines:
            _, other = resumed(state, other_codec, bucket_bytes=2**20)
            other.hvdplus._exchanger.agree_now()  # takes a layout
            assert_close(undelivered(other), total)
            if codec != "onebit":  # other ranks serve in other buckets
                assert_residuals(other, expected)
        assert lines.of_all(hvd) == []
        train(model, other, range(3, 5))
        other.hvdplus.verify()


def scenario_residuals_of_what_travels_exact_now_are_dropped():
    model, opt = wrapped("topk:0.05")
    train(model, opt, range(3))
    state, expected = saved(model, opt), opt.hvdplus.residuals()
    with Lines() as lines:
        _, other = resumed(state, "topk:0.05", overrides={"0.*": "exact"})
        other.hvdplus._exchanger.agree_now()
        assert_residuals(other, {n: r for n, r in expected.items() if not n.startswith("0.")})
    (line,) = lines.of_all(hvd)
    assert "0.weight (residual)" in line and "0.bias (residual)" in line and "2.weight" not in line


def scenario_residuals_of_another_model_are_dropped():
    model, opt = wrapped("onebit")
    train(model, opt, range(2))
    state, expected = saved(model, opt)["optimizer"], opt.hvdplus.residuals()
    residual = state["hvdplus"]["ranks"][RANK]["residual"]
    residual["0.weight"], residual["gone"] = residual["0.weight"][:, 1:], torch.zeros(3)
    with Lines() as lines:
        opt.load_state_dict(state)
    (line,) = lines.of_all(hvd)
    assert "0.weight (residual)" in line and "gone (residual)" in line
    expected["0.weight"] = torch.zeros_like(expected["0.weight"])
    assert_residuals(opt, expected)


def scenario_residuals_follow_their_parameter_when_it_is_frozen():
    for codec in ("topk:0.05", "powersgd:2"):
        model, opt = wrapped(codec)
        train(model, opt, range(3))
        expected = opt.hvdplus.residuals()
        model[0].requires_grad_(False)
        opt.hvdplus._exchanger.agree_now()
        assert_residuals(opt, expected)
        train(model, opt, range(3, 5))
        waiting = {n: r for n, r in opt.hvdplus.residuals().items() if n.startswith("0.")}
        assert waiting and all(torch.equal(r, expected[n]) for n, r in waiting.items())
        assert not torch.equal(opt.hvdplus.residuals()["2.weight"], expected["2.weight"])
        expected, state = opt.hvdplus.residuals(), saved(model, opt)
        model[0].requires_grad_(True)
        opt.hvdplus._exchanger.agree_now()
        assert_residuals(opt, expected)
        _, again = resumed(state, codec)
        again.hvdplus._exchanger.agree_now()
        assert_residuals(again, expected)
        train(model, opt, range(5, 6))
        assert not torch.equal(opt.hvdplus.residuals()["0.weight"], expected["0.weight"])


def scenario_residuals_stay_when_a_group_is_added():
    model, opt = wrapped("int4")
    train(model, opt, range(3))
    expected = undelivered(opt)
    extra = torch.nn.Linear(8, 8)
    hvd.broadcast_parameters(extra.state_dict(), 0)
    opt.add_param_group({"params": extra.parameters()})
    opt.hvdplus._exchanger.agree_now()
    found = undelivered(opt)
    assert not found.pop("group1.param0").any()
    assert_close(found, expected)


def scenario_what_is_thrown_away_leaves_no_trace():
    for codec in LOSSY:
        model, opt = wrapped(codec)
        train(model, opt, range(2))
        expected = opt.hvdplus.residuals()
        for spoil in (1.0, float("nan")):
            x, y = batch(2)
            (cross_entropy(model(x), y) * (spoil if RANK == SIZE - 1 else 1.0)).backward()
            opt.zero_grad()  # no step, as in the half of a pair of adversaries that is not trained now
            assert_residuals(opt, expected)


def scenario_cleared_residuals():
    model, opt = wrapped("powersgd:2")
    train(model, opt, range(2))
    flat = torch.cat([residual.reshape(-1) for residual in opt.hvdplus.residuals().values()])
    assert abs(opt.hvdplus.residual_norm() - flat.norm().item()) < 1e-5 * flat.norm().item()
    kept = opt.state_dict()["hvdplus"]["ranks"][RANK]["start"]
    opt.hvdplus.clear_residuals()
    assert opt.hvdplus.residual_norm() == 0
    found = opt.state_dict()["hvdplus"]["ranks"][RANK]["start"]
    assert kept.keys() == found.keys() and all(torch.equal(kept[n]["values"], found[n]["values"]) for n in kept)
    train(model, opt, range(2, 4))
    assert opt.hvdplus.residual_norm() > 0


def scenario_the_layout_in_memory_does_not_count():
    torch.manual_seed(0)

    def convolution(form):
        model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3)).to(memory_format=form)
        return model, hvdplus.wrap(momentum(model.parameters()), model=model, strategy="onebit", min_compress=0)

    model, opt = convolution(torch.channels_last)
    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(RANK))
    model(x).square().mean().backward()
    opt.step()
    state, expected = saved(model, opt)["optimizer"], opt.hvdplus.residuals()
    assert expected["0.weight"].any()
    for form in (torch.channels_last, torch.contiguous_format):
        _, other = convolution(form)
        other.load_state_dict(state)
        other.hvdplus._exchanger.agree_now()
        assert_residuals(other, expected)


def scaled_run(codec, scaler, accumulate, steps, resume=False):
    """Train under a loss scaling (or none); return model, optimizer, scales, and what was saved after half the steps,
    from where the run goes on if it is to ``resume``.
    """
    model, opt = wrapped(codec, accumulate=accumulate)
    scales, state = [], None
    for micro in range(steps * accumulate):
        if micro == steps * accumulate // 2:
            state = saved(model, opt)
            if resume:
                model, opt = resumed(state, codec, accumulate=accumulate)
        x, y = batch(micro)
        scaler.scale(cross_entropy(model(x), y)).backward()
        if opt.hvdplus.ready:
            scales.append(scaler.get_scale())
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    return model, opt, scales, state


def scenario_residuals_follow_the_loss_scale():
    """A scale that grows is not seen in the parameters, nor in what is kept."""
    for codec, accumulate, resume in (
        ("int8", 1, True),
        ("onebit", 2, True),
        ("topk:0.05", 1, False),
        ("powersgd:2", 2, False),
    ):
        plain, opt, _, state = scaled_run(codec, torch.amp.GradScaler("cpu", enabled=False), accumulate, 8)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        model, opt_scaled, scales, state_scaled = scaled_run(codec, scaler, accumulate, 8, resume)
        assert set(scales) == {2.0**10, 2.0**11, 2.0**12}
        assert_close(dict(model.named_parameters()), dict(plain.named_parameters()))
        assert_close(opt_scaled.hvdplus.residuals(), opt.hvdplus.residuals())
        halfway = [each["optimizer"]["hvdplus"]["ranks"][RANK]["residual"] for each in (state_scaled, state)]
        assert_close(*halfway)


def scenario_a_scale_counts_in_its_own_backward_only():
    """Two losses of one model, one of them scaled and only looked at, as for a gradient penalty."""
    model, opt = wrapped("onebit")
    reference, opt_reference = wrapped("onebit")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        for m, o in ((model, opt), (reference, opt_reference)):
            x, y = batch(step)
            loss = cross_entropy(m(x), y)
            if o is opt:
                torch.autograd.grad(scaler.scale(loss), list(m.parameters()), retain_graph=True)
            loss.backward()
            o.step()
            o.zero_grad()
    assert bytes_of(model, opt) == bytes_of(reference, opt_reference)


def scenario_a_rank_without_a_backward_takes_the_last_scale():
    model, opt = wrapped("onebit")
    reference, opt_reference = wrapped("onebit")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    for step in range(4):
        for m, o, s in ((model, opt, scaler), (reference, opt_reference, None)):
            x, y = batch(step)
            if step != 2 or RANK == 0:
                loss = cross_entropy(m(x), y)
                (loss if s is None else s.scale(loss)).backward()
            o.synchronize()
            if s is None:
                o.step()
            else:
                s.step(o)
                s.update()
            o.zero_grad()
    assert_close(dict(model.named_parameters()), dict(reference.named_parameters()))


def scenario_saved_after_a_step_that_a_loss_scaling_skipped():
    """With ``zero_grad()`` at the top of the loop, as many write it; the skipped exchange counts in both runs."""

    def train(model, opt, scaler, steps):
        for step in steps:
            opt.zero_grad()
            x, y = batch(step)
            loss = cross_entropy(model(x), y) * (float("inf") if step == 4 and RANK == 0 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    for codec in ("randomk:0.1", "int8:rounding=stochastic"):
        (model, opt), scaler = wrapped(codec), torch.amp.GradScaler("cpu", init_scale=2.0**4)
        train(model, opt, scaler, range(5))
        state, scale = saved(model, opt), scaler.state_dict()
        train(model, opt, scaler, range(5, 8))
        again, opt_again = resumed(state, codec)
        scaler = torch.amp.GradScaler("cpu")
        scaler.load_state_dict(scale)
        train(again, opt_again, scaler, range(5, 8))
        assert bytes_of(again, opt_again) == bytes_of(model, opt), codec
