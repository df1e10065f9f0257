"""The Keras scenarios on the torch backend, and the same training in torch itself."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import numpy as np
import parity
import torch
from keras_scenarios import *  # noqa: F403

import hvdplus
import hvdplus.torch


def scenario_parity_torch():
    """Return torch's own parameters after the same 20 steps."""
    return {case: torch_run(*case.split("|")) for case in parity.CASES}


def torch_run(optimizer, codec, window):
    rank, size, window = hvdplus.torch.rank(), hvdplus.torch.size(), int(window)
    model = torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.Tanh(), torch.nn.Linear(24, 3))
    with torch.no_grad():
        for layer, (weight, bias) in zip((model[0], model[2]), parity.start(), strict=True):
            layer.weight.copy_(torch.tensor(weight.T))
            layer.bias.copy_(torch.tensor(bias))
    make = {
        "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, 0.01, eps=parity.EPSILON),
    }[optimizer]
    opt = hvdplus.wrap(make(model.parameters()), model=model, strategy=codec, accumulate=window, min_compress=0)
    x, y = (torch.tensor(part) for part in parity.data(size, window))
    for micro in range(parity.STEPS * window):
        begin = (micro * size + rank) * parity.ROWS
        rows = slice(begin, begin + parity.ROWS)
        torch.nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        opt.step()
        opt.zero_grad()
    with torch.no_grad():
        parts = [model[0].weight.T, model[0].bias, model[2].weight.T, model[2].bias]
        return np.concatenate([part.contiguous().numpy().ravel() for part in parts]).tolist()
