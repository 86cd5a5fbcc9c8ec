"""The laws that the fault harness decodes: a target's, and a drafter's that is often right. Loads quickly.

They hang on the last two tokens and on the position, so that a token lost, repeated or put elsewhere shows.

V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

V = 4
NUM_PHASES = 7  # of the position
MAX_LENGTH = 256

_GENERATOR = np.random.default_rng(11)
_TARGET = 1.5 * _GENERATOR.normal(size=(NUM_PHASES, V, V, V))
_DRAFT = _TARGET + 0.6 * _GENERATOR.normal(size=_TARGET.shape)


def target_law(prefix: tuple[int, ...]) -> NDArray[np.floating]:
    """The target's logits `[V]`."""
    return _row(_TARGET, prefix)


def draft_law(prefix: tuple[int, ...]) -> NDArray[np.floating]:
    """The drafter's logits `[V]`."""
    return _row(_DRAFT, prefix)


def greedy_text(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the target says at temperature 0."""
    said: list[int] = []
    while len(said) < num_tokens:
        said.append(int(np.float32(target_law((*prompt, *said))).argmax()))
    return said


def _row(table: NDArray[np.floating], prefix: tuple[int, ...]) -> NDArray[np.floating]:
    before, last = (0, *prefix)[-2:]
    row: NDArray[np.floating] = table[len(prefix) % NUM_PHASES, before, last]
    return row
