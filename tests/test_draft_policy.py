"""K follows what is measured, through the whole pipeline: long drafts where they are kept, none where not."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.draft_length import MIN_EXPLORING_ROUNDS, DraftLength
from coordinator.draft_policy import DraftPolicy
from coordinator.sessions import Session
from coordinator.turns import Turns
from coordinator.usage import Tally
from coordinator.wire_time import WireTime
from protos.pass_cost import PassCost
from protos.prefix import TokenPrefix
from protos.worker_pb2 import RULE_BLOCK, RULE_TOKEN, Sampling, VerifyTask
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


class Worker:
    """What the policy looks at of a drafter or a target."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def test_sessions_that_come_at_once_are_not_each_taken_for_the_only_one() -> None:
    """With costs that make drafts pay for few sessions: those that come later within the same moment must
    not go by what was computed for the first.
    """
    cost = PassCost((1, 16), (0.02, 0.02), 0.0, 0.0)  # of the target, however many share a pass
    shared = PassCost((1, 16), (0.005, 0.08), 0.0, 0.0)  # of the drafter, by its sessions
    drafter: Any = Worker(
        num_sessions=0,
        num_slots=32,
        turns=Turns(),
        client=SimpleNamespace(cost=shared, wire=WireTime(1e-4), computes_on="cores"),
        num_unread=lambda session: 0,
    )
    verifier: Any = Worker(
        num_sessions=0, client=SimpleNamespace(cost=cost, wire=WireTime(1e-4), computes_on="cores")
    )
    policy, chosen = DraftPolicy(), []
    for number in range(16):
        drafter.num_sessions = verifier.num_sessions = number + 1
        chosen.append(policy.choose(_session(number), drafter, verifier, 4))
    assert all(chosen[:2])
    assert not any(chosen[6:])


def _session(number: int) -> Session:
    return Session(
        id=f"c/{number}",
        choice=0,
        seed=number,
        tokens=TokenPrefix([1] * 50),
        num_prompt_tokens=50,
        max_tokens=100,
        max_length=1000,
        end_token_ids=frozenset(),
        sampling=Sampling(temperature=1.0, top_p=1.0),
        rule=RULE_TOKEN,
        num_draft_tokens=4,
        tally=Tally(),
        draft_length=DraftLength(),
    )


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
