"""q rows on the wire: what was drawn from arrives as the same integers, and a bad row spoils only itself.

Guards against biased fallbacks: dropping a whole proposal, or all of its rows, because one row is malformed
favours texts whose rows are not.
"""

import contextlib
from collections.abc import Callable

import grpc
import numpy as np
import pytest
from google.rpc.error_details_pb2 import BadRequest

from protos.status import TaskError
from protos.worker_pb2 import FullRow, OneHotRow, QRow, QRows, SparseRow
from workers.counts import FULL_TOTAL, SPARSE_TOTAL, CountRow, one_hot, quantise, quantise_full
from workers.distributions import FloatArray
from workers.rows import read_rows, write_rows

V = 50  # vocabulary


def distribution(seed: int, size: int = V) -> FloatArray:
    weights = np.random.default_rng(seed).exponential(size=size) ** 3
    return np.asarray(weights / weights.sum())


def same(one: CountRow, other: CountRow) -> bool:
    return (
        one.ids.tolist() == other.ids.tolist()
        and one.counts.tolist() == other.counts.tolist()
        and one.total == other.total
    )


SPARSE = quantise(distribution(1), 8)
FULL = quantise_full(distribution(2))
ONE_HOT = one_hot(49)
GOOD = [SPARSE, FULL, ONE_HOT]
TOKENS = [int(SPARSE.ids[-1]), int(FULL.ids[0]), 49]


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_every_encoding_arrive_as_the_very_integers_that_were_written(seed: int) -> None:
    q = distribution(seed)
    rows = [quantise(q, 8), quantise_full(q), one_hot(7), quantise(q, V), quantise(q, 1)]
    tokens = [row.draw(0.3) for row in rows]
    back, num_unusable = read_rows(write_rows(rows, V), tokens, V)
    assert num_unusable == 0
    for row, token, read in zip(rows, tokens, back, strict=True):
        assert same(read, one_hot(token) if row.ids.size == 1 else row)
        for u in (0.0, 0.3, 0.7, 1.0 - 2.0**-53):  # the target draws again and must meet the same token
            assert read.draw(u) == row.draw(u)


def test_rows_of_a_drafter_with_fewer_ids_keep_their_ids() -> None:
    output_ids = np.array([3, 4, 17, 30, 49])
    q = distribution(3, size=5)
    rows = [quantise(q, 64, output_ids), quantise_full(q, output_ids)]
    back, num_unusable = read_rows(write_rows(rows, V), [49, 3], V)
    assert num_unusable == 0
    assert all(same(read, row) for read, row in zip(back, rows, strict=True))


def test_counts_at_their_limits_fit_the_wire() -> None:
    rows = [
        CountRow(np.array([0, 49]), np.array([SPARSE_TOTAL - 1, 1]), SPARSE_TOTAL),
        CountRow(np.array([0, 49]), np.array([FULL_TOTAL - 1, 1]), FULL_TOTAL),
    ]
    back, num_unusable = read_rows(write_rows(rows, V), [49, 49], V)
    assert num_unusable == 0
    assert all(same(read, row) for read, row in zip(back, rows, strict=True))


def test_no_rows_are_no_bytes() -> None:
    assert write_rows([], V) == b""
    assert read_rows(b"", [], V) == ([], 0)


@pytest.mark.parametrize("support", [16, 64, 256])
def test_a_sparse_entry_takes_six_bytes(support: int) -> None:
    vocab_size = 150_000
    rows = [quantise(distribution(seed, vocab_size), support) for seed in range(4)]
    num_entries = sum(row.ids.size for row in rows)
    assert num_entries == 4 * support
    overhead = len(write_rows(rows, vocab_size)) - 6 * num_entries
    assert 0 < overhead <= 4 * 13  # tags and lengths of a row, however many entries it has


def test_a_row_that_holds_one_id_takes_no_bytes_for_it() -> None:
    certain = np.zeros(V)
    certain[7] = 1.0
    assert len(write_rows([quantise(certain, 8)], V)) == len(write_rows([one_hot(7)], V)) == 4


def sparse(ids: list[int], counts: list[int]) -> QRow:
    return QRow(
        sparse=SparseRow(
            ids=np.asarray(ids, dtype="<u4").tobytes(), counts=np.asarray(counts, dtype="<u2").tobytes()
        )
    )


def full(counts: list[int]) -> QRow:
    return QRow(full=FullRow(counts=np.asarray(counts, dtype="<u4").tobytes()))


