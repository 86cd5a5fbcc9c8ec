"""Chooses K for sessions that leave it open, from what was measured of workers, wire and verdicts.

Knows where the figures are found and how long they hold; the arithmetic is `coordinator.draft_length`'s and
`coordinator.acceptance`'s. Shared by all sessions of a deployment, which learn from each other.
"""

import time

from coordinator.acceptance import PositionRates
from coordinator.draft_length import LONGEST, UNKNOWN, Load, promised_rates, round_seconds
from coordinator.drafting import Drafter
from coordinator.sessions import Session
from coordinator.verifying import Verifier

FRESH_SECONDS = 0.1  # for so long a computed cost of rounds holds

Workers = tuple[Drafter, Verifier]


class DraftPolicy:
    """One deployment's."""

    def __init__(self) -> None:
        """Nothing is known yet but guesses."""
        self._rates = PositionRates()
        self._seconds: dict[Workers, tuple[float, tuple[float, ...]]] = {}  # with the time it holds until

    def choose(self, session: Session, drafter: Drafter, verifier: Verifier, limit: int) -> int:
        """K of the round that begins, at most `limit`."""
        assert session.draft_length is not None, "the session leaves K open"
        limit = min(limit, LONGEST)
        seconds = self._round_seconds(session, drafter, verifier)
        if not seconds or limit == 0:
            return min(UNKNOWN, limit)
        factor = session.likeness.factor
        return session.draft_length.choose(promised_rates(seconds, self._rates.chances(limit, factor)))

    def learn(self, session: Session, num_drafts: int, num_accepted: int, overlap: float) -> None:
        """A verdict: how many of its drafts were accepted, and the sum of min(p, q) over those it judged."""
        if not num_drafts:
            return
        num_judged = min(num_accepted + 1, num_drafts)
        if session.draft_length is not None:
            session.likeness.learn(overlap, self._rates.chances(num_judged))
        self._rates.learn(num_drafts, num_accepted)

    def _round_seconds(self, session: Session, drafter: Drafter, verifier: Verifier) -> tuple[float, ...]:
        """By K; empty while a worker has not told what its passes take."""
        now = time.monotonic()
        until, seconds = self._seconds.get((drafter, verifier), (0.0, ()))
        if now < until:
            return seconds
        if drafter.client.cost is None or verifier.client.cost is None:
            return ()
        load = Load(
            num_at_drafter=max(drafter.num_sessions, 1),
            num_at_target=max(verifier.num_sessions, 1),
            length=len(session.tokens),
            draft_wire_seconds=drafter.client.wire.seconds,
            target_wire_seconds=verifier.client.wire.seconds,
        )
        seconds = round_seconds(drafter.client.cost, verifier.client.cost, load)
        self._seconds[drafter, verifier] = (now + FRESH_SECONDS, seconds)
        return seconds
