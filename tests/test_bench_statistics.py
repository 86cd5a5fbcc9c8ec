"""A benchmark's figures: paired ratios, pooled rates, intervals, and what is absent."""

from dataclasses import replace

import numpy as np
import pytest

from cluster.bench import Counts, Engine, Sample, Work, Written
from cluster.bench_statistics import Estimate, estimate, figures, middle_ratio, pooled


def _unused(_: Work) -> Written:
    raise AssertionError("statistics run no engine")


REFERENCE = Engine("reference", "reference", _unused)
PLAIN = Engine("plain", "plain", _unused)
DRAFTED = Engine("drafted", "plain", _unused)
ENGINES = [REFERENCE, PLAIN, DRAFTED]
COUNTS = Counts(
    num_rounds=12,
    num_drafts=10,
    num_draft_tokens=30,
    num_accepted_tokens=6,
    num_judged_tokens=15,
    sum_min_pq=6.3,
    num_q_bytes=12_000,
    num_timed_rounds=10,
    draft_ns=200_000_000,
    wire_ns=30_000_000,
    target_ns=1_000_000_000,
    total_ns=1_250_000_000,
)


def _sample(
    engine: Engine, question: int, seconds: float, counts: Counts | None = None, repeat: int = 0
) -> Sample:
    written = Written(tuple(range(100)), seconds, counts or Counts())
    return Sample(engine.name, 1.0, question, repeat, written)


def test_ratios_are_paired_by_question() -> None:
    """On each question twice as fast as the reference, half as fast as plain."""
    samples = []
    for question, seconds in enumerate([1.0, 2.0, 50.0]):
        samples.append(_sample(REFERENCE, question, 2 * seconds))
        samples.append(_sample(PLAIN, question, seconds / 2))
        samples.append(_sample(DRAFTED, question, seconds))
    of_reference, of_plain, of_drafted = figures(samples, ENGINES, "reference")
    assert of_drafted.of_transformers is not None
    assert of_drafted.of_plain is not None
    assert of_drafted.of_transformers.median == pytest.approx(2.0)
    assert of_drafted.of_plain.median == pytest.approx(0.5)
    assert of_drafted.tokens_per_second.median == 50.0
    assert of_plain.of_plain is None
    assert of_reference.of_transformers is None


def test_repeats_of_a_question_count_once() -> None:
    samples = [_sample(PLAIN, 0, seconds, repeat=i) for i, seconds in enumerate([1.0, 2.0, 4.0])]
    samples += [_sample(PLAIN, question, 10.0) for question in (1, 2)]
    [found] = figures(samples, [PLAIN], "plain")
    assert found.tokens_per_second.median == 10.0  # of 50, 10 and 10; all five runs' median would be 25


def test_rates_are_pooled_over_the_questions() -> None:
    """A mean of the two questions' rates would be 0.6, a mean of their lengths 2.3."""
    lucky = replace(COUNTS, num_drafts=1, num_draft_tokens=3, num_accepted_tokens=3, num_judged_tokens=3)
    samples = [_sample(DRAFTED, 0, 1.0, COUNTS), _sample(DRAFTED, 1, 1.0, lucky)]
    samples += [_sample(PLAIN, question, 1.0) for question in (0, 1)]
    [found] = figures(samples, [DRAFTED], "plain")
    assert found.acceptance_rate == pytest.approx(9 / 33)
    assert found.mean_acceptance_length == pytest.approx(1 + 9 / 11)
    assert found.mean_min_pq == pytest.approx(12.6 / 18)
    assert found.accepted_of_judged == pytest.approx(9 / 18)
    assert found.share_drafted == pytest.approx(11 / 24)
    assert found.q_bytes_per_draft_token == pytest.approx(24_000 / 33)


def test_a_rounds_parts_add_up_to_its_time() -> None:
    samples = [_sample(DRAFTED, 0, 1.0, COUNTS), _sample(PLAIN, 0, 1.0)]
    [found] = figures(samples, [DRAFTED], "plain")
    assert found.round is not None
    parts = found.round.draft, found.round.wire, found.round.target, found.round.rest
    assert parts == pytest.approx((20.0, 3.0, 100.0, 2.0))
    assert found.round.total == pytest.approx(125.0)


