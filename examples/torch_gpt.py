"""Train a byte-level GPT on the source code of Python's standard library, on one rank or many.

python examples/torch_gpt.py --size 1m
mpirun -np 2 python examples/torch_gpt.py --strategy int8
horovodrun -np 2 python examples/torch_gpt.py --size 3m --strategy "onebit,warmup_steps=60,overrides=*norm*=exact"
"""

import argparse
import json
import math
import os
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import hvdplus
import hvdplus.torch as hvd

BYTES = 256  # the vocabulary
SIZES = {"1m": (128, 5, 4), "3m": (256, 4, 4), "10m": (384, 6, 6)}  # width, layers, heads
MOMENTUM = 0.9  # AdamW's first beta
ELSEWHERE = {"site-packages", "dist-packages", "test", "tests"}  # folders that are not on every machine alike


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--strategy", default="exact", help="how gradients travel: 'codec,field=value,...' (%(default)s)"
    )
    parser.add_argument(
        "--momentum", type=float, default=MOMENTUM, help="AdamW's first beta once the codec is in force (%(default)s)"
    )
    add_model_and_training(parser)
    return parser.parse_args()


def add_model_and_training(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is trained, and how long."""
    parser.add_argument("--size", choices=SIZES, default="10m", help="millions of parameters (%(default)s)")
    parser.add_argument("--width", type=int, help="numbers to a byte in between the layers (the size's)")
    parser.add_argument("--layers", type=int, help="blocks of attention and perceptron (the size's)")
    parser.add_argument("--heads", type=int, help="heads of attention (the size's)")
    parser.add_argument("--context", type=int, default=256, help="bytes in a sequence (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="sequences in all ranks' batches together (%(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="batches to train on (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate (%(default)s)")
    parser.add_argument("--warmup", type=int, default=30, help="updates in which it rises to that (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the batches (%(default)s)")
    parser.add_argument("--evaluate", type=int, default=100, help="steps between two evaluations (%(default)s)")
    parser.add_argument("--windows", type=int, default=128, help="sequences to an evaluation (%(default)s)")
    parser.add_argument("--diary", type=Path, help="file for one line of JSON for each evaluation")


def standard_library() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the text to train on and the text to validate on, uint8: every tenth file is for validation."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not ELSEWHERE & set(path.relative_to(root).parts))
    training = [path for i, path in enumerate(files) if i % 10]
    return _text(training), _text(files[::10])


def _text(files: list[Path]) -> torch.Tensor:
    return torch.frombuffer(bytearray().join(path.read_bytes() for path in files), dtype=torch.uint8)


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Turn (batch, context, width) into the same shape."""
        x = x + self.attended(self._attend(self.norm1(x)))
        return x + self.down(gelu(self.up(self.norm2(x))))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class GPT(nn.Module):
    """A decoder of bytes: what comes in and what goes out share one table."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:  # what is added to the stream is smaller the more layers add to it
                smaller = name.endswith(("attended.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if smaller else 0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Turn bytes (batch, context) into logits of the bytes that follow, (batch, context, 256)."""
        x = self.bytes(text) + self.places(torch.arange(text.shape[1]))
        return self.norm(self.blocks(x)) @ self.bytes.weight.T

    def loss(self, text: torch.Tensor) -> torch.Tensor:
        """Return the mean loss in nats a byte on ``text`` (batch, context + 1)."""
        return cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def network(args: argparse.Namespace) -> GPT:
    """Return the model that the options ask for, the same for the same seed."""
    width, layers, heads = SIZES[args.size]
    torch.manual_seed(args.seed)
    return GPT(args.width or width, args.layers or layers, args.heads or heads, args.context)


def adamw(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """Return AdamW with decay on matrices alone."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(MOMENTUM, 0.95), fused=True)


def set_momentum(optimizer: torch.optim.Optimizer, momentum: float) -> None:
    """Give AdamW another momentum; sparse codecs do better without, since what they send late is a sum already."""
    for group in optimizer.param_groups:
        group["betas"] = (momentum, group["betas"][1])


def schedule_of(optimizer: torch.optim.Optimizer, args: argparse.Namespace, updates: int) -> LambdaLR:
    """Return the schedule: a straight line up, then half a cosine down to a tenth."""

    def share(step: int) -> float:
        if step < args.warmup:
            return (step + 1) / args.warmup
        done = min(1.0, (step - args.warmup) / max(1, updates - args.warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, share)


def batch(text: torch.Tensor, args: argparse.Namespace, step: int, rank: int, size: int) -> torch.Tensor:
    """Return this rank's sequences of a step, (batch / ranks, context + 1): drawn by all alike, then shared out."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    each = max(1, args.batch // size)
    starts = torch.randint(len(text) - args.context, (each * size,), generator=generator)
    return _windows(text, starts[rank * each :][:each], args.context)


def _windows(text: torch.Tensor, starts: torch.Tensor, context: int) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(context + 1)].long()


@torch.no_grad()
def validate(model: GPT, text: torch.Tensor, args: argparse.Namespace, rank: int, size: int) -> torch.Tensor:
    """Return the loss on this rank's share of windows that lie evenly in ``text``."""
    each = max(1, args.windows // size)
    starts = torch.linspace(0, len(text) - args.context - 1, each * size).long()[rank::size]
    return torch.stack([model.loss(_windows(text, some, args.context)) for some in starts.split(16)]).mean()


class Diary:
    """Evaluates, and writes down what it found; seconds are those of training alone."""

    def __init__(self, log: Path | None, evaluation: Callable[[], float], sent: Callable[[], int | None]) -> None:
        self.seconds, self.loss = 0.0, math.nan
        self._evaluation, self._sent = evaluation, sent
        self._file: TextIO | None = log.open("w") if log else None
        self._begin = time.perf_counter()

    def evaluate(self, step: int) -> None:
        """Write a line of step, seconds, loss and bytes sent; the clock stands still meanwhile."""
        self.seconds += time.perf_counter() - self._begin
        self.loss = self._evaluation()
        if self._file:
            entry = {"step": step, "seconds": self.seconds, "loss": self.loss, "bytes_sent": self._sent()}
            print(json.dumps(entry), file=self._file, flush=True)
        self._begin = time.perf_counter()


def train(
    model: GPT, optimizer: torch.optim.Optimizer, text: torch.Tensor, args: argparse.Namespace, diary: Diary
) -> None:
    """Train for ``args.steps`` batches."""
    strategy = optimizer.hvdplus.strategy
    updates, dense = args.steps // strategy.accumulate, strategy.warmup_steps * strategy.accumulate
    schedule = schedule_of(optimizer, args, updates)
    for step in tqdm(range(args.steps), unit="batch", mininterval=1, ncols=79, disable=hvd.rank() != 0):
        if step % args.evaluate == 0:
            diary.evaluate(step)
        if step == dense:
            set_momentum(optimizer, args.momentum)
        model.loss(batch(text, args, step, hvd.rank(), hvd.size())).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.hvdplus.updated:
            schedule.step()
    diary.evaluate(args.steps)


def main() -> None:
    """Train, validate, and say what it cost."""
    args = arguments()
    hvd.init()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))  # ranks share the host's cores
    text, held_out = standard_library()
    model = network(args)
    optimizer = hvdplus.wrap(adamw(model, args.lr), model=model, strategy=args.strategy)  # the one line

    def evaluation() -> float:
        return hvd.allreduce(validate(model, held_out, args, hvd.rank(), hvd.size())).item()

    log = args.diary if hvd.rank() == 0 else None
    diary = Diary(log, evaluation, lambda: optimizer.hvdplus.stats()["bytes_sent"])
    train(model, optimizer, text, args, diary)
    if hvd.rank() == 0:
        stats = optimizer.hvdplus.stats()
        count = sum(p.numel() for p in model.parameters())
        seen = args.steps * max(1, args.batch // hvd.size()) * hvd.size() * args.context
        print(f"ranks            {hvd.size()}, strategy {args.strategy}, {count:,} parameters")
        print(f"validation loss  {diary.loss:.4f} nats a byte")
        print(f"tokens/s         {seen / diary.seconds:,.0f}")
        print(
            f"bytes sent       {stats['bytes_sent']:,} a rank in {stats['steps']} exchanges "
            f"({stats['bytes_dense']:,} dense)"
        )


if __name__ == "__main__":
    main()
