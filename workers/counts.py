"""The draft distribution q as integer counts: what is drawn from, shipped, computed with and redrawn from.

Knows no wire and no model. Integers make the drafter's distribution and the target's the same numbers, bit
for bit, so no rounding can come between the draw and the ratio p/q.

S ids in the support of a row, C columns of the draft's logits, V vocabulary.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from workers.distributions import FloatArray, IntArray

SPARSE_TOTAL = 1 << 15  # counts of a sparse row fit 16 bits
FULL_TOTAL = 1 << 31  # counts of a full row fit 32 bits


@dataclass(frozen=True, eq=False)
class CountRow:
    """q at one position: `q(ids[j]) = counts[j] / total`, zero elsewhere. total is a power of two."""

    ids: IntArray  # [S] ascending, distinct
    counts: IntArray  # [S] positive
    total: int  # their sum

    @cached_property
    def q(self) -> FloatArray:
        """[S] probabilities, exact: an integer over a power of two."""
        return self.counts / float(self.total)

    def q_of(self, token: int) -> float:
        """q(token)."""
        index = int(self.ids.searchsorted(token))
        return float(self.q[index]) if index < self.ids.size and self.ids[index] == token else 0.0

    def draw(self, uniform: float) -> int:
        """The token selected by a uniform u on [0, 1): the first id whose running count exceeds u * total."""
        threshold = int(uniform * self.total)  # exact: total is a power of two
        return int(self.ids[self.counts.cumsum().searchsorted(threshold, side="right")])


def one_hot(token: int) -> CountRow:
    """The row of a token whose maker ships no q: exact whatever made it, kept with probability p(token)."""
    return CountRow(np.array([token]), np.array([1]), 1)


def quantise(probabilities: FloatArray, support: int, output_ids: IntArray | None = None) -> CountRow:
    """Counts summing to 2^15 over the `support` likeliest columns of a distribution `[C]`.

    `output_ids` `[C]` ascending names the id of each column (None: the column is the id). Rounds by largest
    remainder, so no count is off by one or more. Columns that get no count leave the support. Raises
    ValueError for a support below 1.
    """
    if support < 1:
        raise ValueError(f"support is {support}; it must be at least 1")
    ids = np.arange(probabilities.size) if output_ids is None else output_ids[: probabilities.size]
    if probabilities.size > support:
        kept = np.sort(np.argpartition(probabilities, -support)[-support:])
        ids, probabilities = ids[kept], probabilities[kept]
    return _apportion(probabilities, SPARSE_TOTAL, ids)


def quantise_full(probabilities: FloatArray, output_ids: IntArray | None = None) -> CountRow:
    """Counts summing to 2^31 over every column of a distribution `[C]`: q itself, to 5e-10."""
    ids = np.arange(probabilities.size) if output_ids is None else output_ids[: probabilities.size]
    return _apportion(probabilities, FULL_TOTAL, ids)


def _apportion(weights: FloatArray, total: int, ids: IntArray) -> CountRow:
    shares = weights * (total / weights.sum())
    counts = shares.astype(np.int64)  # rounded down
    missing = total - int(counts.sum())
    assert 0 <= missing <= counts.size, "shares sum to the total but for rounding far below one count"
    counts[np.argsort(counts - shares, kind="stable")[:missing]] += 1
    positive = counts > 0
    return CountRow(ids[positive], counts[positive], total)
