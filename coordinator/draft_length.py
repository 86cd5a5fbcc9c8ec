"""How many tokens to draft: the K that promises the most tokens a second.

Pure arithmetic over what was measured: what passes take, what the wire takes, how likely drafts are accepted.
K is decided before any draw and from verdicts alone, never from the draws themselves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

LONGEST = 16  # K that is chosen unasked
UNKNOWN = 1  # K while nobody has told what passes take
SWITCH_GAIN = 1.03  # another K must promise this much more than the last one
EXPLORING_SHARE = 0.01  # of the time, for rounds that draft although it does not pay, to see whether it does
MIN_EXPLORING_ROUNDS = 16  # between two of them


def draft_limit(num_remaining: int, length: int, draft_max_length: int) -> int:
    """The largest K of use at `length` committed tokens.

    No more than can be committed beside the token that every round adds; and no further than the drafter's
    context, which must hold all drafts but the last.
    """
    return max(0, min(num_remaining - 1, draft_max_length - length + 1))


def promised_rates(seconds: Sequence[float], chances: Sequence[float]) -> list[float]:
    """Tokens a second for K = 0 .. len(chances): (1 + c_0 + c_0 c_1 + ...) over the round's time."""
    rates, num_tokens, reached = [1.0 / seconds[0]], 1.0, 1.0
    for k, chance in enumerate(chances, 1):
        reached *= chance
        num_tokens += reached
        rates.append(num_tokens / seconds[k])
    return rates


class Exploration:
    """The rounds that draft although it does not pay, of all sessions of a drafter.

    What one finds out all know, so one session tries at a time: it leaves the pass that the others share.
    """

    def __init__(self) -> None:
        """Nobody tries."""
        self._num_plain = 0  # rounds of all sessions since the last one with drafts
        self._explorer: DraftLength | None = None

    def is_due(self, session: "DraftLength", lost_rounds: float, num_sessions: int) -> bool:
        """Whether this session's round is to draft, which costs so many plain rounds.

        It goes on trying until `drafted`, since the drafter may have to read the text first; another one
        takes over where that does not come.
        """
        self._num_plain += 1
        pause = num_sessions * max(MIN_EXPLORING_ROUNDS, lost_rounds / EXPLORING_SHARE)
        if self._num_plain < pause:
            return False
        if self._explorer is None or self._num_plain >= 2 * pause:
            self._explorer, self._num_plain = session, math.ceil(pause)
        return session is self._explorer

    def drafted(self) -> None:
        """A round had drafts."""
        self._num_plain, self._explorer = 0, None


@dataclass(slots=True, eq=False)
class DraftLength:
    """One session's K, from round to round."""

    last: int | None = None

    def choose(self, rates: Sequence[float], exploration: Exploration, num_sessions: int = 1) -> int:
        """K by the rates promised for each: the best, unless the last is as good as that.

        Where drafting does not pay, now and then a round drafts all the same: so rarely that it costs less
        than EXPLORING_SHARE. `num_sessions` share the drafter.
        """
        best = max(range(len(rates)), key=rates.__getitem__)
        if self.last is not None and self.last < len(rates) and rates[best] < SWITCH_GAIN * rates[self.last]:
            best = self.last
        self.last = best
        if best > 0 or len(rates) == 1:
            return best
        drafting = max(range(1, len(rates)), key=rates.__getitem__)
        lost_rounds = rates[0] / rates[drafting] - 1  # about: of plain decoding, in one round with drafts
        return drafting if exploration.is_due(self, lost_rounds, num_sessions) else 0
