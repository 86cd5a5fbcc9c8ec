"""Verification leaves exactly the target's law: proved by exact integration of `verify` itself.

`verify` is a step function of each of its uniforms. `pieces` finds the steps on the grid of 53-bit uniforms
by bisection, knowing no formula, so the law below is that of the code. It is compared with plain decoding.

K draft tokens, V vocabulary. A target or a drafter is a function of the prefix, a tuple of tokens.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.dense_rows import block_chances, possible, residual, verify, whole
from workers import verification
from workers.counts import CountRow, one_hot, quantise, quantise_full
from workers.distributions import Distribution, FloatArray, RowsOnDemand
from workers.verification import Rule, Uniforms, UnusableTarget, Verdict, draw

GRID = 1 << 53  # a uniform is an integer below GRID, over GRID
LAST = GRID - 1
ALMOST_ONE = LAST / GRID
TOLERANCE = 1e-12

Prefix = tuple[int, ...]
Target = Callable[[Prefix], FloatArray]  # p behind a prefix, [V]
Draft = tuple[float, int, CountRow]  # probability, token, the row that is shipped with it
Drafter = Callable[[Prefix], Sequence[Draft]]  # nothing: the drafter stops here
Proposal = tuple[float, Prefix, tuple[CountRow, ...]]  # probability, tokens, rows
Judge = Callable[[FloatArray, Sequence[CountRow], Sequence[int], Uniforms, Rule], Verdict]
Hints = defaultdict[object, set[int]]
T = TypeVar("T")

both_rules = pytest.mark.parametrize("rule", list(Rule))


def pieces(function: Callable[[int], T], hints: set[int]) -> list[tuple[int, int, T]]:
    """The steps (start, end, value) of a step function on 0..GRID-1, each end outside its step.

    `hints` are places where a step was found before: they are looked at first and save bisections; what is
    found is added. A step hidden between two equal values is not seen.
    """
    found: list[tuple[int, T]] = []

    def search(low: int, low_value: T, high: int, high_value: T) -> None:
        while low_value != high_value and high - low > 1:
            middle = (low + high) // 2
            value = function(middle)
            if value not in (low_value, high_value):
                search(low, low_value, middle, value)
                low, low_value = middle, value
            elif value == low_value:
                low = middle
            else:
                high = middle
        if low_value != high_value:
            found.append((high, high_value))

    points = sorted({0, LAST, *hints, *(hint - 1 for hint in hints)})
    values = [function(point) for point in points]
    for left, right in itertools.pairwise(zip(points, values, strict=True)):
        search(*left, *right)
    starts = [(0, values[0]), *found]
    hints.update(start for start, _ in found)
    ends = [*(start for start, _ in found), GRID]
    return [(start, end, value) for (start, value), end in zip(starts, ends, strict=True)]


def acceptance_cells(
    p: FloatArray, q: Sequence[CountRow], tokens: Prefix, rule: Rule, hints: Hints, judge: Judge = verify
) -> Iterator[tuple[float, list[list[float]], int]]:
    """Boxes of accept coins in which one number is accepted: (volume, two corners, num_accepted)."""
    num_drafts = len(tokens)

    def accepted(coins: Sequence[float]) -> int:
        return judge(p, q, tokens, Uniforms(coins, [0.5] * num_drafts, 0.5), rule).num_accepted

    def effect(coin: int, value: int) -> tuple[int, ...]:
        """What one coin does while the others let everything through, or nothing."""
        return tuple(
            accepted([(value if i == coin else rest) / GRID for i in range(num_drafts)]) for rest in (0, LAST)
        )

    steps = [pieces(partial(effect, coin), hints["accept", tokens[: coin + 1]]) for coin in range(num_drafts)]
    for cell in itertools.product(*steps):
        low = [start / GRID for start, _, _ in cell]
        middle = [(start + end) // 2 / GRID for start, end, _ in cell]
        high = [(end - 1) / GRID for _, end, _ in cell]
        (num_accepted,) = {accepted(corner) for corner in (low, middle, high)}  # else a coin has more steps
        volume = float(np.prod([(end - start) / GRID for start, end, _ in cell]))
        yield volume, [low, high], num_accepted


def verdict_law(
    p: FloatArray, q: Sequence[CountRow], tokens: Prefix, rule: Rule, hints: Hints, judge: Judge = verify
) -> dict[Verdict, float]:
    """The exact law of the verdict on one proposal, all uniforms independent."""
    num_drafts = len(tokens)
    law: dict[Verdict, float] = defaultdict(float)
    for volume, (low, high), num_accepted in acceptance_cells(p, q, tokens, rule, hints, judge):

        def verdict_at(value: int, coins: list[float], others: float, cut: int = num_accepted) -> Verdict:
            """The deciding uniform is the recover uniform of the cut, or the bonus; no other may matter."""
            recover = [value / GRID if i == cut else others for i in range(num_drafts)]
            bonus = value / GRID if cut == num_drafts else others
            return judge(p, q, tokens, Uniforms(coins, recover, bonus), rule)

        known = hints["token", tokens[:num_accepted], num_accepted == num_drafts]
        for start, end, verdict in pieces(partial(verdict_at, coins=low, others=0.0), known):
            assert verdict_at((start + end) // 2, high, ALMOST_ONE) == verdict
            law[verdict] += volume * ((end - start) / GRID)
    return law


def drawn(row: CountRow) -> list[Draft]:
    """The law of the row's own draws, found by bisection too."""
    return [
        ((end - start) / GRID, token, row)
        for start, end, token in pieces(lambda u: row.draw(u / GRID), set())
    ]


