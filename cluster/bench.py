"""The runs of a benchmark: its engines, their order, and what each run yields.

Knows the public API and the process of transformers' own generation. Computes no statistics
(`cluster.bench_statistics`) and starts nothing.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from cluster.baseline_process import BaselineProcess
from cluster.generation import generate
from protos.inference_pb2 import GenerateRequest, TokenIds, Usage
from protos.limits import AUTO, NumDraftTokens
from workers.baseline_tasks import BaselineTask, BaselineText

NUM_WARM_UP_TOKENS = 8
NUM_FIRST_TOKENS = 3  # times that each command is run to its first token
TRANSFORMERS, ASSISTED = "transformers", "transformers, assisted"

Rule = Literal["token", "block"]


class BenchFailed(RuntimeError):
    """The sentence says which engine did not do what was asked."""


@dataclass(frozen=True, slots=True)
class Work:
    """One text to write, by any engine: at its law's `temperature`, behind end tokens too."""

    prompt: tuple[int, ...]
    num_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Counts:
    """What happened in a run's rounds; 0 where an engine does not count it."""

    num_rounds: int = 0
    num_drafts: int = 0  # rounds with draft tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_pos: tuple[int, ...] = ()  # of them, those at draft position i of their round
    num_judged_tokens: int = 0  # up to the first rejection of each round
    sum_min_pq: float = 0.0  # over judged tokens
    num_q_bytes: int = 0
    num_fallbacks: int = 0
    num_timed_rounds: int = 0  # those that the four times below are sums over
    draft_ns: int = 0
    wire_ns: int = 0
    target_ns: int = 0
    total_ns: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """What came of a run."""

    tokens: tuple[int, ...]
    seconds: float  # from the request, or the call, to the last token
    counts: Counts
    first_token_seconds: float | None = None  # and to the first one; None where nobody saw it come


@dataclass(frozen=True, slots=True)
class Engine:
    """A way to write a text."""

    name: str
    plain: str  # the same engine without drafts, by name; its own name if it has none
    write: Callable[[Work], Written]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run."""

    engine: str
    temperature: float
    question: int  # its index
    repeat: int
    written: Written


@dataclass(frozen=True, slots=True)
class Drafting:
    """How Outrider drafts, and how its target judges."""

    num_draft_tokens: NumDraftTokens
    rule: Rule = "token"

    @property
    def engine(self) -> str:
        """Its name."""
        return outrider(self.num_draft_tokens, self.rule)


def draftings(draft_lengths: Sequence[NumDraftTokens], rules: Sequence[Rule]) -> list[Drafting]:
    """Each fixed K by each rule. K = 0, which has nothing to judge, and auto come once, by the first."""
    return [
        Drafting(k, rule if k else "token")
        for k in draft_lengths
        for rule in (rules[:1] if k in (0, AUTO) else rules)
    ]


def engines(baseline: BaselineProcess, address: str, drafting: Sequence[Drafting]) -> list[Engine]:
    """transformers plain and assisted, and the deployment at `address` with each way of drafting."""
    return [
        Engine(TRANSFORMERS, TRANSFORMERS, lambda work: _by_transformers(baseline, work, assisted=False)),
        Engine(ASSISTED, TRANSFORMERS, lambda work: _by_transformers(baseline, work, assisted=True)),
        *(Engine(way.engine, outrider(0), _by_outrider(address, way)) for way in drafting),
    ]


def outrider(num_draft_tokens: NumDraftTokens, rule: Rule = "token") -> str:
    """The name of Outrider as an engine with this K and rule."""
    return f"Outrider, K = {num_draft_tokens}" + ("" if rule == "token" else f", {rule} rule")


def measure(
    contestants: Sequence[Engine],
    prompts: Sequence[tuple[int, ...]],
    *,
    num_tokens: int,
    temperatures: Sequence[float],
    num_repeats: int,
) -> Iterator[list[Sample]]:
    """Yield one block of samples after another: all engines in turn, on one prompt and temperature.

    Each block has an order of its own, so that a machine that grows slower or faster meets all of them alike.
    Raises BenchFailed when a text has another length than asked for.
    """
    for engine in contestants:
        engine.write(Work(prompts[0], NUM_WARM_UP_TOKENS, temperatures[0], seed=0))
    for repeat, question, temperature in product(range(num_repeats), range(len(prompts)), temperatures):
        work = Work(prompts[question], num_tokens, temperature, seed=repeat * len(prompts) + question)
        order = list(contestants)
        random.Random(f"{repeat} {question} {temperature}").shuffle(order)
        block = []
        for engine in order:
            written = engine.write(work)
            if len(written.tokens) != num_tokens:
                raise BenchFailed(f"{engine.name} wrote {len(written.tokens)} tokens of {num_tokens}")
            block.append(Sample(engine.name, temperature, question, repeat, written))
        yield block


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an engine's greedy text leaves that of transformers."""

    question: int
    position: int  # of the first other token, from 0
    gap: float  # there, between the two best logits


