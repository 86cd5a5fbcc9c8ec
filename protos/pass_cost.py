"""What a pass of a worker's model takes: told by the worker, used by whoever plans passes or rounds.

Knows numbers of rows, positions and sequences; neither how a cost was measured nor what is planned by it.

A pass of N rows that belong to S sequences and attend to A positions in all, each row's own included, takes

    table(N) + A * seconds_per_position + (S - 1) * seconds_per_sequence

where the table is interpolated, and goes on in proportion to N behind its end.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Self

from protos.worker_pb2 import PassCost as PassCostMessage

MAX_TABLE_ROWS = 64  # entries of a table that is told


@dataclass(frozen=True, slots=True)
class PassShape:
    """What the time of a pass depends on."""

    num_rows: int = 0  # N
    num_positions: int = 0  # A, summed over the rows
    num_sequences: int = 0  # S

    def with_feed(self, start: int, num_rows: int) -> "PassShape":
        """The pass with `num_rows` more of another sequence, at positions start .. start+num_rows-1."""
        return PassShape(
            self.num_rows + num_rows,
            self.num_positions + num_rows * start + num_rows * (num_rows + 1) // 2,
            self.num_sequences + 1,
        )


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of any pass. Raises ValueError, naming the field, when it cannot be a cost."""

    rows: tuple[int, ...]  # ascending from 1
    seconds: tuple[float, ...]  # of each of these passes; they do not fall
    seconds_per_position: float
    seconds_per_sequence: float

    def __post_init__(self) -> None:
        if not 1 <= len(self.rows) <= MAX_TABLE_ROWS or len(self.rows) != len(self.seconds):
            counts = f"{len(self.rows)} rows and {len(self.seconds)} seconds"
            raise ValueError(f"the table has {counts}; it needs as many of both, 1 to {MAX_TABLE_ROWS}")
        if self.rows[0] != 1 or any(b <= a for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ValueError(f"rows are {self.rows}; they must ascend from 1")
        if not all(map(math.isfinite, self.seconds)) or self.seconds[0] <= 0:
            raise ValueError(f"seconds are {self.seconds}; they must be finite and positive")
        if any(b < a for a, b in zip(self.seconds, self.seconds[1:], strict=False)):
            raise ValueError(f"seconds are {self.seconds}; more rows cannot take less")
        for name in ("seconds_per_position", "seconds_per_sequence"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; it must be finite and not negative")

    def pass_seconds(self, shape: PassShape) -> float:
        """What a pass of at least one row takes."""
        return (
            self._table(shape.num_rows)
            + shape.num_positions * self.seconds_per_position
            + (shape.num_sequences - 1) * self.seconds_per_sequence
        )

    def _table(self, num_rows: int) -> float:
        rows, seconds = self.rows, self.seconds
        if num_rows >= rows[-1]:
            return seconds[-1] * num_rows / rows[-1]
        i = bisect_left(rows, num_rows)
        if rows[i] == num_rows:
            return seconds[i]
        share = (num_rows - rows[i - 1]) / (rows[i] - rows[i - 1])
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])

    def to_message(self) -> PassCostMessage:
        """For the wire."""
        return PassCostMessage(
            rows=self.rows,
            seconds=self.seconds,
            seconds_per_position=self.seconds_per_position,
            seconds_per_sequence=self.seconds_per_sequence,
        )

    @classmethod
    def from_message(cls, message: PassCostMessage) -> Self:
        """The inverse. Raises ValueError when it cannot be a cost."""
        return cls(
            tuple(message.rows),
            tuple(message.seconds),
            message.seconds_per_position,
            message.seconds_per_sequence,
        )
