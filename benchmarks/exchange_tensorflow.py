"""A rank of the exchange benchmark in TensorFlow: hvdplus and Horovod behind a gradient tape, in a traced function."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import tensorflow as tf
from gradients import WORK, Gradients, fingerprint
from protocol import GROUP, serve

Tensors = Sequence[Any]


class Exchange:
    """One contender on one rank: the traced function from a loss to means, and the gradients of every step."""

    def __init__(self, means: Callable[[Tensors], Tensors], gradients: Gradients) -> None:
        self._means, self._gradients = means, gradients
        self._ready: Tensors = []
        self._found: Tensors = []

    def prepare(self, step: int) -> None:
        """Make fresh gradients."""
        self._found = []
        self._ready = [tf.constant(values) for values in self._gradients.fresh(step)]

    def exchange(self) -> None:
        """Run the traced function; it returns when the means are there."""
        self._found = self._means(self._ready)
        self._ready = []

    def sample(self) -> list[float]:
        """Return what tells all means from others."""
        return fingerprint([mean.numpy() for mean in self._found])

    def counted(self) -> dict[str, Any]:
        """A tape counts nothing."""
        return {}


def traced(tape: Callable[[Any], Any], variables: Tensors) -> Callable[[Tensors], Tensors]:
    """Return a function from prepared gradients to means, with the exchange of a distributed tape inside.

    Args:
        tape: makes the distributed tape from a plain one.
        variables: whose gradients they are.
    """

    @tf.function  # type: ignore[untyped-decorator]
    def means(ready: Tensors) -> Tensors:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def hand(*sources: Any) -> tuple[Any, Callable[..., Tensors]]:
            """Cost nothing: the gradients are those that were prepared."""
            return tf.zeros([]), lambda *_, **__: list(ready)

        with tf.GradientTape() as plain:
            loss = hand(*[tf.convert_to_tensor(variable) for variable in variables])
        found: Tensors = tape(plain).gradient(loss, variables)
        return found

    return cast("Callable[[Tensors], Tensors]", means)


def tape_of(name: str) -> Callable[[Any], Any]:
    """Return what makes a contender's distributed tape."""
    library, _, codec = name.split("/", 2)
    if library == "hvdplus-tf":
        import hvdplus.tensorflow as hvd

        return lambda plain: hvd.DistributedGradientTape(plain, strategy=codec)
    import horovod.tensorflow as stock

    compression = {"none": stock.Compression.none, "fp16": stock.Compression.fp16}[codec]
    return lambda plain: stock.DistributedGradientTape(plain, compression=compression)


class Contenders:
    """Sets contenders up; variables and functions are made once, since what a codec keeps belongs to the variables."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._variables: dict[str, Tensors] = {}
        self._functions: dict[tuple[str, str], Callable[[Tensors], Tensors]] = {}

    def __call__(self, name: str, work: str) -> Exchange:
        """Return a contender, ready to take steps."""
        shapes = WORK[work]()
        if work not in self._variables:
            made = [tf.Variable(tf.zeros(shape), name=f"{work}{number}") for number, shape in enumerate(shapes)]
            self._variables[work] = made
        if (name, work) not in self._functions:
            self._functions[name, work] = traced(tape_of(name), self._variables[work])
        return Exchange(self._functions[name, work], Gradients(shapes, self._rank))


def main() -> None:
    """Join, then serve the driver."""
    tf.config.threading.set_intra_op_parallelism_threads(int(os.environ["OMP_NUM_THREADS"]))
    if os.environ[GROUP].startswith("stock"):
        import horovod.tensorflow as hvd
    else:
        import hvdplus.tensorflow as hvd
    hvd.init()
    serve(hvd.rank(), hvd.size(), Contenders(hvd.rank()))


if __name__ == "__main__":
    main()
