"""Counter-based uniforms: a pure function of what a number decides, so no two decisions share one.

Knows nothing of models or sessions. The key is the request's seed at the target, and at the drafter a key
derived from it one way: whoever knew the seed could see the accept coins before drawing.
"""

import hashlib
import struct
from enum import IntEnum


class Purpose(IntEnum):
    """What a uniform decides. Part of its counter."""

    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3
    BONUS = 4


def uniform(key: bytes, choice: int, base_length: int, position: int, purpose: Purpose) -> float:
    """A uniform of 53 bits on [0, 1) for one decision.

    `key` up to 64 bytes; `choice` is the index among the samples of one request; `base_length` the committed
    length at the start of the round; `position` the absolute index of the token decided. The base length is
    part of the counter because a position that is drafted again after a cut block must not meet the numbers
    that cut it (under the block rule that is a bias).
    """
    counter = struct.pack("<IQQB", choice, base_length, position, purpose)
    digest = hashlib.blake2b(counter, digest_size=8, key=key).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
