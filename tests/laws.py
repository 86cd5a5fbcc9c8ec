"""Laws of short token sequences: enumerated exactly, and compared with samples.

V vocabulary, N tokens of a sequence.
"""

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from workers.sampling import SamplingSettings, probabilities
from workers.table_model import NextLogits

Law = dict[tuple[int, ...], float]


def random_table(vocab_size: int, seed: int, *, spread: float = 1.0, zero_share: float = 0.0) -> NextLogits:
    """Next-token logits drawn once for every prefix of up to 8 tokens, a share of them minus infinity."""
    memory: dict[tuple[int, ...], NDArray[np.floating]] = {}

    def next_logits(prefix: tuple[int, ...]) -> NDArray[np.floating]:
        prefix = prefix[-8:]
        if prefix not in memory:
            rng = np.random.default_rng([seed, len(prefix), *prefix])
            logits = spread * rng.normal(size=vocab_size)
            logits[rng.random(vocab_size) < zero_share] = -np.inf
            if not np.isfinite(logits).any():
                logits[rng.integers(vocab_size)] = 0.0
            memory[prefix] = logits.astype(np.float32)
        return memory[prefix]

    return next_logits


def plain_law(
    next_logits: NextLogits, prompt: Sequence[int], vocab_size: int, length: int, settings: SamplingSettings
) -> Law:
    """The probability of every sequence of `length` tokens behind the prompt, under plain decoding."""

    def step(prefix: tuple[int, ...]) -> NDArray[np.float64]:
        return np.asarray(probabilities(np.asarray(next_logits(prefix))[None], settings)[0])

    law: Law = {}
    for sequence in itertools.product(range(vocab_size), repeat=length):
        mass = 1.0
        for i, token in enumerate(sequence):
            mass *= float(step((*prompt, *sequence[:i]))[token])
        law[sequence] = mass
    return law


def assert_follows(samples: Sequence[tuple[int, ...]], law: Law, *, alpha: float = 1e-5) -> None:
    """No sequence of probability zero was drawn, and a chi-square test cannot tell samples from law."""
    counts = Counter(samples)
    impossible = {sequence: n for sequence, n in counts.items() if law.get(sequence, 0.0) == 0.0}
    assert not impossible, f"sequences of probability zero were drawn: {impossible}"
    p_value = chi_square(counts, law)
    assert p_value > alpha, f"{len(samples)} samples do not follow the law: p-value {p_value:.2e}"


def chi_square(counts: Counter[tuple[int, ...]], law: Law) -> float:
    """The p-value of observed counts; cells of fewer than 5 expected are pooled."""
    total = sum(counts.values())
    cells = sorted((total * mass, float(counts[sequence])) for sequence, mass in law.items() if mass > 0.0)
    expected, observed = [0.0], [0.0]
    for want, got in cells:
        if expected[-1] >= 5.0:
            expected.append(0.0)
            observed.append(0.0)
        expected[-1] += want
        observed[-1] += got
    if len(expected) > 1 and expected[-1] < 5.0:
        expected[-2:], observed[-2:] = [sum(expected[-2:])], [sum(observed[-2:])]
    if len(expected) == 1:
        return 1.0
    return float(stats.chisquare(observed, np.array(expected) * (total / sum(expected))).pvalue)


def total_variation(first: Law, second: Law) -> float:
    """Half the L1 distance."""
    keys = {*first, *second}
    return 0.5 * sum(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in keys)
