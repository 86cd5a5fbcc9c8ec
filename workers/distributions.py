"""A probability distribution as the ids that it leaves possible, and rows of them made on demand.

Knows no logits and no settings. Greedy decoding leaves one id and top-k some tens, so what is done with them
need not touch the whole vocabulary.

S ids of a distribution, T rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Distribution:
    """What can come next at one position: `probabilities[j]` for `ids[j]`, zero for every other id."""

    ids: IntArray  # [S] ascending, distinct, S >= 1
    probabilities: FloatArray  # [S] zeros are allowed

    @cached_property
    def total(self) -> float:
        """The sum of the probabilities: 1 but for rounding, or something else in a row that is broken."""
        return float(self.probabilities.sum())

    @property
    def usable(self) -> bool:
        """Whether anything can be drawn from it."""
        return math.isfinite(self.total) and self.total > 0.0

    def of(self, token: int) -> float:
        """The probability of one id."""
        index = int(self.ids.searchsorted(token))
        found = index < self.ids.size and self.ids[index] == token
        return float(self.probabilities[index]) if found else 0.0

    def at(self, ids: IntArray) -> FloatArray:
        """The probabilities of several ids."""
        values = np.zeros(ids.size)
        index, found = self.find(ids)
        values[found] = self.probabilities[index]
        return values

    def find(self, ids: IntArray) -> tuple[IntArray, NDArray[np.bool_]]:
        """Which of the given ids stand in this distribution, and where: `ids[found] == self.ids[index]`."""
        index = self.ids.searchsorted(ids)
        found = self.ids.take(index, mode="clip") == ids
        return index[found], found


class Rows(Protocol):
    """The distributions of consecutive positions: a list of them, or something that makes them when asked."""

    def __getitem__(self, position: int, /) -> Distribution:
        """The distribution at a position, counted from 0."""


class RowsOnDemand:
    """Rows that are made when they are first asked for, each once: what is not looked at costs nothing."""

    def __init__(self, make_row: Callable[[int], Distribution]) -> None:
        """`make_row` gives the row of a position."""
        self._make_row = make_row
        self._made: dict[int, Distribution] = {}

    def __getitem__(self, position: int, /) -> Distribution:
        """The distribution at a position, counted from 0."""
        row = self._made.get(position)
        if row is None:
            row = self._made[position] = self._make_row(position)
        return row
