"""From logits to the distribution that a request's settings ask for, in float64.

Knows logits and settings only. The settings mean what transformers' processors mean, in transformers' order:
temperature, top-k, top-p, min-p (the tests hold the two equal). It is written with numpy because the
drafter, the target and the torch-free table model share it.

T rows, C columns.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How a distribution is made from logits. Raises ValueError naming the field, the value and the limit."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # 1 keeps all
    min_p: float = 0.0  # 0 keeps all

    def __post_init__(self) -> None:
        """Refuse what no distribution can be made of."""
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature is {self.temperature}; it must lie in [0, 100], 0 being greedy")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (keep all) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must lie in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p is {self.min_p}; it must lie in [0, 1]")


def probabilities(logits: NDArray[np.floating], settings: SamplingSettings) -> FloatArray:
    """The sampling distribution of each row of logits `[T, C]`, float64 `[T, C]`.

    A logit of minus infinity is a probability of zero. A row with a NaN, a plus infinity or nothing but minus
    infinity has no distribution: it comes back as NaN, for the caller to judge.
    """
    rows = np.array(logits, dtype=np.float64)
    result = np.empty_like(rows)
    for row, out in zip(rows, result, strict=True):
        peak = row.max()
        if not np.isfinite(peak):  # NaN propagates through max
            out.fill(np.nan)
        elif settings.temperature == 0.0:
            out.fill(0.0)
            out[int(row.argmax())] = 1.0
        else:
            with np.errstate(over="ignore"):  # a tiny temperature sends all but the peak to minus infinity
                row -= peak
                row /= settings.temperature
            _keep_top_k(row, settings.top_k)
            _softmax(row, out)
            _keep_top_p(out, settings.top_p)
            _keep_min_p(out, settings.min_p)
    return result


def _softmax(row: FloatArray, out: FloatArray) -> None:
    np.exp(row, out=out)
    out /= out.sum()


def _keep_top_k(row: FloatArray, top_k: int) -> None:
    """Ties with the k-th logit stay, as in transformers."""
    if 0 < top_k < row.size:
        row[row < np.partition(row, row.size - top_k)[row.size - top_k]] = -np.inf


def _keep_top_p(row: FloatArray, top_p: float) -> None:
    """Drop the least likely tokens whose joint mass is at most 1 - top_p; the likeliest always stays."""
    if top_p < 1.0:
        ascending = np.argsort(row, kind="stable")
        dropped = np.cumsum(row[ascending]) <= 1.0 - top_p
        dropped[-1] = False
        row[ascending[dropped]] = 0.0
        row /= row.sum()


def _keep_min_p(row: FloatArray, min_p: float) -> None:
    """Drop tokens less likely than min_p times the likeliest."""
    if min_p > 0.0:
        row[row < min_p * row.max()] = 0.0
        row /= row.sum()
