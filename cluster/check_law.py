"""The proof on a live deployment: asks its target for p, its public service for samples, and compares.

Knows the two services and the order of the check; the mathematics stands in `joint_law`, the judgement in
`law_report`. Nothing is drawn again and nothing that was sampled is left out: either could bias.

The first token of a sample is plain, as the drafter takes in the prompt meanwhile; those behind it come from
rounds with drafts. One token more is asked for than is compared, since a round drafts at most one token less
than may still be committed: so every compared token but the first can come from a round with drafts. Every
other request asks for the shortest block that its rule can go wrong with, so that bonus tokens and second
rounds lie among the first tokens, where the law is resolved best; the others leave K to the deployment.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from pydantic import Field

from cluster.joint_law import LawTree, Row, Tokens
from cluster.law_report import Batch, Impossible, LawReport, report
from protos import inference_pb2_grpc, worker_pb2_grpc
from protos.authorization import metadata
from protos.inference_pb2 import (
    FINISH_REASON_STOP,
    ORIGIN_PLAIN,
    GenerateRequest,
    GetModelInfoRequest,
    ModelInfo,
    Token,
    TokenIds,
    Usage,
)
from protos.settings import Settings
from protos.wire import CHANNEL_OPTIONS, PROTOCOL_VERSION, pack_tokens
from protos.worker_pb2 import HandshakeRequest, Sampling, ScoreRequest

NUM_CHOICES = 8  # samples of a request: few, so that the time limit bites, but some, as they must differ
SCORE_SECONDS = 60.0
LEAST_EXPECTED_PREFIX = 40.0  # samples that go through a prefix, for its row to be asked for beforehand
NUM_EXTRA_PREFIXES = 48  # sequences whose other rows are asked for behind the sampling
TIE_TOLERANCES = {"bfloat16": 0.2, "float16": 0.03}  # rounding of p between passes, relative; else:
TIE_TOLERANCE = 1e-3
PAUSE_SECONDS = 0.5  # where other requests fill the service

Progress = Callable[[str], None]


class CheckFailed(RuntimeError):
    """The check could not be done. The sentence says why."""


class CheckSettings(Settings):
    """What is sampled."""

    num_samples: int = Field(default=1280, ge=16, le=1_000_000)
    depth: int = Field(default=4, ge=2, le=64)  # D: tokens of a sample that are compared
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_k: int = Field(default=20, ge=0, le=2**31 - 1)  # so that most tokens have probability zero
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int = Field(ge=0, le=2**64 - 1)  # of the first request; each has the next
    max_seconds: float = Field(default=600.0, gt=0.0)  # of sampling

    @property
    def sampling(self) -> Sampling:
        """What shapes p."""
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a deployment is asked, and what shows that one may."""

    service: str  # host:port of the public service
    target: str  # host:port of a target
    control_token: str
    has_token_rule: bool = True  # else the block rule


async def check_law(
    endpoints: Endpoints, prompt: Sequence[int], settings: CheckSettings, progress: Progress
) -> LawReport:
    """Sample behind the prompt's token ids and compare with p. Raises CheckFailed."""
    async with _called(endpoints.service) as service, _called(endpoints.target) as worker:
        target = _Target(worker_pb2_grpc.TargetStub(worker), prompt, settings, endpoints.control_token)
        stub: Any = inference_pb2_grpc.InferenceStub(service)
        with _in_words("the service"):
            info = await stub.GetModelInfo(GetModelInfoRequest(), timeout=SCORE_SECONDS)
        tree = await _grow(target, settings, info.end_token_ids, progress)
        shortest_block = 1 if endpoints.has_token_rule else 2
        batches = await _Sampler(stub, info, prompt, settings, shortest_block, progress).sample()
        samples = [sample for batch in batches for sample in batch.samples]
        rows = dict(tree.rows)
        progress("Asking for rows of p behind what was sampled")
        await _score_more(target, samples, rows)
        num_checked, impossible = await _look_up(target, samples, rows)
    return report(
        tree,
        batches,
        impossible,
        depth=settings.depth,
        num_wanted=settings.num_samples,
        num_extra_rows=len(rows) - len(tree.rows),
        num_checked=num_checked,
        has_token_rule=endpoints.has_token_rule,
    )


