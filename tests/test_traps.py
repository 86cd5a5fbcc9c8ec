"""How implementations silently stop being exact: each trap, its bias in numbers, and that it is not here.

A faulty variant stands beside the right one and both run through `verify`, so a test shows by exact
integration that the fault moves the law by a stated total variation, and that the right way does not move it.
Where the fault lies in the keys of the uniforms, texts are simulated with fixed keys.

The example throughout: p = (0.4, 0.2, 0.4), q = (0.2, 0.5, 0.3) over A, B, C. A and C are always kept, B with
0.4; the residual is (2/3, 0, 1/3).
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial

import numpy as np
import pytest
from scipy import stats

from tests.dense_rows import block_chances, residual, verify
from tests.test_verification import (
    ABC_P,
    ABC_Q,
    SWAPPED,
    THIRDS,
    TOLERANCE,
    Draft,
    Hints,
    Judge,
    Prefix,
    Proposal,
    Target,
    both_rules,
    drawn,
    emitted_law,
    plain_law,
    proposals,
    random_row,
    verdict_law,
)
from workers.counts import CountRow, one_hot, quantise, quantise_full
from workers.distributions import FloatArray
from workers.randomness import Purpose, uniform
from workers.sampling import SamplingSettings, probabilities
from workers.verification import Rule, Uniforms, Verdict, draw

A, B, C = range(3)
KEY = b"the target's key"
TO_ROUNDING_OF_Q = 1e-8  # ABC_Q is (0.2, 0.5, 0.3) to 5e-10

Counted = Callable[[int, int, int, Purpose], float]  # choice, base length, position, purpose -> uniform


def abc_target(_: Prefix) -> FloatArray:
    return ABC_P


@cache
def abc_drafter(_: Prefix) -> list[Draft]:
    return drawn(ABC_Q)


def total_variation(law: dict[Prefix, float], expected: dict[Prefix, float]) -> float:
    return sum(abs(law.get(text, 0.0) - expected.get(text, 0.0)) for text in law.keys() | expected.keys()) / 2


def bias(
    candidates: Iterable[Proposal],
    rule: Rule,
    length: int,
    target: Target = abc_target,
    judge: Judge = verify,
) -> float:
    """Total variation between the first `length` tokens of a round and of plain decoding."""
    return total_variation(emitted_law(target, candidates, rule, length, judge), plain_law(target, length))


def first_token(law: dict[Verdict, float], tokens: Prefix) -> dict[Prefix, float]:
    result: dict[Prefix, float] = defaultdict(float)
    for verdict, mass in law.items():
        result[(*tokens[: verdict.num_accepted], verdict.token)[:1]] += mass
    return result


# --- q in the ratio is not the distribution that was sampled ----------------------------------------------


def shipped_instead(shipped: CountRow, sampled: CountRow) -> list[Draft]:
    """Faulty: drawn from one row, another one goes with the token."""
    return [(probability, token, shipped) for probability, token, _ in drawn(sampled)]


@both_rules
def test_temperature_on_one_side_only_is_biased_by_0_063(rule: Rule) -> None:
    """Trap: the draft is sampled at temperature 0.5, the ratio computed with q at temperature 1."""
    logits = np.log([[0.2, 0.5, 0.3]])
    sharp, soft = (
        quantise_full(probabilities(logits, SamplingSettings(temperature=value))[0]) for value in (0.5, 1.0)
    )
    assert bias(proposals(lambda _: shipped_instead(soft, sharp), 1), rule, 2) == pytest.approx(
        0.2 * 6 / 19, abs=TO_ROUNDING_OF_Q
    )
    assert bias(proposals(lambda _: drawn(sharp), 1), rule, 2) < TOLERANCE


@both_rules
def test_a_greedy_draft_with_a_soft_q_is_biased_and_looks_better(rule: Rule) -> None:
    """Trap: the draft is the argmax, q the soft row: acceptance rises from 0.9 to 1, the bias is 0.5."""
    p = np.array([0.5, 0.3, 0.2])
    soft = quantise_full(np.array([0.4, 0.35, 0.25]))

    def greedy(row: CountRow, _: Prefix) -> list[Draft]:
        return [(1.0, 0, row)]

    def accepted(drafts: Sequence[Draft]) -> float:
        laws = [
            (chance, verdict_law(np.array([p, p]), [row], (x,), rule, Hints(set)))
            for chance, x, row in drafts
        ]
        return sum(
            chance * mass for chance, law in laws for verdict, mass in law.items() if verdict.num_accepted
        )

    assert bias(proposals(partial(greedy, soft), 1), rule, 1, lambda _: p) == pytest.approx(0.5)
    assert accepted(greedy(soft, ())) == pytest.approx(1.0)
    assert accepted(drawn(soft)) == pytest.approx(0.9, abs=TO_ROUNDING_OF_Q)
    assert bias(proposals(lambda _: drawn(soft), 1), rule, 1, lambda _: p) < TOLERANCE
    assert bias(proposals(partial(greedy, one_hot(0)), 1), rule, 1, lambda _: p) < TOLERANCE


def test_sampling_the_full_q_and_verifying_a_truncated_one_is_biased_by_0_14() -> None:
    """Trap: the draw knows all of q, the shipped row only its top: here acceptance rises too."""
    p, q = np.array([0.2, 0.5, 0.3]), np.array([0.5, 0.3, 0.2])
    top = quantise(
        q, 2
    )  # `verify` refuses a drawn token without any mass, so the tail is shipped with a trace
    shipped = CountRow(np.arange(3), np.array([top.counts[0] - 1, top.counts[1], 1]), top.total)
    faulty = shipped_instead(shipped, quantise_full(q))
    assert bias(proposals(lambda _: faulty, 1), Rule.TOKEN, 1, lambda _: p) == pytest.approx(0.14, abs=1e-4)


@both_rules
def test_a_truncated_q_is_exact_when_the_draw_is_from_its_counts(rule: Rule) -> None:
    """The other half of the trap: `draw` samples the very row that is shipped, whatever was cut from it."""
    p, q = np.array([0.2, 0.5, 0.3]), np.array([0.5, 0.3, 0.2])
    row = quantise(q, 2)
    assert {token: chance for chance, token, _ in drawn(row)} == {
        int(token): count / 2**15 for token, count in zip(row.ids, row.counts, strict=True)
    }
    assert bias(proposals(lambda _: drawn(row), 2), rule, 3, lambda _: p) < TOLERANCE


@both_rules
def test_sampling_in_one_precision_and_judging_in_another_is_biased(rule: Rule) -> None:
    """Trap: drawn from the float row, judged with the shipped counts: a bias of the counts' rounding."""
    p, q = np.array([0.2, 0.3, 0.5]), np.full(3, 1 / 3)
    row = quantise(q, 64)
    faulty = [(1 / 3, token, row) for token in range(3)]
    assert 1e-6 < bias(proposals(lambda _: faulty, 1), rule, 1, lambda _: p) < 1e-4
    assert bias(proposals(lambda _: drawn(row), 1), rule, 1, lambda _: p) < TOLERANCE


