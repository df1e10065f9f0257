"""One rank of test_hosts.py: hosts_training.py FOLDER trains, notes its steps in FOLDER/rankN.log, keeps the result.

All that this rank says goes to its own log, since a launcher cannot bring it over a link that is down.
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import hvdplus
import hvdplus.torch as hvd

STEPS, ROWS = 6, 8
WIDE = 512  # the gradients are 1 MB, so that an exchange over a slow link takes its time


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(512, WIDE)


def batch(step: int, rank: int, size: int) -> torch.Tensor:
    """This rank's rows of a step's batch."""
    rows = torch.randn(ROWS, 512, generator=torch.Generator().manual_seed(step))
    return rows[rank::size]


def learn(model, optimizer, step: int, rank: int, size: int) -> None:
    model(batch(step, rank, size)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def alone() -> np.ndarray:
    """What one process learns from the whole batches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(STEPS):
        learn(model, optimizer, step, 0, 1)
    return flat(model)


def flat(model) -> np.ndarray:
    return nn.utils.parameters_to_vector(model.parameters()).detach().numpy()


def main(folder: Path) -> None:
    rank = hvdplus.discover().rank
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    print("process", os.getpid(), flush=True)
    hvd.init()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer = hvdplus.wrap(optimizer, model=model)
    for step in range(STEPS):
        print("step", step, flush=True)
        learn(model, optimizer, step, hvd.rank(), hvd.size())
    np.save(folder / f"rank{rank}.npy", flat(model))
    print("finished on", os.uname().nodename, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
