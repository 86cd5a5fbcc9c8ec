"""A request's choices: each is a session, from its place in the queue to its end.

Knows how sessions are made, placed and decoded, and how a request goes on after it was interrupted; not who
reads what they say. What was committed is never drawn again: a choice that goes on is a new session, whose
text begins with it.
"""

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.admission import Admission
from coordinator.decoding import decode
from coordinator.draft_length import DraftLength
from coordinator.draft_policy import DraftPolicy
from coordinator.drafting import Drafter
from coordinator.migrating import Target
from coordinator.requests import Limits, Order
from coordinator.sessions import Session
from coordinator.spreading import Place, Spread
from coordinator.text import Text
from coordinator.text_stream import TextStream
from coordinator.transcript import Transcript
from coordinator.usage import Tally
from coordinator.verifying import Verifier, VerifySettings
from protos.inference_pb2 import FINISH_REASON_ABORT, Origin, Token
from protos.prefix import TokenPrefix
from protos.status import TaskError

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Request:
    """What a request has said and counted, while it is decoded and while it is not."""

    order: Order
    prompt: TokenPrefix
    transcript: Transcript
    texts: list[TextStream | None]  # by choice
    past: Tally = field(default_factory=Tally)  # what was counted until it was last interrupted
    tally: Tally = field(default_factory=Tally)  # and since then
    tasks: "list[asyncio.Task[None]]" = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Of the prompt and of all choices."""
        return len(self.prompt) + sum(self.transcript.num_tokens)

    def interrupt(self) -> Tally:
        """Decode no further: nothing more is committed. Returns what has been counted since it last began."""
        for task in self.tasks:
            task.cancel()
        tally, self.tally, self.tasks = self.tally, Tally(), []
        self.past.add(tally)
        return tally

    def abort(self) -> None:
        """End the choices that are not finished."""
        for task in self.tasks:
            task.cancel()
        for choice in sorted(self.transcript.unfinished):
            self.transcript.finish(choice, FINISH_REASON_ABORT)


class Choices:
    """Decodes the choices of all requests of one coordinator."""

    def __init__(
        self,
        *,
        coordinator: str,
        policy: DraftPolicy,
        drafters: Spread[Drafter] | None,
        verifiers: Spread[Verifier],
        verify_settings: VerifySettings,
        text: Text | None,
        limits: Limits,
        end_token_ids: Sequence[int],
        admission: Admission,
    ) -> None:
        """`coordinator` names this coordinator and its life."""
        self._coordinator = coordinator
        self._policy = policy
        self._drafters = drafters
        self._verifiers = verifiers
        self._verify_settings = verify_settings
        self._text = text
        self._max_length = limits.max_length
        self._end_token_ids = frozenset(end_token_ids)
        self._admission = admission
        self._session_numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()  # of all requests, until they have ended

    def begin(self, order: Order) -> Request:
        """Decode a new request. Raises TaskError(RESOURCE_EXHAUSTED) when there is no room for it."""
        text = self._text
        request = Request(
            order,
            TokenPrefix(order.prompt),
            Transcript(order.num_choices),
            [text.stream() if text is not None else None for _ in range(order.num_choices)],
        )
        self.go_on(request)
        return request

    def go_on(self, request: Request) -> None:
        """Decode what is not finished, which nobody does. Raises TaskError(RESOURCE_EXHAUSTED)."""
        unfinished = sorted(request.transcript.unfinished)
        self._admission.admit(len(unfinished))
        request.transcript.go_on()
        for choice in unfinished:
            task = asyncio.create_task(self._run(request, choice))
            task.add_done_callback(self._is_over)  # also of a task that never began
            self._tasks.add(task)
            request.tasks.append(task)

    async def end(self) -> None:
        """Interrupt what still runs, and release its sessions."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_over(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._admission.leave()

    async def _run(self, request: Request, choice: int) -> None:
        """Decode one choice; whatever becomes of it is told to the transcript."""
        session, transcript, text = self._session(request, choice), request.transcript, request.texts[choice]

        def emit(committed: Sequence[tuple[int, "Origin"]]) -> None:
            transcript.commit(choice, [_token(token, origin, text) for token, origin in committed])

        try:
            async with self._admission.turn(), self._verifiers.place_in_slot() as place:
                target = Target(place, self._verify_settings)
                with self._place_drafter(session) as at:
                    drafter = at.worker if at is not None else None
                    await decode(session, drafter, target, self._policy, emit)
            assert session.finish_reason is not None, "decode returns when the session is finished"
            transcript.finish(choice, session.finish_reason, text.flush() if text is not None else "")
        except TaskError as error:
            transcript.fail(error)
        except Exception:  # a fault of ours: the trace to the log, an id to the caller
            fault_id = uuid.uuid4().hex[:12]
            logger.exception("session %s failed (fault %s)", session.id, fault_id)
            transcript.fail(
                TaskError.internal(f"the request failed; the coordinator's log has it as fault {fault_id}")
            )

    def _place_drafter(self, session: Session) -> contextlib.AbstractContextManager[Place[Drafter] | None]:
        if self._drafters is None or not session.wants_drafts:
            return contextlib.nullcontext()
        return self._drafters.place()

    def _session(self, request: Request, choice: int) -> Session:
        order = request.order
        tokens = request.prompt.copy()
        tokens.extend(request.transcript.ids(choice))
        return Session(
            id=f"{self._coordinator}/{next(self._session_numbers)}",
            choice=choice,
            seed=order.seed,
            tokens=tokens,
            num_prompt_tokens=len(order.prompt),
            max_tokens=order.max_tokens,
            max_length=self._max_length,
            end_token_ids=frozenset() if order.ignore_end_tokens else self._end_token_ids,
            sampling=order.sampling,
            rule=order.rule,
            num_draft_tokens=order.num_draft_tokens,
            tally=request.tally,
            draft_length=DraftLength() if order.auto_draft_tokens else None,
        )


def _token(token: int, origin: "Origin", text: TextStream | None) -> Token:
    return Token(id=token, text=text.push(token) if text is not None else "", origin=origin)