# --- dropping what was drawn ------------------------------------------------------------------------------


def cut_before_unlikely(candidates: Iterable[Proposal]) -> Iterator[Proposal]:
    """Faulty: a drawn token with q below 0.25 is thrown away, and what was drawn behind it."""
    for probability, tokens, rows in candidates:
        unlikely = [row.q_of(token) < 0.25 for token, row in zip(tokens, rows, strict=True)]
        length = [*unlikely, True].index(True)
        yield probability, tokens[:length], rows[:length]


def stopping_behind_unlikely(prefix: Prefix) -> list[Draft]:
    """Right: the token that made the drafter stop is kept; it stops before its next draw."""
    return [] if prefix and ABC_Q.q_of(prefix[-1]) < 0.25 else abc_drafter(prefix)


@both_rules
def test_dropping_a_drawn_token_for_its_low_q_is_biased_by_0_12(rule: Rule) -> None:
    """Trap: A (q = 0.2) is thrown away when drawn, so K depends on the draws."""
    faulty = cut_before_unlikely(proposals(abc_drafter, 1))
    assert bias(faulty, rule, 1) == pytest.approx(0.12, abs=TO_ROUNDING_OF_Q)
    assert bias(cut_before_unlikely(proposals(abc_drafter, 3)), rule, 4) > 0.1
    assert bias(proposals(stopping_behind_unlikely, 3), rule, 4) < TOLERANCE


