"""Has the target judge a proposal, and keeps asking while the target is away.

Knows the target's client and how long to persist. A proposal is frozen once it is sent: every retry carries
the same bytes, and the target answers a round that it has answered before with the same verdict.
"""

import asyncio
import time
from dataclasses import dataclass

import grpc

from coordinator.sessions import Session
from coordinator.timeline import Timeline
from coordinator.worker_client import WorkerClient
from protos.status import TaskError
from protos.wire import digest
from protos.worker_pb2 import Proposal, VerifyResult, VerifyTask

PASSING = frozenset(  # what may be over a moment later
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.ABORTED,
    }
)
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 1.0


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """How the target is asked."""

    timeout_seconds: float  # of one attempt
    prefill_timeout_seconds: float  # of one attempt where the target holds nothing of the session
    patience_seconds: float  # of a round, from when its target was lost


class UnreadableProposal(Exception):
    """The target cannot read a proposal, so nobody has judged it and no coin was looked at.

    Its drafter is at fault. Going on without it assumes, as with a loss, that the fault hangs on no token.
    """


class Verifier:
    """One target, seen from its sessions."""

    def __init__(
        self, client: WorkerClient, settings: VerifySettings, timeline: Timeline | None = None
    ) -> None:
        """Ask `client`, which has started, as `settings` say; `timeline` gets to know of it."""
        self._timeline = timeline or Timeline()
        self.num_slots = client.info.num_slots
        self.num_sessions = 0  # that are placed here
        self.client = client
        self._settings = settings

    @property
    def is_ready(self) -> bool:
        """Whether the target can be asked now."""
        return self.client.is_connected

    @property
    def problem(self) -> str:
        """What its sessions know against the target: nothing that its connection does not show."""
        return ""

    async def verify(self, session: Session, proposal: Proposal) -> VerifyResult:
        """The verdict on a proposal, which may be empty.

        Raises UnreadableProposal, or TaskError when the target refuses for good (what it said) or stays away
        longer than the patience (UNAVAILABLE).
        """
        task = VerifyTask(
            proposal=proposal,
            digest=digest(proposal),
            sampling=session.sampling,
            seed=session.seed,
            draft_key=session.draft_key,
            choice=session.choice,
            rule=session.rule,
        )
        begun_ns = time.monotonic_ns()
        give_up: float | None = None
        pause = FIRST_PAUSE_SECONDS
        while True:
            asked = time.monotonic()
            try:
                result = await self._ask(session, task)
                session.lap.count_target(time.monotonic_ns() - begun_ns, result.times.total_ns)
                return result
            except TaskError as error:
                if error.worker_length is not None:
                    continue  # send the tokens from there, at once
                if error.code is grpc.StatusCode.INVALID_ARGUMENT and proposal.ByteSize():
                    raise UnreadableProposal(error.message) from None
                if error.code not in PASSING:
                    raise
                if give_up is None:
                    is_silent = error.code is grpc.StatusCode.DEADLINE_EXCEEDED
                    give_up = (asked if is_silent else time.monotonic()) + self._settings.patience_seconds
                if time.monotonic() >= give_up:
                    raise TaskError.unavailable(f"the target gives no verdict: {error.message}") from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def forget(self, session: Session) -> None:
        """The session is over."""
        self.client.release(session.id)

    async def _ask(self, session: Session, task: VerifyTask) -> VerifyResult:
        client, seat = self.client, session.target_seat
        info, length = client.info, len(session.tokens)
        is_prefill = seat.epoch != info.epoch or seat.length == 0
        timeout_seconds = (
            self._settings.prefill_timeout_seconds if is_prefill else self._settings.timeout_seconds
        )
        task.state.CopyFrom(seat.state(session, info.epoch, timeout_seconds))
        asked_ns = time.monotonic_ns()
        try:
            reply = await client.ask(task, timeout_seconds)
        except TaskError as error:
            if error.worker_length is not None:
                if not 0 <= error.worker_length < task.state.start:  # so this ends
                    raise TaskError.internal("the target asks for tokens that it was sent") from None
                seat.epoch, seat.length = info.epoch, error.worker_length
            raise
        result = reply.verify
        if result.digest != task.digest:
            raise TaskError.data_loss("the verdict is on another proposal")
        if result.num_accepted > len(task.proposal.tokens) // 4 or result.token >= info.vocab_size:
            raise TaskError.internal(f"the target's verdict cannot be: {result.num_accepted} accepted")
        seat.epoch, seat.length = info.epoch, length
        if self._timeline.is_watched:
            self._timeline.record("target", client.address, task, asked_ns, reply)
        return result
