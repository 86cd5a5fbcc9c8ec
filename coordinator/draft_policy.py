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
from coordinator.overlap import Load, alone_seconds, best_groups, plain_seconds, turn_seconds
from coordinator.round_times import TimesBySessions
from coordinator.sessions import Session
from coordinator.verifying import Verifier
from protos.limits import AUTO, NumGroups
from protos.pass_cost import PassCost, PassShape

FRESH_SECONDS = 0.1  # for so long what was computed of rounds holds


@dataclass(slots=True)
class _Crew:
    """The sessions of one drafter and one target that leave K open."""

    sessions: set[Session] = field(default_factory=set)
    shared_length: DraftLength = field(default_factory=DraftLength)  # the K that were best if all had it
    exploration: Exploration = field(default_factory=Exploration)
    times: TimesBySessions = field(default_factory=TimesBySessions)


@dataclass(slots=True)
class _Pace:
    """Rounds of one drafter with one target, as they are now."""

    drafter: Drafter
    crew: _Crew
    draft: PassCost
    target: PassCost
    load: Load
    until: float  # when it is to be computed anew
    seconds: list[float] = field(default_factory=list)  # until all sessions have had a round, by K
    groups: list[int] = field(default_factory=list)  # by K
    shared: int | None = None  # the best K if all that leave it open had the same; None: not computed yet


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
        crew = self._crews.setdefault((drafter, verifier), _Crew())
        pace = self._pace(session, drafter, verifier, crew)
        k = limit
        if session.draft_length is not None:
            k = min(limit, LONGEST)
            if session not in crew.sessions:
                self.forget(session)  # it may have been moved to this target
                crew.sessions.add(session)
            k = min(UNKNOWN, k) if pace is None or k == 0 else self._best(session, pace, k)
        if k:
            shared = crew.shared_length.last if session.draft_length is not None else None
            self._form_groups(pace, drafter, shared or k)
        session.lap.num_asked = k
        return k

    def _best(self, session: Session, pace: _Pace, most: int) -> int:
        """What pays, 1 <= K <= `most` or none."""
        assert session.draft_length is not None, "it leaves K open"
        own, crew = session.draft_length, pace.crew
        if pace.shared is None:
            pace.shared = crew.shared_length.choose(self._promised(crew.sessions, pace, LONGEST))
        reading = _reading_seconds(session, pace)
        if pace.shared:
            may_stay_out = reading > 0 or most < pace.shared
            return own.choose(self._promised([session], pace, most), least=0 if may_stay_out else 1)
        rates = promised_rates(self._corrected(pace, most), self._chances([session], most))
        drafting = max(range(1, most + 1), key=rates.__getitem__)
        lost_rounds = rates[0] / rates[drafting] - 1
        if pace.load.num_at_target > 1:  # the others wait for a pass of its own
            lost_rounds = max(
                lost_rounds, alone_seconds(pace.draft, pace.target, pace.load, drafting) / pace.seconds[0]
            )
        lost_rounds += reading / pace.seconds[0]
        return drafting if crew.exploration.is_due(own, lost_rounds, len(crew.sessions)) else 0

    def _promised(self, sessions: Collection[Session], pace: _Pace, most: int) -> list[float]:
        """What K = 0 .. most promise these sessions, if all have the same."""
        reading = sum(_reading_seconds(session, pace) for session in sessions)
        num_tokens = sum(session.num_remaining for session in sessions)
        entry_seconds = pace.load.num_at_target * reading / max(num_tokens, 1)  # all sessions wait meanwhile
        return promised_rates(self._corrected(pace, most), self._chances(sessions, most), entry_seconds)

    def _corrected(self, pace: _Pace, most: int) -> list[float]:
        """Of rounds with K = 0 .. most, as they compare by what was measured of them."""
        plain, *drafting = self._seconds(pace, most)
        excess = pace.crew.times.of(pace.load.num_at_target).excess
        return [plain, *(seconds * excess for seconds in drafting)]

    def _chances(self, sessions: Collection[Session], most: int) -> list[float]:
        factors = [session.likeness.factor for session in sessions]
        return self._rates.chances(most, sum(factors) / len(factors))

    def learn(self, session: Session, num_drafts: int, num_accepted: int, overlap: float) -> None:
        """A verdict: how many of its drafts were accepted, and the sum of min(p, q) over those it judged."""
        self._learn_time(session, num_drafts)
        if not num_drafts:
            return
        num_judged = min(num_accepted + 1, num_drafts)
        if session.draft_length is not None:
            session.likeness.learn(overlap, self._rates.chances(num_judged))
        self._rates.learn(num_drafts, num_accepted)
        for crew in self._crews.values():
            if session in crew.sessions:
                crew.exploration.drafted()

    def _learn_time(self, session: Session, num_drafts: int) -> None:
        """From rounds of the kind that all have, but for first ones and those for which the drafter reads."""
        if session.round == 1 or num_drafts != session.lap.num_asked:
            return
        for pace in self._paces.values():
            num_sessions = pace.load.num_at_target
            is_usual = num_sessions == 1 or (
                pace.shared is not None and (pace.shared > 0) == (num_drafts > 0)
            )
            if session in pace.crew.sessions and is_usual and num_drafts < len(pace.seconds):
                took = (time.monotonic_ns() - session.lap.begun_ns) / 1e9
                factor = took / pace.seconds[num_drafts]
                pace.crew.times.of(num_sessions).learn(num_drafts > 0, factor, num_sessions)

    def forget(self, session: Session) -> None:
        """The session is over."""
        for crew in self._crews.values():
            crew.sessions.discard(session)

    def _form_groups(self, pace: _Pace | None, drafter: Drafter, k: int) -> None:
        num_groups = 1
        if self._num_groups != AUTO:
            num_groups = self._num_groups
        elif pace is not None:
            self._seconds(pace, k)
            num_groups = pace.groups[k]
        self._last_groups[drafter] = num_groups
        alone = num_groups == 1
        num_sessions = min(drafter.num_sessions, drafter.num_slots)
        drafter.turns.limit = math.inf if alone else math.ceil(num_sessions / num_groups)

    def _seconds(self, pace: _Pace, most: int) -> list[float]:
        """Of rounds with K = 0 .. most."""
        draft, target, load = pace.draft, pace.target, pace.load
        last = self._last_groups.get(pace.drafter, 1)
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

    def _pace(self, session: Session, drafter: Drafter, verifier: Verifier, crew: _Crew) -> _Pace | None:
        """None while a worker has not told what its passes take."""
        now = time.monotonic()
        num_at_drafter = max(min(drafter.num_sessions, drafter.num_slots), 1)
        num_at_target = max(verifier.num_sessions, 1)
        pace = self._paces.get((drafter, verifier))
        if pace is not None and now < pace.until:
            load = pace.load
            if _like(num_at_drafter, load.num_at_drafter) and _like(num_at_target, load.num_at_target):
                return pace
        draft, target = drafter.client, verifier.client
        if draft.cost is None or target.cost is None:
            return None
        lengths = [len(one.tokens) for one in crew.sessions or [session]]
        load = Load(
            num_at_drafter=num_at_drafter,
            num_at_target=num_at_target,
            length=sum(lengths) // len(lengths),
            draft_wire_seconds=draft.wire.seconds,
            target_wire_seconds=target.wire.seconds,
            can_overlap=not draft.computes_on or draft.computes_on != target.computes_on,
        )
        pace = self._paces[drafter, verifier] = _Pace(
            drafter, crew, draft.cost, target.cost, load, now + FRESH_SECONDS
        )
        return pace


def _like(num_sessions: int, before: int) -> bool:
    """Whether what was computed for so many `before` still holds: to look anew costs more for more."""
    return 8 * abs(num_sessions - before) <= before


def _reading_seconds(session: Session, pace: _Pace) -> float:
    """What it costs all that the drafter has yet to read the session's text: nothing where others go on.

    Where drafter and target share what they compute on, everybody waits for that.
    """
    num_unread = pace.drafter.num_unread(session)
    if pace.load.can_overlap or not num_unread:
        return 0.0
    return pace.draft.pass_seconds(PassShape().with_feed(len(session.tokens) - num_unread, num_unread))
