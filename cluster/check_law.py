"""The proof on a live deployment: asks its target for p, its public service for samples, and compares.

Knows the target's service and the order of the check; the samples come from `law_samples`, the mathematics
stands in `joint_law`, the judgement in `law_report`. Nothing is drawn again and nothing that was sampled is
left out: either could bias.
"""

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from cluster.joint_law import LawTree, Row, Tokens
from cluster.law_report import Impossible, LawReport, report
from cluster.law_samples import CALL_SECONDS, CheckSettings, Progress, Sampler, in_words
from protos import inference_pb2_grpc, worker_pb2_grpc
from protos.authorization import metadata
from protos.inference_pb2 import GetModelInfoRequest
from protos.wire import CHANNEL_OPTIONS, PROTOCOL_VERSION, pack_tokens
from protos.worker_pb2 import HandshakeRequest, Sampling, ScoreRequest

LEAST_EXPECTED_PREFIX = 40.0  # samples that go through a prefix, for its row to be asked for beforehand
NUM_EXTRA_PREFIXES = 32  # sequences whose other rows are asked for behind the sampling
TIE_TOLERANCES = {"bfloat16": 0.2, "float16": 0.03}  # rounding of p between passes, relative; else:
TIE_TOLERANCE = 1e-3


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
        with in_words("the service"):
            info = await stub.GetModelInfo(GetModelInfoRequest(), timeout=CALL_SECONDS)
        tree = await _grow(target, settings, info.end_token_ids, progress)
        shortest_block = 1 if endpoints.has_token_rule else 2
        batches = await Sampler(stub, info, prompt, settings, shortest_block, progress).sample()
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
        is_drafting=info.num_draft_tokens > 0,
        has_token_rule=endpoints.has_token_rule,
    )


@contextlib.asynccontextmanager
async def _called(address: str) -> AsyncIterator[grpc.aio.Channel]:
    options = [*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield channel


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
        with in_words("the target"):
            hello = HandshakeRequest(protocol_version=PROTOCOL_VERSION, coordinator="check-law")
            dtype = (await self._stub.Handshake(hello, timeout=CALL_SECONDS)).dtype
        least = min(whole.p_of(int(other)) for other in kept.ids)
        return whole.p_of(token) >= (1.0 - TIE_TOLERANCES.get(dtype, TIE_TOLERANCE)) * least

    async def _score(self, tokens: Tokens, num_rows: int, sampling: Sampling) -> list[Row]:
        request = ScoreRequest(
            tokens=pack_tokens([*self._prompt, *tokens]), num_rows=num_rows, sampling=sampling
        )
        with in_words("the target"):
            reply = await self._stub.Score(request, timeout=CALL_SECONDS, metadata=self._token)
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
