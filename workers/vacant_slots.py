"""Slots that no session has: empty ones, and those that still hold the committed tokens of one that is over.

Knows which of them a session gets and which prefix gives way, the least recently used one first. Does not
know sessions, nor who takes a prefix over.

Live sessions stand in the lowest slots, where neighbours share calls of attention and a pass of fixed shape
ends early. So what a session leaves behind moves up when another session needs its place.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from protos.prefix import TokenPrefix
from workers.language_model import LanguageModel


@dataclass(frozen=True, slots=True)
class Holding:
    """Committed tokens whose positions a slot holds, for others to take over."""

    slot: int
    tokens: TokenPrefix
    length: int  # of the tokens, those that are committed
    touched: float = 0.0


class VacantSlots:
    """The vacant slots of one model: all of them at first."""

    def __init__(self, model: LanguageModel, min_kept: float) -> None:
        """Prefixes of fewer than `min_kept` tokens are not kept."""
        self._model = model
        self._min_kept = min_kept
        self._empty = set(range(model.num_slots))
        self._held: dict[int, Holding] = {}  # by slot

    @property
    def slots(self) -> tuple[int, ...]:
        """All of them, ascending."""
        return tuple(sorted(self._empty | self._held.keys()))

    @property
    def holdings(self) -> Iterable[Holding]:
        """What the slots hold."""
        return self._held.values()

    def put(self, slot: int, tokens: TokenPrefix, touched: float) -> None:
        """A session has left a slot that holds these tokens, all of them committed."""
        if len(tokens) >= self._min_kept:
            self._held[slot] = Holding(slot, tokens, len(tokens), touched)
        else:
            self._model.truncate(slot, 0)
            self._empty.add(slot)

    def take(self, committed: Sequence[int]) -> tuple[int, TokenPrefix]:
        """The lowest slot and what it holds, for a session with these tokens, which may go on from there.

        What it cannot use is kept elsewhere, unless that would cost what was used later. There must be one.
        """
        slot = self.slots[0]
        if slot in self._empty:
            self._empty.remove(slot)
            return slot, TokenPrefix()
        held = self._held[slot]
        if held.tokens.common_length(0, committed) < held.length:
            self._move(held, self._wanted(committed))
        del self._held[slot]
        return slot, held.tokens

    def use(self, slot: int, length: int, now: float) -> None:
        """A session has taken over the first `length` tokens; what it has whole needs no second place."""
        held = self._held.get(slot)
        if held is None:
            return
        self._held[slot] = replace(held, touched=now)
        if length >= held.length:
            self._forget(slot)

    def emptied(self, num_slots: int) -> tuple[int, ...]:
        """Empty slots, ascending: at least so many, or all. Prefixes give way where there are not enough."""
        while len(self._empty) < num_slots and self._held:
            self._forget(self._oldest())
        return tuple(sorted(self._empty))

    def _wanted(self, committed: Sequence[int]) -> int | None:
        """The slot that holds most of these tokens; None where no slot holds enough to be worth it."""
        lengths = {slot: held.tokens.common_length(0, committed) for slot, held in self._held.items()}
        best = max(lengths, key=lengths.__getitem__)
        return best if lengths[best] >= self._min_kept else None

    def _move(self, held: Holding, wanted: int | None) -> None:
        """Into the highest empty slot, or in place of a prefix that was used less recently.

        Not of the one in slot `wanted`, which the session that comes is about to take over.
        """
        if self._empty:
            slot = max(self._empty)
        else:
            others = [one for one in self._held.values() if one is held or one.slot != wanted]
            slot = min(others, key=lambda one: one.touched).slot
        if slot == held.slot:
            return
        if slot in self._held:
            self._forget(slot)
        self._model.copy(held.slot, slot, held.length)
        self._empty.discard(slot)
        self._held[slot] = replace(held, slot=slot, tokens=held.tokens.copy())

    def _oldest(self) -> int:
        return min(self._held.values(), key=lambda held: held.touched).slot

    def _forget(self, slot: int) -> None:
        del self._held[slot]
        self._model.truncate(slot, 0)
        self._empty.add(slot)
