"""Ratios between engines over blocks: paired, against the right rival, and absent where there is none."""

from dataclasses import replace

import pytest

from cluster.bench import TRANSFORMERS, Counts, Drafting, outrider
from cluster.bench_load import LoadRun, LoadSample
from cluster.bench_ratios import best_fixed, load_figures, rule_figures

AUTO, BLOCK = outrider("auto"), outrider(2, "block")
WAYS = [Drafting(0), Drafting(2), Drafting(2, "block"), Drafting("auto")]
COUNTS = Counts(num_rounds=12, num_drafts=10, num_draft_tokens=20, num_accepted_tokens=5)


def _samples(seconds: dict[str, float], num_requests: int = 4, counts: Counts = COUNTS) -> list[LoadSample]:
    """Eight blocks, of which each takes all engines longer than the one before."""
    return [
        LoadSample(engine, 1.0, num_requests, block, LoadRun(100, s * (1 + block), counts))
        for block in range(8)
        for engine, s in seconds.items()
    ]


def test_ratios_are_within_blocks_whatever_changes_between_them() -> None:
    seconds = {TRANSFORMERS: 4.0, outrider(0): 2.0, outrider(2): 1.0, AUTO: 1.25}
    of_generate, plain, fixed, auto = load_figures(_samples(seconds), WAYS)
    assert [f.engine for f in (of_generate, plain, fixed, auto)] == list(seconds)
    for ratio, value in (
        (auto.of_plain, 1.6),
        (auto.of_generate, 3.2),
        (plain.auto_of_it, 1.6),
        (fixed.auto_of_it, 0.8),
        (fixed.of_plain, 2.0),
        (of_generate.of_plain, 0.5),
    ):
        assert ratio is not None
        assert (ratio.median, ratio.low, ratio.high) == pytest.approx((value, value, value))
    assert (plain.of_plain, auto.auto_of_it, of_generate.of_generate) == (None, None, None)
    assert auto.num_blocks == 8


def test_tokens_a_second_are_all_tokens_over_all_time() -> None:
    """A mean of the blocks' speeds would be 34."""
    [plain] = load_figures(_samples({outrider(0): 1.0}), WAYS)
    assert plain.tokens_per_second == pytest.approx(800 / 36)
    assert (plain.of_generate, plain.auto_of_it) == (None, None)


def test_what_was_measured_at_another_number_of_requests_is_not_compared() -> None:
    samples = _samples({outrider(0): 1.0}, 1) + _samples({AUTO: 1.0}, 2)
    plain, auto = load_figures(samples, WAYS)
    assert (plain.num_requests, auto.num_requests) == (1, 2)
    assert (plain.auto_of_it, auto.of_plain) == (None, None)


def test_a_block_that_one_engine_did_not_finish_counts_for_the_others() -> None:
    samples = [s for s in _samples({outrider(0): 2.0, AUTO: 1.0}) if (s.engine, s.block) != (AUTO, 7)]
    plain, auto = load_figures(samples, WAYS)
    assert (plain.num_blocks, auto.num_blocks) == (8, 7)
    assert auto.of_plain is not None
    assert auto.of_plain.median == pytest.approx(2.0)


def test_rates_are_absent_where_nothing_was_drafted() -> None:
    none = Counts(num_rounds=12)
    [plain] = load_figures(_samples({outrider(0): 1.0}, counts=none), WAYS)
    assert (plain.share_drafted, plain.acceptance_rate, plain.mean_acceptance_length) == (None, None, None)
    [drafted] = load_figures(_samples({outrider(2): 1.0}), WAYS)
    assert drafted.share_drafted == pytest.approx(10 / 12)
    assert drafted.acceptance_rate == pytest.approx(0.25)
    assert drafted.mean_acceptance_length == pytest.approx(1.5)


@pytest.mark.parametrize(("fixed_seconds", "best"), [(1.0, outrider(2)), (3.0, outrider(0))])
def test_the_best_fixed_k_is_of_autos_own_rule(fixed_seconds: float, best: str) -> None:
    seconds = {outrider(0): 2.0, outrider(2): fixed_seconds, BLOCK: 0.1, AUTO: 0.5}
    figures = load_figures(_samples(seconds) + _samples(seconds, 8), WAYS)
    auto = next(f for f in figures if f.engine == AUTO)
    found = best_fixed(figures, auto)
    assert found is not None
    assert (found.engine, found.num_requests) == (best, 4)
    assert best_fixed([auto], auto) is None


def test_the_rules_are_compared_by_tokens_a_round_and_by_speed() -> None:
    token = _samples({outrider(2): 2.0, AUTO: 1.0})
    block = _samples({BLOCK: 1.0}, counts=replace(COUNTS, num_accepted_tokens=8))
    [found] = rule_figures(token + block, WAYS)
    assert (found.num_draft_tokens, found.num_requests, found.num_blocks) == (2, 4, 8)
    assert found.tokens_a_round.median == pytest.approx(1.8 / 1.5)
    assert found.tokens_per_second.median == pytest.approx(2.0)
    assert rule_figures(token, WAYS) == []
