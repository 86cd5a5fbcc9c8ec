"""Thirty-two streams at once through one deployment, joining and leaving at random: none sees another.

Guards against rows joined to the wrong session, state of one request visible in the next, a late answer in a
slot that has been given away, and slots that are not freed. At temperature 0 each text must be what the same
request gets alone, up to near ties of the two likeliest tokens.
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from protos import worker_pb2_grpc
from protos.authorization import metadata
from protos.inference_pb2 import GenerateRequest, TokenIds, Usage
from protos.wire import pack_tokens
from protos.worker_pb2 import Sampling, ScoreReply, ScoreRequest
from tests.pipelines import Pipeline, generate, pipeline
from tests.tiny_models import MAX_LENGTH, VOCAB_SIZE, tiny_llama
from workers.transformers_model import TransformersModel

NUM_STREAMS = 32
BLUR = 0.06  # of the weights' own spread
NEAR_TIE = 1e-3  # of the logits: kernels for other batch sizes may order them otherwise


@dataclass(frozen=True)
class Client:
    """What one client asks, when it joins, and after how many tokens it leaves."""

    prompt: list[int]
    max_tokens: int
    num_draft_tokens: int
    joins_seconds: float
    leaves_after: int | None

    @classmethod
    def at_random(cls, rng: random.Random) -> "Client":
        length = rng.randint(1, 60)
        max_tokens = rng.randint(1, 48)
        return cls(
            prompt=[rng.randrange(VOCAB_SIZE) for _ in range(length)],
            max_tokens=max_tokens,
            num_draft_tokens=rng.choice([0, 1, 3, 5]),
            joins_seconds=rng.random() * 0.2,
            leaves_after=rng.randint(0, max_tokens) if rng.random() < 0.3 else None,
        )

    async def run(self, stub: Any, usages: list[Usage]) -> list[int]:
        """The tokens that came before the client left, or all, and then its usage."""
        await asyncio.sleep(self.joins_seconds)
        request = GenerateRequest(
            token_ids=TokenIds(ids=self.prompt),
            max_tokens=self.max_tokens,
            num_draft_tokens=self.num_draft_tokens,
            temperature=0.0,
            ignore_end_tokens=True,
        )
        call = stub.Generate(request, timeout=120)
        tokens: list[int] = []
        async for reply in call:
            tokens += [token.id for token in reply.tokens.tokens]
            if reply.HasField("usage"):
                usages.append(reply.usage)
            if self.leaves_after is not None and len(tokens) >= self.leaves_after:
                call.cancel()
                break
        return tokens


@pytest.mark.parametrize(
    ("num_target_slots", "num_draft_slots"),
    [(NUM_STREAMS, NUM_STREAMS), (7, 3)],  # all at once; most wait, and some of those that run go undrafted
)
async def test_each_of_many_streams_gets_what_it_gets_alone(
    num_target_slots: int, num_draft_slots: int
) -> None:
    rng = random.Random(num_target_slots)
    clients = [Client.at_random(rng) for _ in range(NUM_STREAMS)]
    assert sum(client.leaves_after is not None for client in clients) >= 5
    target = TransformersModel(tiny_llama(0), num_slots=num_target_slots, max_length=MAX_LENGTH)
    draft = TransformersModel(_blurred(tiny_llama(0)), num_slots=num_draft_slots, max_length=MAX_LENGTH)
    async with pipeline(target, draft, control_token="secret") as running:
        usages: list[Usage] = []
        peak = asyncio.create_task(_peak(running))
        together = await asyncio.gather(*(client.run(running.stub, usages) for client in clients))
        peak.cancel()
        await _until_slots_are_free(running)
        num_accepted = sum(usage.num_accepted_tokens for usage in usages)
        assert 0 < num_accepted < sum(usage.num_draft_tokens for usage in usages)  # both happen
        assert await peak >= min(num_target_slots, NUM_STREAMS // 2)  # streams overlapped
        num_ties = 0
        for client, tokens in zip(clients, together, strict=True):
            alone = await generate(
                running.stub,
                client.prompt,
                max_tokens=client.max_tokens,
                num_draft_tokens=0,
                temperature=0.0,
                ignore_end_tokens=True,
            )
            if client.leaves_after is None:
                assert len(tokens) == client.max_tokens
            num_ties += await _is_cut_by_a_near_tie(running, client.prompt, tokens, alone.ids())
        await _until_slots_are_free(running)
    assert num_ties <= NUM_STREAMS // 8, f"{num_ties} near ties are more than chance"


def _blurred(model: PreTrainedModel) -> PreTrainedModel:
    """The model with noise in its weights: a drafter that is often right, and often not."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(BLUR * weights.std() * torch.randn(weights.shape, generator=generator))
    return model


async def _peak(running: Pipeline) -> int:
    """Most slots that the target has had in use at once, when cancelled."""
    most = 0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            most = max(most, running.target.num_slots_used)
            await asyncio.sleep(0.001)
    return most


async def _until_slots_are_free(running: Pipeline) -> None:
    assert running.draft is not None
    for _ in range(500):
        if running.target.num_slots_used == running.draft.num_slots_used == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"slots in use: {running.target.num_slots_used}, {running.draft.num_slots_used}")


async def _is_cut_by_a_near_tie(
    running: Pipeline, prompt: Sequence[int], tokens: Sequence[int], alone: Sequence[int]
) -> bool:
    """False when all tokens are those of the solo run; fails where they differ without a near tie."""
    for i, (mine, expected) in enumerate(zip(tokens, alone, strict=False)):
        if mine != expected:
            p = await _p_behind(running, [*prompt, *alone[:i]])
            gap = abs(float(np.log(p[expected]) - np.log(p[mine])))
            assert gap < NEAR_TIE, f"token {i} is {mine}, alone it is {expected}: {gap:.4f} apart"
            return True
    return False


async def _p_behind(running: Pipeline, tokens: Sequence[int]) -> dict[int, float]:
    request = ScoreRequest(
        tokens=pack_tokens(tokens), num_rows=1, sampling=Sampling(temperature=1.0, top_p=1.0)
    )
    async with grpc.aio.insecure_channel(running.target_address) as channel:
        stub = worker_pb2_grpc.TargetStub(channel)
        reply: ScoreReply = await stub.Score(request, metadata=metadata("secret"), timeout=20)
    [row] = reply.rows
    return dict(
        zip(
            np.frombuffer(row.ids, "<u4").tolist(),
            np.frombuffer(row.probabilities, "<f8").tolist(),
            strict=True,
        )
    )