def proposals(drafter: Drafter, num_drafts: int, prefix: Prefix = ()) -> Iterator[Proposal]:
    """Every proposal of up to K tokens that the drafter can make."""
    drafts = drafter(prefix) if num_drafts else ()
    if not drafts:
        yield 1.0, (), ()
    for probability, token, row in drafts:
        for rest, tokens, rows in proposals(drafter, num_drafts - 1, (*prefix, token)):
            yield probability * rest, (token, *tokens), (row, *rows)


def plain_law(target: Target, length: int, prefix: Prefix = ()) -> dict[Prefix, float]:
    """The law of the next `length` tokens under plain decoding."""
    if length == 0:
        return {(): 1.0}
    return {
        (token, *rest): float(probability) * mass
        for token, probability in enumerate(target(prefix))
        for rest, mass in plain_law(target, length - 1, (*prefix, token)).items()
    }


def target_rows(target: Target, tokens: Prefix) -> FloatArray:
    """[K+1, V]: p behind each prefix of the proposal."""
    return np.array([target(tokens[:i]) for i in range(len(tokens) + 1)])


def emitted_law(
    target: Target, candidates: Iterable[Proposal], rule: Rule, length: int, judge: Judge = verify
) -> dict[Prefix, float]:
    """The exact law of the first `length` tokens: what a round emits, then plain decoding."""
    law: dict[Prefix, float] = defaultdict(float)
    hints: Hints = defaultdict(set)
    for probability, tokens, rows in candidates:
        if probability == 0.0:
            continue
        p = target_rows(target, tokens)
        for verdict, mass in verdict_law(p, rows, tokens, rule, hints, judge).items():
            emitted = (*tokens[: verdict.num_accepted], verdict.token)[:length]
            for rest, chance in plain_law(target, length - len(emitted), emitted).items():
                law[(*emitted, *rest)] += probability * mass * chance
    return law


def worst_error(law: dict[Prefix, float], expected: dict[Prefix, float]) -> float:
    return max(abs(law.get(text, 0.0) - expected.get(text, 0.0)) for text in law.keys() | expected.keys())


def expected_accepted(target: Target, drafter: Drafter, num_drafts: int, rule: Rule) -> float:
    hints: Hints = defaultdict(set)
    return sum(
        probability * volume * num_accepted
        for probability, tokens, rows in proposals(drafter, num_drafts)
        for volume, _, num_accepted in acceptance_cells(
            target_rows(target, tokens), rows, tokens, rule, hints
        )
    )


# --- targets and drafters whose rows depend on the prefix -------------------------------------------------


def random_row(seed: int, prefix: Prefix, vocabulary: int) -> FloatArray:
    """A distribution with a zero in about a third of the places."""
    generator = np.random.default_rng([seed, len(prefix), *prefix])
    weights = generator.exponential(size=vocabulary) * (generator.random(vocabulary) > 0.3)
    weights[generator.integers(vocabulary)] += 0.1
    return np.asarray(weights / weights.sum())


def random_counts(seed: int, prefix: Prefix, vocabulary: int, total: int) -> CountRow:
    generator = np.random.default_rng([seed, 1, len(prefix), *prefix])
    counts = generator.multinomial(total, random_row(seed, prefix, vocabulary))
    return CountRow(np.flatnonzero(counts), counts[counts > 0], total)


def dense(row: CountRow, vocabulary: int) -> FloatArray:
    return np.array([row.q_of(token) for token in range(vocabulary)])


Pair = tuple[Target, Drafter]


def remembered(pair: Pair) -> Pair:
    target, drafter = pair
    return cache(target), cache(drafter)


def unrelated(seed: int, vocabulary: int) -> Pair:
    return (
        lambda prefix: random_row(seed, prefix, vocabulary),
        lambda prefix: drawn(random_counts(seed + 1, prefix, vocabulary, 1 << 15)),
    )


def coarse(seed: int, vocabulary: int) -> Pair:
    """Small totals: many exact ties between p and q."""
    return (
        lambda prefix: dense(random_counts(seed, prefix, vocabulary, 8), vocabulary),
        lambda prefix: drawn(random_counts(seed + 1, prefix, vocabulary, 8)),
    )