def short_ones_only(candidates: Iterable[Proposal]) -> Iterator[Proposal]:
    """Faulty: proposals of two tokens come too late and are dropped."""
    for probability, tokens, rows in candidates:
        yield (probability, (), ()) if len(tokens) > 1 else (probability, tokens, rows)


@both_rules
def test_dropping_late_proposals_is_biased_where_lateness_goes_with_the_tokens(rule: Rule) -> None:
    """Trap: the drafter stops behind A, so proposals with another first token are longer, late, dropped."""
    faulty = short_ones_only(proposals(stopping_behind_unlikely, 2))
    assert bias(faulty, rule, 2) == pytest.approx(0.12, abs=TO_ROUNDING_OF_Q)
    assert bias(proposals(stopping_behind_unlikely, 2), rule, 3) < TOLERANCE


@both_rules
def test_dropping_a_whole_proposal_for_one_malformed_row_is_biased(rule: Rule) -> None:
    """Trap: the second row is malformed behind A. Only that row may become one-hot, or be left out.

    Dropping the whole proposal: 0.12. All of its rows one-hot: 0.12 too.
    """

    def malformed(prefix: Prefix) -> bool:
        return prefix == (A,)

    def dropped(candidates: Iterable[Proposal]) -> Iterator[Proposal]:
        for probability, tokens, rows in candidates:
            yield (probability, (), ()) if malformed(tokens[:1]) else (probability, tokens, rows)

    def all_one_hot(candidates: Iterable[Proposal]) -> Iterator[Proposal]:
        for probability, tokens, rows in candidates:
            hot = tuple(one_hot(token) for token in tokens)
            yield probability, tokens, hot if malformed(tokens[:1]) else rows

    def that_row_one_hot(prefix: Prefix) -> list[Draft]:
        drafts = abc_drafter(prefix)
        return [(chance, x, one_hot(x)) for chance, x, _ in drafts] if malformed(prefix) else drafts

    def rows_before_it(prefix: Prefix) -> list[Draft]:
        return [] if malformed(prefix) else abc_drafter(prefix)

    for fault in (dropped, all_one_hot):
        assert bias(fault(proposals(abc_drafter, 2)), rule, 3) == pytest.approx(0.12, abs=TO_ROUNDING_OF_Q)
    assert bias(proposals(that_row_one_hot, 2), rule, 3) < TOLERANCE
    assert bias(proposals(rows_before_it, 2), rule, 3) < TOLERANCE


# --- choosing and drawing again ---------------------------------------------------------------------------


@both_rules
def test_choosing_among_prepared_continuations_by_p_is_biased_by_0_1(rule: Rule) -> None:
    """Trap: of two prepared continuations the one that p likes better is sent. Right: p decides nothing."""

    def pairs(choose: Callable[[Proposal, Proposal], Proposal]) -> Iterator[Proposal]:
        for first, second in itertools.product(proposals(abc_drafter, 1), repeat=2):
            _, tokens, rows = choose(first, second)
            yield first[0] * second[0], tokens, rows

    def ratio(candidate: Proposal) -> float:
        _, (token,), (row,) = candidate
        return float(ABC_P[token]) / row.q_of(token)

    faulty = pairs(lambda first, second: max(first, second, key=ratio))
    assert bias(faulty, rule, 2) == pytest.approx(0.1, abs=TO_ROUNDING_OF_Q)
    assert bias(pairs(lambda first, second: first), rule, 2) < TOLERANCE


