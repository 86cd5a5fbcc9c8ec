"""What both ends of the wire compute alike: token arrays, checksums, digests and message caps.

Knows the messages of worker.proto and no models, sessions or sockets.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Protocol, TypeVar

import google_crc32c
import numpy as np
from google.protobuf.message import DecodeError, Message

from protos.status import TaskError
from protos.worker_pb2 import Proposal, Sealed

PROTOCOL_VERSION = 2

MAX_MESSAGE_BYTES = 64 << 20
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *CHANNEL_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.so_reuseport", 0),  # two servers on one port would share its calls in silence
]

M = TypeVar("M", bound=Message)
M_co = TypeVar("M_co", bound=Message, covariant=True)


class MessageType(Protocol[M_co]):
    """A generated message class."""

    def FromString(self, data: bytes, /) -> M_co:
        """Parse."""


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack_tokens(data: bytes, field: str) -> list[int]:
    """The inverse of `pack_tokens`; raises TaskError(INVALID_ARGUMENT) naming the field."""
    if len(data) % 4:
        raise TaskError.invalid(field, f"is {len(data)} bytes long; token ids take 4 bytes each")
    tokens: list[int] = np.frombuffer(data, dtype="<u4").tolist()
    return tokens


def checksum(task_id: int, body: bytes) -> int:
    """CRC32C of a sealed message: over the task's id (8 bytes, little-endian) and its body."""
    return int(google_crc32c.extend(google_crc32c.value(struct.pack("<Q", task_id)), body))


def seal(task_id: int, message: Message) -> Sealed:
    """Serialise a message under a checksum."""
    body = message.SerializeToString()
    return Sealed(task_id=task_id, body=body, crc32c=checksum(task_id, body))


def unseal(sealed: Sealed, kind: MessageType[M]) -> M:
    """Check and parse a sealed message; raises TaskError(DATA_LOSS) when it is not what was sent."""
    body = sealed.body
    if checksum(sealed.task_id, body) != sealed.crc32c:
        raise TaskError.data_loss(f"task {sealed.task_id}: the checksum does not match its {len(body)} bytes")
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise TaskError.data_loss(f"task {sealed.task_id}: its body does not parse: {error}") from None


def digest(proposal: Proposal) -> bytes:
    """16 bytes that name a proposal: the same tokens with other rows have another digest."""
    tokens, rows = proposal.tokens, proposal.rows
    return hashlib.blake2b(b"".join((struct.pack("<Q", len(tokens)), tokens, rows)), digest_size=16).digest()