def equal(seed: int, vocabulary: int) -> Pair:
    return (
        lambda prefix: dense(random_counts(seed, prefix, vocabulary, 1 << 15), vocabulary),
        lambda prefix: drawn(random_counts(seed, prefix, vocabulary, 1 << 15)),
    )


def nearly_equal(seed: int, vocabulary: int) -> Pair:
    """p differs from q by rounding alone."""

    def target(prefix: Prefix) -> FloatArray:
        row = dense(random_counts(seed, prefix, vocabulary, 1 << 15), vocabulary)
        row *= 1.0 + 1e-15 * np.arange(vocabulary)
        return np.asarray(row / row.sum())

    return target, lambda prefix: drawn(random_counts(seed, prefix, vocabulary, 1 << 15))


def disjoint(seed: int, vocabulary: int) -> Pair:
    """p on one half of the tokens, q on the other; which half depends on the prefix."""

    def half(row: FloatArray, parity: int) -> FloatArray:
        row = np.where(np.arange(vocabulary) % 2 == parity, row + 0.01, 0.0)
        return np.asarray(row / row.sum())

    return (
        lambda prefix: half(random_row(seed, prefix, vocabulary), sum(prefix) % 2),
        lambda prefix: drawn(
            quantise(half(random_row(seed + 1, prefix, vocabulary), 1 - sum(prefix) % 2), 64)
        ),
    )


def sparse(seed: int, vocabulary: int) -> Pair:
    """q quantised to a support smaller than the vocabulary."""
    return (
        lambda prefix: random_row(seed, prefix, vocabulary),
        lambda prefix: drawn(quantise(random_row(seed + 1, prefix, vocabulary), vocabulary - 1)),
    )


def full(seed: int, vocabulary: int) -> Pair:
    return (
        lambda prefix: random_row(seed, prefix, vocabulary),
        lambda prefix: drawn(quantise_full(random_row(seed + 1, prefix, vocabulary))),
    )


def chosen(seed: int, vocabulary: int) -> Pair:
    """One-hot rows for tokens that the drafter computes, without a draw."""

    def drafter(prefix: Prefix) -> list[Draft]:
        token = int(random_row(seed + 1, prefix, vocabulary).argmax())
        return [(1.0, token, one_hot(token))]

    return lambda prefix: random_row(seed, prefix, vocabulary), drafter


def from_anywhere(seed: int, vocabulary: int) -> Pair:
    """One-hot rows for tokens drawn from a law that nobody is told."""

    def drafter(prefix: Prefix) -> list[Draft]:
        law = random_row(seed + 1, prefix, vocabulary)
        return [(float(chance), token, one_hot(token)) for token, chance in enumerate(law) if chance > 0.0]

    return lambda prefix: random_row(seed, prefix, vocabulary), drafter


def mixed(seed: int, vocabulary: int) -> Pair:
    """Count rows and one-hot rows in one proposal; which of them depends on the tokens before."""
    target, counted = unrelated(seed, vocabulary)
    _, unknown = from_anywhere(seed + 2, vocabulary)
    return target, lambda prefix: (counted if (len(prefix) + sum(prefix)) % 2 else unknown)(prefix)


def stopping(seed: int, vocabulary: int) -> Pair:
    """The drafter looks at its kept tokens and stops before its next draw."""
    target, counted = unrelated(seed, vocabulary)
    return target, lambda prefix: () if prefix and prefix[-1] == 0 else counted(prefix)


SHAPES = {1: 6, 2: 4, 3: 3, 4: 2}  # K: V


@both_rules
@pytest.mark.parametrize("num_drafts", SHAPES)
@pytest.mark.parametrize(
    "pair",
    [
        *(unrelated, coarse, equal, nearly_equal, disjoint, sparse, full),
        *(chosen, from_anywhere, mixed, stopping),
    ],
)
def test_emitted_tokens_have_exactly_the_law_of_plain_decoding(
    pair: Callable[[int, int], Pair], num_drafts: int, rule: Rule
) -> None:
    target, drafter = remembered(pair(10 * num_drafts, SHAPES[num_drafts]))
    law = emitted_law(target, proposals(drafter, num_drafts), rule, num_drafts + 1)
    assert worst_error(law, plain_law(target, num_drafts + 1)) < TOLERANCE


@both_rules
def test_four_drafts_of_three_tokens_have_exactly_the_law_of_plain_decoding(rule: Rule) -> None:
    target, drafter = remembered(mixed(100, 3))
    law = emitted_law(target, proposals(drafter, 4), rule, 5)
    assert worst_error(law, plain_law(target, 5)) < TOLERANCE


def test_the_integration_itself_sees_a_bias_of_one_part_in_a_billion() -> None:
    """The instrument is tested too: q off by 1e-9 in the draws is seen, at the very tolerance used."""
    target, drafter = unrelated(7, 3)

    def off(prefix: Prefix) -> list[Draft]:
        first, *rest = drafter(prefix)
        return [(first[0] + 1e-9, *first[1:]), *rest]

    law = emitted_law(target, proposals(off, 2), Rule.BLOCK, 3)
    assert worst_error(law, plain_law(target, 3)) > 1e-10