@both_rules
def test_drawing_a_delivered_round_again_is_biased_by_0_08(rule: Rule) -> None:
    """Trap: a verdict that rejects seems lost, and the round is drawn afresh, here as a plain step."""
    law: dict[Prefix, float] = defaultdict(float)
    for probability, tokens, rows in proposals(abc_drafter, 1):
        verdicts = verdict_law(np.array([ABC_P, ABC_P]), rows, tokens, rule, Hints(set))
        kept = sum(mass for verdict, mass in verdicts.items() if verdict.num_accepted)
        law[tokens] += probability * kept
        for again, chance in plain_law(abc_target, 1).items():
            law[again] += probability * (1.0 - kept) * chance
    assert total_variation(law, plain_law(abc_target, 1)) == pytest.approx(0.08, abs=TO_ROUNDING_OF_Q)


@both_rules
def test_a_round_done_again_meets_its_own_numbers(rule: Rule) -> None:
    """The right side of the trap above: any process draws the same tokens and gives the same verdict."""
    rows = [quantise(random_row(1, (i,), 8), 64) for i in range(4)]
    p = np.array([random_row(2, (i,), 8) + 0.01 for i in range(5)])
    for choice in range(100):
        first, again = (play_round(partial(uniform, KEY), choice, 50, p, rows, rule) for _ in range(2))
        assert first == again


@both_rules
def test_answering_one_proposal_with_the_verdict_on_another_is_biased_by_0_15(rule: Rule) -> None:
    """Trap: a cached verdict is found by the round alone, not by the digest of the proposal."""
    law: dict[Prefix, float] = defaultdict(float)
    p = np.array([ABC_P, ABC_P])
    for judged, answered in itertools.product(proposals(abc_drafter, 1), repeat=2):
        probability, tokens, rows = judged
        for verdict, mass in verdict_law(p, rows, tokens, rule, Hints(set)).items():
            emitted = (*answered[1][: verdict.num_accepted], verdict.token)[:1]
            law[emitted] += probability * answered[0] * mass
    assert total_variation(law, plain_law(abc_target, 1)) == pytest.approx(0.15, abs=TO_ROUNDING_OF_Q)


# --- who shares a number with whom ------------------------------------------------------------------------


def play_round(
    number: Counted, choice: int, base: int, p: FloatArray, rows: Sequence[CountRow], rule: Rule
) -> tuple[Prefix, Verdict]:
    """Draw and judge one round with numbers from counters: the proposal and its verdict."""
    places = range(base, base + len(rows))
    draft, accept, recover = (
        [number(choice, base, place, purpose) for place in places]
        for purpose in (Purpose.DRAFT, Purpose.ACCEPT, Purpose.RECOVER)
    )
    tokens = tuple(row.draw(u) for row, u in zip(rows, draft, strict=True))
    bonus = number(choice, base, base + len(rows), Purpose.BONUS)
    return tokens, verify(p, rows, tokens, Uniforms(accept, recover, bonus), rule)


def play(
    number: Counted, choice: int, row: FloatArray, draft: CountRow, num_drafts: int, length: int, rule: Rule
) -> Prefix:
    """The first `length` tokens of a text whose p and q are the same everywhere, behind a prompt of 10."""
    text: Prefix = ()
    while len(text) < length:
        p, rows = np.tile(row, (num_drafts + 1, 1)), [draft] * num_drafts
        tokens, verdict = play_round(number, choice, 10 + len(text), p, rows, rule)
        text = (*text, *tokens[: verdict.num_accepted], verdict.token)
    return text[:length]


def tally(
    num_texts: int, play_one: Callable[[int], Prefix], row: FloatArray, length: int
) -> tuple[float, float]:
    """Total variation and chi-square p-value of simulated texts, against independent draws from `row`."""
    found = Counter(play_one(choice) for choice in range(num_texts))
    texts = list(itertools.product(range(row.size), repeat=length))
    expected = np.array([num_texts * np.prod(row[list(text)]) for text in texts])
    observed = np.array([found[text] for text in texts])
    return float(np.abs(observed - expected).sum()) / 2 / num_texts, stats.chisquare(
        observed, expected
    ).pvalue


def separate(choice: int, base: int, place: int, purpose: Purpose) -> float:
    return uniform(KEY, choice, base, place, purpose)


def position_only(choice: int, _: int, place: int, purpose: Purpose) -> float:
    """Faulty: the base length is not in the key."""
    return uniform(KEY, choice, 0, place, purpose)


