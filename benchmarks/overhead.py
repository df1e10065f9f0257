"""What wrapping costs on one rank: a plain and a wrapped optimizer in turn, microseconds a step.

python benchmarks/overhead.py --parameters 161
"""

import argparse
import os
import time
from statistics import median

os.environ.setdefault("HVDPLUS_ENGINE", "local")

import torch

import hvdplus


def step_time(parameters: int, accumulate: int, steps: int) -> float:
    """Return the median seconds of backward, step and zero_grad; ``accumulate`` 0 is the plain optimizer."""
    params = [torch.nn.Parameter(torch.randn(10)) for _ in range(parameters)]
    optimizer = torch.optim.SGD(params, lr=0.1)
    if accumulate:
        optimizer = hvdplus.wrap(optimizer, accumulate=accumulate)
    times = []
    for _ in range(steps):
        loss = torch.stack([p.sum() for p in params]).sum()
        begin = time.perf_counter()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    return median(times)


def main() -> None:
    """Measure in turn, so that whatever else the machine does hits all alike, and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=161, help="number of parameters (ResNet-50 has %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="how often each is measured (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds = [[step_time(args.parameters, k, 100) for k in (0, 1, 4)] for _ in range(args.rounds)]
    plain = median(times[0] for times in rounds)
    print(f"{args.parameters} parameters, one rank; a plain step takes {plain * 1e6:,.0f} us")
    for column, name in ((1, "wrapped"), (2, "wrapped, accumulate=4")):
        added = median(times[column] - times[0] for times in rounds)
        ratio = median(times[column] / times[0] for times in rounds)
        print(f"  {name:<24} adds {added * 1e6:8,.1f} us a step ({ratio:.3f} x plain)")


if __name__ == "__main__":
    main()