# --- golden values ----------------------------------------------------------------------------------------

THIRDS = np.array([1 / 3, 2 / 3])
SWAPPED = quantise_full(np.array([2 / 3, 1 / 3]))
ABC_P = np.array([0.4, 0.2, 0.4])
ABC_Q = quantise_full(np.array([0.2, 0.5, 0.3]))  # to 5e-10


@pytest.mark.parametrize(
    ("num_drafts", "rule", "expected", "within"),
    [
        (1, Rule.TOKEN, 2 / 3, 1e-8),
        (1, Rule.BLOCK, 2 / 3, 1e-8),
        (2, Rule.TOKEN, 10 / 9, 1e-8),
        (2, Rule.BLOCK, 11 / 9, 1e-8),
        (4, Rule.TOKEN, 1.604938, 1e-6),
        (4, Rule.BLOCK, 2.049383, 1e-6),
        (6, Rule.TOKEN, 1.824417, 1e-6),
        (6, Rule.BLOCK, 2.651578, 1e-6),
    ],
)
def test_expected_accepted_tokens_have_the_published_values(
    num_drafts: int, rule: Rule, expected: float, within: float
) -> None:
    drafts = drawn(SWAPPED)
    value = expected_accepted(lambda _: THIRDS, lambda _: drafts, num_drafts, rule)
    assert value == pytest.approx(expected, abs=within)


@both_rules
def test_the_worked_example(rule: Rule) -> None:
    """p = (0.4, 0.2, 0.4), q = (0.2, 0.5, 0.3): B kept with 0.4, residual (2/3, 0, 1/3), the law is p."""
    p = np.array([ABC_P, ABC_P])
    law = verdict_law(p, [ABC_Q], (1,), rule, defaultdict(set))
    assert sum(mass for verdict, mass in law.items() if verdict.num_accepted) == pytest.approx(0.4, abs=1e-8)
    recovered = {verdict.token: mass / 0.6 for verdict, mass in law.items() if verdict.num_accepted == 0}
    assert recovered == pytest.approx({0: 2 / 3, 2: 1 / 3}, abs=1e-8)
    for token in (0, 2):
        kept = verdict_law(p, [ABC_Q], (token,), rule, defaultdict(set))
        assert {verdict.num_accepted for verdict in kept} == {1}
    weights = residual(ABC_P, ABC_Q, 1.0)
    assert weights / weights.sum() == pytest.approx([2 / 3, 0, 1 / 3], abs=1e-8)
    drafts = drawn(ABC_Q)
    law_of_one = emitted_law(lambda _: ABC_P, proposals(lambda _: drafts, 1), rule, 2)
    assert worst_error(law_of_one, plain_law(lambda _: ABC_P, 2)) < TOLERANCE


@both_rules
def test_a_one_hot_row_is_kept_with_the_targets_probability(rule: Rule) -> None:
    for token, probability in enumerate(ABC_P):
        law = verdict_law(np.array([ABC_P, ABC_P]), [one_hot(token)], (token,), rule, defaultdict(set))
        kept = sum(mass for verdict, mass in law.items() if verdict.num_accepted)
        assert kept == pytest.approx(probability, abs=1e-15)
        assert all(verdict.token != token for verdict in law if verdict.num_accepted == 0)


def exact_chances(p: FloatArray, q: Sequence[CountRow], tokens: Prefix) -> list[tuple[Fraction, Fraction]]:
    """(h_i, w_i) of arXiv 2403.10444 in rational arithmetic, over the whole vocabulary."""
    target = [[Fraction(float(value)) for value in row] for row in p]
    draft = [[Fraction(value) for value in dense(row, p.shape[1])] for row in q]
    weight, chances = Fraction(1), []
    for i, token in enumerate(tokens):
        weight = min(weight * target[i][token] / draft[i][token], Fraction(1))
        chance = weight
        if i + 1 < len(tokens):
            pairs = zip(target[i + 1], draft[i + 1], strict=True)
            mass = sum((max(weight * a - b, Fraction(0)) for a, b in pairs), Fraction(0))
            chance = mass / (mass + 1 - weight) if mass + 1 - weight else Fraction(1)
        chances.append((chance, weight))
    return chances


@pytest.mark.parametrize("pair", [unrelated, coarse, equal, disjoint, sparse, chosen, mixed])
def test_block_chances_are_the_papers_in_rational_arithmetic(pair: Callable[[int, int], Pair]) -> None:
    target, drafter = pair(40, 4)
    for _, tokens, rows in proposals(cache(drafter), 3):
        p = target_rows(target, tokens)
        for found, wanted in zip(block_chances(p, rows, tokens), exact_chances(p, rows, tokens), strict=True):
            assert found == pytest.approx([float(value) for value in wanted], abs=1e-14)


