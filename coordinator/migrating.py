"""The target of one session: the one that it was placed at, or another one when that is lost.

Knows how long to persist with a target and when to leave it. A proposal is frozen once it is sent: every
attempt carries the same bytes, to whichever target, and its coins hang on the round, not on who judges. So
targets of one model give the same verdict, and one that answers a round again repeats it.
"""

import asyncio
import logging
import time

import grpc

from coordinator.sessions import Seat, Session
from coordinator.spreading import Place
from coordinator.verifying import Verifier, VerifySettings
from protos.status import TaskError
from protos.wire import digest
from protos.worker_pb2 import Proposal, VerifyResult, VerifyTask

logger = logging.getLogger(__name__)

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
HOLD_SECONDS = 0.25  # a connection that is back by then costs no prefill elsewhere


class UnreadableProposal(Exception):
    """The target cannot read a proposal, so nobody has judged it and no coin was looked at.

    Its drafter is at fault. Going on without it assumes, as with a loss, that the fault hangs on no token.
    """


class Target:
    """Verdicts for one session."""

    def __init__(self, place: Place[Verifier], settings: VerifySettings) -> None:
        """At the place's verifier, to begin with."""
        self._place = place
        self._settings = settings

    @property
    def verifier(self) -> Verifier:
        """The one that is asked now."""
        return self._place.worker

    async def verify(self, session: Session, proposal: Proposal) -> VerifyResult:
        """The verdict on a proposal, which may be empty.

        Raises UnreadableProposal, or TaskError when a target refuses for good (what it said) or none gives a
        verdict within the patience (UNAVAILABLE).
        """
        task = _frozen(session, proposal)
        begun_ns = time.monotonic_ns()
        lost: float | None = None  # since when, by this target
        pause = FIRST_PAUSE_SECONDS
        while True:
            asked = time.monotonic()
            try:
                result = await self.verifier.ask(session, task)
                session.lap.count_target(time.monotonic_ns() - begun_ns, result.times.total_ns)
                return result
            except TaskError as error:
                if error.worker_length is not None:
                    continue  # send the tokens from there, at once
                if error.code is grpc.StatusCode.INVALID_ARGUMENT and proposal.ByteSize():
                    raise UnreadableProposal(error.message) from None
                if error.code not in PASSING:
                    raise
                is_silent = error.code is grpc.StatusCode.DEADLINE_EXCEEDED
                if lost is None:
                    lost = asked if is_silent else time.monotonic()
                seconds = time.monotonic() - lost
                patience = self._settings.patience_seconds
                is_gone = not self.verifier.is_ready and seconds >= min(HOLD_SECONDS, patience)
                if (is_silent or is_gone) and self._move(session, error):
                    lost, pause = None, FIRST_PAUSE_SECONDS
                    continue
                if seconds >= patience:
                    raise TaskError.unavailable(f"the target gives no verdict: {error.message}") from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def forget(self, session: Session) -> None:
        """The session is over."""
        self.verifier.forget(session)

    def _move(self, session: Session, why: TaskError) -> bool:
        """Go to a target with a free slot, if there is one and the session has not moved too often."""
        if session.num_migrations >= self._settings.max_migrations:
            return False
        left = self.verifier
        if not self._place.move():
            return False
        left.forget(session)
        session.target_seat = Seat()
        session.num_migrations += 1
        session.tally.num_migrations += 1
        to, length = self.verifier.client.address, len(session.tokens)
        logger.warning("session %s goes on at %s with %d tokens: %s", session.id, to, length, why.message)
        return True


def _frozen(session: Session, proposal: Proposal) -> VerifyTask:
    """The round's question, all but where the target stands."""
    return VerifyTask(
        proposal=proposal,
        digest=digest(proposal),
        sampling=session.sampling,
        seed=session.seed,
        draft_key=session.draft_key,
        choice=session.choice,
        rule=session.rule,
    )