def one_stream(choice: int, base: int, place: int, _: Purpose) -> float:
    """Faulty: draft draw, accept coin, recovered draw and bonus draw of a position are one number."""
    return uniform(KEY, choice, base, place, Purpose.DRAFT)


def test_position_alone_in_the_key_biases_the_block_rule_by_0_056() -> None:
    """Trap: a position drafted again after a stop meets the numbers that made it stop (1/18 in the limit)."""
    play_one = partial(play, row=THIRDS, draft=SWAPPED, num_drafts=2, length=2, rule=Rule.BLOCK)
    error, p_value = tally(6000, partial(play_one, position_only), THIRDS, 2)
    assert error == pytest.approx(1 / 18, abs=0.015)
    assert p_value < 1e-12
    error, p_value = tally(6000, partial(play_one, separate), THIRDS, 2)
    assert error < 0.02
    assert p_value > 1e-3


PAIR_P, PAIR_Q = np.array([0.2, 0.4, 0.4]), quantise_full(np.array([0.4, 0.3, 0.3]))


@both_rules
def test_one_stream_for_all_decisions_is_biased_and_separate_purposes_are_not(rule: Rule) -> None:
    """Trap: draft draw, accept coin, recovered and bonus draw share a stream."""
    play_one = partial(play, row=PAIR_P, draft=PAIR_Q, num_drafts=1, length=2, rule=rule)
    error, p_value = tally(4000, partial(play_one, one_stream), PAIR_P, 2)
    assert error > 0.1
    assert p_value < 1e-12
    error, p_value = tally(4000, partial(play_one, separate), PAIR_P, 2)
    assert error < 0.04
    assert p_value > 1e-3


TENTHS = [(i + 0.5) / 10 for i in range(10)]


@both_rules
@pytest.mark.parametrize(
    ("shared", "expected"),
    [
        pytest.param(lambda u, v, w: (u, u, v, w), 0.2, id="draft and accept"),
        pytest.param(lambda u, v, w: (u, v, u, w), 0.1, id="draft and recover"),
        pytest.param(lambda u, v, w: (v, u, u, w), 0.1, id="accept and recover"),
        pytest.param(lambda u, v, w: (u, v, w, u), 0.34, id="draft and bonus"),
        pytest.param(lambda u, v, w: (v, u, w, u), 0.08, id="accept and bonus"),
        pytest.param(lambda u, v, w: (u, v, w, w), 0.0, id="recover and bonus, never used together"),
    ],
)
def test_two_decisions_of_a_round_that_share_a_number_are_biased(
    shared: Callable[[float, float, float], tuple[float, float, float, float]], expected: float, rule: Rule
) -> None:
    """Trap: as above, pair by pair. All thresholds are multiples of 1/10: midpoints integrate exactly."""
    law: dict[Prefix, float] = defaultdict(float)
    p = np.array([PAIR_P, PAIR_P])
    for numbers in itertools.product(TENTHS, repeat=3):
        draft, accept, recover, bonus = shared(*numbers)
        token = PAIR_Q.draw(draft)
        verdict = verify(p, [PAIR_Q], [token], Uniforms([accept], [recover], bonus), rule)
        emitted = (*(token,)[: verdict.num_accepted], verdict.token)
        for rest, chance in plain_law(lambda _: PAIR_P, 2 - len(emitted)).items():
            law[(*emitted, *rest)] += chance / 1000
    assert total_variation(law, plain_law(lambda _: PAIR_P, 2)) == pytest.approx(expected, abs=1e-12)


def test_the_samples_of_one_prompt_are_different_and_independent() -> None:
    """Trap: n samples with the same keys are n copies. The choice index is part of ours."""

    def samples(number: Counted) -> list[Prefix]:
        return [play(number, choice, THIRDS, SWAPPED, 2, 40, Rule.BLOCK) for choice in range(8)]

    def same_keys(_: int, base: int, place: int, purpose: Purpose) -> float:
        return uniform(KEY, 0, base, place, purpose)

    assert len(set(samples(same_keys))) == 1
    assert len(set(samples(separate))) == 8

    def pair_of_samples(number: Counted, choice: int) -> Prefix:
        two = (2 * choice, 2 * choice + 1)
        return tuple(play(number, each, THIRDS, SWAPPED, 1, 1, Rule.BLOCK)[0] for each in two)

    error, p_value = tally(2000, partial(pair_of_samples, same_keys), THIRDS, 2)
    assert error > 0.3
    error, p_value = tally(2000, partial(pair_of_samples, separate), THIRDS, 2)
    assert error < 0.05
    assert p_value > 1e-3