@pytest.mark.parametrize("scale", [1.0, 0.6, 1e-9, 0.0])
def test_the_residual_is_scaled_p_minus_q_where_positive(scale: float) -> None:
    p, q = random_row(50, (), 6), random_counts(51, (), 6, 64)
    assert residual(p, q, scale) == pytest.approx(np.maximum(scale * p - dense(q, 6), 0.0), abs=1e-16)


@pytest.mark.parametrize("pair", [unrelated, coarse, disjoint, sparse, full, from_anywhere, mixed, stopping])
@pytest.mark.parametrize("seed", range(3))
def test_the_block_rule_never_accepts_fewer_tokens_in_expectation(
    pair: Callable[[int, int], Pair], seed: int
) -> None:
    target, drafter = remembered(pair(200 + seed, 3))
    by_token, by_block = (expected_accepted(target, drafter, 2, rule) for rule in (Rule.TOKEN, Rule.BLOCK))
    assert by_block >= by_token - TOLERANCE


def test_the_block_rule_keeps_the_last_success_after_a_failure() -> None:
    """The coin of the first prefix fails and that of the second succeeds: both are kept."""
    p = np.array([[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]])
    halves = CountRow(np.array([0, 1]), np.array([1, 1]), 2)
    # w_1 = 1/2, Z_1 = max(1/2 - 1/2, 0) = 0, h_1 = 0, w_2 = h_2 = 1
    verdict = verify(p, [halves, halves], [0, 0], Uniforms([0.0, 0.9], [0.0, 0.0], 0.6), Rule.BLOCK)
    assert verdict == Verdict(2, 1)


# --- edges ------------------------------------------------------------------------------------------------

HALVES = CountRow(np.array([0, 1]), np.array([1, 1]), 2)


@both_rules
@pytest.mark.parametrize("row", [HALVES, one_hot(0)])
def test_a_token_without_target_probability_is_never_accepted(row: CountRow, rule: Rule) -> None:
    p = np.array([[0.0, 1.0], [0.5, 0.5]])
    assert verify(p, [row], [0], Uniforms([0.0], [0.0], 0.0), rule) == Verdict(0, 1)


@both_rules
def test_a_block_behind_an_impossible_token_is_never_accepted(rule: Rule) -> None:
    p = np.array([[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    uniforms = Uniforms([0.0, 0.0], [0.0, 0.0], 0.0)
    assert verify(p, [HALVES, HALVES], [0, 0], uniforms, rule) == Verdict(0, 1)


@both_rules
def test_the_comparison_is_strict(rule: Rule) -> None:
    p = np.array([[0.25, 0.75], [0.5, 0.5]])
    below = float(np.nextafter(0.5, 0.0))
    assert verify(p, [HALVES], [0], Uniforms([0.5], [0.0], 0.0), rule).num_accepted == 0
    assert verify(p, [HALVES], [0], Uniforms([below], [0.0], 0.0), rule).num_accepted == 1


@both_rules
def test_a_token_that_the_target_likes_better_is_kept_by_the_largest_uniform(rule: Rule) -> None:
    for seed in range(50):
        row = random_counts(seed, (), 7, 1 << 15)
        p = dense(row, 7)
        for token in row.ids:
            uniforms = Uniforms([ALMOST_ONE], [0.0], 0.0)
            assert verify(np.array([p, p]), [row], [int(token)], uniforms, rule).num_accepted == 1


@both_rules
@pytest.mark.parametrize("vocabulary", [2, 50, 3000])
def test_everything_is_accepted_where_p_equals_q(vocabulary: int, rule: Rule) -> None:
    rows = [quantise(random_row(seed, (), vocabulary), 64) for seed in range(6)]
    p = np.array([dense(row, vocabulary) for row in rows])
    tokens = [int(row.ids[-1]) for row in rows[:5]]
    verdict = verify(p, rows[:5], tokens, Uniforms([ALMOST_ONE] * 5, [0.0] * 5, 0.0), rule)
    assert verdict == Verdict(5, int(np.flatnonzero(p[5])[0]))


@both_rules
@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.4999, 0), (0.5, 1), (ALMOST_ONE, 1)])
def test_p_is_drawn_from_where_rounding_leaves_no_residual(uniform: float, token: int, rule: Rule) -> None:
    """p is an ulp below q: the largest uniform rejects, and max(0, p - q) is zero everywhere."""
    p = np.array([[np.nextafter(0.5, 0.0), 0.5], [0.5, 0.5]])
    assert not residual(p[0], HALVES, 1.0).any()
    assert verify(p, [HALVES], [0], Uniforms([ALMOST_ONE], [uniform], 0.0), rule) == Verdict(0, token)


