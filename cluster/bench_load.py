"""Many requests at once: the engines, the blocks in which they take turns, and what each run yields.

Knows the public API and the process of transformers' own generation. Computes no statistics
(`cluster.bench_ratios`) and starts nothing.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import grpc

from cluster.baseline_process import BaselineProcess
from cluster.bench import (
    NUM_WARM_UP_TOKENS,
    TRANSFORMERS,
    BenchFailed,
    Counts,
    Drafting,
    Sample,
    Work,
    counts_of_usage,
    request_for,
)
from cluster.bench_statistics import pooled
from cluster.call_requests import Call
from cluster.calls import OPTIONS, Answer, Caller
from protos.inference_pb2 import GenerateRequest
from workers.baseline_tasks import BaselineBatch

MIN_BLOCKS = 8  # of each number of requests, unless told otherwise; six are the fewest with an interval

# Every wait has an end. Beyond these no model that is worth waiting for is still at work.
_PROMPT_SECONDS = 600.0
_SECONDS_A_TOKEN = 60.0


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What one engine made of the works of a block."""

    num_tokens: int  # of all texts
    seconds: float  # from the first request until the last token
    counts: Counts


@dataclass(frozen=True, slots=True)
class LoadEngine:
    """A way to write many texts, a given number of them at once."""

    name: str
    write: Callable[[Sequence[Work], int], LoadRun]


@dataclass(frozen=True, slots=True)
class LoadSample:
    """One run."""

    engine: str
    temperature: float
    num_requests: int  # at once
    block: int  # the engines of a block had the same works
    run: LoadRun


@dataclass(frozen=True, slots=True)
class Load:
    """How many requests come at once, and how many in all."""

    num_requests: int  # at once: the next one comes when one is done
    num_waves: int  # texts of a block for each of these places
    num_blocks: int

    @property
    def num_texts(self) -> int:
        """Of a block."""
        return self.num_requests * self.num_waves


def plan_load(
    num_requests: int, num_waves: int, num_prompts: int, num_repeats: int, num_blocks: int | None
) -> Load:
    """Where nobody says how many blocks: as many as ask every prompt so often, and MIN_BLOCKS at least."""
    num_texts = num_requests * num_waves
    if num_blocks is None:
        num_blocks = max(MIN_BLOCKS, -(-num_prompts * num_repeats // num_texts))
    return Load(num_requests, num_waves, num_blocks)


def load_engines(
    baseline: BaselineProcess | None, address: str, drafting: Sequence[Drafting]
) -> list[LoadEngine]:
    """transformers' batched `generate`, if given; the deployment at `address` with each way of drafting."""
    batched = [] if baseline is None else [LoadEngine(TRANSFORMERS, _by_transformers(baseline))]
    return batched + [LoadEngine(way.engine, _by_outrider(address, way)) for way in drafting]


def measure_load(
    contestants: Sequence[LoadEngine],
    prompts: Sequence[tuple[int, ...]],
    load: Load,
    *,
    num_tokens: int,
    temperatures: Sequence[float],
) -> Iterator[list[LoadSample]]:
    """Yield one block of samples after another: all engines in turn, in an order of the block's own.

    Raises BenchFailed when a text has another length than asked for.
    """
    for engine in contestants:
        short = [
            replace(work, prompt=work.prompt[:NUM_WARM_UP_TOKENS], num_tokens=NUM_WARM_UP_TOKENS)
            for work in works_of(0, load, prompts, num_tokens, temperatures[0])
        ]
        engine.write(short, load.num_requests)
    for block, temperature in product(range(load.num_blocks), temperatures):
        works = works_of(block, load, prompts, num_tokens, temperature)
        order = list(contestants)
        random.Random(f"{load} {block} {temperature}").shuffle(order)
        yield [
            LoadSample(engine.name, temperature, load.num_requests, block, _checked(engine, works, load))
            for engine in order
        ]


def works_of(
    block: int, load: Load, prompts: Sequence[tuple[int, ...]], num_tokens: int, temperature: float
) -> list[Work]:
    """The next of the prompts, over and over, each time with another seed.

    The longest comes first, so that none begins when the others are nearly done.
    """
    numbers = range(block * load.num_texts, (block + 1) * load.num_texts)
    works = [Work(prompts[n % len(prompts)], num_tokens, temperature, seed=n) for n in numbers]
    return sorted(works, key=lambda work: -len(work.prompt))


def as_load(sample: Sample, num_prompts: int) -> LoadSample:
    """A text that was written alone, as a block of one request."""
    written = sample.written
    return LoadSample(
        sample.engine,
        sample.temperature,
        1,
        sample.repeat * num_prompts + sample.question,
        LoadRun(len(written.tokens), written.seconds, written.counts),
    )


def _checked(engine: LoadEngine, works: Sequence[Work], load: Load) -> LoadRun:
    run = engine.write(works, load.num_requests)
    wanted = sum(work.num_tokens for work in works)
    if run.num_tokens != wanted:
        raise BenchFailed(f"{engine.name} wrote {run.num_tokens} tokens of {wanted}")
    return run


def _by_transformers(baseline: BaselineProcess) -> Callable[[Sequence[Work], int], LoadRun]:
    """One `generate` after another, each of as many prompts as there are requests at once."""

    def write(works: Sequence[Work], num_at_once: int) -> LoadRun:
        num_tokens, seconds = 0, 0.0
        for first in range(0, len(works), num_at_once):
            batch = works[first : first + num_at_once]
            written = baseline.write_batch(
                BaselineBatch(
                    prompts=tuple(work.prompt for work in batch),
                    num_tokens=batch[0].num_tokens,
                    temperature=batch[0].temperature,
                    seed=batch[0].seed,
                )
            )
            num_tokens += sum(map(len, written.texts))
            seconds += written.seconds
        return LoadRun(num_tokens, seconds, Counts())

    return write


def _by_outrider(address: str, drafting: Drafting) -> Callable[[Sequence[Work], int], LoadRun]:
    def write(works: Sequence[Work], num_at_once: int) -> LoadRun:
        requests = [request_for(work, drafting) for work in works]
        answers, seconds = asyncio.run(_answers(address, requests, num_at_once))
        for answer in answers:
            if answer.error is not None:
                raise BenchFailed(f"{drafting.engine} ended a request: {answer.error.message}")
        texts = [answer.choices[0] for answer in answers]
        return LoadRun(
            sum(len(text.tokens) for text in texts),
            seconds,
            pooled([counts_of_usage(text.usage) for text in texts]),
        )

    return write


async def _answers(
    address: str, requests: Sequence[GenerateRequest], num_at_once: int
) -> tuple[list[Answer], float]:
    """All of them, and the seconds from the first request to the end of the last answer."""
    places = asyncio.Semaphore(num_at_once)
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        timeout = _PROMPT_SECONDS + _SECONDS_A_TOKEN * requests[0].max_tokens
        caller = Caller(channel, timeout_seconds=timeout, max_retries=0)

        async def answer(number: int, request: GenerateRequest) -> Answer:
            async with places:
                return await caller.answer(Call(number, request))

        begun = time.monotonic()
        answers = await asyncio.gather(*(answer(number, request) for number, request in enumerate(requests)))
        return answers, time.monotonic() - begun
