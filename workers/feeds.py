"""Which positions the slots of an engine hold, and whether the feeds of a pass fit them.

Knows numbers only: the same book-keeping for every engine. Keys and values are the engine's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from workers.language_model import Feed


class HeldPositions:
    """How many positions each slot holds: they are always the first ones."""

    def __init__(self, num_slots: int, max_length: int, vocab_size: int) -> None:
        """All slots are empty. Raises ValueError for a size below 1."""
        for field, value in (("num_slots", num_slots), ("max_length", max_length)):
            if value < 1:
                raise ValueError(f"{field} {value} is below 1")
        self._num_slots, self._max_length, self._vocab_size = num_slots, max_length, vocab_size
        self._held = [0] * num_slots

    @contextmanager
    def feeding(self, feeds: Sequence[Feed]) -> Iterator[None]:
        """Around a pass: the slots hold the feeds behind it; if it fails, what it did not touch.

        Raises ValueError, before anything has changed, for feeds that do not fit.
        """
        self._validate(feeds)
        for feed in feeds:
            self._held[feed.slot] = feed.start
        yield
        for feed in feeds:
            self._held[feed.slot] = feed.start + len(feed.tokens)

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` positions of the slot; a slot that holds fewer is left alone."""
        self._validate_slot(slot)
        if length < 0:
            raise ValueError(f"length {length} of slot {slot} is below 0")
        self._held[slot] = min(self._held[slot], length)

    @contextmanager
    def copying(self, source: int, slot: int, length: int) -> Iterator[None]:
        """Around a copy: behind it the slot holds as many positions; if it fails, none.

        Raises ValueError, before anything has changed, for one that cannot be.
        """
        self._validate_slot(source)
        self._validate_slot(slot)
        if source == slot:
            raise ValueError(f"slot {slot} is to be copied onto itself")
        if not 0 <= length <= self._held[source]:
            held = self._held[source]
            raise ValueError(f"length {length} is not in 0..{held}, what slot {source} holds")
        self._held[slot] = 0
        yield
        self._held[slot] = length

    def _validate_slot(self, slot: int) -> None:
        if not 0 <= slot < self._num_slots:
            raise ValueError(f"slot {slot} is not in 0..{self._num_slots - 1}")

    def _validate(self, feeds: Sequence[Feed]) -> None:
        slots = set()
        for feed in feeds:
            slot, start, num_tokens = feed.slot, feed.start, len(feed.tokens)
            self._validate_slot(slot)
            if slot in slots:
                raise ValueError(f"slot {slot} is fed twice, a pass feeds a slot at most once")
            slots.add(slot)
            held = self._held[slot]
            if not 0 <= start <= held:
                raise ValueError(f"start {start} of slot {slot} is not in 0..{held}, what the slot holds")
            if not 1 <= num_tokens <= self._max_length - start:
                room = f"1..{self._max_length - start} (max_length {self._max_length})"
                raise ValueError(f"{num_tokens} tokens of slot {slot} from start {start} are not in {room}")
            if not 0 <= feed.num_logits <= num_tokens:
                raise ValueError(f"num_logits {feed.num_logits} of slot {slot} is not in 0..{num_tokens}")
            for token in (min(feed.tokens), max(feed.tokens)):
                if not 0 <= token < self._vocab_size:
                    raise ValueError(f"token {token} of slot {slot} is not in 0..{self._vocab_size - 1}")


def wanted_rows(feeds: Sequence[Feed]) -> list[int]:
    """Which rows of the packed pass want logits: the last num_logits of each feed, in order."""
    rows: list[int] = []
    end = 0
    for feed in feeds:
        end += len(feed.tokens)
        rows += range(end - feed.num_logits, end)
    return rows


def split_logits(logits: NDArray[np.float32], feeds: Sequence[Feed]) -> list[NDArray[np.float32]]:
    """The wanted rows `[rows, C]` of a pass, feed by feed."""
    return np.split(logits, np.cumsum([feed.num_logits for feed in feeds])[:-1])


def checked_output_ids(output_ids: Sequence[int] | NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """[C] the ids that logit columns stand for, read-only. Raises ValueError unless they ascend within V."""
    ids = np.array(output_ids, dtype=np.int64)
    if ids.ndim != 1 or not len(ids):
        raise ValueError(f"output_ids of shape {ids.shape} is not a list of at least 1 id")
    if ids[0] < 0 or ids[-1] >= vocab_size or (np.diff(ids) < 1).any():
        raise ValueError(f"output_ids from {ids[0]} to {ids[-1]} do not ascend within 0..{vocab_size - 1}")
    ids.flags.writeable = False
    return ids