def greedy_differences(
    samples: Sequence[Sample],
    prompts: Sequence[tuple[int, ...]],
    gap: Callable[[tuple[int, ...]], float],
) -> dict[str, list[Difference]]:
    """Where each engine's texts at temperature 0 leave those of transformers' `generate`."""
    greedy = [sample for sample in samples if sample.temperature == 0 and sample.repeat == 0]
    expected = {sample.question: sample.written.tokens for sample in greedy if sample.engine == TRANSFORMERS}
    found: dict[str, list[Difference]] = {}
    for sample in greedy:
        if sample.engine == TRANSFORMERS:
            continue
        differences = found.setdefault(sample.engine, [])
        pairs = enumerate(zip(sample.written.tokens, expected[sample.question], strict=True))
        position = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
        if position is not None:
            prefix = prompts[sample.question] + sample.written.tokens[:position]
            differences.append(Difference(sample.question, position, gap(prefix)))
    return found


def _by_transformers(baseline: BaselineProcess, work: Work, *, assisted: bool) -> Written:
    text = baseline.write(
        BaselineTask(
            kind="assisted" if assisted else "plain",
            prompt=work.prompt,
            num_tokens=work.num_tokens,
            temperature=work.temperature,
            seed=work.seed,
        )
    )
    return Written(text.tokens, text.seconds, _counts_of_text(text))


def _counts_of_text(text: BaselineText) -> Counts:
    return Counts(
        num_rounds=text.num_rounds,
        num_drafts=text.num_drafts,
        num_draft_tokens=text.num_draft_tokens,
        num_accepted_tokens=text.num_accepted_tokens,
    )


def request_for(work: Work, drafting: Drafting) -> GenerateRequest:
    """The work as the public API takes it."""
    k = drafting.num_draft_tokens
    return GenerateRequest(
        token_ids=TokenIds(ids=work.prompt),
        max_tokens=work.num_tokens,
        temperature=work.temperature,
        seed=work.seed,
        num_draft_tokens=None if k == AUTO else k,
        auto_draft_tokens=k == AUTO,
        rule=drafting.rule,
        ignore_end_tokens=True,
    )


def _by_outrider(address: str, drafting: Drafting) -> Callable[[Work], Written]:
    def write(work: Work) -> Written:
        generation = generate(address, request_for(work, drafting), lambda tokens: None)
        return Written(
            tuple(token.id for token in generation.tokens),
            generation.seconds or 0.0,
            counts_of_usage(generation.usage),
            generation.first_token_seconds,
        )

    return write


def counts_of_usage(usage: Usage) -> Counts:
    """The service's own account of a request."""
    return Counts(
        num_rounds=usage.num_rounds,
        num_drafts=usage.num_drafts,
        num_draft_tokens=usage.num_draft_tokens,
        num_accepted_tokens=usage.num_accepted_tokens,
        num_accepted_per_pos=tuple(usage.num_accepted_tokens_per_pos),
        num_judged_tokens=usage.num_judged_tokens,
        sum_min_pq=usage.mean_min_pq * usage.num_judged_tokens,
        num_q_bytes=usage.num_q_bytes,
        num_fallbacks=usage.num_fallbacks,
        num_timed_rounds=usage.times.num_rounds,
        draft_ns=usage.times.draft_ns,
        wire_ns=usage.times.wire_ns,
        target_ns=usage.times.target_ns,
        total_ns=usage.times.total_ns,
    )
