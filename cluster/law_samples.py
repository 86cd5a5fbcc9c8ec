"""Samples for a check of the law: many short ones behind one prompt, through the public service.

Knows the service's messages and what is sampled; not what the samples are compared with.

The first D tokens of each sample are compared, whatever K its rounds had. The first of them is plain, as the
drafter takes in the prompt meanwhile; those behind it come from rounds with drafts. A round drafts at most
one token less than may still be committed, so more is asked for than is compared. Of every four requests

- two ask for the shortest block that the rule can go wrong with, and for so many tokens more than D, so that
  bonus tokens and second rounds lie among the first tokens, where the law is resolved best;
- one asks for as many tokens, and its first block is as long as they allow, D + shortest block - 2 drafts;
- one asks for K + 2 tokens, if that is more, K being the deployment's, which its first block then has, given
  a drafter that is ready by the second round.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import grpc
from pydantic import Field

from cluster.law_report import Batch
from cluster.outcome import Refused
from protos.inference_pb2 import (
    FINISH_REASON_ABORT,
    FINISH_REASON_STOP,
    ORIGIN_PLAIN,
    GenerateRequest,
    ModelInfo,
    Token,
    TokenIds,
    Usage,
)
from protos.settings import Settings
from protos.worker_pb2 import Sampling

USUAL_AUTO = 4  # K that is chosen round by round is seldom above it
NUM_CHOICES = 8  # samples of a request: few, so that the time limit bites, but some, as they must differ
CALL_SECONDS = 60.0
PAUSE_SECONDS = 0.5  # before somebody busy is asked again

Progress = Callable[[str], None]
_T = TypeVar("_T")


class CheckFailed(RuntimeError):
    """The check could not be done. The sentence says why."""


class CheckSettings(Settings):
    """What is sampled."""

    num_samples: int = Field(default=1408, ge=16, le=1_000_000)
    depth: int = Field(default=3, ge=2, le=64)  # D: tokens of a sample that are compared
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_k: int = Field(default=20, ge=0, le=2**31 - 1)  # so that most tokens have probability zero
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int = Field(ge=0, le=2**64 - 1)  # of the first request; each has the next
    max_seconds: float = Field(default=600.0, gt=0.0)  # of the check, after which no further sample is begun

    @property
    def sampling(self) -> Sampling:
        """What shapes p."""
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


@contextlib.contextmanager
def in_words(who: str) -> Iterator[None]:
    """Turn an RPC's failure into CheckFailed."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        hint = "; `outrider ps` shows what is wrong" if error.code() is grpc.StatusCode.UNAVAILABLE else ""
        raise CheckFailed(f"{error.code().name} from {who}: {error.details()}{hint}") from error


async def patiently(
    who: str, ask: Callable[[], Awaitable[_T]], busy: Collection[grpc.StatusCode], give_up: float
) -> _T:
    """What `ask` returns, asked again while it fails with one of the `busy` codes. Raises CheckFailed.

    `give_up` is on the monotonic clock.
    """
    with in_words(who):
        while True:
            try:
                return await ask()
            except grpc.aio.AioRpcError as error:
                if error.code() not in busy or time.monotonic() > give_up - PAUSE_SECONDS:
                    raise
            await asyncio.sleep(PAUSE_SECONDS)


