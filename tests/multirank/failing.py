"""Trains until this rank does what its argument says at step 3: failing.py raise|exit|sleep|kill|stop [RANK]."""

import os
import signal
import sys
import time

import torch

import hvdplus
import hvdplus.torch as hvd


def load_batch(step):
    """Stand for a data loader; the guilty rank fails here."""
    if step == 3 and hvd.rank() == guilty:
        if mode == "raise":
            raise ValueError("boom: no such file")
        if mode == "exit":
            sys.exit(0)
        if mode == "sleep":
            time.sleep(3600)
        if mode in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if mode == "kill" else signal.SIGSTOP)
    return torch.randn(4, 8)


mode, guilty = sys.argv[1], int(sys.argv[2])
hvd.init()
model = torch.nn.Linear(8, 2)
optimizer = hvdplus.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
for step in range(6):
    model(load_batch(step)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {hvd.rank()} finished", flush=True)
