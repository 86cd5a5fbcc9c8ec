"""Text that grows token by token, exactly as the tokenizer decodes the whole.

Knows decoders; not where tokens come from. The library's DecodeStream is not used: it raises where bytes that
began a character turn out not to be one, holds everything from an invalid byte on (so that a token's cost
grows), and never tells what it holds.
"""

import codecs
import json
import re
from typing import Any, Protocol

from tokenizers import Tokenizer

from coordinator.text_error import TextError

_LOCAL_STEPS = {"BPEDecoder", "ByteFallback", "CTC", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}


class TextStream(Protocol):
    """The text of one growing sequence of ids, special tokens left out, as the tokenizer decodes the whole.

    All that `push` and `flush` have returned, joined, is `tokenizer.decode(ids, skip_special_tokens=True)`,
    whatever the ids. A token's cost does not depend on how many came before.
    """

    def push(self, token_id: int) -> str:
        """The text that this token completes: '' inside a character, for special and for unknown ids."""

    def flush(self) -> str:
        """The text held back for a character that never came to its end; call it once, last."""


def decoder_steps(tokenizer: Tokenizer) -> list[str]:
    """The names of the decoder's steps; raises TextError where a token's text depends on far ones."""
    decoder = tokenizer.decoder
    if decoder is None:
        return []
    steps = _flatten(json.loads(decoder.__getstate__()))
    names = [step["type"] for step in steps]
    if names != ["ByteLevel"]:
        for step in steps:
            strips_more = step["type"] == "Strip" and (step["start"] > 1 or step["stop"] > 0)
            if step["type"] not in _LOCAL_STEPS or strips_more:
                raise TextError(f"tokenizer.json: decoder: {step} cannot be streamed within {names}")
    return names


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for outer in step["decoders"] for inner in _flatten(outer)]


def _byte_of_character() -> dict[str, int]:
    """Byte-level vocabularies write a printable byte as its Latin-1 character, the n-th other as 256 + n."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


class ByteLevelStream:
    """Tokens are bytes, and the text is their UTF-8."""

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        """`special_ids` give no text."""
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """See `TextStream`."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return ""
        try:
            data = bytes(_BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:  # an added token in its own words
            data = token.encode()
        return self._utf8.decode(data)

    def flush(self) -> str:
        """See `TextStream`."""
        return self._utf8.decode(b"", final=True)


class PieceStream:
    """Tokens are pieces of text or, with byte fallback, single bytes `<0xE4>`.

    A piece's text depends on the piece before it at most (the first loses its space), so it is what decoding
    both gives beyond decoding that one alone. A run of bytes is decoded as a whole: as its characters or, if
    one of them is not complete, as one U+FFFD a byte. So a run is held until a piece ends it.
    """

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int], has_byte_tokens: bool) -> None:
        """`special_ids` give no text; without byte fallback no piece is a byte."""
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._byte_token = re.compile(r"<0x..>" if has_byte_tokens else r"(?!)")
        self._before: list[int] = []  # the last piece
        self._held: list[int] = []  # bytes after it

    def push(self, token_id: int) -> str:
        """See `TextStream`."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return ""
        self._held.append(token_id)
        if self._byte_token.fullmatch(token):
            return ""
        text = self._decode_held()
        self._before, self._held = [token_id], []
        return text

    def flush(self) -> str:
        """See `TextStream`."""
        return self._decode_held()

    def _decode_held(self) -> str:
        emitted = self._tokenizer.decode(self._before)
        return self._tokenizer.decode(self._before + self._held)[len(emitted) :]
