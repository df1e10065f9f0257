"""What a codec is: a generator that asks for collectives and is answered by whoever drives it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

from hvdplus.arrays import Arrays, Cell
from hvdplus.collectives import Collectives, Request

A = TypeVar("A")


@dataclass(frozen=True)
class Outcome(Generic[A]):
    """What an exchange leaves.

    ``mean`` is the mean over ranks, bit-identical on all of them. ``sent`` is what this rank really contributed
    to it, in the units of what it was given; ``None`` means that all of it went out, nothing was lost. ``alarm`` are a
    few numbers that are finite only where the whole mean is, for a codec that knows them: looking at the mean takes
    longer.
    """

    mean: A
    sent: A | None = None
    alarm: A | None = None


@dataclass
class Site(Generic[A]):
    """The place where a codec works: one bucket of one plan on one rank.

    It holds the array operations, the rank and number of ranks, the step (number of exchanges so far; a tensor where a
    framework traces its steps), whether somebody will read ``Outcome.sent``, and the state cells that outlive a step.
    ``new_cell`` (name, size, dtype) makes a cell where plain arrays will not do, because the framework saves its
    variables or traces its steps. ``place`` is the bucket's number in its plan, ``shapes`` are its members' shapes as
    they lie in memory (none: one of one dimension). ``feedback`` says whether a codec may keep what it loses beyond
    ``sent``.
    """

    name: str
    arrays: Arrays[A]
    collectives: Collectives[A]
    step: int = 0
    keep_sent: bool = True
    cells: dict[str, Cell[A]] = field(default_factory=dict)
    new_cell: Callable[[str, int, str], Cell[A]] | None = None
    place: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    feedback: bool = True

    @property
    def rank(self) -> int:
        """This rank among those that exchange."""
        return self.collectives.rank

    @property
    def size(self) -> int:
        """The number of ranks that exchange."""
        return self.collectives.size

    def cell(self, key: str, size: int, dtype: str = "float32") -> Cell[A]:
        """Return the state cell ``key``, made with ``size`` zeros of ``dtype`` at first use."""
        if key not in self.cells and self.new_cell is not None:
            self.cells[key] = self.new_cell(f"{self.name} {key}", size, dtype)
        elif key not in self.cells:
            self.cells[key] = Cell(self.arrays.zeros(size, dtype))
        return self.cells[key]

    def commit(self) -> None:
        """Make what the cells were told since the last commit their value."""
        for cell in self.cells.values():
            cell.commit()

    def rollback(self) -> None:
        """Forget what the cells were told since the last commit."""
        for cell in self.cells.values():
            cell.rollback()


# What a codec yields (one request, or several that fly together) and what it gets back in the same form.
Exchange: TypeAlias = Generator[Request[A] | Sequence[Request[A]], Any, Outcome[A]]


class Codec(Protocol):
    """The contract. A class with this one method is a codec.

    Where it has more: ``lossy`` says whether error feedback helps it, ``serves(shape)`` whether it can take an
    array of this shape (as it lies in memory), which else travels exact, ``with_feedback`` makes it a
    ``FeedbackCodec``, and ``reads_pieces`` says whether host functions do all that it (as a ``FeedbackCodec`` its
    ``with_feedback``) does to what it is given where ``Arrays.hosts`` it: they read gradients, and write means, where
    those lie.
    """

    def exchange(self, x: A, site: Site[A]) -> Exchange[A]:
        """Encode ``x`` (shape ``(n,)``, given up by the caller), ask for collectives, return the outcome."""


@runtime_checkable
class FeedbackCodec(Codec, Protocol):
    """A codec that adds what it lost before, and finds what it loses now, in the passes that encode anyway."""

    def with_feedback(self, x: A, residual: Cell[A], site: Site[A]) -> Exchange[A]:
        """Do as ``exchange`` of ``x + residual``, and stage in ``residual`` what was not sent.

        Where the mean is not finite, the residual stays as it was.
        """


def reads_pieces(codec: Codec) -> bool:
    """Whether ``codec.exchange`` can take what lies in pieces; without its residual a ``FeedbackCodec`` cannot."""
    return not isinstance(codec, FeedbackCodec) and getattr(codec, "reads_pieces", False)