# --- restarts ---------------------------------------------------------------------------------------------

END_CHANCE, KILL_CHANCE = 0.1, 0.06
State = tuple[int, int]  # committed tokens, attempts


def from_scratch(state: State) -> State:
    """Faulty: the text is begun anew, with new numbers."""
    return 0, state[1] + 1


def from_committed(state: State) -> State:
    """Right: committed tokens stay, and so do the numbers."""
    return state


def text_length(choice: int, kill_chance: float, after_kill: Callable[[State], State]) -> int:
    """The length of a text that ends at each token with END_CHANCE, in plain steps, under kills."""
    p, state = np.array([[1.0 - END_CHANCE, END_CHANCE]]), (0, 0)
    for step in itertools.count():
        if uniform(b"kills", choice, 0, step, Purpose.DRAFT) < kill_chance:
            state = after_kill(state)
        committed, attempt = state
        bonus = uniform(KEY, choice + 100_000 * attempt, 1 + committed, 1 + committed, Purpose.BONUS)
        state = committed + 1, attempt
        if verify(p, [], [], Uniforms([], [], bonus), Rule.TOKEN).token == 1:
            return state[0]
    raise AssertionError


def test_restarting_unfinished_texts_from_scratch_shortens_them() -> None:
    """Trap: long texts are likelier to be cut and drawn again: a mean length of 6.5 for 10."""
    unkilled = [text_length(choice, 0.0, from_committed) for choice in range(1200)]
    resumed = [text_length(choice, KILL_CHANCE, from_committed) for choice in range(1200)]
    restarted = [text_length(choice, KILL_CHANCE, from_scratch) for choice in range(1200)]
    survival = (1 - END_CHANCE) * (1 - KILL_CHANCE)
    assert 1 / (1 - survival) == pytest.approx(6.5, abs=0.01)  # of a text given that nothing killed it
    assert np.mean(restarted) == pytest.approx(6.5, abs=0.6)
    assert np.mean(resumed) == pytest.approx(10.0, abs=1.0)
    assert resumed == unkilled


# --- the block rule's two known bugs ----------------------------------------------------------------------


def stopping_at_the_first_failure(
    p: FloatArray, q: Sequence[CountRow], tokens: Sequence[int], uniforms: Uniforms, _: Rule
) -> Verdict:
    chances = block_chances(p, q, tokens)
    kept = [u < chance for u, (chance, _) in zip(uniforms.accept, chances, strict=True)]
    length = [*kept, False].index(False)
    return finish(p, q, uniforms, length, [1.0, *(weight for _, weight in chances)][length])


def recovering_from_p_minus_q(
    p: FloatArray, q: Sequence[CountRow], tokens: Sequence[int], uniforms: Uniforms, rule: Rule
) -> Verdict:
    length = verify(p, q, tokens, uniforms, rule).num_accepted
    return finish(p, q, uniforms, length, 1.0)


def finish(p: FloatArray, q: Sequence[CountRow], uniforms: Uniforms, length: int, scale: float) -> Verdict:
    if length == len(q):
        return Verdict(length, draw(p[length], uniforms.bonus))
    return Verdict(length, draw(residual(p[length], q[length], scale), uniforms.recover[length]))


