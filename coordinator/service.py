"""The public Inference service: requests in, events out as rounds commit tokens.

Knows requests, the streams that read them and their ends; choices are decoded elsewhere. Every way out of a
request (its end, an error, Abort, a client that is gone, a deadline) frees what it held at the workers. What
it has said is kept for a while, and a request that is not complete goes on when it is resumed.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import grpc
from grpc_status import rpc_status

from coordinator.admission import Admission
from coordinator.choices import Choices, Request
from coordinator.kept_requests import KeepSettings, KeptRequests
from coordinator.requests import Limits, check_resumption, read_request
from coordinator.text import Text
from coordinator.usage import Tally, totals_of, usage_of
from protos.control_pb2 import Totals
from protos.inference_pb2 import (
    AbortReply,
    AbortRequest,
    GenerateReply,
    GenerateRequest,
    GetModelInfoRequest,
    ModelInfo,
    Started,
)
from protos.inference_pb2_grpc import InferenceServicer
from protos.status import TaskError

Write = Callable[[GenerateReply], Awaitable[None]]


class InferenceService(InferenceServicer):
    """Generate, Abort and GetModelInfo over drafters and targets."""

    def __init__(
        self,
        *,
        choices: Choices,
        text: Text | None,
        limits: Limits,
        admission: Admission,
        keep: KeepSettings,
        info: ModelInfo,
    ) -> None:
        """`info` is completed with live counts."""
        self._choices = choices
        self._text = text
        self._limits = limits
        self._admission = admission
        self._info = info
        self._running: dict[str, Request] = {}
        self._kept: KeptRequests[Request] = KeptRequests(keep)
        self._num_requests = 0
        self._finished = Tally()

    @property
    def num_running(self) -> int:
        """Requests that are decoded, or have a stream that is not complete."""
        return len(self._running)

    @property
    def num_running_sessions(self) -> int:
        """Sessions that are decoded now."""
        return self._admission.num_running

    @property
    def num_waiting_sessions(self) -> int:
        """Sessions that wait for a place."""
        return self._admission.num_waiting

    def totals(self) -> Totals:
        """What all requests have counted so far."""
        tally = Tally()
        for part in (self._finished, *(running.tally for running in self._running.values())):
            tally.add(part)
        return totals_of(tally, self._num_requests)

    async def end(self) -> None:
        """End what still runs, release its sessions, and keep nothing."""
        await self._choices.end()
        self._kept.clear()

    async def Generate(
        self,
        request: GenerateRequest,
        context: grpc.aio.ServicerContext[GenerateRequest, GenerateReply],
    ) -> None:
        """See inference.proto.

        A coroutine that writes, not a generator: one that is cancelled between two replies would be left to
        the garbage collector, and its request with it.
        """
        try:
            await self._stream(request, context.write)
        except TaskError as error:
            await context.abort_with_status(rpc_status.to_status(error.to_status()))

    async def Abort(
        self, request: AbortRequest, context: grpc.aio.ServicerContext[AbortRequest, AbortReply]
    ) -> AbortReply:
        """See inference.proto."""
        running = self._running.get(request.request_id)
        if running is None:
            self._kept.forget(request.request_id)
            return AbortReply(aborted=False)
        running.abort()  # now: the stream may be held up by a client that does not read
        return AbortReply(aborted=True)

    async def GetModelInfo(
        self,
        request: GetModelInfoRequest,
        context: grpc.aio.ServicerContext[GetModelInfoRequest, ModelInfo],
    ) -> ModelInfo:
        """See inference.proto."""
        info = ModelInfo()
        info.CopyFrom(self._info)
        info.num_running_sessions = self.num_running_sessions
        info.num_waiting_sessions = self.num_waiting_sessions
        return info

    async def _stream(self, message: GenerateRequest, write: Write) -> None:
        """One stream that reads a request, from its beginning or from where the message says."""
        request = self._resume(message) if message.resume_from else await self._begin(message)
        order, transcript = request.order, request.transcript
        stream = transcript.begin_stream()
        try:
            started = Started(
                request_id=order.request_id, seed=order.seed, num_prompt_tokens=len(order.prompt)
            )
            await write(GenerateReply(started=started))
            start = list(message.resume_from) or [0] * order.num_choices
            async with contextlib.aclosing(transcript.read(stream, start)) as events:
                async for event in events:
                    await write(event)
            self._settle(request)
            await write(GenerateReply(usage=usage_of(request.past, len(order.prompt))))
        finally:
            if transcript.is_read_by(stream):
                self._settle(request)

    async def _begin(self, message: GenerateRequest) -> Request:
        order = await asyncio.to_thread(read_request, message, self._text, self._limits)
        name = order.request_id
        if name in self._running:
            raise TaskError.invalid("request_id", f"is {name!r}, which is running already")
        request = self._running[name] = self._choices.begin(order)
        self._kept.forget(name)  # an earlier request of this name
        self._num_requests += 1
        return request

    def _resume(self, message: GenerateRequest) -> Request:
        """The request that is named, decoded again where it is not complete. Raises TaskError."""
        name = message.request_id
        request = self._running.get(name) or self._kept.get(name)
        if request is None:
            raise TaskError.unknown("request_id", name)
        check_resumption(message, request.order, request.transcript.num_tokens)
        if name not in self._running and request.transcript.unfinished:
            self._choices.go_on(request)
            self._kept.forget(name)
            self._running[name] = request
        return request

    def _settle(self, request: Request) -> None:
        """Nobody reads the request any more, or nothing is to come: free what it holds, keep what it said."""
        name = request.order.request_id
        if self._running.get(name) is request:
            del self._running[name]
            self._finished.add(request.interrupt())
            self._kept.keep(name, request)
