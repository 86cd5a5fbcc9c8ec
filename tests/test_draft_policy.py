"""K follows what is measured, through the whole pipeline: long drafts where they are kept, none where not."""

import asyncio
from collections.abc import Sequence

import pytest

from coordinator.draft_length import MIN_EXPLORING_ROUNDS
from protos.worker_pb2 import RULE_BLOCK, RULE_TOKEN, VerifyTask
from tests.laws import random_table
from tests.pipelines import generate, pipeline
from tests.test_law import hostile
from workers.jobs import _rule_of as rule_of
from workers.table_model import NextLogits, TableModel
from workers.verification import Rule

V = 3
TARGET = random_table(V, 1, zero_share=0.15)
NUM_TOKENS = 200


class Latency:
    """Every pass takes as long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, lengths: Sequence[int]) -> float:
        return self._seconds


def models(drafter: NextLogits, draft_seconds: float) -> tuple[TableModel, TableModel]:
    return (
        TableModel(TARGET, V, latency_seconds=Latency(0.02)),
        TableModel(drafter, V, latency_seconds=Latency(draft_seconds)),
    )


async def test_a_drafter_that_is_always_kept_drafts_far() -> None:
    async with pipeline(*models(TARGET, 0.0001), num_draft_tokens="auto") as running:
        usage = (await generate(running.stub, [1], max_tokens=NUM_TOKENS, seed=1)).usage
    assert len(usage.num_accepted_tokens_per_pos) >= 6  # of 8 rows a pass was measured, of more it is not yet
    assert usage.num_rounds < NUM_TOKENS / 5


@pytest.mark.parametrize(
    ("drafter", "draft_seconds", "least"),
    [(hostile, 0.02, 1), (TARGET, 0.1, 0)],  # the slow one costs many plain rounds each time
)
async def test_a_drafter_that_is_never_kept_or_slow_is_tried_now_and_then(
    drafter: NextLogits, draft_seconds: float, least: int
) -> None:
    async with pipeline(*models(drafter, draft_seconds), num_draft_tokens="auto") as running:
        prompt = [1] * 300  # the drafter learns that reading much takes as long as reading little
        await generate(running.stub, prompt, max_tokens=NUM_TOKENS, seed=1)
        usage = (await generate(running.stub, [1], max_tokens=NUM_TOKENS, seed=2)).usage
    assert least <= usage.num_drafts <= 2 * NUM_TOKENS / MIN_EXPLORING_ROUNDS


class LatencyBySessions:
    """A pass takes as long as the sessions in it are many."""

    def __call__(self, lengths: Sequence[int]) -> float:
        return 0.005 * len(lengths)


async def test_sessions_that_come_at_once_are_not_each_taken_for_the_only_one() -> None:
    """Drafts pay for one session and cost too much for many, which the drafter need not read therefore."""
    target = TableModel(TARGET, V, latency_seconds=Latency(0.02), num_slots=16)
    drafter = TableModel(TARGET, V, latency_seconds=LatencyBySessions(), num_slots=16)
    async with pipeline(target, drafter, num_draft_tokens="auto") as running:
        alone = (await generate(running.stub, [1] * 300, max_tokens=100, seed=1)).usage
        for seeds in range(16), range(16, 32):  # the drafter learns what company costs from the first ones
            answers = await asyncio.gather(
                *(generate(running.stub, [1 + seed % 2] * 50, max_tokens=20, seed=seed) for seed in seeds)
            )
    assert alone.num_drafts > 3
    drafted = [answer.usage.num_drafts > 0 for answer in answers]
    assert sum(drafted) <= 8  # the first three, those that are the last three, and those that try


async def test_a_request_names_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    rules: set[int] = set()

    def spy(task: VerifyTask) -> Rule:
        rules.add(task.rule)
        return rule_of(task)

    monkeypatch.setattr("workers.jobs._rule_of", spy)
    async with pipeline(*models(TARGET, 0.0001), num_draft_tokens=2) as running:
        for rule, expected in (("", RULE_TOKEN), ("block", RULE_BLOCK), ("token", RULE_TOKEN)):
            await generate(running.stub, [1], max_tokens=5, rule=rule)
            assert rules == {expected}
            rules.clear()


async def test_a_request_names_k_or_leaves_it_open_whatever_the_deployment_does() -> None:
    async with pipeline(*models(TARGET, 0.0001), num_draft_tokens=1) as running:
        fixed = (await generate(running.stub, [1], max_tokens=60, seed=1)).usage
        free = (await generate(running.stub, [1], max_tokens=60, seed=1, auto_draft_tokens=True)).usage
        bounded = await generate(
            running.stub, [1], max_tokens=60, seed=1, auto_draft_tokens=True, num_draft_tokens=2
        )
    assert len(fixed.num_accepted_tokens_per_pos) == 1
    assert len(free.num_accepted_tokens_per_pos) > 2
    assert len(bounded.usage.num_accepted_tokens_per_pos) == 2