@pytest.mark.parametrize(
    ("judge", "expected"),
    [(stopping_at_the_first_failure, 0.125), (recovering_from_p_minus_q, 0.0625), (verify, 0.0)],
)
def test_the_two_known_bugs_of_the_block_rule_are_biased(judge: Judge, expected: float) -> None:
    """Trap: tau is the LAST success, and the residual behind it is w*p - q.

    Position 1: p = (1/2, 1/2, 0), q all on A: w = 1/2. Position 2: p = (0, 1/2, 1/2), q = (0.8, 0.2, 0). So
    Z = 0.05 + 0.25, h = 3/8, the residual is (0, 1/6, 5/6), and p - q would be (0, 3/8, 5/8). A behind A
    fails for sure and is cut at h: 0.8 * 3/8 * (3/8 - 1/6) = 0.0625. B behind A has w = 1 and is kept for
    sure, but not by who stops at the first failure: 0.2 * 5/8 = 0.125.
    """
    p_rows = [np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.5, 0.5]), ABC_P]
    q_rows = [quantise_full(np.array([1.0, 0.0, 0.0])), quantise_full(np.array([0.8, 0.2, 0.0]))]
    candidates = proposals(lambda prefix: drawn(q_rows[len(prefix)]), 2)
    error = bias(candidates, Rule.BLOCK, 3, lambda prefix: p_rows[len(prefix)], judge)
    assert error == pytest.approx(expected, abs=TO_ROUNDING_OF_Q if expected else TOLERANCE)


def test_a_made_up_q_of_one_everywhere_is_biased_under_the_block_rule() -> None:
    """Trap: a one-hot row gives Z = w * (1 - p(x)). With q = 1 everywhere Z = 0 and the residual is empty.

    A is then kept only with B behind it (1/4), and p is drawn from otherwise: 1/4 + 3/4 * 1/4 for AB.
    """
    p = np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], ABC_P])
    (first, weight), _ = block_chances(p, [one_hot(A), one_hot(B)], (A, B))
    assert (first, weight) == pytest.approx((0.25 / (0.25 + 0.5), 0.5), abs=1e-15)
    made_up = CountRow(np.arange(3), np.ones(3, dtype=np.int64), 1)

    def error(*rows: CountRow) -> float:
        return bias([(1.0, (A, B), rows)], Rule.BLOCK, 3, lambda prefix: np.asarray(p[len(prefix)]))

    assert error(made_up, made_up) == pytest.approx(3 / 16, abs=1e-12)
    assert error(one_hot(A), one_hot(B)) < TOLERANCE


# --- p is not the target's --------------------------------------------------------------------------------


@both_rules
def test_a_target_that_sees_the_draft_it_judges_is_biased_by_0_08(rule: Rule) -> None:
    """Trap: a hole in the causal mask: a tenth of p is the draft token itself."""

    def seen(p: FloatArray, token: int) -> FloatArray:
        return np.array([0.9 * p + 0.1 * np.eye(p.size)[token], p])

    def whole(p: FloatArray, _: int) -> FloatArray:
        return np.array([p, p])

    def law(rows_of: Callable[[FloatArray, int], FloatArray]) -> dict[Prefix, float]:
        result: dict[Prefix, float] = defaultdict(float)
        for chance, token, row in abc_drafter(()):
            verdicts = verdict_law(rows_of(ABC_P, token), [row], (token,), rule, Hints(set))
            for emitted, mass in first_token(verdicts, (token,)).items():
                result[emitted] += chance * mass
        return result

    expected = plain_law(abc_target, 1)
    assert total_variation(law(seen), expected) == pytest.approx(0.08, abs=TO_ROUNDING_OF_Q)
    assert total_variation(law(whole), expected) < TOLERANCE


def test_one_scale_for_the_batch_lets_a_neighbour_change_the_law() -> None:
    """Trap: activations rounded to a grid that the whole batch shares. Our rows are computed each alone."""
    mine, loud = np.log([0.2, 0.3, 0.5]), np.array([100.0, 0.0, 0.0])

    def one_scale(logits: FloatArray) -> FloatArray:
        scale = np.abs(logits).max() / 127
        return probabilities(np.round(logits / scale) * scale, SamplingSettings())

    def moved(law: Callable[[FloatArray], FloatArray]) -> float:
        return float(np.abs(law(np.array([mine, loud]))[0] - law(np.array([mine]))[0]).sum()) / 2

    assert moved(one_scale) > 0.05
    assert moved(lambda logits: probabilities(logits, SamplingSettings())) == 0.0


# --- ids and penalties ------------------------------------------------------------------------------------