def test_what_does_not_exist_is_absent() -> None:
    plain_round = replace(Counts(), num_rounds=5, num_timed_rounds=4, target_ns=8_000_000, total_ns=9_000_000)
    samples = [_sample(REFERENCE, 0, 1.0), _sample(PLAIN, 0, 1.0, plain_round)]
    for found in figures(samples, [REFERENCE, PLAIN], "reference"):
        rates = (
            found.acceptance_rate,
            found.mean_acceptance_length,
            found.mean_min_pq,
            found.accepted_of_judged,
            found.share_drafted,
        )
        assert (*rates, found.q_bytes_per_draft_token) == (None,) * 6
    of_reference, of_plain = figures(samples, [REFERENCE, PLAIN], "reference")
    assert of_reference.round is None
    assert of_plain.round is not None
    assert of_plain.round.draft is None


@pytest.mark.parametrize("num_prompts", [7, 13, 20])
@pytest.mark.parametrize("confidence", [0.95, 1 - 0.05 / 3])
def test_an_interval_covers_the_median_as_often_as_it_says(num_prompts: int, confidence: float) -> None:
    """Of a skewed law, whose median is 1; less three standard errors. A bootstrap has 0.90 at 13."""
    random = np.random.default_rng(0)
    covered, num_trials = 0, 2000
    for _ in range(num_trials):
        found = estimate(random.lognormal(0.0, 1.0, num_prompts).tolist(), confidence)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 1.0 <= found.high
    error = (confidence * (1 - confidence) / num_trials) ** 0.5
    assert covered / num_trials >= confidence - 3 * error


def test_thirteen_values_give_the_third_of_each_end() -> None:
    assert estimate([float(i) for i in range(1, 14)]) == Estimate(7.0, 3.0, 11.0)


def test_ratios_of_several_k_to_the_same_plain_are_judged_together() -> None:
    """With three K the interval is that of 98.3 %: the second of each end. One rival alone has 95 %."""
    rivals = [Engine(name, "plain", _unused) for name in ("a", "b", "c")]
    alone = Engine("alone", "reference", _unused)
    engines = [REFERENCE, alone, PLAIN, *rivals]
    samples = [
        _sample(engine, i, 1.0 if engine in (REFERENCE, PLAIN) else 1 / (i + 1))
        for engine in engines
        for i in range(13)
    ]
    found = {f.engine: f for f in figures(samples, engines, "reference")}
    for rival in rivals:
        of_plain = found[rival.name].of_plain
        assert of_plain is not None
        assert (of_plain.low, of_plain.high) == pytest.approx((2.0, 12.0))
    for ratio in (found["a"].of_transformers, found["alone"].of_plain):
        assert ratio is not None
        assert (ratio.low, ratio.high) == pytest.approx((3.0, 11.0))


def test_a_ratio_is_other_than_one_where_its_interval_is() -> None:
    assert not estimate([1.1 - 0.02 * i for i in range(12)]).excludes_one
    assert estimate([1.1 + 0.02 * i for i in range(12)]).excludes_one


def test_five_values_give_no_interval() -> None:
    assert (estimate([1.0, 2.0, 3.0, 4.0, 5.0]).low, estimate([7.0]).high) == (None, None)
    assert estimate([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).low is not None


@pytest.mark.parametrize("num_blocks", [6, 8, 13])
def test_an_interval_of_paired_ratios_covers_their_middle_as_often_as_it_says(num_blocks: int) -> None:
    """Of two engines whose speeds scatter alike, by a law with wide tails; less three standard errors."""
    random = np.random.default_rng(1)
    covered, num_trials = 0, 2000
    for _ in range(num_trials):
        ours, theirs = np.exp(0.05 * random.standard_t(2, (2, num_blocks)))
        found = middle_ratio((1.25 * ours / theirs).tolist())
        assert found.low is not None
        assert found.high is not None
        assert found.low <= found.median <= found.high
        covered += found.low <= 1.25 <= found.high
    assert covered / num_trials >= 0.95 - 3 * (0.95 * 0.05 / num_trials) ** 0.5


def test_ranks_of_paired_ratios_are_those_of_wilcoxons_table() -> None:
    """Of eight values the fourth least of 36 pairwise means, of six the least; of five there is none."""
    values = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
    eight = middle_ratio(values)
    assert (eight.low, eight.high) == pytest.approx((2.0, 64.0))
    assert eight.median == pytest.approx(2**3.5)
    six = middle_ratio(values[:6])
    assert (six.low, six.high) == pytest.approx((1.0, 32.0))
    assert middle_ratio(values[:5]).low is None


def test_accepted_tokens_are_pooled_by_position() -> None:
    found = pooled([Counts(num_accepted_per_pos=(3, 1)), Counts(num_accepted_per_pos=(2, 2, 1)), Counts()])
    assert found.num_accepted_per_pos == (5, 3, 1)