def without_last_byte_of_ids() -> QRow:
    row = sparse([1, 7], [SPARSE_TOTAL // 2] * 2)
    return QRow(sparse=SparseRow(ids=row.sparse.ids[:-1], counts=row.sparse.counts))


def without_last_byte_of_counts() -> QRow:
    row = sparse([1, 7], [SPARSE_TOTAL // 2] * 2)
    return QRow(sparse=SparseRow(ids=row.sparse.ids, counts=row.sparse.counts[:-1]))


def full_without_last_byte() -> QRow:
    return QRow(full=FullRow(counts=full([FULL_TOTAL // V] * V).full.counts[:-1]))


HALF, FULL_HALF = SPARSE_TOTAL // 2, FULL_TOTAL // 2
UNUSABLE: dict[str, Callable[[], QRow]] = {  # for the drawn token 7
    "bytes of ids are missing": without_last_byte_of_ids,
    "bytes of counts are missing": without_last_byte_of_counts,
    "bytes of a full row are missing": full_without_last_byte,
    "more ids than counts": lambda: sparse([1, 2, 7], [HALF, HALF]),
    "fewer ids than counts": lambda: sparse([1, 7], [HALF, HALF, 1]),
    "a count of zero": lambda: sparse([1, 3, 7], [HALF, 0, HALF]),
    "no entries": lambda: sparse([], []),
    "ids descend": lambda: sparse([7, 1], [HALF, HALF]),
    "an id twice": lambda: sparse([1, 7, 7], [HALF, HALF // 2, HALF // 2]),
    "an id outside the vocabulary": lambda: sparse([7, V], [HALF, HALF]),
    "an id that would be negative as int32": lambda: sparse([7, 0xFFFFFFFF], [HALF, HALF]),
    "the sum is one short": lambda: sparse([1, 7], [HALF, HALF - 1]),
    "the sum is one over": lambda: sparse([1, 7], [HALF, HALF + 1]),
    "the sum is right modulo 2^16": lambda: sparse([1, 2, 7], [HALF * 2, HALF * 2, HALF * 2]),
    "the drawn token has no entry": lambda: sparse([1, 8], [HALF, HALF]),
    "the drawn token lies past all entries": lambda: sparse([1, 2], [HALF, HALF]),
    "no encoding": QRow,
    "a full row is too short": lambda: full([0] * 7 + [FULL_TOTAL] + [0] * (V - 9)),
    "a full row is too long": lambda: full([0] * 7 + [FULL_TOTAL] + [0] * (V - 7)),
    "a full row is empty": lambda: full([]),
    "a full row is all zero": lambda: full([0] * V),
    "the sum of a full row is one short": lambda: full([0] * 7 + [FULL_TOTAL - 1] + [0] * (V - 8)),
    "the sum of a full row is right modulo 2^32": lambda: full(
        [FULL_TOTAL] * 2 + [0] * 5 + [FULL_TOTAL] + [0] * (V - 8)
    ),
    "a full row has nothing at the drawn token": lambda: full([FULL_TOTAL] + [0] * (V - 1)),
}


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("kind", UNUSABLE)
def test_an_unusable_row_becomes_one_hot_at_its_position_alone(kind: str, position: int) -> None:
    messages = list(QRows.FromString(write_rows(GOOD, V)).rows)
    messages.insert(position, UNUSABLE[kind]())
    tokens = [*TOKENS[:position], 7, *TOKENS[position:]]
    expected = [*GOOD[:position], one_hot(7), *GOOD[position:]]
    rows, num_unusable = read_rows(QRows(rows=messages).SerializeToString(), tokens, V)
    assert num_unusable == 1
    assert all(same(row, wanted) for row, wanted in zip(rows, expected, strict=True))


def test_every_unusable_row_is_counted() -> None:
    messages = [row() for row in UNUSABLE.values()]
    rows, num_unusable = read_rows(QRows(rows=messages).SerializeToString(), [7] * len(messages), V)
    assert num_unusable == len(UNUSABLE)
    assert all(same(row, one_hot(7)) for row in rows)


def test_a_one_hot_row_is_usable_whatever_its_token() -> None:
    rows, num_unusable = read_rows(
        QRows(rows=[QRow(one_hot=OneHotRow())] * 2).SerializeToString(), [0, 49], V
    )
    assert num_unusable == 0
    assert [row.ids.tolist() for row in rows] == [[0], [49]]


@pytest.mark.parametrize("num_tokens", [0, 2, 4])
def test_another_number_of_rows_than_tokens_is_refused_by_name(num_tokens: int) -> None:
    data = write_rows(GOOD, V)
    refused(data, [*TOKENS, 1][:num_tokens], f"has 3 rows for {num_tokens} tokens")


def test_no_rows_for_a_token_are_refused_by_name() -> None:
    refused(b"", [1], "has 0 rows for 1 tokens")


def test_rows_that_do_not_parse_are_refused_by_name() -> None:
    data = write_rows(GOOD, V)
    for broken in (data[:-3], data[:10], b"\xff" * 9, data + b"\x0a"):
        refused(broken, TOKENS, "does not parse as QRows")


@pytest.mark.parametrize("seed", range(200))
def test_rows_with_flipped_bits_are_refused_or_are_distributions_with_the_drawn_token(seed: int) -> None:
    random = np.random.default_rng(seed)
    data = bytearray(write_rows(GOOD, V))
    for _ in range(int(random.integers(1, 4))):
        data[int(random.integers(len(data)))] ^= 1 << int(random.integers(8))
    with contextlib.suppress(TaskError):  # nothing else is ever raised
        rows, num_unusable = read_rows(bytes(data), TOKENS, V)
        assert 0 <= num_unusable <= 3
        for row, token in zip(rows, TOKENS, strict=True):
            assert row.q_of(token) > 0.0
            assert row.counts.sum() == row.total
            assert (np.diff(row.ids) > 0).all()
            assert 0 <= row.ids[0] <= row.ids[-1] < V


def refused(data: bytes, tokens: list[int], problem: str) -> None:
    with pytest.raises(TaskError, match=problem) as caught:
        read_rows(data, tokens, V)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    (detail,) = caught.value.details
    assert isinstance(detail, BadRequest)
    assert [violation.field for violation in detail.field_violations] == ["proposal.rows"]