@both_rules
@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.99, ALMOST_ONE])
def test_without_drafts_the_verdict_is_a_plain_draw(uniform: float, rule: Rule) -> None:
    p = np.array([[0.0, 0.25, 0.5, 0.25, 0.0]])
    expected = 1 if uniform < 0.25 else 2 if uniform < 0.75 else 3
    assert verify(p, [], [], Uniforms([], [], uniform), rule) == Verdict(0, expected)


@both_rules
@pytest.mark.parametrize("token", [0, 4])
def test_the_first_and_the_last_id_are_ordinary_tokens(token: int, rule: Rule) -> None:
    """As draft, as recovered token and as bonus: an id is never taken for 'none'."""
    p = np.zeros((2, 5))
    p[:, token] = 1.0
    other = 2
    kept = verify(p, [one_hot(token)], [token], Uniforms([0.5], [0.5], 0.5), rule)
    cut = verify(p, [one_hot(other)], [other], Uniforms([0.5], [0.5], 0.5), rule)
    assert (kept, cut) == (Verdict(1, token), Verdict(0, token))
    row = CountRow(np.array([0, 4]), np.array([1, 3]), 4)
    p = np.full((2, 5), 0.2)
    law = verdict_law(p, [row], (token,), rule, defaultdict(set))
    kept_mass = sum(mass for verdict, mass in law.items() if verdict.num_accepted)
    assert kept_mass == pytest.approx(min(1.0, 0.2 / row.q_of(token)), abs=1e-14)


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, ALMOST_ONE])
def test_a_token_of_weight_zero_is_never_drawn(uniform: float) -> None:
    generator = np.random.default_rng(3)
    for _ in range(300):
        weights = generator.exponential(size=12) * (generator.random(12) > 0.6)
        weights[[0, -1]] = 0.0
        weights[generator.integers(1, 11)] += generator.exponential() * 10.0 ** generator.integers(-300, 1)
        assert weights[draw(weights, uniform)] > 0.0


def test_a_draw_takes_the_first_token_whose_running_sum_exceeds_the_uniform() -> None:
    weights = np.array([0.0, 1.0, 0.0, 2.0, 1.0, 0.0])
    at = {0.0: 1, 0.25 - 2.0**-54: 1, 0.25: 3, 0.75 - 2.0**-53: 3, 0.75: 4, ALMOST_ONE: 4}
    assert {uniform: draw(weights, uniform) for uniform in at} == at


def test_a_draw_survives_a_total_so_small_that_the_product_rounds_up_to_it() -> None:
    assert draw(np.array([0.0, 5e-324, 0.0]), ALMOST_ONE) == 1


@pytest.mark.parametrize("weights", [[0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0], [1.0, np.nan]])
def test_what_is_no_distribution_is_refused(weights: list[float]) -> None:
    with pytest.raises(UnusableTarget, match="must be sampled"):
        draw(np.array(weights), 0.5)


BROKEN_ROWS = [[np.nan, np.nan], [0.5, np.nan], [np.inf, 0.0], [np.nan, 1.0]]


@both_rules
@pytest.mark.parametrize("broken", BROKEN_ROWS)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_broken_row_fails_the_round_only_where_it_must_be_sampled(
    position: int, broken: list[float], rule: Rule
) -> None:
    p = np.array([[0.4, 0.6], [0.1, 0.9], [0.5, 0.5]])  # h = (0.22/0.42, 0.16), token by token (0.8, 0.2)
    p[position] = broken
    for coins in itertools.product([0.0, 0.9], repeat=2):
        kept = [coin == 0.0 for coin in coins[:position]]
        leading, longest = [*kept, False].index(False), max(i * ok for i, ok in enumerate([True, *kept]))
        num_accepted = leading if rule is Rule.TOKEN else longest
        uniforms = Uniforms(coins, [0.0, 0.0], 0.0)
        if num_accepted == position:
            with pytest.raises(UnusableTarget):
                verify(p, [HALVES, HALVES], [0, 0], uniforms, rule)
        else:
            assert verify(p, [HALVES, HALVES], [0, 0], uniforms, rule) == Verdict(num_accepted, 1)


@both_rules
def test_a_broken_row_at_the_only_position_fails_a_plain_draw(rule: Rule) -> None:
    with pytest.raises(UnusableTarget):
        verify(np.array([[np.nan, 1.0]]), [], [], Uniforms([], [], 0.5), rule)


@pytest.mark.parametrize(("coin", "kept"), [(0.4999, True), (0.5, False)])
def test_the_block_before_a_broken_row_is_judged_as_if_it_ended_there(coin: float, kept: bool) -> None:
    """h = w where the next row of p is broken; with that row whole, h would be 0."""
    p = np.array(
        [[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]]
    )  # w_1 = 1/2; Z_1 = max(1/2 - 1, 0) = 0 with a one-hot q_2
    rows, uniforms = [HALVES, one_hot(0)], Uniforms([coin, ALMOST_ONE], [0.0, 0.0], 0.0)
    assert verify(p, rows, [0, 0], uniforms, Rule.BLOCK) == Verdict(0, 1)
    p[1] = np.nan
    if kept:
        with pytest.raises(UnusableTarget):
            verify(p, rows, [0, 0], uniforms, Rule.BLOCK)
    else:
        assert verify(p, rows, [0, 0], uniforms, Rule.BLOCK) == Verdict(0, 1)


