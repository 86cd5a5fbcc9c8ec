"""From a benchmark's options to all that it needs: models, prompts as token ids, a deployment that fits.

Knows checkpoints, the tokenizer and memory. Starts nothing and loads no weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.actors import WorkerSettings
from cluster.bench import Drafting, Rule, draftings
from cluster.bench_conditions import Conditions, conditions
from cluster.bench_load import Load, plan_load
from cluster.finding import NO_DRAFT, find
from cluster.machine import available_memory, usable_cores
from cluster.memory import estimate, model_memory
from cluster.outcome import Refused
from cluster.plan import Plan
from cluster.private_run import load_text
from cluster.prompt_file import Question, read_questions
from coordinator.draft_length import LONGEST
from coordinator.text_error import TextError
from protos.limits import AUTO, MAX_DRAFT_TOKENS, NumDraftTokens
from workers.baseline_tasks import BaselineModels
from workers.checkpoints import CheckpointInfo, check, check_pair

MAX_TEMPERATURE = 100.0
MAX_REQUESTS = 256  # at once
RULES: tuple[Rule, ...] = ("token", "block")
_MAX_COUNT = 100_000


@dataclass(frozen=True, slots=True)
class BenchWish:
    """What to measure, as a person says it."""

    target: str
    draft: str
    prompts: Path
    num_prompts: int | None  # None: two of each category
    num_tokens: int  # of each text
    draft_lengths: tuple[NumDraftTokens, ...]  # each K to try; 0 is tried in any case
    temperatures: tuple[float, ...]
    num_threads: int
    num_repeats: int
    num_requests: tuple[int, ...] = (1,)  # at once: each number to try
    num_waves: int = 1  # texts that each of so many places writes in a block
    num_blocks: int | None = None  # of each number of requests above 1; None: see `plan_load`
    rules: tuple[Rule, ...] = ("token",)  # for each fixed K; auto goes by the first
    batched: tuple[int, ...] = ()  # numbers of requests at which transformers' batched `generate` takes part


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to start, and what to ask."""

    plan: Plan
    baseline: BaselineModels
    questions: tuple[Question, ...]
    prompts: tuple[tuple[int, ...], ...]  # their token ids
    drafting: tuple[Drafting, ...]
    loads: tuple[Load, ...]  # of several requests at once
    conditions: Conditions
    memory: str  # a sentence


def check_wish(wish: BenchWish) -> None:
    """Raise Refused for what can be refused without knowing the models."""
    limits = {
        "num_prompts": (1 if wish.num_prompts is None else wish.num_prompts, _MAX_COUNT),
        "num_tokens": (wish.num_tokens, _MAX_COUNT),
        "num_threads": (wish.num_threads, usable_cores()),
        "num_repeats": (wish.num_repeats, _MAX_COUNT),
        "num_waves": (wish.num_waves, _MAX_COUNT),
        "num_blocks": (1 if wish.num_blocks is None else wish.num_blocks, _MAX_COUNT),
    }
    for name, (value, highest) in limits.items():
        if not 1 <= value <= highest:
            raise Refused(f"{name} is {value}; it must lie in 1..{highest}")
    for length in wish.draft_lengths:
        if length != AUTO and not 0 <= length <= MAX_DRAFT_TOKENS:
            raise Refused(
                f"draft_lengths has {length}; each K must lie in 0..{MAX_DRAFT_TOKENS}, or be {AUTO}"
            )
    for number in wish.num_requests:
        if not 1 <= number <= MAX_REQUESTS:
            raise Refused(f"num_requests has {number}; each must lie in 1..{MAX_REQUESTS}")
    for rule in wish.rules:
        if rule not in RULES:
            raise Refused(f"rules has {rule!r}; known are {' and '.join(RULES)}")
    if not wish.temperatures:
        raise Refused("temperatures is empty; give at least one")
    for temperature in wish.temperatures:
        if not 0 <= temperature <= MAX_TEMPERATURE:  # NaN lies nowhere
            raise Refused(f"temperatures has {temperature:g}; each must lie in 0..{MAX_TEMPERATURE:g}")
    if wish.draft == NO_DRAFT:
        raise Refused("draft is none; a benchmark of drafting needs a model that drafts")


