"""The public Inference service: requests in, events out as rounds commit tokens.

Knows requests, their choices and their ends; the decoding loop does the work. Every way out of a request
(its end, an error, Abort, a client that is gone, a deadline) frees what it held.
"""

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import grpc
from grpc_status import rpc_status

from coordinator.admission import Admission
from coordinator.decoding import decode
from coordinator.draft_length import DraftLength
from coordinator.draft_policy import DraftPolicy
from coordinator.drafting import Drafter
from coordinator.requests import Limits, Order, read_request
from coordinator.sessions import Session
from coordinator.spreading import Spread
from coordinator.text import Text
from coordinator.text_stream import TextStream
from coordinator.usage import Tally, totals_of, usage_of
from coordinator.verifying import Verifier
from protos.control_pb2 import Totals
from protos.inference_pb2 import (
    FINISH_REASON_ABORT,
    AbortReply,
    AbortRequest,
    Finished,
    GenerateReply,
    GenerateRequest,
    GetModelInfoRequest,
    ModelInfo,
    Origin,
    Started,
    Token,
    Tokens,
)
from protos.inference_pb2_grpc import InferenceServicer
from protos.prefix import TokenPrefix
from protos.status import TaskError

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Request:
    """A running request: its choices' tasks, what they have to say, what they count."""

    order: Order
    prompt: TokenPrefix
    tally: Tally = field(default_factory=Tally)
    events: "asyncio.Queue[GenerateReply | TaskError | _Aborted]" = field(default_factory=asyncio.Queue)
    tasks: "list[asyncio.Task[None]]" = field(default_factory=list)


class _Aborted(Exception):
    """Somebody called Abort."""


class InferenceService(InferenceServicer):
    """Generate, Abort and GetModelInfo over drafters and targets."""

    def __init__(
        self,
        *,
        coordinator: str,
        policy: DraftPolicy,
        drafters: Spread[Drafter] | None,
        verifiers: Spread[Verifier],
        text: Text | None,
        limits: Limits,
        end_token_ids: Sequence[int],
        admission: Admission,
        info: ModelInfo,
    ) -> None:
        """`coordinator` names this coordinator and its life; `info` is completed with live counts."""
        self._coordinator = coordinator
        self._drafters = drafters
        self._verifiers = verifiers
        self._text = text
        self._limits = limits
        self._end_token_ids = frozenset(end_token_ids)
        self._admission = admission
        self._info = info
        self._session_numbers = itertools.count(1)
        self._policy = policy
        self._running: dict[str, _Request] = {}
        self._num_requests = 0
        self._finished = Tally()

    @property
    def num_running(self) -> int:
        """Requests that are not complete."""
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
        """End what still runs, and release its sessions."""
        tasks = [task for running in self._running.values() for task in running.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
            async with contextlib.aclosing(self._generate(request)) as replies:
                async for reply in replies:
                    await context.write(reply)
        except TaskError as error:
            await context.abort_with_status(rpc_status.to_status(error.to_status()))

    async def Abort(
        self, request: AbortRequest, context: grpc.aio.ServicerContext[AbortRequest, AbortReply]
    ) -> AbortReply:
        """See inference.proto."""
        running = self._running.get(request.request_id)
        if running is None:
            return AbortReply(aborted=False)
        for task in running.tasks:  # now: the stream may be held up by a client that does not read
            task.cancel()
        running.events.put_nowait(_Aborted())
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

    async def _generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateReply, None]:
        order = await asyncio.to_thread(read_request, request, self._text, self._limits)
        if order.request_id in self._running:
            raise TaskError.invalid("request_id", f"is {order.request_id!r}, which is running already")
        self._admission.admit(order.num_choices)
        self._num_requests += 1
        running = self._running[order.request_id] = _Request(order, TokenPrefix(order.prompt))
        for choice in range(order.num_choices):
            task = asyncio.create_task(self._run_choice(running, choice))
            task.add_done_callback(lambda _: self._admission.leave())  # also of a task that never began
            running.tasks.append(task)
        try:
            yield GenerateReply(
                started=Started(
                    request_id=order.request_id, seed=order.seed, num_prompt_tokens=len(order.prompt)
                )
            )
            unfinished = set(range(order.num_choices))
            while unfinished:
                event = await running.events.get()
                if isinstance(event, _Aborted):
                    break
                if isinstance(event, TaskError):
                    raise event
                if event.HasField("finished"):
                    unfinished.remove(event.finished.choice)
                yield event
            for choice in sorted(unfinished):
                yield GenerateReply(finished=Finished(choice=choice, reason=FINISH_REASON_ABORT))
            yield GenerateReply(usage=usage_of(running.tally, len(order.prompt)))
        finally:
            for task in running.tasks:
                task.cancel()
            try:
                await asyncio.gather(*running.tasks, return_exceptions=True)
            finally:  # also when the call is cancelled once more
                self._finished.add(running.tally)
                del self._running[order.request_id]

    async def _run_choice(self, running: _Request, choice: int) -> None:
        """Decode one choice; whatever becomes of it is told to the request's events."""
        session = self._open_session(running, choice)
        text = self._text.stream() if self._text is not None else None

        def emit(committed: Sequence[tuple[int, "Origin"]]) -> None:
            tokens = [_token(token, origin, text) for token, origin in committed]
            running.events.put_nowait(GenerateReply(tokens=Tokens(choice=choice, tokens=tokens)))

        try:
            async with self._admission.turn(), self._verifiers.place_in_slot() as verifier:
                with self._place_drafter(session) as drafter:
                    await decode(session, drafter, verifier, self._policy, emit)
            assert session.finish_reason is not None, "decode returns when the session is finished"
            rest = text.flush() if text is not None else ""
            finished = Finished(choice=choice, reason=session.finish_reason, text=rest)
            running.events.put_nowait(GenerateReply(finished=finished))
        except TaskError as error:
            running.events.put_nowait(error)
        except Exception:  # a fault of ours: the trace to the log, an id to the caller
            fault_id = uuid.uuid4().hex[:12]
            logger.exception("session %s failed (fault %s)", session.id, fault_id)
            fault = TaskError.internal(
                f"the request failed; the coordinator's log has it as fault {fault_id}"
            )
            running.events.put_nowait(fault)

    def _place_drafter(self, session: Session) -> contextlib.AbstractContextManager[Drafter | None]:
        if self._drafters is None or not session.wants_drafts:
            return contextlib.nullcontext()
        return self._drafters.place()

    def _open_session(self, running: _Request, choice: int) -> Session:
        order = running.order
        return Session(
            id=f"{self._coordinator}/{next(self._session_numbers)}",
            choice=choice,
            seed=order.seed,
            tokens=running.prompt.copy(),
            num_prompt_tokens=len(order.prompt),
            max_tokens=order.max_tokens,
            max_length=self._limits.max_length,
            end_token_ids=frozenset() if order.ignore_end_tokens else self._end_token_ids,
            sampling=order.sampling,
            rule=order.rule,
            num_draft_tokens=order.num_draft_tokens,
            tally=running.tally,
            draft_length=DraftLength() if order.auto_draft_tokens else None,
        )


def _token(token: int, origin: "Origin", text: TextStream | None) -> Token:
    return Token(id=token, text=text.push(token) if text is not None else "", origin=origin)
