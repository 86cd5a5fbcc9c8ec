"""A language model whose law is written down: the next-token logits are a function of the prefix.

Knows no framework. It keeps its tokens in slots like any engine, so a cache that is cut or joined wrongly
shows in its law. Proofs enumerate that law; load tests use it for its speed and its settable latency.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from workers.language_model import Feed, Logits

NextLogits = Callable[[tuple[int, ...]], NDArray[np.floating]]  # prefix -> [C]


class TableModel:
    """A `LanguageModel` made of a function from prefixes to logits."""

    def __init__(
        self,
        next_logits: NextLogits,
        vocab_size: int,
        *,
        num_slots: int = 8,
        max_length: int = 4096,
        output_ids: NDArray[np.int64] | None = None,
        latency_seconds: Callable[[Sequence[int]], float] | None = None,
    ) -> None:
        """`latency_seconds` gives a pass's duration from the lengths of its feeds; none by default."""
        self.vocab_size = vocab_size
        self.num_slots = num_slots
        self.max_length = max_length
        self.output_ids = output_ids
        self._next_logits = next_logits
        self._latency_seconds = latency_seconds
        self._slots: list[list[int]] = [[] for _ in range(num_slots)]

    def forward(self, feeds: Sequence[Feed]) -> list[Logits]:
        """See `LanguageModel.forward`."""
        for feed in feeds:
            if feed.start > len(self._slots[feed.slot]):
                held = len(self._slots[feed.slot])
                raise ValueError(f"start is {feed.start}; slot {feed.slot} holds {held} positions")
            if not 0 <= feed.num_logits <= len(feed.tokens):
                raise ValueError(f"num_logits is {feed.num_logits}; the feed has {len(feed.tokens)} tokens")
            if feed.start + len(feed.tokens) > self.max_length:
                end = feed.start + len(feed.tokens)
                raise ValueError(f"the feed ends at {end}; slots hold {self.max_length} positions")
        if self._latency_seconds is not None:
            time.sleep(self._latency_seconds([len(feed.tokens) for feed in feeds]))
        return [self._feed(feed) for feed in feeds]

    def truncate(self, slot: int, length: int) -> None:
        """See `LanguageModel.truncate`."""
        del self._slots[slot][length:]

    def copy(self, source: int, slot: int, length: int) -> None:
        """See `LanguageModel.copy`."""
        held = self._slots[source]
        if source == slot or not 0 <= length <= len(held):
            raise ValueError(
                f"slot {slot} cannot have {length} positions of slot {source}, which holds {len(held)}"
            )
        self._slots[slot] = held[:length]

    def _feed(self, feed: Feed) -> Logits:
        held = self._slots[feed.slot]
        del held[feed.start :]
        held.extend(feed.tokens)
        ends = range(len(held) - feed.num_logits + 1, len(held) + 1)
        num_columns = self.vocab_size if self.output_ids is None else self.output_ids.size
        logits = np.empty((feed.num_logits, num_columns), dtype=np.float32)
        for row, end in zip(logits, ends, strict=True):
            row[:] = self._next_logits(tuple(held[:end]))
        return logits
