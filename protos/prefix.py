"""A growing and shrinking token sequence with the hash of every prefix.

Coordinator and workers compare prefixes by it without sending them. Knows tokens only.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Self

from protos.wire import pack_tokens

_PRIME = (1 << 61) - 1
_BASE = 1_318_699_217_803_205_611 % _PRIME  # any fixed number works; both ends must use the same


class TokenPrefix:
    """Token ids with rolling hashes: `hash_at(n)` names the first n tokens, at no cost."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        """Start with some tokens."""
        self._tokens: list[int] = []
        self._hashes: list[int] = [0]
        self.extend(tokens)

    def copy(self) -> Self:
        """The same tokens, growing apart from here."""
        other = type(self)()
        other._tokens, other._hashes = self._tokens[:], self._hashes[:]
        return other

    def __len__(self) -> int:
        """How many tokens there are."""
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        value = self._hashes[-1]
        for token in tokens:
            value = (value * _BASE + token + 1) % _PRIME
            self._tokens.append(token)
            self._hashes.append(value)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens at most."""
        del self._tokens[length:]
        del self._hashes[length + 1 :]

    def hash_at(self, length: int) -> int:
        """The hash of the first `length` tokens."""
        return self._hashes[length]

    def since(self, start: int) -> list[int]:
        """The tokens from a position on."""
        return self._tokens[start:]

    def pack_since(self, start: int) -> bytes:
        """The same as the wire's bytes."""
        return pack_tokens(self._tokens[start:])

    def common_by_hash(self, other: "TokenPrefix") -> int:
        """How far both agree by their hashes alone: at no cost, too far where hashes were made to meet."""
        mine, theirs = self._hashes, other._hashes
        length = min(len(mine), len(theirs)) - 1
        if mine[length] == theirs[length] or mine[1] != theirs[1]:  # as a rule
            return length if mine[length] == theirs[length] else 0
        return bisect_left(range(1, length + 1), True, key=lambda n: mine[n] != theirs[n])

    def common_length(self, start: int, tokens: Sequence[int]) -> int:
        """How far this sequence agrees with one that shares the first `start` tokens and goes on as given."""
        length = start
        for mine, theirs in zip(self._tokens[start:], tokens, strict=False):
            if mine != theirs:
                break
            length += 1
        return length
