"""The GPT of `examples/torch_gpt.py`, trained with Horovod as it comes: the other side of `benchmarks/training.py`.

mpirun -np 2 python benchmarks/stock_gpt.py --compression fp16 --diary fp16.jsonl
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch.nn.utils import clip_grad_norm_

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import torch_gpt as gpt


def train(model: gpt.GPT, optimizer: Any, text: torch.Tensor, args: argparse.Namespace, diary: gpt.Diary) -> None:
    """Train for ``args.steps`` batches: the example's loop, with what Horovod wants for clipping."""
    schedule = gpt.schedule_of(optimizer, args, args.steps)
    for step in range(args.steps):
        if step % args.evaluate == 0:
            diary.evaluate(step)
        model.loss(gpt.batch(text, args, step, hvd.rank(), hvd.size())).backward()
        optimizer.synchronize()
        clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    diary.evaluate(args.steps)


def main() -> None:
    """Train, and write the log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", choices=["none", "fp16"], default="none", help="Horovod's own (%(default)s)")
    gpt.add_model_and_training(parser)
    args = parser.parse_args()
    hvd.init()
    text, held_out = gpt.standard_library()
    model = gpt.network(args)
    optimizer = hvd.DistributedOptimizer(
        gpt.adamw(model, args.lr),
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, args.compression),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def evaluation() -> float:
        return float(hvd.allreduce(gpt.validate(model, held_out, args, hvd.rank(), hvd.size())))

    diary = gpt.Diary(args.diary if hvd.rank() == 0 else None, evaluation, lambda: None)
    train(model, optimizer, text, args, diary)


if __name__ == "__main__":
    main()
