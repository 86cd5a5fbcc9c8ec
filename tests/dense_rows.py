"""Verification of rows written out over a vocabulary, as enumerations have them: `[K+1, V]` arrays for p.

Every other row is handed on without its zeros, as top-k leaves it: the law may not depend on that.
"""

from collections.abc import Sequence

import numpy as np

from workers import verification
from workers.counts import CountRow
from workers.distributions import Distribution, FloatArray
from workers.verification import Rule, Uniforms, Verdict


def whole(row: FloatArray) -> Distribution:
    """All of a row `[V]`: column i is id i."""
    return Distribution(np.arange(row.size), row)


def possible(row: FloatArray) -> Distribution:
    """What of a row is not zero; all of a row that has nothing else."""
    ids = np.flatnonzero(row)
    return Distribution(ids, row[ids]) if ids.size else whole(row)


def alternating(p: Sequence[FloatArray] | FloatArray) -> list[Distribution]:
    """Rows of p, `[K+1, V]`."""
    return [possible(row) if i % 2 else whole(row) for i, row in enumerate(p)]


def verify(
    p: Sequence[FloatArray] | FloatArray,
    q: Sequence[CountRow],
    tokens: Sequence[int],
    uniforms: Uniforms,
    rule: Rule,
) -> Verdict:
    """`workers.verification.verify`."""
    return verification.verify(alternating(p), q, tokens, uniforms, rule)


def block_chances(p: FloatArray, q: Sequence[CountRow], tokens: Sequence[int]) -> list[tuple[float, float]]:
    """`workers.verification.block_chances`."""
    return verification.block_chances(alternating(p), q, tokens)


def residual(p: FloatArray, q: CountRow, scale: float) -> FloatArray:
    """`workers.verification.residual`, `[V]`."""
    return verification.residual(whole(p), q, scale)
