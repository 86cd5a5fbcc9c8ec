"""Verification as pure functions: which draft tokens the target accepts, and the token that follows them.

Knows distributions, tokens and uniforms; no generator, no model, no wire. Definitions:

- accepted: a draft token that is kept;
- recovered: the token drawn from the residual max(0, w*p - q) at the first position that is not kept;
- bonus: the token drawn from p behind the last draft when all K are kept.

Token rule: Leviathan, Kalman, Matias 2023 (Algorithm 1). Block rule: Sun et al., arXiv 2403.10444. A one-hot
row needs no rule of its own: q(x) = 1 gives acceptance p(x) and the residual "p without x".

K draft tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from workers.counts import CountRow
from workers.sampling import FloatArray


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


def verify(
    p: FloatArray, q: Sequence[CountRow], tokens: Sequence[int], uniforms: Uniforms, rule: Rule
) -> Verdict:
    """Judge K draft tokens.

    `p` `[K+1, V]`: the target's distributions at the K draft positions and the one behind them; `q`: K rows,
    the very ones that the K `tokens` were drawn from. With K = 0 the verdict is a plain draw from p.
    A row of p that is no distribution cuts the block before it. Raises UnusableTarget when such a row itself
    has to be sampled, ValueError for a token that its own row gives no mass.
    """
    for i, (row, token) in enumerate(zip(q, tokens, strict=True)):
        if row.q_of(token) == 0.0:
            raise ValueError(f"tokens[{i}] is {token}, to which q[{i}] gives no mass; make that row one-hot")
    num_usable = _num_usable(p, len(tokens))
    p, q, tokens = p[: num_usable + 1], q[:num_usable], tokens[:num_usable]
    if rule is Rule.TOKEN:
        num_accepted, scale = _accept_by_token(p, q, tokens, uniforms.accept)
    else:
        num_accepted, scale = _accept_by_block(p, q, tokens, uniforms.accept)
    if num_accepted == num_usable:
        return Verdict(num_accepted, draw(p[num_accepted], uniforms.bonus))
    weights = residual(p[num_accepted], q[num_accepted], scale)
    if not weights.any():  # rounding left nothing where p and q agree
        weights = p[num_accepted]
    return Verdict(num_accepted, draw(weights, uniforms.recover[num_accepted]))


def _num_usable(p: FloatArray, num_drafts: int) -> int:
    masses = p.sum(axis=1)
    broken = np.flatnonzero(~(np.isfinite(masses) & (masses > 0.0)))
    return min(num_drafts, int(broken[0])) if broken.size else num_drafts


def _accept_by_token(
    p: FloatArray, q: Sequence[CountRow], tokens: Sequence[int], accept: Sequence[float]
) -> tuple[int, float]:
    """Keep x_i while u_i * q_i(x_i) < p_i(x_i): strict, so a token with p = 0 is not kept even at u = 0."""
    for i, token in enumerate(tokens):
        if not accept[i] * q[i].q_of(token) < p[i, token]:
            return i, 1.0
    return len(tokens), 1.0


def _accept_by_block(
    p: FloatArray, q: Sequence[CountRow], tokens: Sequence[int], accept: Sequence[float]
) -> tuple[int, float]:
    """Keep the LONGEST prefix whose own coin succeeds; returns its length and its weight w."""
    num_accepted, scale = 0, 1.0
    for i, (chance, weight) in enumerate(block_chances(p, q, tokens), start=1):
        if accept[i - 1] < chance:
            num_accepted, scale = i, weight
    return num_accepted, scale


def block_chances(p: FloatArray, q: Sequence[CountRow], tokens: Sequence[int]) -> list[tuple[float, float]]:
    """(h_i, w_i) for i = 1..K: the chance that the prefix of length i is kept by its own coin, its weight.

    w_i = min(w_{i-1} p_i(x_i) / q_i(x_i), 1), w_0 = 1; h_K = w_K, and for i < K
    h_i = Z_i / (Z_i + 1 - w_i) with Z_i the mass of the residual behind the prefix (0/0 is 1).
    """
    chances = []
    weight = 1.0
    for i, token in enumerate(tokens):
        weight = min(weight * float(p[i, token]) / q[i].q_of(token), 1.0)
        chance = weight
        if i + 1 < len(tokens):
            mass = _residual_mass(p[i + 1], q[i + 1], weight)
            chance = mass / (mass + 1.0 - weight) if mass + 1.0 - weight > 0.0 else 1.0
        chances.append((chance, weight))
    return chances


def residual(p: FloatArray, q: CountRow, scale: float) -> FloatArray:
    """max(0, scale * p - q), `[V]`, not normalised."""
    weights = scale * p
    weights[q.ids] = np.maximum(weights[q.ids] - q.q, 0.0)
    return weights


def _residual_mass(p: FloatArray, q: CountRow, scale: float) -> float:
    """The sum of `residual`, touching q's support only: outside it the term is scale * p."""
    inside = p[q.ids]
    outside = max(float(p.sum()) - float(inside.sum()), 0.0)
    return scale * outside + float(np.maximum(scale * inside - q.q, 0.0).sum())


def draw(weights: FloatArray, uniform: float) -> int:
    """The index that a uniform selects from unnormalised weights `[V]`; never one of weight zero.

    Raises UnusableTarget when the weights are no distribution.
    """
    cumulative = np.cumsum(weights)
    total = cumulative[-1]
    if not (np.isfinite(total) and total > 0.0):
        raise UnusableTarget(f"the target's probabilities sum to {total} at a position that must be sampled")
    index = int(np.searchsorted(cumulative, uniform * total, side="right"))
    if index == weights.size:  # u * total rounded up to total
        index = int(np.flatnonzero(weights)[-1])
    return index
