"""From logits to the distribution that a request's settings ask for, in float64.

Knows logits and settings only. The settings mean what transformers' processors mean, in transformers' order:
temperature, top-k, top-p, min-p (the tests hold the two equal). It is written with numpy because the
drafter, the target and the torch-free table model share it.

T rows, C columns, S columns that are kept.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from workers.distributions import Distribution, FloatArray, IntArray

NUM_GROUPS = 1024  # of columns, in the search for the k largest logits


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


def distribution(logits: NDArray[np.floating], settings: SamplingSettings) -> Distribution:
    """The sampling distribution of a row of logits `[C]`, over the columns that the settings keep.

    A logit of minus infinity is a probability of zero. A row with a NaN, a plus infinity or nothing but minus
    infinity has no distribution: what comes back is not usable, for the caller to judge.

    Columns that top-k drops are dropped before anything else: numpy takes 5 ns for a float64 exponential on
    machines without AVX-512, and a whole vocabulary of them is most of what a row costs.
    """
    likeliest = int(logits.argmax())  # the first NaN, if there is one
    peak = float(logits[likeliest])
    if not math.isfinite(peak):
        return Distribution(np.array([likeliest]), np.array([np.nan]))
    if settings.temperature == 0.0:
        return Distribution(np.array([likeliest]), np.ones(1))
    ids = _all_columns(logits.size)
    if 0 < settings.top_k < logits.size:
        ids = _top_k(logits, settings.top_k)
        logits = logits[ids]
    weights = np.subtract(logits, peak, dtype=np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the peak to minus infinity
        weights /= settings.temperature
    np.exp(weights, out=weights)
    weights /= weights.sum()
    if settings.top_p < 1.0:
        ids, weights = _keep_top_p(ids, weights, settings.top_p)
    if settings.min_p > 0.0:
        ids, weights = _only(np.flatnonzero(weights >= settings.min_p * weights.max()), ids, weights)
    return Distribution(ids, weights)


def probabilities(logits: NDArray[np.floating], settings: SamplingSettings) -> FloatArray:
    """`distribution` of each row of logits `[T, C]`, written out `[T, C]`; NaN where it is not usable."""
    result = np.zeros(np.shape(logits))
    for row, out in zip(logits, result, strict=True):
        law = distribution(row, settings)
        if law.usable:
            out[law.ids] = law.probabilities
        else:
            out.fill(np.nan)
    return result


@cache
def _all_columns(num: int) -> IntArray:
    columns = np.arange(num)
    columns.flags.writeable = False
    return columns


def _top_k(logits: NDArray[np.floating], top_k: int) -> IntArray:
    """The columns `[S]` of the k largest logits. Ties with the k-th stay, as in transformers.

    The k-th largest maximum of disjoint groups of columns is at most the k-th largest logit, and few logits
    reach it: only these are partitioned.
    """
    columns = _all_columns(logits.size)
    if top_k < NUM_GROUPS < logits.size:
        whole = logits.size - logits.size % NUM_GROUPS
        maxima = logits[:whole].reshape(-1, NUM_GROUPS).max(axis=0)
        columns = np.flatnonzero(logits >= _kth_largest(maxima, top_k))
    likely = logits[columns]
    return columns[likely >= _kth_largest(likely, top_k)]


def _kth_largest(values: NDArray[np.floating], k: int) -> np.floating:
    value: np.floating = np.partition(values, values.size - k)[values.size - k]
    return value


def _keep_top_p(ids: IntArray, weights: FloatArray, top_p: float) -> tuple[IntArray, FloatArray]:
    """Drop the least likely tokens whose joint mass is at most 1 - top_p; the likeliest always stays.

    What weighs less than an equal share of the mass that may still go is dropped unsorted: together such
    tokens weigh less than that mass. A few turns of this leave some hundred tokens of a vocabulary to sort.
    """
    mass, peak = weights.sum(), weights.max()
    may_go = 1.0 - top_p
    gone = 0.0
    while True:
        stay = np.flatnonzero(weights >= min((may_go - gone) / weights.size, peak))
        if stay.size == weights.size:
            break
        ids, weights = ids[stay], weights[stay]
        gone = mass - weights.sum()
    ascending = weights.argsort(kind="stable")
    num_dropped = np.count_nonzero(gone + weights[ascending].cumsum() <= may_go)
    return _only(np.sort(ascending[min(num_dropped, weights.size - 1) :]), ids, weights)


def _only(stay: IntArray, ids: IntArray, weights: FloatArray) -> tuple[IntArray, FloatArray]:
    kept = weights[stay]
    return ids[stay], kept / kept.sum()
