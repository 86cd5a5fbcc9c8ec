"""Requests to the public API from one client: each with its deadline, its retries, and all that it said.

Knows the public messages and errors. Prints nothing, and leaves it to others how many run at once.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import grpc
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from cluster.call_requests import Call
from cluster.generation import Generation
from protos.inference_pb2 import AbortRequest, GenerateReply
from protos.inference_pb2_grpc import InferenceStub
from protos.status import TaskError
from protos.wire import CHANNEL_OPTIONS

OPTIONS: list[tuple[str, int]] = [
    *CHANNEL_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_reconnect_backoff_ms", 2000),  # else a service that comes back is found after two minutes
]
MAX_PAUSE_SECONDS = 30.0  # between attempts
_CLOCKS_SECONDS = 0.1  # gRPC counts the deadline by another clock
_RETRIED = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)

Show = Callable[[Call, GenerateReply], None]


@dataclass(slots=True)
class Answer:
    """What came of a call."""

    call: Call
    choices: list[Generation] = field(init=False)
    error: TaskError | None = None
    seconds: float = 0.0  # from the first sending to the end, pauses and all

    def __post_init__(self) -> None:
        """Nothing has been said yet."""
        self.choices = [Generation() for _ in range(max(1, self.call.request.n))]

    def take(self, reply: GenerateReply, seconds: float) -> None:
        """Add what one reply says, so many seconds after the request was sent."""
        event = reply.WhichOneof("event")
        if event in ("tokens", "finished"):
            self.choices[getattr(reply, event).choice].take(reply, seconds)
        else:
            for choice in self.choices:
                choice.take(reply, seconds)

    @property
    def is_complete(self) -> bool:
        """Whether every choice has come to its end, by Abort too."""
        return all(choice.finish_reason for choice in self.choices)

    @property
    def is_aborted(self) -> bool:
        """Whether somebody called Abort."""
        return any(choice.finish_reason == "abort" for choice in self.choices)

    @property
    def has_output(self) -> bool:
        """Whether a token has arrived, or an end without one."""
        return any(choice.tokens or choice.finish_reason for choice in self.choices)


class Caller:
    """Sends requests over one channel."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        timeout_seconds: float,
        max_retries: int,
        show: Show = lambda call, reply: None,
    ) -> None:
        """`timeout_seconds` is for calls that name none; `show` gets every reply as it arrives."""
        self._stub = InferenceStub(channel)
        self._timeout_seconds = timeout_seconds
        self._max_retries = max_retries
        self._show = show

    async def answer(self, call: Call) -> Answer:
        """Send a request, again where the service asks for it, and read to its end.

        Errors are in the answer. So is the cancellation of this task, which ends the request at the service.
        """
        answer = Answer(call)
        begun = time.monotonic()
        timeout = call.timeout_seconds or self._timeout_seconds
        try:
            await self._try(answer, begun, begun + timeout)
        except asyncio.CancelledError:
            answer.error = TaskError(grpc.StatusCode.CANCELLED, "the caller was interrupted")
        answer.seconds = time.monotonic() - begun
        error = answer.error
        is_late = answer.seconds > timeout - _CLOCKS_SECONDS  # if not, it was a deadline within the service
        if error is not None and error.code is grpc.StatusCode.DEADLINE_EXCEEDED and is_late:
            answer.error = TaskError.deadline(f"the request was not complete within {timeout:g} seconds")
        return answer

    async def _try(self, answer: Answer, begun: float, deadline: float) -> None:
        for num_retries in range(self._max_retries + 1):
            answer.error = await self._send(answer, begun, deadline)
            if answer.error is None or answer.has_output or num_retries == self._max_retries:
                return
            pause = _pause(answer.error, num_retries)
            if pause is None or time.monotonic() + pause >= deadline:
                return
            await asyncio.sleep(pause)

    async def _send(self, answer: Answer, begun: float, deadline: float) -> TaskError | None:
        """One attempt; returns how it failed."""
        replies = self._stub.Generate(answer.call.request, timeout=deadline - time.monotonic())
        try:
            async for reply in replies:
                answer.take(reply, time.monotonic() - begun)
                self._show(answer.call, reply)
        except grpc.aio.AioRpcError as error:
            return _error_of(error)
        finally:
            replies.cancel()  # where `show` failed; nothing is left to cancel otherwise
        return None if answer.is_complete else TaskError.internal("the stream ended before the request did")


async def abort(channel: grpc.aio.Channel, request_id: str, timeout_seconds: float) -> bool:
    """Whether a request of this name was running and is ended. Raises TaskError."""
    try:
        reply = await InferenceStub(channel).Abort(
            AbortRequest(request_id=request_id), timeout=timeout_seconds
        )
    except grpc.aio.AioRpcError as error:
        raise _error_of(error) from error
    return bool(reply.aborted)


def field_of(error: TaskError) -> str | None:
    """The field that an INVALID_ARGUMENT names."""
    for detail in error.details:
        if isinstance(detail, BadRequest) and detail.field_violations:
            return str(detail.field_violations[0].field)
    return None


def retry_seconds_of(error: TaskError) -> float | None:
    """After how long the service wants to be asked again; None when it does not say."""
    for detail in error.details:
        if isinstance(detail, RetryInfo):
            return float(detail.retry_delay.ToNanoseconds()) / 1e9
    return None


def _pause(error: TaskError, num_retries: int) -> float | None:
    """Seconds before the next attempt: what the service asks for, doubled with each; None for no attempt."""
    asked = retry_seconds_of(error)
    if error.code not in _RETRIED or asked is None or asked > MAX_PAUSE_SECONDS:
        return None
    return min(asked * 2.0**num_retries, MAX_PAUSE_SECONDS)


def _error_of(error: grpc.aio.AioRpcError) -> TaskError:
    with contextlib.suppress(ValueError):  # details that contradict the status
        status = rpc_status.from_call(cast(grpc.Call, error))
        if isinstance(status, Status):
            return TaskError.from_status(status)
    return TaskError(error.code(), error.details() or "")
