"""q rows on the wire: written by the drafter, read and judged by the target.

Knows the messages and `CountRow`; not how rows are made or used. A row that cannot be used is replaced by a
one-hot row at its position alone: what a row looks like depends on the tokens before it, so dropping more
than that row would bias the output.
"""

from collections.abc import Sequence

import numpy as np
from google.protobuf.message import DecodeError

from protos.status import TaskError
from protos.worker_pb2 import FullRow, OneHotRow, QRow, QRows, SparseRow
from workers.counts import FULL_TOTAL, SPARSE_TOTAL, CountRow, one_hot
from workers.distributions import IntArray


class UnusableRow(ValueError):
    """What arrived is not a distribution that the token can have been drawn from."""


def write_rows(rows: Sequence[CountRow], vocab_size: int) -> bytes:
    """K rows as a serialised QRows; the encoding follows from each row's total."""
    return QRows(rows=[_write_row(row, vocab_size) for row in rows]).SerializeToString()


def read_rows(data: bytes, tokens: Sequence[int], vocab_size: int) -> tuple[list[CountRow], int]:
    """The rows of K drawn tokens, and how many of them were unusable and became one-hot.

    Raises TaskError(INVALID_ARGUMENT) when the message does not parse or has not K rows.
    """
    try:
        messages = QRows.FromString(data).rows
    except DecodeError as error:
        raise TaskError.invalid("proposal.rows", f"does not parse as QRows: {error}") from None
    if len(messages) != len(tokens):
        raise TaskError.invalid("proposal.rows", f"has {len(messages)} rows for {len(tokens)} tokens")
    rows: list[CountRow] = []
    num_unusable = 0
    for message, token in zip(messages, tokens, strict=True):
        try:
            rows.append(_read_row(message, token, vocab_size))
        except UnusableRow:
            rows.append(one_hot(token))
            num_unusable += 1
    return rows, num_unusable


def _write_row(row: CountRow, vocab_size: int) -> QRow:
    if row.ids.size == 1:  # the same distribution in no bytes
        return QRow(one_hot=OneHotRow())
    if row.total == SPARSE_TOTAL:
        ids, counts = row.ids.astype("<u4").tobytes(), row.counts.astype("<u2").tobytes()
        return QRow(sparse=SparseRow(ids=ids, counts=counts))
    counts_by_id = np.zeros(vocab_size, dtype="<u4")
    counts_by_id[row.ids] = row.counts
    return QRow(full=FullRow(counts=counts_by_id.tobytes()))


def _read_row(message: QRow, token: int, vocab_size: int) -> CountRow:
    kind = message.WhichOneof("encoding")
    if kind == "one_hot":
        return one_hot(token)
    if kind == "sparse":
        ids = _integers(message.sparse.ids, "<u4")
        counts = _integers(message.sparse.counts, "<u2")
        total = SPARSE_TOTAL
        if ids.size != counts.size or not counts.all():
            raise UnusableRow("ids and counts do not pair up")
        if (ids[1:] <= ids[:-1]).any() or (ids.size and ids[-1] >= vocab_size):
            raise UnusableRow(f"ids do not ascend below {vocab_size}")
    elif kind == "full":
        by_id = _integers(message.full.counts, "<u4")
        if by_id.size != vocab_size:
            raise UnusableRow(f"{by_id.size} counts for a vocabulary of {vocab_size}")
        ids = np.flatnonzero(by_id)
        counts = by_id[ids]
        total = FULL_TOTAL
    else:
        raise UnusableRow("no encoding")
    row = CountRow(ids, counts, total)
    if int(counts.sum()) != total:
        raise UnusableRow(f"counts do not sum to {total}")
    if row.q_of(token) == 0.0:
        raise UnusableRow("the drawn token has no count")
    return row


def _integers(data: bytes, dtype: str) -> IntArray:
    if len(data) % np.dtype(dtype).itemsize:
        raise UnusableRow("bytes are missing")
    return np.frombuffer(data, dtype=dtype).astype(np.int64)