def prepare_bench(wish: BenchWish, say: Callable[[str], None]) -> BenchPlan:
    """Find the models, fetching them where need be, read the prompts, and plan the deployment.

    Raises Refused, PromptsRefused or ModelRefused for what cannot be run, DoesNotFit when memory is short.
    """
    questions = read_questions(wish.prompts, wish.num_prompts)
    found = find(wish.target, wish.draft, say)
    assert found.draft is not None  # see `check_wish`
    target, draft = check(found.target, role="target"), check(found.draft, role="draft")
    check_pair(target, draft)
    for role, name, info in (("target", wish.target, target), ("draft", wish.draft, draft)):
        if info.gguf is not None:
            raise Refused(
                f"{role} is {name}; a benchmark compares with transformers, which runs the folder of a model"
            )
    draft_lengths: tuple[NumDraftTokens, ...] = tuple(dict.fromkeys((0, *wish.draft_lengths)))
    longest = max(LONGEST if k == AUTO else k for k in draft_lengths)
    prompts = _tokenised(questions, target.folder)
    context = min(target.context_length, draft.context_length)
    _check_lengths(questions, prompts, wish.num_tokens, context)

    loads = tuple(
        plan_load(number, wish.num_waves, len(prompts), wish.num_repeats, wish.num_blocks)
        for number in wish.num_requests
        if number > 1
    )
    num_slots = max(wish.num_requests)
    length = min(context, max(map(len, prompts)) + wish.num_tokens + longest + 1)

    def settings(name: str, info: CheckpointInfo) -> WorkerSettings:
        return WorkerSettings(
            name=name,
            folder=info.folder,
            num_slots=num_slots,
            max_length=length,
            num_threads=info.num_threads(wish.num_threads),
            shares_prefixes=False,  # every engine computes every prompt, as transformers does
        )

    return BenchPlan(
        plan=Plan(
            target=settings(wish.target, target),
            draft=settings(wish.draft, draft),
            num_draft_tokens=AUTO if AUTO in draft_lengths else longest,
        ),
        baseline=BaselineModels(target=target.folder, assistant=draft.folder, num_threads=wish.num_threads),
        questions=tuple(questions),
        prompts=prompts,
        drafting=tuple(draftings(draft_lengths, wish.rules)),
        loads=loads,
        conditions=conditions(
            target=wish.target,
            draft=wish.draft,
            num_threads=wish.num_threads,
            file=wish.prompts,
            questions=questions,
            num_tokens=wish.num_tokens,
            temperatures=wish.temperatures,
            num_repeats=wish.num_repeats,
            num_requests=wish.num_requests,
            loads=loads,
            rules=wish.rules,
        ),
        memory=_weigh(
            target, draft, length, num_slots, max({*wish.batched} & {*wish.num_requests}, default=1)
        ),
    )


def _tokenised(questions: Sequence[Question], folder: Path) -> tuple[tuple[int, ...], ...]:
    """Each question's ids, through the chat template where the target has one."""
    text = load_text(folder)
    try:
        return tuple(
            tuple(text.encode_chat([("user", q.text)]) if text.has_chat_template else text.encode(q.text))
            for q in questions
        )
    except TextError as error:
        raise Refused(str(error)) from error


def _check_lengths(
    questions: Sequence[Question], prompts: Sequence[tuple[int, ...]], num_tokens: int, context: int
) -> None:
    for question, prompt in zip(questions, prompts, strict=True):
        if len(prompt) + num_tokens > context:
            raise Refused(
                f"prompts is too long in {question.name}: it has {len(prompt)} tokens; with {num_tokens} to"
                f" write the pair's context of {context} holds {context - num_tokens}"
            )


def _weigh(
    target: CheckpointInfo, draft: CheckpointInfo, length: int, num_slots: int, batch_size: int
) -> str:
    """The models are held twice: by the deployment, and by transformers, with `batch_size` texts at once."""
    models = [
        model_memory(role, info, num_slots=num_texts, max_length=length)
        for role, info, num_texts in (
            ("target", target, num_slots),
            ("draft", draft, num_slots),
            ("transformers' target", target, batch_size),
            ("transformers' assistant", draft, 1),
        )
    ]
    total, available = estimate(models), available_memory()
    total.require(available, lower="--tokens" if num_slots == 1 else "--tokens or --requests")
    return total.sentence(available)
