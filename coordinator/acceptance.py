"""How likely drafts are to be accepted: by position over all sessions, how each session compares, and how a
drafter compares with its own past.

Arithmetic only. It learns from verdicts alone, which are past when the next K is chosen, so a K chosen by it
keeps the law. What it knows fades, since texts and drafters change.

c_i is the chance that draft i (from 0) is accepted once those before it were.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from protos.limits import MAX_DRAFT_TOKENS

FIRST_GUESS = 0.6  # of c_0; a later position is guessed to be as likely as the one before it
GUESS_WEIGHT = 4.0  # verdicts that outweigh a guess
HIGHEST_CHANCE = 0.98
_ALL_KEPT, _OWN_KEPT = 0.999, 0.95  # of what was known, after a round
BLOCK_TOKENS, USUAL_TOKENS = 256, 1024  # judged ones that are compared, with so many at least
FAR_BELOW = 0.5  # of what was usual
_BLOCK_KEPT = 0.98  # of what was known, after a block


class PositionRates:
    """c_i over all sessions of a deployment."""

    def __init__(self) -> None:
        """Guesses."""
        self._judged = [0.0] * MAX_DRAFT_TOKENS
        self._accepted = [0.0] * MAX_DRAFT_TOKENS

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """A verdict that accepted `num_accepted` of `num_drafts`, at least one."""
        for i in range(min(num_accepted + 1, num_drafts)):
            self._judged[i] = _ALL_KEPT * self._judged[i] + 1.0
            self._accepted[i] = _ALL_KEPT * self._accepted[i] + (i < num_accepted)

    def chances(self, num_drafts: int, factor: float = 1.0) -> list[float]:
        """c_0 .. c_{num_drafts - 1}, each times a session's factor."""
        chances, chance = [], FIRST_GUESS
        for i in range(num_drafts):
            chance = (self._accepted[i] + GUESS_WEIGHT * chance) / (self._judged[i] + GUESS_WEIGHT)
            chances.append(min(HIGHEST_CHANCE, factor * chance))
        return chances


@dataclass(slots=True)
class Likeness:
    """How a session's overlaps of p and q compare with what positions promise: its factor on every c_i."""

    found: float = 0.0  # sum of min(p, q) over judged positions
    promised: float = 0.0  # c_i over the same

    def learn(self, overlap: float, promised: Sequence[float]) -> None:
        """A verdict whose judged positions had this much overlap in all, and were promised these chances."""
        self.found = _OWN_KEPT * self.found + overlap
        self.promised = _OWN_KEPT * self.promised + sum(promised)

    @property
    def factor(self) -> float:
        """Near 1 until much is known."""
        return (self.found + GUESS_WEIGHT / 2) / (self.promised + GUESS_WEIGHT / 2)


class History:
    """A drafter's overlaps of p and q, block by block: whether the last block is far below those before it.

    A drafter with other weights than it should have, or a cache that is wrong, keeps the law and is slow in
    silence; this is where it shows. Texts differ too, so it is a reason to look, and no more.
    """

    def __init__(self) -> None:
        """Nothing is known."""
        self._found, self._judged = 0.0, 0.0  # in blocks that are over, fading
        self._block_found, self._block_judged = 0.0, 0
        self.warning = ""  # in words; empty where the last block was as usual

    def learn(self, num_judged: int, overlap: float) -> bool:
        """A verdict's judged positions and their sum of min(p, q); True when this makes a new warning."""
        self._block_found += overlap
        self._block_judged += num_judged
        if self._block_judged < BLOCK_TOKENS:
            return False
        was_warned = bool(self.warning)
        last = self._block_found / self._block_judged
        usual = self._found / self._judged if self._judged >= USUAL_TOKENS else 0.0
        self.warning = ""
        if last < FAR_BELOW * usual:
            self.warning = f"drafts are accepted with a chance of {last:.0%}, before it was {usual:.0%}"
        self._found = _BLOCK_KEPT * self._found + self._block_found
        self._judged = _BLOCK_KEPT * self._judged + self._block_judged
        self._block_found, self._block_judged = 0.0, 0
        return bool(self.warning) and not was_warned
