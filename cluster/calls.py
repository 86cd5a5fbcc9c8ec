"""Requests to the public API from one client: each with its deadline, its retries, and all that it said.

Knows the public messages and errors. Prints nothing, and leaves it to others how many run at once.
"""

import asyncio
import contextlib
import itertools
import random
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
from protos.inference_pb2 import AbortRequest, GenerateReply, GenerateRequest
from protos.inference_pb2_grpc import InferenceStub
from protos.status import TaskError
from protos.wire import CHANNEL_OPTIONS

OPTIONS: list[tuple[str, int]] = [
    *CHANNEL_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_reconnect_backoff_ms", 2000),  # else a service that comes back is found after two minutes
]
MAX_SPREAD_SECONDS = 30.0  # of the pauses between attempts, beyond what the service asks for
MIN_PAUSE_SECONDS = 0.01
RESUME_PAUSE_SECONDS = 0.5  # where a connection is lost, which says nothing of when to come again
_CLOCKS_SECONDS = 0.1  # gRPC counts the deadline by another clock

Show = Callable[[Call, GenerateReply], None]


@dataclass(slots=True)
class Answer:
    """What came of a call."""

    call: Call
    choices: list[Generation] = field(default_factory=lambda: [Generation()])  # all n from Started on
    error: TaskError | None = None
    seconds: float = 0.0  # from the first sending to the end, pauses and all
    request_id: str = ""  # by which the service knows the request, once it has said so

    @property
    def next_request(self) -> GenerateRequest:
        """What to send: the call's request, or one that resumes it behind what has arrived."""
        asked = self.call.request
        if not self.has_output:
            return asked
        request = GenerateRequest()
        request.CopyFrom(asked)
        request.request_id = self.request_id
        known = list(asked.resume_from) or [0] * len(self.choices)
        request.resume_from[:] = [
            first + len(choice.tokens) for first, choice in zip(known, self.choices, strict=True)
        ]
        return request

    def take(self, reply: GenerateReply, seconds: float) -> bool:
        """Add what one reply says, so many seconds after the request was sent.

        Returns False for what had been said before the stream was resumed. Raises TaskError for a choice that
        the request has not.
        """
        event = reply.WhichOneof("event")
        if event == "started":
            if self.has_output:  # resumed
                return False
            # Not sooner: n may be any number until the service has agreed to it.
            self.choices = [Generation() for _ in range(max(1, self.call.request.n))]
            self.request_id = reply.started.request_id
        if event in ("tokens", "finished"):
            choice = getattr(reply, event).choice
            if choice >= len(self.choices):
                limit = f"it must lie in 0..{len(self.choices) - 1}"
                raise TaskError.internal(f"choice of the service's reply is {choice}; {limit}")
            if event == "finished" and self.choices[choice].finish_reason:
                return False
            self.choices[choice].take(reply, seconds)
        else:
            for choice in self.choices:
                choice.take(reply, seconds)
        return True

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
        """`timeout_seconds` is for calls that name none; `show` gets every reply as it arrives.

        `max_retries` is for a service that is unavailable, or gets lost in mid-text; a full one is waited for
        until the deadline.
        """
        self._stub = InferenceStub(channel)
        self._timeout_seconds = timeout_seconds
        self._max_retries = max_retries
        self._show = show

    async def answer(self, call: Call) -> Answer:
        """Send a request, again where the service asks for it, and read to its end.

        Where the stream breaks behind its first token, it is resumed behind what has arrived.

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
        # A request_id that the caller gave is the same in every attempt. One that is sent while an earlier
        # one still runs at the service is refused as running already: Abort must find one request of a name.
        num_unavailable = 0
        for num_retries in itertools.count():
            is_resumed = answer.has_output
            error = await self._send(answer, begun, deadline)
            if is_resumed and error is not None and error.code is grpc.StatusCode.NOT_FOUND:
                return  # the service is another one now: what has failed is what broke the stream
            answer.error = error
            if error is None or (answer.has_output and not answer.request_id):
                return
            num_unavailable += error.code is grpc.StatusCode.UNAVAILABLE
            if num_unavailable > self._max_retries:
                return
            unasked = RESUME_PAUSE_SECONDS if answer.has_output else None
            pause = retry_pause(error, num_retries, deadline - time.monotonic(), unasked)
            if pause is None:
                return
            await asyncio.sleep(pause)

    async def _send(self, answer: Answer, begun: float, deadline: float) -> TaskError | None:
        """One attempt; returns how it failed."""
        replies = self._stub.Generate(answer.next_request, timeout=deadline - time.monotonic())
        try:
            async for reply in replies:
                if answer.take(reply, time.monotonic() - begun):
                    self._show(answer.call, reply)
        except grpc.aio.AioRpcError as error:
            return _error_of(error)
        except TaskError as error:
            return error
        finally:
            replies.cancel()  # where a reply could not be taken or shown; otherwise nothing is left to cancel
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


def retry_pause(
    error: TaskError, num_retries: int, left_seconds: float, unasked: float | None = None
) -> float | None:
    """Seconds before the next attempt, of the `left_seconds` before the deadline; None for no attempt.

    What the service asks for (`unasked` where it says nothing), and a random part on top, lest all that were
    refused together come together. Its bound doubles with each attempt, but leaves the attempt half of the
    time that there is.
    """
    asked = retry_seconds_of(error)
    if asked is None:
        asked = unasked
    if error.code not in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE) or asked is None:
        return None
    asked = max(asked, MIN_PAUSE_SECONDS)
    if asked >= left_seconds:
        return None
    spread = min(asked * 2.0 ** min(num_retries, 16), MAX_SPREAD_SECONDS, (left_seconds - asked) / 2)
    return asked + random.uniform(0.0, spread)


def _error_of(error: grpc.aio.AioRpcError) -> TaskError:
    with contextlib.suppress(ValueError):  # details that contradict the status
        status = rpc_status.from_call(cast(grpc.Call, error))
        if isinstance(status, Status):
            return TaskError.from_status(status)
    return TaskError(error.code(), error.details() or "")
