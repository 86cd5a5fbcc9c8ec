"""Many requests at once: fair blocks, honest totals over real gRPC, transformers' batches of the same law."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.baseline_process import BaselineProcess
from cluster.bench import (
    NUM_WARM_UP_TOKENS,
    TRANSFORMERS,
    BenchFailed,
    Counts,
    Drafting,
    Sample,
    Work,
    Written,
    draftings,
)
from cluster.bench_load import (
    MIN_BLOCKS,
    Load,
    LoadEngine,
    LoadRun,
    as_load,
    load_engines,
    measure_load,
    plan_load,
    works_of,
)
from cluster.told_costs import told_costs
from tests.laws import random_table
from tests.pipelines import pipeline
from workers.baseline_tasks import BaselineBatch, BaselineTexts
from workers.table_model import TableModel

PROMPTS = [(1, 2), (3,), (4, 5, 6), (7, 7, 7, 7)]


def _engine(name: str, log: list[tuple[str, list[Work], int]], num_missing: int = 0) -> LoadEngine:
    def write(works: Any, num_at_once: int) -> LoadRun:
        log.append((name, list(works), num_at_once))
        return LoadRun(sum(work.num_tokens for work in works) - num_missing, 0.1, Counts())

    return LoadEngine(name, write)


def test_every_engine_gets_the_same_works_in_an_order_that_changes() -> None:
    log: list[tuple[str, list[Work], int]] = []
    engines = [_engine(name, log) for name in "abcd"]
    load = Load(num_requests=2, num_waves=1, num_blocks=8)
    blocks = list(measure_load(engines, PROMPTS, load, num_tokens=50, temperatures=(1.0, 0.0)))
    assert [(b[0].block, b[0].temperature) for b in blocks] == [(i, t) for i in range(8) for t in (1.0, 0.0)]
    warm_up, runs = log[:4], log[4:]
    assert all(work.num_tokens == NUM_WARM_UP_TOKENS for _, works, _ in warm_up for work in works)
    orders = []
    for first in range(0, len(runs), 4):
        block = runs[first : first + 4]
        assert all(works == block[0][1] and at_once == 2 for _, works, at_once in block)
        orders.append("".join(name for name, _, _ in block))
    assert all(sorted(order) == list("abcd") for order in orders)
    assert len(set(orders)) > len(orders) // 2
    asked = Counter(work.prompt for _, works, _ in runs for work in works)
    assert asked == dict.fromkeys(PROMPTS, 8 * 2 * 4 * 2 // 4)


def test_prompts_go_on_from_block_to_block_with_seeds_of_their_own() -> None:
    load = Load(num_requests=3, num_waves=2, num_blocks=2)
    blocks = [works_of(block, load, PROMPTS, 5, 1.0) for block in range(2)]
    assert [len(works) for works in blocks] == [6, 6]
    assert Counter(work.prompt for works in blocks for work in works) == dict.fromkeys(PROMPTS, 3)
    assert len({work.seed for works in blocks for work in works}) == 12


def test_the_longest_prompts_come_first() -> None:
    works = works_of(0, Load(4, 1, 1), PROMPTS, 5, 1.0)
    assert [len(work.prompt) for work in works] == [4, 3, 2, 1]


def test_blocks_ask_every_prompt_and_are_enough_for_an_interval() -> None:
    assert plan_load(2, 1, num_prompts=26, num_repeats=1, num_blocks=None).num_blocks == 13
    assert plan_load(4, 1, num_prompts=26, num_repeats=2, num_blocks=None).num_blocks == 13
    assert plan_load(16, 2, num_prompts=26, num_repeats=1, num_blocks=None).num_blocks == MIN_BLOCKS
    assert plan_load(16, 1, num_prompts=26, num_repeats=1, num_blocks=2).num_blocks == 2


def test_a_run_of_another_length_ends_the_benchmark() -> None:
    with pytest.raises(BenchFailed, match="short wrote 19 tokens of 20"):
        list(
            measure_load([_engine("short", [], 1)], PROMPTS, Load(4, 1, 1), num_tokens=5, temperatures=(0.0,))
        )


def test_a_single_text_is_a_block_of_its_own() -> None:
    counts = Counts(num_rounds=2)
    samples = [
        Sample("a", 1.0, question, repeat, Written((1, 2, 3), 0.5, counts))
        for repeat in range(2)
        for question in range(3)
    ]
    loads = [as_load(sample, num_prompts=3) for sample in samples]
    assert [load.block for load in loads] == list(range(6))
    assert {load.run for load in loads} == {LoadRun(3, 0.5, counts)}


def test_rules_multiply_fixed_lengths_alone() -> None:
    ways = draftings((0, 2, "auto"), ("block", "token"))
    assert ways == [Drafting(0), Drafting(2, "block"), Drafting(2), Drafting("auto", "block")]
    assert [way.engine for way in ways] == [
        "Outrider, K = 0",
        "Outrider, K = 2, block rule",
        "Outrider, K = 2",
        "Outrider, K = auto, block rule",
    ]


def _model(seed: int, num_slots: int = 4) -> TableModel:
    return TableModel(random_table(16, seed), 16, num_slots=num_slots, max_length=64)


async def test_requests_run_at_once_and_all_their_tokens_and_rounds_count() -> None:
    """Seven texts through three places; the bench's loop is in a thread, as the pipeline has this one."""
    works = [Work((1, 2), 10, 1.0, seed) for seed in range(7)]
    async with pipeline(_model(1), _model(2)) as running:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, running.coordinator._service.num_running)
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        [engine] = load_engines(None, running.address, [Drafting(3, "block")])
        run = await asyncio.to_thread(engine.write, works, 3)
        watching.cancel()
    assert run.num_tokens == 70
    assert run.seconds > 0
    counts = run.counts
    assert counts.num_rounds + counts.num_accepted_tokens == 70
    assert counts.num_drafts > 0
    assert sum(counts.num_accepted_per_pos) == counts.num_accepted_tokens
    assert most == 3