class Sampler:
    """Requests of a few choices each, as many at once as the service has places for."""

    def __init__(
        self,
        stub: Any,
        info: ModelInfo,
        prompt: Sequence[int],
        settings: CheckSettings,
        shortest_block: int,
        until: float,
        progress: Progress,
    ) -> None:
        """`stub` is the service's, `info` what it says of itself, `prompt` token ids.

        `shortest_block` is the smallest K at which the deployment's rule does all that it does; `until`, on
        the monotonic clock, is when the last request is begun. Raises Refused for a prompt that is too long.
        """
        self._stub = stub
        self._settings = settings
        self._until = until
        self._progress = progress
        self._end_token_ids = frozenset(info.end_token_ids)
        self._num_choices = min(NUM_CHOICES, info.max_choices)
        self._short_k = min(info.num_draft_tokens, shortest_block)
        self._num_at_once = -(-info.max_running_sessions // self._num_choices) + 1  # so that some wait
        self._request = GenerateRequest(
            token_ids=TokenIds(ids=prompt),
            max_tokens=settings.depth + shortest_block,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            n=self._num_choices,
        )
        longest = min(info.num_draft_tokens, USUAL_AUTO) if info.auto_draft_tokens else info.num_draft_tokens
        self._most_tokens = max(self._request.max_tokens, longest + 2)
        if len(prompt) + self._most_tokens > info.max_length:
            raise Refused(
                f"prompt has {len(prompt)} tokens, a sample up to {self._most_tokens} more; the context holds"
                f" {info.max_length}"
            )
        self._batches: dict[int, Batch] = {}

    async def sample(self) -> list[Batch]:
        """All of them, or those that were begun before time was up."""
        num_requests = -(-self._settings.num_samples // self._num_choices)
        numbers = iter(range(num_requests))
        self._begun = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._num_at_once, num_requests)):
                    group.create_task(self._work(numbers))
        except* CheckFailed as errors:
            raise errors.exceptions[0] from None
        return [self._batches[number] for number in sorted(self._batches)]

    async def _work(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            if time.monotonic() > self._until and self._batches:
                return
            self._batches[number] = await self._ask(number)
            self._say()

    def _say(self) -> None:
        num_done = len(self._batches) * self._num_choices
        num_left = max(0, self._settings.num_samples - num_done)
        seconds = (time.monotonic() - self._begun) / num_done * num_left
        self._progress(f"Sampling: {num_done} of {self._settings.num_samples}, about {seconds:.0f} s left")

    async def _ask(self, number: int) -> Batch:
        """One request, with a seed of its own. It is sent again only where it was not begun."""
        request = GenerateRequest(seed=(self._settings.seed + number) % 2**64)
        request.MergeFrom(self._request)
        if number % 4 == 0:
            request.max_tokens = self._most_tokens
        elif number % 2 and self._short_k:
            request.num_draft_tokens = self._short_k
        give_up = self._until + CALL_SECONDS
        return await patiently(
            "the service",
            lambda: self._collect(request, give_up - time.monotonic()),
            (grpc.StatusCode.RESOURCE_EXHAUSTED,),
            give_up,
        )

    async def _collect(self, request: GenerateRequest, seconds: float) -> Batch:
        choices: list[list[Token]] = [[] for _ in range(request.n)]
        num_ended, usage = 0, Usage()
        async for reply in self._stub.Generate(request, timeout=max(seconds, 1.0)):
            match reply.WhichOneof("event"):
                case "tokens":
                    choices[reply.tokens.choice] += reply.tokens.tokens
                case "finished" if reply.finished.reason == FINISH_REASON_ABORT:
                    raise CheckFailed(
                        "Somebody aborted a request of the check; what is left could be biased."
                    )
                case "finished":
                    num_ended += reply.finished.reason == FINISH_REASON_STOP
                case "usage":
                    usage = reply.usage
        compared = [tokens[: self._settings.depth] for tokens in choices]
        return Batch(
            samples=tuple(tuple(token.id for token in tokens) for tokens in compared),
            num_verified=sum(token.origin != ORIGIN_PLAIN for tokens in compared for token in tokens[1:]),
            num_ended=num_ended,
            num_cut=sum(self._is_cut(tokens, request.max_tokens) for tokens in choices),
            num_accepted_per_pos=tuple(usage.num_accepted_tokens_per_pos),
            num_draft_tokens=usage.num_draft_tokens,
            num_judged=usage.num_judged_tokens,
            mean_min_pq=usage.mean_min_pq,
            num_mismatches=usage.num_redraw_mismatches,
            num_unusable=usage.num_unusable_rows,
        )

    def _is_cut(self, tokens: Sequence[Token], max_tokens: int) -> bool:
        """Whether a sample stops though nothing has ended it."""
        return len(tokens) < max_tokens and not (tokens and tokens[-1].id in self._end_token_ids)
