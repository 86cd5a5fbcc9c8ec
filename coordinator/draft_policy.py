"""Chooses K for sessions that leave it open, and groups for all, from what was measured of workers and wire.

Knows where the figures are found and how long they hold; the arithmetic is `coordinator.draft_length`'s,
`coordinator.overlap`'s and `coordinator.acceptance`'s. Shared by all sessions of a deployment, which learn
from each other.
"""

import math
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from coordinator.acceptance import PositionRates
from coordinator.draft_length import LONGEST, UNKNOWN, DraftLength, Exploration, promised_rates
from coordinator.drafting import Drafter
from coordinator.overlap import Load, best_groups, plain_seconds, turn_seconds
from coordinator.sessions import Session
from coordinator.verifying import Verifier
from protos.limits import AUTO, NumGroups
from protos.pass_cost import PassCost, PassShape

FRESH_SECONDS = 0.1  # for so long what was computed of rounds holds


@dataclass(slots=True)
class _Pace:
    """Rounds of one drafter with one target, as they are now."""

    draft: PassCost
    target: PassCost
    load: Load
    until: float  # when it is to be computed anew
    seconds: list[float] = field(default_factory=list)  # until all sessions have had a round, by K
    groups: list[int] = field(default_factory=list)  # by K
    drafting_pays: bool | None = None  # for those that leave K open, together; None: not computed yet


@dataclass(slots=True)
class _Crew:
    """The sessions of one drafter and one target that leave K open."""

    sessions: set[Session] = field(default_factory=set)
    shared_length: DraftLength = field(default_factory=DraftLength)  # the K that were best if all had it
    exploration: Exploration = field(default_factory=Exploration)


