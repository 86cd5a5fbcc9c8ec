"""Chooses K for sessions that leave it open, and groups for all, from what was measured of workers and wire.

Knows where the figures are found and how long they hold; the arithmetic is `coordinator.draft_length`'s,
`coordinator.overlap`'s and `coordinator.acceptance`'s. Shared by all sessions of a deployment, which learn
from each other.
"""

import math
import time
from dataclasses import dataclass, field

from coordinator.acceptance import PositionRates
from coordinator.draft_length import LONGEST, UNKNOWN, Exploration, promised_rates
from coordinator.drafting import Drafter
from coordinator.overlap import Load, best_groups, plain_seconds, turn_seconds
from coordinator.sessions import Session
from coordinator.verifying import Verifier
from protos.limits import AUTO, NumGroups
from protos.pass_cost import PassCost

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


class DraftPolicy:
    """One deployment's."""

    def __init__(self, num_groups: NumGroups = AUTO) -> None:
        """Nothing is known yet but guesses. `num_groups` fixes how many groups a drafter's sessions make."""
        self._rates = PositionRates()
        self._num_groups = num_groups
        self._paces: dict[tuple[Drafter, Verifier], _Pace] = {}
        self._last_groups: dict[Drafter, int] = {}
        self._explorations: dict[Drafter | None, Exploration] = {}

    def choose(self, session: Session, drafter: Drafter, verifier: Verifier, limit: int) -> int:
        """K of the round that begins, at most `limit`; the drafter's groups are formed for it."""
        pace = self._pace(session, drafter, verifier)
        k = limit
        if session.draft_length is not None:
            k = min(limit, LONGEST)
            if pace is None or k == 0:
                k = min(UNKNOWN, k)
            else:
                chances = self._rates.chances(k, session.likeness.factor)
                rates = promised_rates(self._seconds(pace, drafter, k), chances)
                exploration = self._explorations.setdefault(drafter, Exploration())
                k = session.draft_length.choose(rates, exploration, pace.load.num_at_drafter)
        if k:
            self._form_groups(pace, drafter, k)
        return k

    def learn(
        self, session: Session, drafter: Drafter | None, num_drafts: int, num_accepted: int, overlap: float
    ) -> None:
        """A verdict: how many of its drafts were accepted, and the sum of min(p, q) over those it judged."""
        if not num_drafts:
            return
        num_judged = min(num_accepted + 1, num_drafts)
        if session.draft_length is not None:
            session.likeness.learn(overlap, self._rates.chances(num_judged))
        self._rates.learn(num_drafts, num_accepted)
        if drafter in self._explorations:
            self._explorations[drafter].drafted()

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
        pace = self._paces.get((drafter, verifier))
        if pace is not None and now < pace.until:
            return pace
        draft, target = drafter.client, verifier.client
        if draft.cost is None or target.cost is None:
            return None
        load = Load(
            num_at_drafter=max(drafter.num_sessions, 1),
            num_at_target=max(verifier.num_sessions, 1),
            length=len(session.tokens),
            draft_wire_seconds=draft.wire.seconds,
            target_wire_seconds=target.wire.seconds,
            can_overlap=not draft.computes_on or draft.computes_on != target.computes_on,
        )
        pace = self._paces[drafter, verifier] = _Pace(draft.cost, target.cost, load, now + FRESH_SECONDS)
        return pace
