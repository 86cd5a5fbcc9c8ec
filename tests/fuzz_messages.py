"""Messages that are almost right, and bytes that are hardly messages: what fuzzing sends.

Knows descriptors and bytes, and no server. Every choice comes from the generator that is passed in, so a seed
says it all.
"""

import math
import struct
from random import Random
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

EDGES = (1, 2, 12, 64, 4096, 2**15, 2**16, 2**31, 2**32, 2**63, 2**64)  # of limits and widths on the wire
WHOLES = tuple(edge + step for edge in EDGES for step in (-1, 0, 1))
REALS = (
    0.0,
    5e-324,
    1e-300,
    0.5,
    1.0,
    math.nextafter(1.0, 2.0),
    -1.0,
    100.0,
    100.1,
    1e308,
    math.inf,
    math.nan,
)
TEXTS = ("", "a", "block", "token", "x" * 129, "\0", "{{ 1 }}", "é" * 99, "\U000e0001" * 128, "y" * 9000)
UNKNOWN_FIELD = b"\xf8\x07\x01"  # number 127, a varint 1
_WIDTHS = {
    FieldDescriptor.TYPE_INT32: 31,
    FieldDescriptor.TYPE_UINT32: 32,
    FieldDescriptor.TYPE_FIXED32: 32,
    FieldDescriptor.TYPE_INT64: 63,
    FieldDescriptor.TYPE_UINT64: 64,
    FieldDescriptor.TYPE_FIXED64: 64,
    FieldDescriptor.TYPE_ENUM: 31,
}


def almost(message: Message, random: Random) -> bytes:
    """The message with some fields changed, and sometimes its bytes as well."""
    changed = mutated(message, random)
    data = changed.SerializeToString()
    return damaged(data, random) if random.random() < 0.25 else data


def mutated(message: M, random: Random) -> M:
    """A copy with one to three fields changed, in it or in the messages that it holds."""
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        holder = random.choice(_messages_in(copy))
        if holder.DESCRIPTOR.fields:
            _change(holder, random.choice(holder.DESCRIPTOR.fields), random)
    return copy


def damaged(data: bytes, random: Random) -> bytes:
    """Bytes with a bit flipped, a piece lost, repeated or put in, a field that nobody knows, or others."""
    at = random.randrange(len(data) + 1)
    until = min(at + random.randint(1, 8), len(data))
    noise = bytes(random.randrange(256) for _ in range(random.randint(0, 24)))
    flipped = bytearray(data)
    if at < len(data):
        flipped[at] ^= 1 << random.randrange(8)
    return random.choice(
        (
            bytes(flipped),
            data[:at],
            data[:at] + data[until:],
            data[:until] + data[at:],
            data[:at] + noise + data[at:],
            data + UNKNOWN_FIELD,
            noise,
        )
    )


def _messages_in(message: Message) -> list[Message]:
    found = [message]
    for field, value in message.ListFields():
        if field.message_type is not None and not _is_map(field):
            for part in value if field.is_repeated else [value]:
                found += _messages_in(part)
    return found


def _is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _change(holder: Message, field: Any, random: Random) -> None:
    value = getattr(holder, field.name)
    if random.random() < 0.15:
        holder.ClearField(field.name)
    elif _is_map(field):
        value[random.choice(WHOLES) % 2**32] = random.choice(REALS)
    elif field.is_repeated:
        _change_many(value, field, random)
    elif field.message_type is not None:
        value.SetInParent()
    else:
        setattr(holder, field.name, _another(field, value, random))


def _change_many(values: Any, field: Any, random: Random) -> None:
    """One of the values is repeated, lost, or changed."""
    at = random.randrange(len(values) + 1)
    if values and random.random() < 0.3:
        del values[min(at, len(values) - 1)]
    elif field.message_type is not None:
        added = values.add()
        if at < len(values) - 1:
            added.CopyFrom(values[at])
    elif at < len(values) and random.random() < 0.5:
        values[at] = _another(field, values[at], random)
    else:
        nothing = b"" if field.type == FieldDescriptor.TYPE_BYTES else 0
        values.append(_another(field, values[at - 1] if values else nothing, random))


def _another(field: Any, value: Any, random: Random) -> Any:
    """A value of the field's type, often one at a limit or next to the one it has."""
    if field.type == FieldDescriptor.TYPE_BYTES:
        return (
            damaged(value, random)
            if random.random() < 0.7
            else struct.pack("<I", random.choice(WHOLES) % 2**32)
        )
    if field.type == FieldDescriptor.TYPE_STRING:
        return random.choice(TEXTS)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return not value
    if field.type in _WIDTHS:
        whole = int(value) + random.choice((-1, 1)) if random.random() < 0.3 else random.choice(WHOLES)
        return whole % 2 ** _WIDTHS[field.type]
    return random.choice(REALS)
