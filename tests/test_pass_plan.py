"""The plan of a pass keeps its bounds by the cost at hand, leaves no decoding session out, starves nobody."""

import math
import random
from dataclasses import replace

import pytest

from protos.pass_cost import PassCost, PassShape
from workers.pass_plan import MIN_PREFILL_TOKENS, PassBounds, Pending, fast_rows, plan_pass

COST = PassCost((1, 4, 32, 64, 256), (0.04, 0.04, 0.16, 0.3, 1.1), 1e-6, 1e-3)
STEP = 0.25
BOUNDS = PassBounds(256, STEP, COST.pass_seconds)
UNBOUND = PassBounds(128, math.inf, lambda _: 0.0)


def decoding(start: int = 100, num_rows: int = 4) -> Pending:
    return Pending(start, num_rows, num_rows, decodes=True)


def prompt(num_tokens: int, start: int = 0, num_logits: int = 1) -> Pending:
    return Pending(start, num_tokens, num_logits, decodes=False)


def shape_of(tasks: list[Pending], sizes: list[int]) -> PassShape:
    shape = PassShape()
    for task, size in zip(tasks, sizes, strict=True):
        if size:
            shape = shape.with_feed(task.start, size)
    return shape


def test_where_nothing_decodes_prompts_fill_the_rows_oldest_first() -> None:
    assert plan_pass([prompt(1000)], UNBOUND) == [128]
    assert plan_pass([prompt(100), prompt(500), prompt(500)], UNBOUND) == [
        100,
        0,
        0,
    ]  # 28 are too small a piece
    assert plan_pass([prompt(60), prompt(500), prompt(500)], UNBOUND) == [60, 68, 0]


def test_beside_decoding_sessions_a_chunk_is_as_large_as_the_step_allows() -> None:
    tasks = [prompt(1000), decoding(), decoding()]
    sizes = plan_pass(tasks, BOUNDS)
    assert sizes[1:] == [4, 4]
    assert MIN_PREFILL_TOKENS < sizes[0] < 64
    assert COST.pass_seconds(shape_of(tasks, sizes)) <= STEP
    assert COST.pass_seconds(shape_of(tasks, [sizes[0] + 1, 4, 4])) > STEP
    later = plan_pass([replace(tasks[0], start=1500), *tasks[1:]], BOUNDS)
    assert later[0] < sizes[0]  # its rows attend to more


def test_what_is_through_at_once_overtakes_a_long_prompt_that_moves_on_all_the_same() -> None:
    wide = replace(BOUNDS, max_seconds=0.5)
    tasks = [prompt(1000), prompt(500), prompt(8), decoding(), prompt(20)]
    sizes = plan_pass(tasks, wide)
    assert sizes[2:] == [8, 4, 20]
    assert sizes[0] >= MIN_PREFILL_TOKENS
    assert COST.pass_seconds(shape_of(tasks, sizes)) <= 0.5
    assert plan_pass([prompt(1000), *[prompt(32)] * 20], UNBOUND) == [32, 32, 32, 32] + [0] * 17


def test_the_oldest_prompt_moves_on_however_many_decode() -> None:
    tasks = [*[decoding()] * 60, prompt(50), prompt(50), prompt(5)]
    assert plan_pass(tasks, BOUNDS) == [*[4] * 60, MIN_PREFILL_TOKENS, 0, 0]


@pytest.mark.parametrize(
    ("num_tokens", "num_logits", "size", "expected"),
    [(41, 7, 41, 41), (41, 7, 40, 34), (41, 7, 20, 20), (41, 35, 20, 6), (37, 37, 8, 37), (5, 1, 99, 5)],
)
def test_wanted_positions_stay_together(num_tokens: int, num_logits: int, size: int, expected: int) -> None:
    assert prompt(num_tokens, num_logits=num_logits).piece(size) == expected


