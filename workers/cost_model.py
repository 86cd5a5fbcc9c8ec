"""What a pass of the model takes, learnt from the passes that it runs.

Knows shapes and seconds; runs nothing. The form is that of `protos.pass_cost`: a table over rows, a term for
each position that a row attends to, a term for each sequence. All of it is linear in the table's entries and
the two terms, so each pass corrects them by recursive least squares (a Kalman filter, some 60 us), which

- weighs a pass by what is uncertain yet: the first ones set the table, a thousandth hardly moves it;
- forgets: the speed drifts, mostly of the machine as a whole, so that passes of one kind tell of others too;
- bounds how far one pass moves anything: one that a busy machine disturbed counts as somewhat slow.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from protos.pass_cost import PassCost, PassShape

FloatArray = NDArray[np.float64]

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

# Relative to the times themselves.
_NOISE = 0.1  # of a pass
_DRIFT = 0.03  # a pass, of the whole machine
_OWN_DRIFT = 0.01  # a pass, of the entries that it tells
# How large the terms may be at first, in passes of a row.
_POSITION = 1 / 16384
_SEQUENCE = 1 / 8
_ROWS_PER_READ = 16  # rows whose arithmetic takes as long as reading the weights, roughly

_CLIP = 2.0  # deviations: what goes beyond counts as that
_SHORTEST_SECONDS = 1e-9


class CostModel:
    """The cost of one model on this machine as it is now. One thread observes, any may ask."""

    def __init__(self) -> None:
        """Nothing is known until the first pass."""
        self._forget()

    def _forget(self) -> None:
        self._values = np.zeros(len(ROWS) + 2)  # the table, seconds_per_position, seconds_per_sequence
        self._covariance = np.zeros((len(self._values), len(self._values)))
        self._seen: set[int] = set()  # entries that some pass told
        self.cost: PassCost | None = None  # the best estimate; None before the first pass

    def _estimate(self) -> PassCost:
        """The cost by the entries that were seen.

        Where entries fall, as more rows cannot take less, they are pooled by how certain each is.
        """
        seen = sorted(self._seen)
        *_, per_position, per_sequence = self._values.tolist()
        weights = 1.0 / np.maximum(self._covariance.diagonal()[seen], _SHORTEST_SECONDS**2)
        seconds = _not_falling(self._values[seen].tolist(), weights.tolist())
        rows = [ROWS[i] for i in seen]
        if rows[0] > 1:
            rows, seconds = [1, *rows], [seconds[0], *seconds]
        return PassCost(tuple(rows), tuple(seconds), max(per_position, 0.0), max(per_sequence, 0.0))

    def observe(self, shape: PassShape, seconds: float) -> None:
        """Learn from a pass of at least one row."""
        seconds = max(seconds, _SHORTEST_SECONDS)
        weights = _weights(shape)
        self._begin(weights, seconds)
        values, covariance = self._values, self._covariance
        drift = _DRIFT * values
        covariance += drift[:, None] * drift
        covariance[_DIAGONAL] += (_OWN_DRIFT * values * weights)[: len(ROWS)] ** 2
        expected = float(weights @ values)
        gains = covariance @ weights
        usual = max(abs(expected), seconds / 10)
        variance = float(weights @ gains) + (_NOISE * usual) ** 2
        if not variance > 0:  # times of all orders of magnitude have cost all precision
            self._forget()
            return
        surprise, limit = seconds - expected, _CLIP * variance**0.5
        told = gains / max(variance, (surprise / _CLIP) ** 2)  # a fluke makes nothing surer
        covariance -= gains[:, None] * told
        values = values + min(max(surprise, -limit), limit) / variance * gains
        for term in (-2, -1):
            if (
                values[term] < 0 < covariance[term, term]
            ):  # it cannot be: to the likeliest values where it is 0
                values = values - covariance[:, term] * (values[term] / covariance[term, term])
        self._values = values
        self._seen.update(np.flatnonzero(weights[: len(ROWS)]).tolist())
        self.cost = self._estimate()  # whole, for whichever thread reads it

    def _begin(self, weights: FloatArray, seconds: float) -> None:
        """Guess what the first pass of its kind is about to tell, by those that were seen, and be unsure."""
        table = weights[: len(ROWS)]
        new = np.flatnonzero((table > 0) & (self._covariance[_DIAGONAL] == 0))
        if not new.size:
            return
        cost = self.cost
        if cost is None:
            scale = seconds / (1 + table @ ROWS / _ROWS_PER_READ)
            self._covariance[-2, -2] = (_POSITION * scale) ** 2
            self._covariance[-1, -1] = (_SEQUENCE * scale) ** 2
        for i in new:
            guess = cost.pass_seconds(PassShape(ROWS[i], 0, 1)) if cost is not None else seconds
            self._values[i] = guess
            self._covariance[i, i] = guess * guess


_DIAGONAL = np.diag_indices(len(ROWS))


def _not_falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest positive values, by weighted squares, of which none is below the one before it."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] > mean:
            other, other_total, other_count = pools.pop()
            mean = (mean * total + other * other_total) / (total + other_total)
            total, count = total + other_total, count + other_count
        pools.append((mean, total, count))
    return [max(mean, _SHORTEST_SECONDS) for mean, _, count in pools for _ in range(count)]


def _weights(shape: PassShape) -> FloatArray:
    """What each value counts in the time of a pass."""
    weights = np.zeros(len(ROWS) + 2)
    weights[-2:] = shape.num_positions, shape.num_sequences - 1
    i = bisect_right(ROWS, shape.num_rows) - 1
    if i == len(ROWS) - 1:
        weights[i] = shape.num_rows / ROWS[i]
    else:
        weights[i + 1] = (shape.num_rows - ROWS[i]) / (ROWS[i + 1] - ROWS[i])
        weights[i] = 1.0 - weights[i + 1]
    return weights
