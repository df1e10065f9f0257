"""Counts what exchanges cost: collectives, bytes, seconds, and how far off a codec is."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Stats:
    """Totals since the optimizer was wrapped, on this rank.

    ``steps`` counts finished exchanges; ``bytes_sent`` is what this rank put on the wire and ``bytes_dense`` what
    an exact all-reduce of the same numbers would have; ``relative_error`` is ``|given - sent| / |given|`` when it
    was last sampled (``None`` before).
    """

    steps: int = 0
    collectives: int = 0
    bytes_dense: int = 0
    bytes_sent: int = 0
    seconds_encode: float = 0.0
    seconds_wait: float = 0.0
    relative_error: float | None = None

    def add(self, cost: Stats) -> None:
        """Count one more exchange that costs the same messages as ``cost``."""
        self.steps += 1
        self.collectives += cost.collectives
        self.bytes_dense += cost.bytes_dense
        self.bytes_sent += cost.bytes_sent

    def to_dict(self) -> dict[str, float | int | None]:
        """Return the fields by name."""
        return asdict(self)