@both_rules
def test_the_law_is_the_targets_where_a_later_row_is_broken_but_never_reached(rule: Rule) -> None:
    """The first draft is never accepted (p = 0), so what stands behind it is nobody's business."""
    p = np.array([[0.0, 0.25, 0.75], [np.nan] * 3, [np.nan] * 3])
    row = quantise(np.array([1.0, 0.0, 0.0]), 64)
    law = verdict_law(p, [row, row], (0, 0), rule, defaultdict(set))
    assert law == pytest.approx({Verdict(0, 1): 0.25, Verdict(0, 2): 0.75}, abs=1e-15)


@both_rules
def test_verify_leaves_its_arguments_alone_and_answers_the_same_twice(rule: Rule) -> None:
    p = np.array([random_row(60, (i,), 5) for i in range(4)])
    p.flags.writeable = False
    rows = [random_counts(61, (i,), 5, 1 << 15) for i in range(3)]
    tokens = [row.draw(0.7) for row in rows]
    uniforms = Uniforms((0.3, 0.99, 0.2), (0.1, 0.6, 0.9), 0.4)
    before = p.copy()
    first = verify(p, rows, tokens, uniforms, rule)
    assert verify(p, rows, tokens, uniforms, rule) == first
    assert np.array_equal(p, before)
    assert isinstance(first.token, int)
    assert isinstance(first.num_accepted, int)


def test_the_token_rule_looks_at_nothing_behind_the_cut() -> None:
    p = np.array([[0.1, 0.9], [0.5, 0.5], [0.5, 0.5]])
    uniforms = Uniforms([0.9, 0.0], [0.5, 0.5], 0.5)
    verdict = verify(p, [HALVES, HALVES], [0, 1], uniforms, Rule.TOKEN)
    p[1:] = [[0.0, 1.0], [1.0, 0.0]]
    assert verify(p, [HALVES, one_hot(1)], [0, 1], uniforms, Rule.TOKEN) == verdict == Verdict(0, 1)


@pytest.mark.parametrize("rule", list(Rule))
def test_a_token_without_mass_in_its_own_row_is_refused_by_name(rule: Rule) -> None:
    """It cannot have been drawn from that row; accepted as it is, it would bias, or divide by zero."""
    q = CountRow(np.array([0, 1]), np.array([1, 1]), 2)
    with pytest.raises(ValueError, match=r"tokens\[0\] is 2, to which q\[0\] gives no mass"):
        verify(np.full((2, 3), 1 / 3), [q], [2], Uniforms([0.5], [0.5], 0.5), rule)


@pytest.mark.parametrize("rule", list(Rule))
def test_a_target_row_without_any_mass_cuts_the_block_before_it(rule: Rule) -> None:
    """Like one that is not finite: the token before it is judged as the last one."""
    p = np.array([[0.5, 0.5], [0.0, 0.0], [0.5, 0.5]])
    q = [CountRow(np.array([0, 1]), np.array([1, 1]), 2)] * 2
    with pytest.raises(UnusableTarget):  # p = q accepts the first draft, and the broken row must be sampled
        verify(p, q, [0, 1], Uniforms([0.9, 0.9], [0.5, 0.5], 0.5), rule)


# --- rows on demand ---------------------------------------------------------------------------------------

SURE_OF_1 = np.array([0.0, 1.0])
EVEN = np.array([0.5, 0.5])
KEPT, REJECTED = 0.0, ALMOST_ONE  # by EVEN, where the draft's row is one_hot(0)


@pytest.mark.parametrize(
    ("rule", "p", "coins", "made"),
    [
        pytest.param(Rule.TOKEN, [EVEN], [], [0], id="plain"),
        pytest.param(Rule.TOKEN, [EVEN] * 4, [REJECTED, KEPT, KEPT], [0], id="token, first rejected"),
        pytest.param(Rule.TOKEN, [EVEN] * 4, [KEPT, REJECTED, KEPT], [0, 1], id="token, second rejected"),
        pytest.param(Rule.TOKEN, [EVEN] * 4, [KEPT, KEPT, KEPT], [0, 1, 2, 3], id="token, all kept"),
        pytest.param(Rule.BLOCK, [EVEN], [], [0], id="plain, block"),
        pytest.param(Rule.BLOCK, [EVEN] * 4, [REJECTED] * 3, [0, 1, 2], id="block, bonus row not reached"),
        pytest.param(Rule.BLOCK, [EVEN] * 4, [REJECTED, REJECTED, KEPT], [0, 1, 2, 3], id="block, all kept"),
        pytest.param(Rule.BLOCK, [EVEN, SURE_OF_1, EVEN, EVEN], [KEPT] * 3, [0, 1], id="block, impossible"),
        pytest.param(
            Rule.BLOCK, [SURE_OF_1, EVEN, EVEN, EVEN], [KEPT] * 3, [0], id="block, first impossible"
        ),
    ],
)
def test_a_row_of_p_is_made_only_where_a_decision_depends_on_it(
    rule: Rule, p: list[FloatArray], coins: list[float], made: list[int]
) -> None:
    looked_at: set[int] = set()

    def make(position: int) -> Distribution:
        looked_at.add(position)
        return whole(p[position])

    drafts = [0] * len(coins)
    uniforms = Uniforms(coins, [0.5] * len(coins), 0.5)
    verification.verify(RowsOnDemand(make), [one_hot(token) for token in drafts], drafts, uniforms, rule)
    assert sorted(looked_at) == made


