"""What the servers ask of a model engine: ragged passes over numbered slots, and absolute rollback.

Knows no framework: logits come back as numpy arrays. The slots hold keys and values (or whatever the engine
keeps per position); which tokens they stand for is the caller's book-keeping (`workers.slots`).

B feeds in a pass, T tokens in a feed, C logit columns, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from workers.counts import CountRow
from workers.sampling import SamplingSettings

Logits = NDArray[np.float32]  # [num_logits, C]


@dataclass(frozen=True, slots=True)
class Feed:
    """Consecutive tokens of one slot in one pass: positions start .. start+T-1."""

    slot: int
    start: int  # the slot must already hold exactly positions 0..start-1, or more (then they are overwritten)
    tokens: Sequence[int]  # T >= 1 ids in [0, V)
    num_logits: int  # logits wanted for the last num_logits positions of this feed, 0..T


@dataclass(frozen=True, slots=True)
class Draws:
    """Tokens wanted behind a feed, one after another, each drawn from the counts made of its row."""

    settings: SamplingSettings
    support: int  # ids of a row, at most
    num_columns: int  # of the logits, the first ones: the others are not to be drawn
    coins: Sequence[float]  # [K] uniforms on [0, 1), K >= 1


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token and the row that it was drawn from."""

    token: int
    row: CountRow


class LanguageModel(Protocol):
    """An autoregressive model with `num_slots` independent sequences of up to `max_length` positions each."""

    @property
    def vocab_size(self) -> int:
        """V: token ids are 0..V-1."""

    @property
    def output_ids(self) -> NDArray[np.int64] | None:
        """[C] ascending ids that the C logit columns stand for, or None when C = V and column i is id i."""

    @property
    def num_slots(self) -> int:
        """How many sequences can be held at once."""

    @property
    def max_length(self) -> int:
        """How many positions a slot can hold."""

    def forward(self, feeds: Sequence[Feed]) -> list[Logits]:
        """Run one pass over all feeds, which name distinct slots.

        Returns one float32 array `[num_logits, C]` a feed, in order. A feed's logits depend on its own slot's
        tokens at or before each position, and on nothing else in the pass but, by a rounding, its shape: how
        many rows it has and how long its sequences are.
        Raises ValueError on a feed that does not fit (unknown slot, gap, past max_length, id outside V).
        """

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` positions of the slot; a slot that holds fewer is left alone."""

    def copy(self, source: int, slot: int, length: int) -> None:
        """Let `slot` hold the first `length` positions of another slot, and nothing else.

        Raises ValueError for an unknown slot, the same one twice, or a source that holds fewer.
        """


@runtime_checkable
class DrawingModel(LanguageModel, Protocol):
    """A model that can draw draft tokens where it computes, so that no draw waits for the host."""

    @property
    def can_draw(self) -> bool:
        """Whether it does on this device: a CPU is the host."""

    def draw(self, feeds: Sequence[Feed], draws: Sequence[Draws | None]) -> list[list[Drawn]] | None:
        """Feed, then draw and feed on: as `forward` and K draws from its logits would, one pass a draw.

        Feeds with draws want the logits of their last position alone. Afterwards their slots hold all that
        was fed and drawn but the last token. Returns what was drawn, by feed; None where it takes the host,
        as for a row that is no distribution: then all of it is to be fed again.
        Raises ValueError on a feed that does not fit.
        """