@both_rules
def test_taking_token_id_0_for_none_is_biased_by_0_12(rule: Rule) -> None:
    """Trap: a recovered token 0 is 'no token', and the position is decoded afresh."""
    faulty: dict[Prefix, float] = defaultdict(float)
    right: dict[Prefix, float] = defaultdict(float)
    for chance, token, row in abc_drafter(()):
        for verdict, mass in verdict_law(np.array([ABC_P] * 2), [row], (token,), rule, Hints(set)).items():
            emitted = (*(token,)[: verdict.num_accepted], verdict.token)[:1]
            right[emitted] += chance * mass
            taken_for_none = verdict.num_accepted == 0 and not verdict.token
            for text, fresh in plain_law(abc_target, 1).items() if taken_for_none else [(emitted, 1.0)]:
                faulty[text] += chance * mass * fresh
    expected = plain_law(abc_target, 1)
    assert total_variation(faulty, expected) == pytest.approx(0.12, abs=TO_ROUNDING_OF_Q)
    assert total_variation(right, expected) < TOLERANCE


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    """Trap: running sums in float32 end below 1, and a clamped search answers with the last id, a padding."""
    weights = np.concatenate([np.full(49, 1 / 49), np.zeros(15)])

    def clamped(uniform: float) -> int:
        return min(int(np.searchsorted(np.cumsum(weights.astype(np.float32)), uniform, side="right")), 63)

    almost_one = 1.0 - 2.0**-53
    assert clamped(almost_one) == 63
    assert draw(weights, almost_one) == 48
    row = quantise(weights, 64)
    assert row.draw(almost_one) == 48
    assert max(token for _, token, _ in drawn(row)) == 48


@both_rules
def test_a_penalty_on_the_wrong_history_is_biased(rule: Rule) -> None:
    """Trap: a repetition penalty counts a rejected token (0.032), or forgets an accepted one (0.093)."""

    @cache
    def penalised(history: Prefix) -> FloatArray:
        """A token that the history contains is half as likely."""
        weights = ABC_P * np.where(np.isin(range(3), history), 0.5, 1.0)
        return np.asarray(weights / weights.sum())

    def two_tokens(inside: Callable[[int], Prefix], after: Callable[[int, Prefix], Prefix]) -> float:
        """The bias when these are the histories of the bonus and of the step after a rejection."""
        law: dict[Prefix, float] = defaultdict(float)
        for chance, token, row in abc_drafter(()):
            p = np.array([penalised(()), penalised(inside(token))])
            for verdict, mass in verdict_law(p, [row], (token,), rule, Hints(set)).items():
                emitted = (*(token,)[: verdict.num_accepted], verdict.token)
                for rest, later in plain_law(penalised, 2 - len(emitted), after(token, emitted)).items():
                    law[(*emitted, *rest)] += chance * mass * later
        return total_variation(law, plain_law(penalised, 2))

    counting_rejected = two_tokens(lambda token: (token,), lambda token, emitted: (token, *emitted))
    forgetting_accepted = two_tokens(lambda token: (), lambda token, emitted: emitted)
    right = two_tokens(lambda token: (token,), lambda token, emitted: emitted)
    assert counting_rejected == pytest.approx(0.3 * 3 / 28, abs=TO_ROUNDING_OF_Q)
    assert forgetting_accepted == pytest.approx(0.075 + 0.2 * 4 / 45, abs=TO_ROUNDING_OF_Q)
    assert right < TOLERANCE
    assert bias(proposals(abc_drafter, 2), rule, 3, penalised) < TOLERANCE


# --- the whole path ---------------------------------------------------------------------------------------


@both_rules
def test_draw_and_verify_with_our_numbers_give_the_targets_law(rule: Rule) -> None:
    """Everything together, statistically: sparse q, three drafts, four tokens, numbers from counters."""
    p = np.array([0.5, 0.2, 0.3])
    draft = quantise(np.array([0.2, 0.5, 0.3]), 2)
    play_one = partial(play, separate, row=p, draft=draft, num_drafts=3, length=3, rule=rule)
    error, p_value = tally(4000, play_one, p, 3)
    assert error < 0.06
    assert p_value > 1e-3