@contextlib.asynccontextmanager
async def _called(address: str) -> AsyncIterator[grpc.aio.Channel]:
    options = [*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield channel


@contextlib.contextmanager
def _in_words(who: str) -> Iterator[None]:
    """Turn an RPC's failure into CheckFailed."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise CheckFailed(f"{error.code().name} from {who}: {error.details()}") from error


class _Target:
    """Rows of p, asked for one request at a time: nothing else of the check takes part in their passes."""

    def __init__(self, stub: Any, prompt: Sequence[int], settings: CheckSettings, token: str) -> None:
        self._stub = stub
        self._prompt = tuple(prompt)
        self._sampling = settings.sampling
        self._token = metadata(token)

    async def rows(self, tokens: Tokens, num_rows: int) -> list[Row]:
        """p behind each of the last `num_rows` prefixes of the prompt and these tokens."""
        return await self._score(tokens, num_rows, self._sampling)

    async def is_tie(self, prefix: Tokens, token: int, kept: Row) -> bool:
        """Whether rounding may decide if a token without probability is among those that settings keep.

        All settings keep the likeliest tokens. One that is as likely as the last of them, but for rounding
        (kernels round differently for other batches), may be kept in one pass and not in the next.
        """
        sampling = Sampling(temperature=self._sampling.temperature or 1.0, top_p=1.0)
        [whole] = await self._score(prefix, 1, sampling)
        with _in_words("the target"):
            hello = HandshakeRequest(protocol_version=PROTOCOL_VERSION, coordinator="check-law")
            dtype = (await self._stub.Handshake(hello, timeout=SCORE_SECONDS)).dtype
        least = min(whole.p_of(int(other)) for other in kept.ids)
        return whole.p_of(token) >= (1.0 - TIE_TOLERANCES.get(dtype, TIE_TOLERANCE)) * least

    async def _score(self, tokens: Tokens, num_rows: int, sampling: Sampling) -> list[Row]:
        request = ScoreRequest(
            tokens=pack_tokens([*self._prompt, *tokens]), num_rows=num_rows, sampling=sampling
        )
        with _in_words("the target"):
            reply = await self._stub.Score(request, timeout=SCORE_SECONDS, metadata=self._token)
        return [
            Row(
                np.frombuffer(row.ids, dtype="<u4").astype(np.int64),
                np.frombuffer(row.probabilities, dtype="<f8").astype(np.float64),
            )
            for row in reply.rows
        ]


async def _grow(
    target: _Target, settings: CheckSettings, end_token_ids: Sequence[int], progress: Progress
) -> LawTree:
    """Every prefix that enough samples will go through gets its row, before anything is sampled."""
    least_mass = LEAST_EXPECTED_PREFIX / settings.num_samples
    tree = LawTree(depth=settings.depth, least_mass=least_mass, end_token_ids=end_token_ids)
    while (prefix := tree.next_prefix()) is not None:
        progress(f"Asking for rows of p: {len(tree.rows) + 1}")
        [row] = await target.rows(prefix, 1)
        tree.add(prefix, row)
    return tree


async def _score_more(target: _Target, samples: Sequence[Tokens], rows: dict[Tokens, Row]) -> None:
    """Add rows behind prefixes that were sampled but are not in the tree, those of one sequence at once."""
    num_requests = 0
    for sample in dict.fromkeys(samples):
        unknown = [n for n in range(len(sample)) if sample[:n] not in rows]
        if unknown and num_requests < NUM_EXTRA_PREFIXES:
            num_requests += 1
            last = len(sample) - 1
            found = await target.rows(sample[:last], last - unknown[0] + 1)
            rows |= {sample[:n]: row for n, row in zip(range(unknown[0], last + 1), found, strict=True)}


async def _look_up(
    target: _Target, samples: Sequence[Tokens], rows: dict[Tokens, Row]
) -> tuple[int, list[Impossible]]:
    """How many sampled tokens have a known row, and those that it gives no probability, ties apart."""
    num_checked = 0
    suspects: dict[Impossible, bool] = {}
    impossible = []
    for sample in samples:
        for n, token in enumerate(sample):
            row = rows.get(sample[:n])
            if row is None:
                continue
            num_checked += 1
            if row.p_of(token) > 0.0:
                continue
            suspect = Impossible(sample[:n], token)
            if suspect not in suspects:
                suspects[suspect] = await target.is_tie(sample[:n], token, row)
            if not suspects[suspect]:
                impossible.append(suspect)
    return num_checked, impossible


class _Sampler:
    """Requests of a few choices each, as many at once as the service has places for."""

    def __init__(
        self,
        stub: Any,
        info: ModelInfo,
        prompt: Sequence[int],
        settings: CheckSettings,
        shortest_block: int,
        progress: Progress,
    ) -> None:
        self._stub = stub
        self._settings = settings
        self._progress = progress
        self._num_choices = min(NUM_CHOICES, info.max_choices)
        self._short_k = min(info.num_draft_tokens, shortest_block)
        self._num_at_once = -(-info.max_running_sessions // self._num_choices) + 1  # so that some wait
        self._request = GenerateRequest(
            token_ids=TokenIds(ids=prompt),
            max_tokens=settings.depth + 1,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            n=self._num_choices,
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
            if time.monotonic() - self._begun > self._settings.max_seconds and self._batches:
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
        if number % 2 and self._short_k:
            request.num_draft_tokens = self._short_k
        give_up = self._begun + self._settings.max_seconds + SCORE_SECONDS
        while True:
            try:
                return await self._collect(request, give_up - time.monotonic())
            except grpc.aio.AioRpcError as error:
                is_full = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                if not is_full or time.monotonic() > give_up - PAUSE_SECONDS:
                    raise CheckFailed(f"{error.code().name} from the service: {error.details()}") from error
            await asyncio.sleep(PAUSE_SECONDS)

    async def _collect(self, request: GenerateRequest, seconds: float) -> Batch:
        choices: list[list[Token]] = [[] for _ in range(request.n)]
        num_ended, usage = 0, Usage()
        async for reply in self._stub.Generate(request, timeout=max(seconds, 1.0)):
            match reply.WhichOneof("event"):
                case "tokens":
                    choices[reply.tokens.choice] += reply.tokens.tokens
                case "finished":
                    num_ended += reply.finished.reason == FINISH_REASON_STOP
                case "usage":
                    usage = reply.usage
        compared = [tokens[: self._settings.depth] for tokens in choices]
        return Batch(
            samples=tuple(tuple(token.id for token in tokens) for tokens in compared),
            num_verified=sum(token.origin != ORIGIN_PLAIN for tokens in compared for token in tokens[1:]),
            num_ended=num_ended,
            num_accepted=usage.num_accepted_tokens,
            num_draft_tokens=usage.num_draft_tokens,
            num_judged=usage.num_judged_tokens,
            mean_min_pq=usage.mean_min_pq,
            num_mismatches=usage.num_redraw_mismatches,
            num_unusable=usage.num_unusable_rows,
        )
