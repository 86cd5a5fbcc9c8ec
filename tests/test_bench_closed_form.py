"""The closed form: arithmetic by hand, and the run's own parts alone in it."""

from dataclasses import replace

import pytest

from cluster.bench import Counts, Sample, Written, outrider
from cluster.bench_closed_form import predictions
from cluster.told_costs import PassCosts
from protos.pass_cost import PassCost

PROMPTS = [(1,) * 90]
TARGET = PassCost(
    rows=(1, 2, 4), seconds=(0.040, 0.050, 0.060), seconds_per_position=1e-5, seconds_per_sequence=0.0
)
DRAFT = PassCost(rows=(1,), seconds=(0.004,), seconds_per_position=1e-5, seconds_per_sequence=0.0)
COSTS = [PassCosts(DRAFT, TARGET)]
# Of each text the first round is plain, and one more.
DRAFTED = Counts(
    num_rounds=12,
    num_drafts=10,
    num_draft_tokens=30,
    num_accepted_tokens=9,
    num_accepted_per_pos=(5, 3, 1),
    num_timed_rounds=10,
    draft_ns=10**12,
    wire_ns=30_000_000,
    target_ns=10**12,
    total_ns=10**13,
)
PLAIN = Counts(num_rounds=20, num_timed_rounds=19, wire_ns=38_000_000, target_ns=10**12, total_ns=10**13)


def _sample(engine: str, counts: Counts, seconds: float = 1.5) -> Sample:
    return Sample(engine, 1.0, 0, 0, Written((0,) * 20, seconds, counts, first_token_seconds=0.5))


def test_rounds_with_and_without_drafts_enter_with_their_share() -> None:
    """100 positions in the mean: K + 1 = 4 rows attend to 406 of them, one to 100."""
    [found] = predictions([_sample(outrider(3), DRAFTED)], PROMPTS, COSTS)
    assert found.chances == pytest.approx((0.5, 0.6, 1 / 3))
    assert found.share_drafted == pytest.approx(10 / 11)
    assert found.num_draft_tokens == pytest.approx(3.0)
    assert found.tokens_a_round == pytest.approx((10 * 1.9 + 1) / 11)
    assert found.step_seconds == pytest.approx(0.005)
    assert found.verify_seconds == pytest.approx(0.060 + 406e-5)
    assert found.plain_seconds == pytest.approx(0.041)
    assert found.wire_seconds == pytest.approx(0.003)
    round_seconds = (10 * (3 * 0.005 + 0.06406) + 0.041) / 11 + 0.003
    assert found.predicted == pytest.approx(found.tokens_a_round / round_seconds)
    assert found.measured == pytest.approx(19.0)  # behind the first token
    assert found.reached == pytest.approx(19.0 / found.predicted)


def test_plain_rounds_are_passes_and_wire() -> None:
    [found] = predictions([_sample(outrider(0), PLAIN)], PROMPTS, COSTS)
    assert (found.chances, found.num_draft_tokens, found.tokens_a_round) == ((), 0.0, 1.0)
    assert found.predicted == pytest.approx(1 / (0.041 + 0.002))


def test_a_mean_k_lies_between_two_passes() -> None:
    counts = replace(DRAFTED, num_draft_tokens=25)
    [found] = predictions([_sample(outrider("auto"), counts)], PROMPTS, COSTS)
    assert found.verify_seconds == pytest.approx((0.055 + 303e-5 + 0.060 + 406e-5) / 2)


def test_costs_are_means_over_the_run() -> None:
    slower = replace(TARGET, seconds=(0.060, 0.070, 0.080))
    [found] = predictions([_sample(outrider(0), PLAIN)], PROMPTS, [*COSTS, PassCosts(DRAFT, slower)])
    assert found.plain_seconds == pytest.approx(0.051)


def test_the_time_of_whole_rounds_does_not_enter() -> None:
    other = replace(DRAFTED, draft_ns=0, target_ns=0, total_ns=0)
    found = [predictions([_sample(outrider(3), counts)], PROMPTS, COSTS)[0] for counts in (DRAFTED, other)]
    assert found[0] == found[1]


def test_without_costs_or_timed_rounds_there_is_nothing_to_say() -> None:
    samples = [_sample(outrider(3), DRAFTED), _sample("transformers", Counts(num_rounds=20))]
    assert predictions(samples, PROMPTS, []) == []
    assert [p.engine for p in predictions(samples, PROMPTS, COSTS)] == [outrider(3)]
