"""How many tokens to draft: the K that promises the most tokens a second.

Pure arithmetic over what was measured: what passes take, what the wire takes, how likely drafts are accepted.
K is decided before any draw and from verdicts alone, never from the draws themselves.
"""

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


@dataclass(slots=True)
class DraftLength:
    """One session's K, from round to round."""

    last: int | None = None
    num_plain: int = 0  # rounds since the last one with drafts

    def choose(self, rates: Sequence[float]) -> int:
        """K by the rates promised for each: the best, unless the last is as good as that.

        Where drafting does not pay, now and then a round drafts all the same: so rarely that it costs less
        than EXPLORING_SHARE. It goes on trying until `drafted`: the drafter may have to read the text first.
        """
        best = max(range(len(rates)), key=rates.__getitem__)
        if self.last is not None and self.last < len(rates) and rates[best] < SWITCH_GAIN * rates[self.last]:
            best = self.last
        self.last = best
        if best > 0 or len(rates) == 1:
            self.num_plain = 0
            return best
        self.num_plain += 1
        drafting = max(range(1, len(rates)), key=rates.__getitem__)
        lost_rounds = rates[0] / rates[drafting] - 1  # about: of plain decoding, in one round with drafts
        if self.num_plain < max(MIN_EXPLORING_ROUNDS, lost_rounds / EXPLORING_SHARE):
            return 0
        return drafting

    def drafted(self) -> None:
        """The round had drafts."""
        self.num_plain = 0
