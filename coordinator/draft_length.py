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


def promised_rates(
    seconds: Sequence[float], chances: Sequence[float], entry_seconds: float = 0.0
) -> list[float]:
    """Tokens a second for K = 0 .. len(chances): (1 + c_0 + c_0 c_1 + ...) over the round's time.

    `entry_seconds` is what each token costs beside its round before there can be drafts at all.
    """
    rates, num_tokens, reached = [1.0 / seconds[0]], 1.0, 1.0
    for k, chance in enumerate(chances, 1):
        reached *= chance
        num_tokens += reached
        rates.append(num_tokens / (seconds[k] + num_tokens * entry_seconds))
    return rates


class Exploration:
    """The rounds that draft although it does not pay: so rarely that they cost less than EXPLORING_SHARE.

    What one session of a drafter finds out all know, so one tries at a time: it leaves the pass that the
    others share.
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
    """A K that is kept from round to round, until another is clearly better."""

    last: int | None = None

    def choose(self, rates: Sequence[float], least: int = 0) -> int:
        """K >= `least` by the rates promised for each: the best, unless the last is as good as that."""
        best = max(range(least, len(rates)), key=rates.__getitem__)
        last = self.last
        if last is not None and least <= last < len(rates) and rates[best] < SWITCH_GAIN * rates[last]:
            best = last
        self.last = best
        return best
