"""What is counted: judged tokens and min(p, q) beside what was accepted, and where a round's time goes."""

import math

import numpy as np
import pytest

from coordinator.usage import Tally, totals_of, usage_of
from tests.laws import random_table
from tests.pipelines import generate, pipeline
from workers.table_model import TableModel

V = 6


@pytest.mark.parametrize("spread", [0.3, 1.5])
async def test_mean_min_pq_is_the_share_of_judged_tokens_that_are_accepted(spread: float) -> None:
    target = TableModel(random_table(V, 1, spread=spread), V, num_slots=32)
    draft = TableModel(random_table(V, 2, spread=spread), V, num_slots=32)
    async with pipeline(target, draft, num_draft_tokens=3, encoding="full") as served:
        usage = (await generate(served.stub, [1], max_tokens=60, n=32, seed=5)).usage
    measured = usage.num_accepted_tokens / usage.num_judged_tokens
    error = math.sqrt(measured * (1 - measured) / usage.num_judged_tokens)
    assert abs(measured - usage.mean_min_pq) < 4 * error
    assert usage.num_accepted_tokens <= usage.num_judged_tokens <= usage.num_draft_tokens
    assert usage.num_judged_tokens - usage.num_accepted_tokens <= usage.num_drafts + 32  # 32: cut at the end


async def test_equal_models_have_min_pq_of_one() -> None:
    table = random_table(V, 1)
    async with pipeline(TableModel(table, V), TableModel(table, V), encoding="full") as served:
        usage = (await generate(served.stub, [1], max_tokens=50, num_draft_tokens=3)).usage
    assert usage.mean_min_pq == pytest.approx(1.0, abs=1e-6)
    assert usage.num_judged_tokens == usage.num_draft_tokens


@pytest.mark.parametrize("num_draft_tokens", [0, 2])
async def test_the_parts_of_a_round_are_where_its_time_went(num_draft_tokens: int) -> None:
    draft_seconds, target_seconds = 0.004, 0.02
    target = TableModel(random_table(V, 1), V, latency_seconds=lambda _: target_seconds)
    draft = TableModel(random_table(V, 2), V, latency_seconds=lambda _: draft_seconds)
    async with pipeline(target, draft) as served:
        usage = (await generate(served.stub, [1], max_tokens=20, num_draft_tokens=num_draft_tokens)).usage
    times = usage.times
    assert times.num_rounds == (usage.num_drafts if num_draft_tokens else usage.num_rounds - 1)
    parts = np.array([times.draft_ns, times.wire_ns, times.target_ns]) / times.num_rounds / 1e9
    if num_draft_tokens:  # the last round of a text may have no room for all of K
        assert draft_seconds <= parts[0]
    else:
        assert parts[0] == 0
    assert parts[2] >= target_seconds
    assert parts[1] > 0
    assert parts.sum() <= times.total_ns / times.num_rounds / 1e9


async def test_rounds_without_the_drafter_are_no_part_of_the_mean_round() -> None:
    target = TableModel(random_table(V, 1), V, max_length=60)
    draft = TableModel(random_table(V, 2), V, max_length=20)  # given up on the way
    async with pipeline(target, draft) as served:
        usage = (await generate(served.stub, [1], max_tokens=50, num_draft_tokens=2)).usage
    assert 0 < usage.num_drafts < usage.num_rounds - 20
    assert usage.times.num_rounds == usage.num_drafts


def test_sums_over_requests_add_up() -> None:
    first = Tally(num_drafts=2, num_draft_tokens=4, num_accepted_per_pos=[2], sum_min_pq=0.5)
    second = Tally(num_drafts=1, num_draft_tokens=3, num_accepted_per_pos=[1, 1, 0], sum_min_pq=0.25)
    first.add(second)
    assert first.num_accepted_per_pos == [3, 1, 0]
    assert first.sum_min_pq == 0.75
    assert second.num_accepted_per_pos == [1, 1, 0]
    totals = totals_of(first, 2)
    assert (totals.num_requests, totals.num_draft_tokens, totals.num_accepted_tokens) == (2, 7, 4)


def test_rates_of_nothing_are_absent() -> None:
    usage = usage_of(Tally(num_completion_tokens=5), 3)
    for name in ("acceptance_rate", "mean_acceptance_length", "mean_min_pq"):
        assert not usage.HasField(name)