@pytest.mark.parametrize("seed", range(40))
def test_random_loads_keep_the_bounds_and_everybody_comes_through(seed: int) -> None:
    """Sessions decode without end beside prompts of all lengths; each pass is checked, to the last prompt."""
    generator = random.Random(seed)
    seconds = sorted(generator.uniform(0.001, 0.5) for _ in range(4))
    cost = PassCost((1, 8, 64, 256), tuple(seconds), generator.uniform(0, 1e-5), generator.uniform(0, 3e-3))
    bounds = PassBounds(generator.randint(1, 300), generator.uniform(0.01, 1.0), cost.pass_seconds)
    decoders = [
        decoding(generator.randint(1, 2000), generator.randint(1, 9)) for _ in range(generator.randint(0, 20))
    ]
    prompts = [
        prompt(
            n := generator.choice([1, 5, 31, 32, 33, 70, 400]), num_logits=min(n, generator.choice([0, 1, 6]))
        )
        for _ in range(generator.randint(1, 12))
    ]
    num_passes = 0
    limit = sum(math.ceil(task.num_tokens / MIN_PREFILL_TOKENS) + 1 for task in prompts)
    while prompts:
        tasks = [*prompts, *decoders]
        generator.shuffle(decoders)
        sizes = plan_pass(tasks, bounds)
        assert sizes[len(prompts) :] == [task.num_tokens for task in tasks[len(prompts) :]]
        assert all(size in (0, task.piece(size)) for task, size in zip(tasks, sizes, strict=True))
        assert sizes[0] >= min(prompts[0].piece(MIN_PREFILL_TOKENS), MIN_PREFILL_TOKENS)
        shape = shape_of(tasks, sizes)
        if sum(sizes[: len(prompts)]) > prompts[0].piece(MIN_PREFILL_TOKENS):
            assert shape.num_rows <= bounds.max_rows
            alone = shape_of(decoders, [task.num_tokens for task in decoders])
            hardly_longer = 1.1 * cost.pass_seconds(alone) if decoders else 0.0
            assert cost.pass_seconds(shape) <= max(bounds.max_seconds, hardly_longer)
        prompts = [
            replace(task, start=task.start + size, num_tokens=task.num_tokens - size)
            for task, size in zip(prompts, sizes, strict=False)
            if size < task.num_tokens
        ]
        num_passes += 1
    assert num_passes <= limit


@pytest.mark.parametrize(
    ("seconds", "max_rows", "expected"),
    [
        ((0.04, 0.20, 0.36, 0.56, 1.10), 256, 128),  # a row of 64 takes a fifth more, one of 256 as much
        ((0.04, 0.05, 0.06, 0.07, 0.08), 256, 256),
        ((0.04, 0.05, 0.06, 0.07, 0.08), 100, 100),
        ((0.04, 1.28, 2.56, 5.12, 10.2), 256, 32),
        ((0.04, 1.28, 2.56, 5.12, 10.2), 8, 8),
    ],
)
def test_prompts_are_read_in_the_smallest_chunks_that_are_fast(
    seconds: tuple[float, ...], max_rows: int, expected: int
) -> None:
    assert fast_rows(PassCost((1, 32, 64, 128, 256), seconds, 0.0, 0.0), max_rows) == expected


def test_a_size_that_was_never_tried_is_tried() -> None:
    assert fast_rows(None, 256) == 256
    assert fast_rows(PassCost((1, 64), (0.04, 2.0), 0.0, 0.0), 256) == 256


def test_short_prompts_join_a_pass_that_they_make_hardly_longer_however_late_it_is() -> None:
    late = replace(BOUNDS, max_seconds=-1.0)
    cheap = PassCost((1, 1024), (0.06, 0.07), 0.0, 0.0)
    tasks = [decoding(num_rows=1), *(prompt(5) for _ in range(6))]
    assert plan_pass(tasks, replace(late, seconds_of=cheap.pass_seconds)) == [1, 5, 5, 5, 5, 5, 5]
    assert plan_pass([decoding(), *(prompt(30) for _ in range(6))], late)[1:] == [30, 0, 0, 0, 0, 0]
