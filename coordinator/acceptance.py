"""How likely drafts are to be accepted: by position over all sessions, and how each session compares.

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
