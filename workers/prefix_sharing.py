"""Which slot has the most of the tokens that a session wants, so that it can take them over.

Knows tokens and positions; runs no model and copies nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from protos.prefix import TokenPrefix
from workers.vacant_slots import Holding


@dataclass(slots=True)
class PrefixCounts:
    """What taking over has saved. Tasks that lack few tokens are not counted."""

    num_prefills: int = 0  # tasks that lacked tokens as they entered
    num_hits: int = 0  # of them, those that found some of these tokens in a slot
    num_prefill_tokens: int = 0  # tokens that they lacked
    num_cached_tokens: int = 0  # of them, those that were taken over


def longest(wanted: TokenPrefix, holdings: Iterable[Holding]) -> tuple[Holding | None, int]:
    """The holding with the most of the first tokens wanted, and how many.

    Hashes find it, for nothing a token; then the tokens themselves are compared, so that whoever makes hashes
    meet gets no other session's positions.
    """
    best = max(holdings, key=lambda held: min(held.length, wanted.common_by_hash(held.tokens)), default=None)
    if best is None:
        return None, 0
    return best, wanted.common_length(0, best.tokens.since(0)[: best.length])