def random_case(
    generator: np.random.Generator,
) -> tuple[list[FloatArray], list[CountRow], list[int], Uniforms]:
    """Up to four drafts over up to six ids: ties, zeros, sure rows, one-hot rows, and broken rows of p."""
    vocabulary, num_drafts = int(generator.integers(2, 7)), int(generator.integers(0, 5))

    def counts() -> CountRow:
        drawn = generator.multinomial(8, generator.dirichlet(np.ones(vocabulary)))
        return CountRow(np.flatnonzero(drawn), drawn[drawn > 0], 8)

    p = [dense(counts(), vocabulary) for _ in range(num_drafts + 1)]
    for row in p:
        if generator.random() < 0.1:
            row *= generator.choice([0.0, 1.0])
            row[generator.integers(vocabulary)] = generator.choice([np.nan, np.inf, 0.0])
    q = [counts() for _ in range(num_drafts)]
    q = [one_hot(int(row.ids[0])) if generator.random() < 0.2 else row for row in q]
    tokens = [row.draw(generator.random()) for row in q]
    accept, recover = (generator.random(num_drafts).tolist() for _ in range(2))
    return p, q, tokens, Uniforms(accept, recover, generator.random())


def outcome(*case: Any) -> Verdict | str:
    try:
        return verification.verify(*case)
    except UnusableTarget as error:
        return str(error)


def test_making_rows_on_demand_or_leaving_out_their_zeros_changes_no_verdict() -> None:
    """Against rows that are all made before, of a block cut before the first broken one."""
    generator = np.random.default_rng(70)
    seen: set[tuple[int, int] | str] = set()
    for case in range(2500):
        p, q, tokens, uniforms = random_case(generator)
        rule = list(Rule)[case % 2]
        rows = [whole(row) for row in p]
        end = next((i for i, row in enumerate(rows[:-1]) if not row.usable), len(tokens))
        upto_end = Uniforms(uniforms.accept[:end], uniforms.recover[:end], uniforms.bonus)
        expected = outcome(rows[: end + 1], q[:end], tokens[:end], upto_end, rule)
        for form in (whole, possible):
            on_demand = RowsOnDemand(lambda i, p=p, form=form: form(p[i]))  # type: ignore[misc]
            assert outcome(on_demand, q, tokens, uniforms, rule) == expected
        seen.add("failed" if isinstance(expected, str) else (expected.num_accepted, len(tokens)))
    assert seen == {"failed", *((n, k) for k in range(5) for n in range(k + 1))}


# --- draws from many weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [255, 256, 257, 512, 1000, 5000])
def test_a_draw_from_many_weights_is_that_of_the_running_sum(size: int) -> None:
    """Small integers sum exactly, so both must agree at every threshold, also where whole blocks are zero."""
    generator = np.random.default_rng(size)
    weights = generator.integers(0, 4, size=size).astype(np.float64)
    weights[size // 4 : size // 2] = 0.0
    weights[-size // 5 :] = 0.0
    running = np.cumsum(weights)
    for threshold in range(int(running[-1])):
        uniform = threshold / running[-1]
        expected = int(np.searchsorted(running, uniform * running[-1], side="right"))
        assert draw(weights, uniform) == expected
    assert draw(weights, ALMOST_ONE) == np.flatnonzero(weights)[-1]


def test_rounding_between_blocks_never_draws_a_weight_of_zero() -> None:
    """Uniforms at the very borders of blocks, where the sum of a block and its running sum may differ."""
    generator = np.random.default_rng(71)
    for _ in range(50):
        weights = generator.exponential(size=1500) * (generator.random(1500) > 0.7)
        weights[-300:] = 0.0
        borders = np.cumsum(weights)[255::256] / weights.sum()
        for uniform in {
            u for border in borders for u in (border - 2.0**-53, border, border + 2.0**-53) if u < 1
        }:
            assert weights[draw(weights, uniform)] > 0.0