async def test_a_request_that_fails_ends_the_benchmark_with_its_reason() -> None:
    async with pipeline(_model(1), None) as running:
        [engine] = load_engines(None, running.address, [Drafting(0)])
        with pytest.raises(BenchFailed, match=r"Outrider, K = 0 ended a request: token_ids\.ids.* 16"):
            await asyncio.to_thread(engine.write, [Work((99,), 4, 1.0, 0)], 1)


def test_transformers_writes_a_batch_for_each_wave() -> None:
    asked: list[BaselineBatch] = []

    def write_batch(batch: BaselineBatch) -> BaselineTexts:
        asked.append(batch)
        return BaselineTexts(texts=tuple((1,) * batch.num_tokens for _ in batch.prompts), seconds=0.25)

    baseline = cast(BaselineProcess, SimpleNamespace(write_batch=write_batch))
    batched, ours = load_engines(baseline, "", [Drafting(0)])
    assert (batched.name, ours.name) == (TRANSFORMERS, "Outrider, K = 0")
    works = works_of(0, Load(2, 2, 1), PROMPTS, 5, 0.5)
    assert batched.write(works, 2) == LoadRun(20, 0.5, Counts())
    assert [batch.prompts for batch in asked] == [
        (PROMPTS[3], PROMPTS[2]),
        (PROMPTS[0], PROMPTS[1]),
    ]
    assert {batch.temperature for batch in asked} == {0.5}


async def test_costs_are_those_that_both_workers_tell() -> None:
    async with pipeline(_model(1), _model(2), control_token="secret") as running:
        works = [Work((1, 2), 10, 1.0, 0)]
        [engine] = load_engines(None, running.address, [Drafting(2)])
        await asyncio.to_thread(engine.write, works, 1)
        costs = await asyncio.to_thread(told_costs, running.address, "secret")
        assert costs is not None
        assert costs.draft.rows[0] == costs.target.rows[0] == 1
        assert await asyncio.to_thread(told_costs, running.address, "another") is None
    assert await asyncio.to_thread(told_costs, running.address, "secret") is None
