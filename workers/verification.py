"""Verification as pure functions: which draft tokens the target accepts, and the token that follows them.

Knows distributions, tokens and uniforms; no generator, no model, no wire. Definitions:

- accepted: a draft token that is kept;
- recovered: the token drawn from the residual max(0, w*p - q) at the first position that is not kept;
- bonus: the token drawn from p behind the last draft when all K are kept.

Token rule: Leviathan, Kalman, Matias 2023 (Algorithm 1). Block rule: Sun et al., arXiv 2403.10444. A one-hot
row needs no rule of its own: q(x) = 1 gives acceptance p(x) and the residual "p without x".

A row of p is looked at only when a decision depends on it, so that rows behind the cut need not be made.

K draft tokens, S ids of a row of p.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from workers.counts import CountRow
from workers.distributions import Distribution, FloatArray, Rows

BLOCK_SIZE = 256  # weights that a draw sums at once


class Rule(Enum):
    """How a block of draft tokens is judged. Both leave exactly the target's law."""

    TOKEN = "token"
    BLOCK = "block"


class UnusableTarget(ArithmeticError):
    """A row of p that has to be sampled is not a distribution."""


@dataclass(frozen=True, slots=True)
class Uniforms:
    """The numbers on [0, 1) that decide a round, each with a counter of its own."""

    accept: Sequence[float]  # [K] one a draft token
    recover: Sequence[float]  # [K] one a draft token, used where the block is cut
    bonus: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target says of a proposal."""

    num_accepted: int  # 0..K
    token: int  # recovered when num_accepted < K, bonus otherwise


def verify(p: Rows, q: Sequence[CountRow], tokens: Sequence[int], uniforms: Uniforms, rule: Rule) -> Verdict:
    """Judge K draft tokens.

    `p`: K+1 rows, the target's distributions at the K draft positions and the one behind them; `q`: K rows,
    the very ones that the K `tokens` were drawn from. With K = 0 the verdict is a plain draw from p.
    A row of p that is no distribution cuts the block before it. Raises UnusableTarget when such a row itself
    has to be sampled, ValueError for a token that its own row gives no mass.
    """
    for i, (row, token) in enumerate(zip(q, tokens, strict=True)):
        if row.q_of(token) == 0.0:
            raise ValueError(f"tokens[{i}] is {token}, to which q[{i}] gives no mass; make that row one-hot")
    if rule is Rule.TOKEN:
        num_accepted, scale = _accept_by_token(p, q, tokens, uniforms.accept)
    else:
        num_accepted, scale = _accept_by_block(p, q, tokens, uniforms.accept)
    following = p[num_accepted]
    if num_accepted == len(tokens):
        return Verdict(num_accepted, _drawn(following, following.probabilities, uniforms.bonus))
    weights = residual(following, q[num_accepted], scale)
    if not weights.any():  # rounding left nothing where p and q agree
        weights = following.probabilities
    return Verdict(num_accepted, _drawn(following, weights, uniforms.recover[num_accepted]))


def _accept_by_token(
    p: Rows, q: Sequence[CountRow], tokens: Sequence[int], accept: Sequence[float]
) -> tuple[int, float]:
    """Keep x_i while u_i * q_i(x_i) < p_i(x_i): strict, so a token with p = 0 is not kept even at u = 0."""
    for i, token in enumerate(tokens):
        if not (p[i].usable and accept[i] * q[i].q_of(token) < p[i].of(token)):
            return i, 1.0
    return len(tokens), 1.0


def _accept_by_block(
    p: Rows, q: Sequence[CountRow], tokens: Sequence[int], accept: Sequence[float]
) -> tuple[int, float]:
    """Keep the LONGEST prefix whose own coin succeeds; returns its length and its weight w."""
    num_accepted, scale = 0, 1.0
    for i, (chance, weight) in enumerate(block_chances(p, q, tokens), start=1):
        if accept[i - 1] < chance:
            num_accepted, scale = i, weight
    return num_accepted, scale


def block_chances(p: Rows, q: Sequence[CountRow], tokens: Sequence[int]) -> list[tuple[float, float]]:
    """(h_i, w_i) for i = 1..K: the chance that the prefix of length i is kept by its own coin, its weight.

    w_i = min(w_{i-1} p_i(x_i) / q_i(x_i), 1), w_0 = 1; h_K = w_K, and for i < K
    h_i = Z_i / (Z_i + 1 - w_i) with Z_i the mass of the residual behind the prefix (0/0 is 1).
    The block ends before a row of p that is no distribution, as it does at K. Past its end, and behind a
    weight of 0, both are 0.
    """
    chances: list[tuple[float, float]] = []
    weight = 1.0
    for i, token in enumerate(tokens):
        if weight == 0.0 or not p[i].usable:
            break
        weight = min(weight * p[i].of(token) / q[i].q_of(token), 1.0)
        chance = weight
        if weight > 0.0 and i + 1 < len(tokens) and p[i + 1].usable:
            mass = _residual_mass(p[i + 1], q[i + 1], weight)
            chance = mass / (mass + 1.0 - weight) if mass + 1.0 - weight > 0.0 else 1.0
        chances.append((chance, weight))
    return chances + [(0.0, 0.0)] * (len(tokens) - len(chances))


def residual(p: Distribution, q: CountRow, scale: float) -> FloatArray:
    """max(0, scale * p - q) over the ids of p, `[S]`, not normalised."""
    weights = scale * p.probabilities
    index, found = p.find(q.ids)
    weights[index] = np.maximum(weights[index] - q.q[found], 0.0)
    return weights


def _residual_mass(p: Distribution, q: CountRow, scale: float) -> float:
    """The sum of `residual`, touching q's support only: outside it the term is scale * p."""
    inside = p.at(q.ids)
    outside = max(p.total - float(inside.sum()), 0.0)
    return scale * outside + float(np.maximum(scale * inside - q.q, 0.0).sum())


def _drawn(row: Distribution, weights: FloatArray, uniform: float) -> int:
    return int(row.ids[draw(weights, uniform)])


def draw(weights: FloatArray, uniform: float) -> int:
    """The index that a uniform selects from unnormalised weights `[S]`; never one of weight zero.

    It is the first whose running sum exceeds u * total. The sum runs over blocks, and then over the one block
    where it passes that threshold. Raises UnusableTarget when the weights are no distribution.
    """
    running = np.add.reduceat(weights, np.arange(0, weights.size, BLOCK_SIZE)).cumsum()
    total = float(running[-1])
    if not (math.isfinite(total) and total > 0.0):
        raise UnusableTarget(f"the target's probabilities sum to {total} at a position that must be sampled")
    threshold = uniform * total
    block = min(int(running.searchsorted(threshold, side="right")), running.size - 1)
    start = block * BLOCK_SIZE
    inside = weights[start : start + BLOCK_SIZE].cumsum()
    if block:
        inside += running[block - 1]
    index = start + int(inside.searchsorted(threshold, side="right"))
    if index == start + inside.size:  # rounding put the threshold at or behind the block's last sum
        index = int(np.flatnonzero(weights[:index])[-1])
    return index
