"""The example of a GPT: its data, and a small one trained."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hvdplus.torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_gpt.py"
spec = importlib.util.spec_from_file_location("torch_gpt", EXAMPLE)
gpt = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpt)

SMALL = {"width": 32, "layers": 1, "heads": 2, "context": 16, "batch": 8, "steps": 40, "warmup": 4, "windows": 16}


def test_ranks_share_out_one_batch():
    text = torch.arange(100).repeat(10).to(torch.uint8)
    args = argparse.Namespace(seed=1, batch=8, context=5)
    whole = gpt.batch(text, args, 7, 0, 1)
    assert whole.shape == (8, 6)
    assert torch.equal(torch.cat([gpt.batch(text, args, 7, rank, 4) for rank in range(4)]), whole)
    assert not torch.equal(gpt.batch(text, args, 8, 0, 1), whole)


def test_ranks_share_out_one_validation():
    args = argparse.Namespace(
        size="1m", seed=1, windows=16, **{k: SMALL[k] for k in ("width", "layers", "heads", "context")}
    )
    model, text = gpt.network(args), torch.arange(250).repeat(4).to(torch.uint8)
    parts = torch.stack([gpt.validate(model, text, args, rank, 4) for rank in range(4)])
    torch.testing.assert_close(parts.mean(), gpt.validate(model, text, args, 0, 1))


def test_a_byte_sees_nothing_that_comes_after_it():
    torch.manual_seed(0)
    model, text = gpt.GPT(32, 2, 2, 16), torch.randint(256, (1, 16))
    other = text.clone()
    other[0, 9] += 1
    same = torch.isclose(model(text), model(other % 256)).all(-1)[0]
    assert same.tolist() == [place < 9 for place in range(16)]


def test_it_learns_and_logs(tmp_path):
    log = tmp_path / "log.jsonl"
    options = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]
    line = [sys.executable, str(EXAMPLE), "--lr", "1e-2", "--evaluate", "20", "--diary", str(log), *options]
    ended = subprocess.run(
        line, env=os.environ | {"HVDPLUS_ENGINE": "local"}, capture_output=True, text=True, timeout=300, check=True
    )
    entries = [json.loads(text) for text in log.read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [0, 20, 40]
    assert entries[-1]["loss"] < entries[0]["loss"] - 1
    assert f"validation loss  {entries[-1]['loss']:.4f}" in ended.stdout


@pytest.fixture
def alone(monkeypatch):
    """One rank, and no engine that would outlive the test."""
    monkeypatch.setenv("HVDPLUS_ENGINE", "local")
    yield
    hvdplus.torch.shutdown()


@pytest.mark.usefixtures("alone")
def test_momentum_is_taken_away_where_the_codec_sets_in(monkeypatch):
    seen, taken, model = [], [], gpt.GPT(8, 1, 1, 4)
    optimizer = gpt.adamw(model, 1e-3)
    gpt.set_momentum(optimizer, 0.25)
    assert {group["betas"] for group in optimizer.param_groups} == {(0.25, 0.95)}
    args = argparse.Namespace(steps=6, evaluate=3, momentum=0.0, warmup=1, seed=0, batch=2, context=4, lr=1e-3)
    monkeypatch.setattr(gpt, "set_momentum", lambda optimizer, momentum: seen.append((len(taken), momentum)))
    wrapped = hvdplus.wrap(optimizer, model=model, strategy="topk:0.5,warmup_steps=2,accumulate=2")
    monkeypatch.setattr(model, "loss", lambda text: taken.append(1) or gpt.GPT.loss(model, text))
    gpt.train(model, wrapped, torch.zeros(99, dtype=torch.uint8), args, gpt.Diary(None, float, int))
    assert seen == [(4, 0.0)]
