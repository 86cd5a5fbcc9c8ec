"""JSON values out of a stream of bytes, one after the other as they arrive.

Knows JSON lines, and values that stand on several lines as `jq` prints them; not what a value means. Holds
one value at a time, of at most MAX_VALUE_BYTES.
"""

import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

MAX_DIGITS = 1000  # of an integer: no field takes more than 20
MAX_VALUE_BYTES = 64 << 20  # as much as a message to the service may have

# A string, which its line may have cut short, or a bracket. Possessive: no way back is kept in memory; and an
# open string goes on to the end, or it would be searched once more from each quote in it.
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|([\[\]{}])')
_CLOSES = {b"}": b"{", b"]": b"["}


@dataclass(frozen=True, slots=True)
class JsonValue:
    """What json.loads makes of it."""

    value: Any


@dataclass(frozen=True, slots=True)
class NotJson:
    """Something else; `problem` is a sentence that names the line."""

    problem: str


class _Refused(ValueError):
    """What the standard library would let pass."""


def values_of(text: bytes) -> Iterator[JsonValue | NotJson]:
    """The one value that the text is, however it is laid out, or else what `read_values` makes of it."""
    try:
        yield JsonValue(_loads(text))
    except (ValueError, RecursionError):
        yield from read_values(io.BytesIO(text))


def read_values(file: BinaryIO) -> Iterator[JsonValue | NotJson]:
    """The values of a file, each as soon as its last line is there.

    A line is a value, unless it leaves a bracket open and ends in a bracket or a comma: then the value goes
    on until its brackets are closed. So a line that was cut short spoils no other. Blank lines are left out.
    """
    lines: list[bytes] = []  # of the value at hand, which begins in line `begun`
    begun, opened, num_bytes = 1, list[bytes](), 0
    for number, line in enumerate(_lines(file), 1):
        if lines and _is_broken_off(lines[-1], opened, line):
            yield _parse(begun, lines)
            lines = []
        if not lines:
            if not line.strip():
                continue
            begun, opened, num_bytes = number, [], 0
        lines.append(line)
        num_bytes += len(line)
        _follow(opened, line)
        goes_on = len(lines) > 1 or line.rstrip().endswith((b"{", b"[", b","))
        if not (opened and goes_on) or num_bytes > MAX_VALUE_BYTES:
            yield _parse(begun, lines)
            lines = []
    if lines:
        yield _parse(begun, lines)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Of a line that is too long, only as much as shows that it is."""
    while line := file.readline(MAX_VALUE_BYTES + 1):
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(1 << 16)
        yield line


def _follow(opened: list[bytes], line: bytes) -> None:
    """Keep the list of open brackets, up to the end of the line; it is empty when they do not match."""
    for match in _STRING_OR_BRACKET.finditer(line):
        bracket = match[1]
        if bracket is None:
            continue
        if bracket in (b"{", b"["):
            opened.append(bracket)
        elif not opened or opened.pop() != _CLOSES[bracket]:
            opened.clear()
            return


def _is_broken_off(before: bytes, opened: list[bytes], line: bytes) -> bool:
    """Whether a value cannot go on: behind a comma in an object comes a name, never another object."""
    return before.rstrip().endswith(b",") and opened[-1] == b"{" and line.lstrip().startswith(b"{")


def _parse(begun: int, lines: list[bytes]) -> JsonValue | NotJson:
    end = begun + len(lines) - 1
    where, are = (f"line {begun}", "is") if end == begun else (f"lines {begun} to {end}", "are")
    text = b"".join(lines).rstrip()
    if len(text) > MAX_VALUE_BYTES:
        return NotJson(f"{where} {are} longer than {MAX_VALUE_BYTES} bytes")
    try:
        return JsonValue(_loads(text.removeprefix(b"\xef\xbb\xbf") if begun == 1 else text))
    except UnicodeDecodeError as error:
        return NotJson(f"{where} {are} not UTF-8 at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        at = f"column {error.colno}" if end == begun else f"line {begun + error.lineno - 1}"
        return NotJson(f"{where} {are} not JSON: {error.msg.removesuffix(' at')} at {at}")
    except RecursionError:
        return NotJson(f"{where} {are} nested too deeply")
    except ValueError as error:
        return NotJson(f"{where} {are} not JSON: {error}")


def _loads(text: bytes) -> Any:
    """Strictly: no NaN, no infinity, no name twice in an object. Raises ValueError or RecursionError."""
    return json.loads(
        text.decode(),
        parse_constant=_refuse,
        parse_int=_short,
        parse_float=_finite,
        object_pairs_hook=_without_repeats,
    )


def _refuse(name: str) -> Any:
    raise _Refused(f"{name} is no number there")


def _short(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _Refused(f"{digits[:40]}... has {len(digits)} digits; the limit is {MAX_DIGITS}")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _Refused(f"{digits[:40]} is too large for a number")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Refused(f"{twice!r} stands twice in one object")
    return values
