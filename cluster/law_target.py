"""Rows of p from one target, asked for with the control token: the very numbers that verification uses.

Knows the target's service, and how far rounding may move p from one pass to the next, as kernels round
differently for other batches; not what the rows are compared with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc
import numpy as np

from cluster.joint_law import Row, Tokens
from cluster.law_samples import CALL_SECONDS, in_words, patiently
from protos import worker_pb2_grpc
from protos.authorization import metadata
from protos.wire import PROTOCOL_VERSION, pack_tokens
from protos.worker_pb2 import HandshakeRequest, Sampling, ScoreReply, ScoreRequest

TOLERANCES = {"bfloat16": 0.2, "float16": 0.03}  # of p between passes, relative; else:
TOLERANCE = 1e-3
_BUSY = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Asked for rows one request at a time: nothing else of the check takes part in their passes."""

    address: str  # host:port
    prompt: Tokens
    sampling: Sampling  # what shapes p
    tolerance: float
    give_up: float  # on the monotonic clock: until then it is asked again while it is busy
    stub: Any
    token: tuple[tuple[str, str], ...]

    @classmethod
    async def meet(
        cls,
        channel: grpc.aio.Channel,
        address: str,
        token: str,
        prompt: Sequence[int],
        sampling: Sampling,
        give_up: float,
    ) -> Self:
        """Ask who is there. `token` is the control token, `prompt` token ids. Raises CheckFailed."""
        stub: Any = worker_pb2_grpc.TargetStub(channel)
        hello = HandshakeRequest(protocol_version=PROTOCOL_VERSION, coordinator="check-law")
        with in_words(f"the target at {address}"):
            dtype = (await stub.Handshake(hello, timeout=CALL_SECONDS)).dtype
        tolerance = TOLERANCES.get(dtype, TOLERANCE)
        return cls(address, tuple(prompt), sampling, tolerance, give_up, stub, metadata(token))

    async def rows(self, tokens: Tokens, num_rows: int) -> list[Row]:
        """p behind each of the last `num_rows` prefixes of prompt and tokens. Raises CheckFailed."""
        return await self._score(tokens, num_rows, self.sampling)

    async def whole_row(self, tokens: Tokens) -> Row:
        """The same behind all of them, with no token cut off by settings."""
        whole = Sampling(temperature=self.sampling.temperature or 1.0, top_p=1.0)
        [row] = await self._score(tokens, 1, whole)
        return row

    async def is_tie(self, prefix: Tokens, token: int) -> bool:
        """Whether rounding may decide if a token that a row gives no probability is among those it keeps.

        It may if the token is kept once the mass behind `top_p` and the share `min_p` are less by the
        tolerance: the next token outside them may be much less likely than the last one inside. And it may
        if the token is as likely as the least likely of those, but for the tolerance, as at the edge of
        `top_k`.
        """
        relaxed = Sampling()
        relaxed.CopyFrom(self.sampling)
        relaxed.top_p = 1.0 - (1.0 - relaxed.top_p) / (1.0 + self.tolerance)
        relaxed.min_p *= 1.0 - self.tolerance
        [kept] = await self._score(prefix, 1, relaxed)
        if kept.p_of(token) > 0.0:
            return True
        whole = await self.whole_row(prefix)
        least = min(whole.p_of(other) for other in kept.ids.tolist())
        return whole.p_of(token) >= (1.0 - self.tolerance) * least

    async def _score(self, tokens: Tokens, num_rows: int, sampling: Sampling) -> list[Row]:
        request = ScoreRequest(
            tokens=pack_tokens([*self.prompt, *tokens]), num_rows=num_rows, sampling=sampling
        )
        reply: ScoreReply = await patiently(
            f"the target at {self.address}",
            lambda: self.stub.Score(request, timeout=CALL_SECONDS, metadata=self.token),
            _BUSY,
            self.give_up,
        )
        return [
            Row(
                np.frombuffer(row.ids, dtype="<u4").astype(np.int64),
                np.frombuffer(row.probabilities, dtype="<f8").astype(np.float64),
            )
            for row in reply.rows
        ]
