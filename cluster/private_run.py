"""From models that were found and a request to a plan that fits: models checked as a pair, and weighed.

Knows checkpoints, the request's rules and memory. Starts nothing and loads no weights.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from cluster.actors import WorkerSettings
from cluster.finding import NO_DRAFT, Found
from cluster.machine import usable_cores
from cluster.memory import estimate, model_memory
from cluster.outcome import Refused
from cluster.plan import Plan
from coordinator.draft_length import LONGEST
from coordinator.requests import Limits, read_request
from coordinator.text import Text
from coordinator.text_error import TextError
from protos.inference_pb2 import Chat, ChatMessage, GenerateRequest, TokenIds
from protos.limits import AUTO, MAX_DRAFT_TOKENS, NumDraftTokens
from protos.status import TaskError
from workers.checkpoints import CheckpointInfo, check, check_pair

DEMO = "demo"
_NO_LIMIT = 2**31 - 1
_INTEGERS = {  # looked at here, since a message holds no others
    "num_draft_tokens": (0, MAX_DRAFT_TOKENS),
    "top_k": (0, _NO_LIMIT),
    "seed": (0, 2**64 - 1),
    "max_tokens": (1, _NO_LIMIT),
}


@dataclass(frozen=True, slots=True)
class Models:
    """Which models to run, as a person says it."""

    target: str = DEMO
    draft: str = DEMO  # a model, or NO_DRAFT

    def num_draft_tokens(self, wish: "Wish") -> NumDraftTokens:
        """K of a run of these models."""
        if self.draft == NO_DRAFT:
            return 0
        return AUTO if wish.num_draft_tokens is None else wish.num_draft_tokens


@dataclass(frozen=True, slots=True)
class Wish:
    """What to write, as a person says it."""

    prompt: str
    num_draft_tokens: NumDraftTokens | None  # None: the deployment's
    chat: bool | None  # None: where the target has a chat template
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None  # None: a fresh one
    max_tokens: int

    def options(self) -> GenerateRequest:
        """The request without its prompt."""
        return GenerateRequest(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            num_draft_tokens=None if self.num_draft_tokens == AUTO else self.num_draft_tokens,
            auto_draft_tokens=self.num_draft_tokens == AUTO,
        )


@dataclass(frozen=True, slots=True)
class PrivateRun:
    """What to start, and the request to send to it."""

    plan: Plan
    request: GenerateRequest
    memory: str  # a sentence


def check_options(wish: Wish) -> None:
    """Refuse what can be refused without knowing the models."""
    for name, (lowest, highest) in _INTEGERS.items():
        value = getattr(wish, name)
        if value not in (None, AUTO) and not lowest <= value <= highest:
            raise Refused(f"{name} is {value}; it must lie in {lowest}..{highest}")
    request = wish.options()
    request.token_ids.CopyFrom(TokenIds(ids=[0]))
    _read(request, None, vocab_size=1, max_length=_NO_LIMIT)
    if not wish.prompt.strip():
        raise Refused("prompt is empty; give some text, or '-' and text on standard input")
    try:
        wish.prompt.encode()
    except UnicodeEncodeError as error:
        raise Refused(f"prompt is not UTF-8 at character {error.start}") from None


def prepare(wish: Wish, models: Models, found: Found) -> PrivateRun:
    """Plan the deployment of the models, which were found.

    Raises Refused or ModelRefused for what cannot be run, DoesNotFit when memory is short.
    """
    num_draft_tokens = models.num_draft_tokens(wish)
    target, draft = check(found.target, role="target"), None
    if found.draft is not None:
        draft = check(found.draft, role="draft")
        check_pair(target, draft)
    text = load_text(target.folder)
    request = full_request(replace(wish, num_draft_tokens=num_draft_tokens), models.target, text)
    # The slots end where this request must; the round that goes beyond it is part of the length.
    length = _read(request, text, vocab_size=target.vocab_size, max_length=target.context_length)
    length += wish.max_tokens + (LONGEST if num_draft_tokens == AUTO else num_draft_tokens) + 1
    plan = Plan(
        target=_settings(models.target, target, length),
        draft=None if draft is None else _settings(models.draft, draft, length),
        num_draft_tokens=num_draft_tokens,
    )
    return PrivateRun(plan, request, _weigh(plan, target, draft, found.available))


def load_text(target_folder: Path) -> Text:
    """The target's tokenizer and chat template. Raises Refused."""
    try:
        return Text.load(target_folder)
    except TextError as error:
        raise Refused(str(error)) from error


def full_request(wish: Wish, target: str, text: Text) -> GenerateRequest:
    """The request with its prompt. Raises Refused when a chat is wanted and `target` has no template."""
    if wish.chat and not text.has_chat_template:
        raise Refused(f"--chat is given, but {target} has no chat template; use --no-chat")
    request = wish.options()
    if text.has_chat_template if wish.chat is None else wish.chat:
        request.chat.CopyFrom(Chat(messages=[ChatMessage(role="user", content=wish.prompt)]))
    else:
        request.text = wish.prompt
    return request


def _read(request: GenerateRequest, text: Text | None, *, vocab_size: int, max_length: int) -> int:
    """The number of the prompt's tokens; raises Refused by the service's own rules."""
    limits = Limits(
        vocab_size=vocab_size,
        max_length=max_length,
        max_choices=1,
        max_num_draft_tokens=MAX_DRAFT_TOKENS,
        default_max_tokens=1,
        num_draft_tokens=0,
        auto_draft_tokens=False,
        rule="token",
    )
    try:
        return len(read_request(request, text, limits).prompt)
    except TaskError as error:
        raise Refused(error.message) from error


def _settings(name: str, info: CheckpointInfo, length: int) -> WorkerSettings:
    # Draft and verification take turns, so both may use all cores: ARCHITECTURE.md has the figures.
    return WorkerSettings(
        name=name,
        folder=info.folder,
        gguf=info.gguf,
        num_slots=1,
        max_length=min(info.context_length, length),
        num_threads=info.num_threads(usable_cores()),
    )


def _weigh(plan: Plan, target: CheckpointInfo, draft: CheckpointInfo | None, available: int) -> str:
    models = [("target", target, plan.target), ("draft", draft, plan.draft)]
    total = estimate(
        [
            model_memory(role, info, num_slots=settings.num_slots, max_length=settings.max_length)
            for role, info, settings in models
            if info is not None and settings is not None
        ]
    )
    total.require(available)
    return total.sentence(available)
