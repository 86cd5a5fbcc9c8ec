"""Asks the drafter for proposals, and does without it when it cannot: the text goes on, only slower.

Knows when a drafter may be asked and how long; not what is done with a proposal. A proposal that arrived is
always handed on whole; only what a dead drafter or the network withheld is missing.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

import grpc

from coordinator.acceptance import History
from coordinator.circuit import Circuit
from coordinator.patience import Patience
from coordinator.sessions import Session
from coordinator.timeline import Timeline
from coordinator.turns import Turns
from coordinator.worker_client import WorkerClient
from protos.control_pb2 import CIRCUIT_CLOSED, CIRCUIT_OPEN
from protos.control_pb2 import Circuit as CircuitState
from protos.pass_cost import PassShape
from protos.status import TaskError
from protos.wire import unpack_tokens
from protos.worker_pb2 import DraftResult, DraftTask, Encoding, Proposal, VerifyResult

logger = logging.getLogger(__name__)

# Beyond the task's own time: the drafter stops before its next draw, and its answer must still travel.
GRACE_SECONDS = 0.25
USUAL_MULTIPLE = 4.0  # of what K passes and the wire take by their measures, before a proposal is late
LONGEST_SECONDS = 10.0  # that what is usual may make of it
MAX_CATCH_UP_TOKENS = 256  # a drafter that lacks more takes them in by a task without draws
FAULT_PAUSE_SECONDS = 30.0  # without a drafter whose tokens are not those of its rows


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """How a drafter is asked."""

    encoding: "Encoding"
    support: int  # ids that a sparse row may have
    vocab_size: int  # the target's: no id from there on is proposed
    timeout_seconds: float  # of one proposal, where it does not usually take longer
    prefill_timeout_seconds: float


class Drafter:
    """One drafter, seen from its sessions."""

    def __init__(
        self, client: WorkerClient, settings: DraftSettings, timeline: Timeline | None = None
    ) -> None:
        """Ask `client`, which has started, as `settings` say; `timeline` gets to know of it."""
        self._timeline = timeline or Timeline()
        self.max_length = client.info.max_length  # positions that the drafter holds of a session
        self.client = client
        self._settings = settings
        self.num_slots = client.info.num_slots
        self.num_sessions = 0  # that are placed here
        self.turns = Turns()  # of those that draft
        self._seated: set[str] = set()  # sessions that have one of the drafter's slots
        self._prefills: dict[str, asyncio.Task[None]] = {}
        self._circuit = Circuit()
        self._patience = Patience()
        self._history = History()

    @property
    def is_ready(self) -> bool:
        """Whether the drafter would be asked now."""
        return self.client.is_connected and self._circuit.state != CIRCUIT_OPEN

    @property
    def circuit(self) -> "CircuitState":
        """Who asks the drafter: all, nobody, or one session at a time."""
        return self._circuit.state

    @property
    def problem(self) -> str:
        """Why the drafter is left alone at the moment, in words; empty when it is not."""
        return self._circuit.problem

    @property
    def notice(self) -> str:
        """What is odd about a drafter that answers, in words."""
        return self._history.warning

    def num_unread(self, session: Session) -> int:
        """Tokens that the drafter must read, by a task of its own, before it drafts; 0 where they are few."""
        seat, length = session.draft_seat, len(session.tokens)
        with contextlib.suppress(TaskError):
            if seat.epoch == self.client.info.epoch and 0 < seat.length <= length:
                num_missing = length - seat.length
                return num_missing if num_missing > MAX_CATCH_UP_TOKENS else 0
        return length

    async def propose(self, session: Session, num_draft_tokens: int) -> Proposal:
        """K drafts behind the committed tokens, or fewer, or none: the drafter never holds a session up."""
        if len(session.tokens) > self.max_length:
            self._give_up(session)
        if num_draft_tokens == 0 or not self._is_ready(session):
            return Proposal()
        await self.turns.enter()
        try:
            return await self._draft(session, num_draft_tokens)
        finally:
            self.turns.leave()

    async def _draft(self, session: Session, num_draft_tokens: int) -> Proposal:
        attempt = self._circuit.enter()
        if attempt is None:  # since the session's turn was due
            session.tally.num_fallbacks += 1
            return Proposal()
        asked_ns = time.monotonic_ns()
        try:
            seconds = self._seconds_for(session, num_draft_tokens)
            reply = await self._ask(session, num_draft_tokens, seconds)
            self._patience.learn((time.monotonic_ns() - asked_ns) / 1e9)
            if not reply.proposal.tokens:
                raise TaskError.unavailable("the drafter drew nothing")
            session.lap.count_draft(time.monotonic_ns() - asked_ns, reply.times.total_ns)
            self._circuit.succeeded(attempt)
            return reply.proposal
        except TaskError as error:
            session.lap.count_draft(time.monotonic_ns() - asked_ns, 0)
            session.tally.num_fallbacks += 1
            if error.code is grpc.StatusCode.INVALID_ARGUMENT:
                logger.warning("session %s goes on without drafts: %s", session.id, error.message)
                self._give_up(session)
            elif error.worker_length is None:
                self._failed(attempt, error)
            return Proposal()
        finally:
            self._circuit.leave(attempt)

    def _seconds_for(self, session: Session, num_draft_tokens: int) -> float:
        """How long a proposal may take: as configured, or longer where that is usual.

        What is usual is told by the drafter's own costs, for all its sessions in one pass, and by what
        proposals have taken, which may have stood behind prompts.
        """
        expected, cost = 0.0, self.client.cost
        if cost is not None:
            num_sessions, length = max(self.num_sessions, 1), len(session.tokens)
            step = cost.pass_seconds(PassShape(num_sessions, num_sessions * length, num_sessions))
            expected = num_draft_tokens * step + self.client.wire.seconds
        usual = max(USUAL_MULTIPLE * expected, self._patience.seconds)
        return max(self._settings.timeout_seconds, min(usual, LONGEST_SECONDS))

    def learn(self, session: Session, num_drafts: int, verdict: VerifyResult) -> None:
        """What the target found of `num_drafts` tokens of this drafter's."""
        if verdict.num_redraw_mismatches:
            self.blame(session, f"{verdict.num_redraw_mismatches} tokens are not those of their rows")
        num_judged = min(verdict.num_accepted + 1, num_drafts)
        if num_judged and self._history.learn(num_judged, verdict.sum_min_pq):
            logger.warning("the drafter at %s: %s", self.client.address, self._history.warning)

    def blame(self, session: Session, fault: str) -> None:
        """The target found the drafter at fault: leave it alone for a while.

        What it drew before is judged and kept, so nothing hangs on which of its tokens were at fault.
        """
        logger.error("the drafter is at fault in session %s: %s", session.id, fault)
        self._circuit.open(FAULT_PAUSE_SECONDS, fault)

    def forget(self, session: Session) -> None:
        """The session is over."""
        self._seated.discard(session.id)
        prefill = self._prefills.pop(session.id, None)
        if prefill is not None:
            prefill.cancel()
        self.client.release(session.id)

    def _give_up(self, session: Session) -> None:
        """This session is beyond the drafter, though others are not: it goes on plainly, its slot is free."""
        if session.num_draft_tokens:
            session.num_draft_tokens = 0
            self.forget(session)

    def _is_ready(self, session: Session) -> bool:
        """Whether the drafter holds the session; starts bringing it up to date when it does not.

        With more sessions than the drafter has slots, the later ones go plainly until a slot is free: taking
        turns in the slots would prefill more than it drafts.
        """
        if session.id not in self._seated:
            if len(self._seated) >= self.num_slots:
                return False
            self._seated.add(session.id)
        if not self._circuit.lets_in:
            session.tally.num_fallbacks += 1
            return False
        if session.id in self._prefills:
            return False
        if not self.num_unread(session):
            return True
        if not self.client.is_connected:
            session.tally.num_fallbacks += 1
            return False
        seconds = self._settings.prefill_timeout_seconds
        if self._circuit.state != CIRCUIT_CLOSED:  # nobody else asks meanwhile
            seconds = min(seconds, LONGEST_SECONDS)
        attempt = self._circuit.enter()
        assert attempt is not None, "it lets in"
        prefill = asyncio.create_task(self._prefill(session, attempt, seconds))
        prefill.add_done_callback(lambda _: self._circuit.leave(attempt))  # also of one that never began
        self._prefills[session.id] = prefill
        return False

    async def _prefill(self, session: Session, attempt: int, timeout_seconds: float) -> None:
        """A task of its own, without draws."""
        try:
            await self._ask(session, 0, timeout_seconds)
            self._circuit.answered(attempt)
        except TaskError as error:
            if error.code is grpc.StatusCode.INVALID_ARGUMENT:
                self._give_up(session)
            else:
                self._failed(attempt, error)
        finally:
            self._prefills.pop(session.id, None)

    async def _ask(self, session: Session, num_draft_tokens: int, timeout_seconds: float) -> DraftResult:
        """The drafter's answer, checked."""
        client, seat = self.client, session.draft_seat
        epoch, length = client.info.epoch, len(session.tokens)
        vocab_size = self._settings.vocab_size
        task = DraftTask(
            state=seat.state(session, epoch, timeout_seconds),
            num_draft_tokens=num_draft_tokens,
            sampling=session.sampling,
            draft_key=session.draft_key,
            choice=session.choice,
            encoding=self._settings.encoding,
            support=self._settings.support,
            vocab_size=vocab_size,
        )
        asked_ns = time.monotonic_ns()
        try:
            reply = await client.ask(task, timeout_seconds + GRACE_SECONDS)
        except TaskError as error:
            seat.epoch, seat.length = epoch, error.worker_length or 0
            raise
        if not reply.HasField("draft"):
            raise TaskError.data_loss(f"the drafter's answer is {reply.WhichOneof('outcome')}, not a draft")
        proposal = reply.draft.proposal
        if len(proposal.tokens) % 4:
            raise TaskError.data_loss(f"the drafter's tokens are {len(proposal.tokens)} bytes")
        tokens = unpack_tokens(proposal.tokens, "proposal.tokens")
        if len(tokens) > num_draft_tokens or any(token >= vocab_size for token in tokens):
            raise TaskError.data_loss(f"the drafter's tokens are {tokens}; asked for {num_draft_tokens}")
        seat.epoch, seat.length = epoch, length
        if self._timeline.is_watched:
            self._timeline.record("draft", client.address, task, asked_ns, reply)
        return reply.draft

    def _failed(self, attempt: int, error: TaskError) -> None:
        pause = self._circuit.failed(attempt, error.message)
        if pause is not None:
            logger.warning("the drafter failed, asked again in %.1f s: %s", pause, error.message)
