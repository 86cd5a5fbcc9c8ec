"""When the sessions that were answered come back, and whether a pass had better wait for them.

Knows sessions, times and what passes take; no model and no task. A pass that begins while other sessions are
on their way leaves them to a pass of their own, and so it goes on for ever: two passes of half the rows, and
one of all takes hardly longer. Who is back in less than that saves is waited for.
"""

from dataclasses import dataclass

from protos.pass_cost import PassCost, PassShape

WORTH = 0.5  # of what a merged pass saves: so long is waited at most
_SLACK, _SLACK_SECONDS = 1.5, 0.001  # beyond a session's last absence
MAX_EXPECTED = 256  # sessions that are considered
GONE_SECONDS = 10.0  # who has been away for longer is not expected
MAX_KEPT = 4096  # that are remembered: more are of coordinators that have gone without a word


@dataclass(slots=True)
class _Absence:
    """A session between its answer and its next round."""

    since: float
    num_rows: int  # of its last round
    length: int  # positions that it holds
    usual_seconds: float | None = None  # how long it was away the last time; None: it never came back yet


class Returns:
    """The sessions of one worker. Times are seconds of one clock."""

    def __init__(self) -> None:
        """Nobody is away."""
        self._away: dict[str, _Absence] = {}
        self._usual: dict[str, float] = {}

    def answered(self, session: str, num_rows: int, length: int, now: float) -> None:
        """The session goes away with its answer; it fed so many rows and holds so many positions."""
        if len(self._away) >= MAX_KEPT or len(self._usual) >= MAX_KEPT:  # to be learnt again, at no cost
            self._away.clear()
            self._usual.clear()
        while self._away and now - next(iter(self._away.values())).since > GONE_SECONDS:
            del self._away[next(iter(self._away))]  # they stand in the order in which they went
        self._away[session] = _Absence(now, num_rows, length, self._usual.get(session))

    def arrived(self, session: str, when: float) -> None:
        """It is back."""
        absence = self._away.pop(session, None)
        if absence is not None:
            self._usual[session] = max(0.0, when - absence.since)

    def forget(self, session: str) -> None:
        """It does not come back."""
        self._away.pop(session, None)
        self._usual.pop(session, None)

    def worth_waiting(self, planned: PassShape, cost: PassCost, now: float) -> float:
        """Seconds for which a pass should wait for others to join it; 0 when it should not."""
        alone = cost.pass_seconds(planned)
        soon = sorted(
            (due, absence.num_rows, absence.length)
            for absence in self._away.values()
            if absence.usual_seconds is not None
            and now
            < (due := absence.since + _SLACK * absence.usual_seconds + _SLACK_SECONDS)
            < now + WORTH * alone
        )
        best, others, merged = 0.0, PassShape(), planned
        for due, num_rows, length in soon[:MAX_EXPECTED]:
            others, merged = others.with_feed(length, num_rows), merged.with_feed(length, num_rows)
            saved = alone + cost.pass_seconds(others) - cost.pass_seconds(merged)
            if due - now < WORTH * saved:
                best = due - now
        return best