class DraftPolicy:
    """One deployment's.

    Whether to draft is decided for all sessions of a drafter and a target at once: they share passes, and one
    that drafts while the others do not leaves theirs for a pass of its own. How far is each one's choice.
    """

    def __init__(self, num_groups: NumGroups = AUTO) -> None:
        """Nothing is known yet but guesses. `num_groups` fixes how many groups a drafter's sessions make."""
        self._rates = PositionRates()
        self._num_groups = num_groups
        self._paces: dict[tuple[Drafter, Verifier], _Pace] = {}
        self._crews: dict[tuple[Drafter, Verifier], _Crew] = {}
        self._last_groups: dict[Drafter, int] = {}

    def choose(self, session: Session, drafter: Drafter, verifier: Verifier, limit: int) -> int:
        """K of the round that begins, at most `limit`; the drafter's groups are formed for it."""
        pace = self._pace(session, drafter, verifier)
        k = limit
        if session.draft_length is not None:
            k = min(limit, LONGEST)
            crew = self._crews.setdefault((drafter, verifier), _Crew())
            if session not in crew.sessions:
                self.forget(session)  # it may have been moved to this target
                crew.sessions.add(session)
            k = min(UNKNOWN, k) if pace is None or k == 0 else self._best(session, drafter, pace, crew, k)
        if k:
            self._form_groups(pace, drafter, k)
        return k

    def _best(self, session: Session, drafter: Drafter, pace: _Pace, crew: _Crew, most: int) -> int:
        """What pays, 1 <= K <= `most` or none."""
        assert session.draft_length is not None, "it leaves K open"
        own, shared = session.draft_length, crew.shared_length
        if pace.drafting_pays is None:
            pace.drafting_pays = shared.choose(self._rates_for(crew.sessions, drafter, pace, LONGEST)) > 0
        reading = _reading_seconds(session, drafter, pace)
        if pace.drafting_pays:
            return own.choose(self._rates_for([session], drafter, pace, most), least=0 if reading else 1)
        rates = promised_rates(self._seconds(pace, drafter, most), self._chances([session], most))
        drafting = max(range(1, most + 1), key=rates.__getitem__)
        lost_rounds = rates[0] / rates[drafting] - 1 + reading / pace.seconds[0]
        is_due = crew.exploration.is_due(own, lost_rounds, pace.load.num_at_drafter)
        return drafting if is_due else 0

    def _rates_for(
        self, sessions: Collection[Session], drafter: Drafter, pace: _Pace, most: int
    ) -> list[float]:
        """What K = 0 .. most promise these sessions, if all have the same."""
        reading = sum(_reading_seconds(session, drafter, pace) for session in sessions)
        num_tokens = sum(session.num_remaining for session in sessions)
        entry_seconds = pace.load.num_at_target * reading / max(num_tokens, 1)  # all sessions wait meanwhile
        return promised_rates(
            self._seconds(pace, drafter, most), self._chances(sessions, most), entry_seconds
        )

    def _chances(self, sessions: Collection[Session], most: int) -> list[float]:
        factors = [session.likeness.factor for session in sessions]
        return self._rates.chances(most, sum(factors) / len(factors))

    def learn(self, session: Session, num_drafts: int, num_accepted: int, overlap: float) -> None:
        """A verdict: how many of its drafts were accepted, and the sum of min(p, q) over those it judged."""
        if not num_drafts:
            return
        num_judged = min(num_accepted + 1, num_drafts)
        if session.draft_length is not None:
            session.likeness.learn(overlap, self._rates.chances(num_judged))
        self._rates.learn(num_drafts, num_accepted)
        for crew in self._crews.values():
            if session in crew.sessions:
                crew.exploration.drafted()

    def forget(self, session: Session) -> None:
        """The session is over."""
        for crew in self._crews.values():
            crew.sessions.discard(session)

    def _form_groups(self, pace: _Pace | None, drafter: Drafter, k: int) -> None:
        num_groups = 1
        if self._num_groups != AUTO:
            num_groups = self._num_groups
        elif pace is not None:
            self._seconds(pace, drafter, k)
            num_groups = pace.groups[k]
        self._last_groups[drafter] = num_groups
        alone = num_groups == 1
        drafter.turns.limit = math.inf if alone else math.ceil(drafter.num_sessions / num_groups)

    def _seconds(self, pace: _Pace, drafter: Drafter, most: int) -> list[float]:
        """Of rounds with K = 0 .. most."""
        draft, target, load, last = pace.draft, pace.target, pace.load, self._last_groups.get(drafter, 1)
        for k in range(len(pace.seconds), most + 1):
            if k == 0:
                num_groups, seconds = 1, plain_seconds(target, load)
            else:
                if self._num_groups != AUTO:
                    num_groups = self._num_groups
                else:
                    num_groups = best_groups(draft, target, load, k, last)
                seconds = turn_seconds(draft, target, load, k, num_groups)
            pace.seconds.append(seconds)
            pace.groups.append(num_groups)
        return pace.seconds

    def _pace(self, session: Session, drafter: Drafter, verifier: Verifier) -> _Pace | None:
        """None while a worker has not told what its passes take."""
        now = time.monotonic()
        num_at = max(drafter.num_sessions, 1), max(verifier.num_sessions, 1)
        pace = self._paces.get((drafter, verifier))
        if (
            pace is not None
            and now < pace.until
            and num_at == (pace.load.num_at_drafter, pace.load.num_at_target)
        ):
            return pace
        draft, target = drafter.client, verifier.client
        if draft.cost is None or target.cost is None:
            return None
        load = Load(
            num_at_drafter=num_at[0],
            num_at_target=num_at[1],
            length=len(session.tokens),
            draft_wire_seconds=draft.wire.seconds,
            target_wire_seconds=target.wire.seconds,
            can_overlap=not draft.computes_on or draft.computes_on != target.computes_on,
        )
        pace = self._paces[drafter, verifier] = _Pace(draft.cost, target.cost, load, now + FRESH_SECONDS)
        return pace


def _reading_seconds(session: Session, drafter: Drafter, pace: _Pace) -> float:
    """What it costs all that the drafter has yet to read the session's text: nothing where others go on.

    Where drafter and target share what they compute on, everybody waits for that.
    """
    num_unread = drafter.num_unread(session)
    if pace.load.can_overlap or not num_unread:
        return 0.0
    return pace.draft.pass_seconds(PassShape().with_feed(len(session.tokens) - num_unread, num_unread))
