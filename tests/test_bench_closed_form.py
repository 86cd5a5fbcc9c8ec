"""The closed form: arithmetic by hand, and a text's own parts alone in it."""

from dataclasses import replace

import pytest

from cluster.bench import TRANSFORMERS, Counts, Sample, Written, outrider
from cluster.bench_closed_form import Prediction, form_figures, predict
from cluster.told_costs import PassCosts
from protos.pass_cost import PassCost

TARGET = PassCost(
    rows=(1, 2, 4), seconds=(0.040, 0.050, 0.060), seconds_per_position=1e-5, seconds_per_sequence=0.0
)
DRAFT = PassCost(rows=(1,), seconds=(0.004,), seconds_per_position=1e-5, seconds_per_sequence=0.0)
COSTS = PassCosts(DRAFT, TARGET)
# The first round is plain, and one more.
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


def _predict(counts: Counts, seconds: float = 1.5) -> Prediction:
    found = predict(Written((0,) * 20, seconds, counts, first_token_seconds=0.5), 90, COSTS)
    assert found is not None
    return found


def test_rounds_with_and_without_drafts_enter_with_their_share() -> None:
    """100 positions in the mean: K + 1 = 4 rows attend to 406 of them, one to 100."""
    found = _predict(DRAFTED)
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


def test_plain_rounds_are_passes_and_wire() -> None:
    found = _predict(PLAIN)
    assert (found.num_draft_tokens, found.tokens_a_round) == (0.0, 1.0)
    assert found.predicted == pytest.approx(1 / (0.041 + 0.002))


def test_a_mean_k_lies_between_two_passes() -> None:
    found = _predict(replace(DRAFTED, num_draft_tokens=25))
    assert found.verify_seconds == pytest.approx((0.055 + 303e-5 + 0.060 + 406e-5) / 2)


def test_the_time_of_whole_rounds_does_not_enter() -> None:
    assert _predict(DRAFTED) == _predict(replace(DRAFTED, draft_ns=0, target_ns=0, total_ns=0))


def test_a_text_whose_rounds_nobody_timed_has_no_prediction() -> None:
    assert predict(Written((0,) * 20, 1.5, Counts(num_rounds=20), 0.5), 90, COSTS) is None
    assert predict(Written((0,) * 20, 1.5, PLAIN, None), 90, COSTS) is None
    assert predict(Written((0,), 1.5, replace(PLAIN, num_rounds=1), 1.5), 90, COSTS) is None


def test_figures_are_medians_over_texts_each_with_the_costs_of_its_moment() -> None:
    """Of seven texts one was disturbed, and one met a machine of half the speed."""
    half = PassCost((1,), (0.080,), 2e-5, 0.0)
    costs = {(0, question, 1.0): COSTS for question in range(6)} | {(0, 6, 1.0): PassCosts(DRAFT, half)}
    predicted = [1 / 0.043] * 6 + [1 / 0.084]
    measured = [value * (0.1 if i == 0 else 0.9 + 0.01 * i) for i, value in enumerate(predicted)]
    samples = [
        Sample(engine, 1.0, i, 0, Written((0,) * 20, 0.5 + 19 / speed, counts, 0.5))
        for i, speed in enumerate(measured)
        for engine, counts in ((TRANSFORMERS, Counts(num_rounds=20)), (outrider(0), PLAIN))
    ]
    engines, prompts = [TRANSFORMERS, outrider(0)], [(1,) * 90] * 7
    [found] = form_figures(samples, engines, prompts, costs)
    assert (found.engine, found.temperature) == (outrider(0), 1.0)
    assert found.reached.median == pytest.approx(0.93)
    assert (found.reached.low, found.reached.high) == pytest.approx((0.1, 0.96))
    assert found.middle.predicted == pytest.approx(1 / 0.043)
    assert form_figures(samples, engines, prompts, {}) == []
