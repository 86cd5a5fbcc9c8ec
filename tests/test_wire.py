"""What both ends of the wire compute alike: checksums, digests, packed tokens, prefixes, errors and stubs.

A token flipped on the way would be committed, and a proposal taken for another one would bias the text: each
is caught here, bit by bit.
"""

import re
import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.rpc.error_details_pb2 import BadRequest, DebugInfo, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from protos.prefix import TokenPrefix
from protos.status import TaskError
from protos.wire import digest, pack_tokens, seal, unpack_tokens, unseal
from protos.worker_pb2 import DraftTask, Proposal, Sealed, SessionState, TaskReply, VerifyResult, VerifyTask

ROOT = Path(__file__).parents[1]


def a_task() -> VerifyTask:
    state = SessionState(session="a/1/0", epoch=7, round=3, base_length=4, tokens=pack_tokens([5, 0, 9, 2]))
    return VerifyTask(state=state, proposal=Proposal(tokens=pack_tokens([1, 2])), seed=11, choice=1)


def test_what_is_sealed_comes_back_under_the_same_id() -> None:
    sealed = Sealed.FromString(seal(1 << 40, a_task()).SerializeToString())
    assert sealed.task_id == 1 << 40
    assert unseal(sealed, VerifyTask) == a_task()


def test_every_flipped_bit_of_the_body_is_data_loss() -> None:
    sealed = seal(3, a_task())
    for bit in range(8 * len(sealed.body)):
        body = bytearray(sealed.body)
        body[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TaskError, match="task 3: the checksum") as caught:
            unseal(Sealed(task_id=3, body=bytes(body), crc32c=sealed.crc32c), VerifyTask)
        assert caught.value.code is grpc.StatusCode.DATA_LOSS


@pytest.mark.parametrize("bit", range(64))
def test_an_answer_whose_id_flipped_is_data_loss(bit: int) -> None:
    sealed = seal(3, a_task())
    with pytest.raises(TaskError, match="checksum") as caught:
        unseal(Sealed(task_id=3 ^ 1 << bit, body=sealed.body, crc32c=sealed.crc32c), VerifyTask)
    assert caught.value.code is grpc.StatusCode.DATA_LOSS


@pytest.mark.parametrize("cut", [0, 1, -1])
def test_a_body_that_lost_bytes_is_data_loss(cut: int) -> None:
    sealed = seal(3, a_task())
    with pytest.raises(TaskError) as caught:
        unseal(Sealed(task_id=3, body=sealed.body[:cut], crc32c=sealed.crc32c), VerifyTask)
    assert caught.value.code is grpc.StatusCode.DATA_LOSS


def test_a_sealed_body_that_is_no_such_message_is_data_loss() -> None:
    class Noise:
        def SerializeToString(self) -> bytes:
            return b"\xff\xff\xff"

    with pytest.raises(TaskError, match="does not parse") as caught:
        unseal(seal(3, Noise()), DraftTask)  # type: ignore[arg-type]
    assert caught.value.code is grpc.StatusCode.DATA_LOSS


def test_token_ids_travel_as_little_endian_uint32() -> None:
    assert pack_tokens([1, 0x01020304, 0xFFFFFFFF]) == bytes([1, 0, 0, 0, 4, 3, 2, 1, 255, 255, 255, 255])
    assert unpack_tokens(pack_tokens([0, 1, 0xFFFFFFFF]), "tokens") == [0, 1, 0xFFFFFFFF]
    assert unpack_tokens(pack_tokens([]), "tokens") == []


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_token_bytes_that_do_not_divide_by_four_are_refused_by_name(size: int) -> None:
    with pytest.raises(TaskError, match=f"state.tokens is {size} bytes long") as caught:
        unpack_tokens(b"x" * size, "state.tokens")
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert violations(caught.value) == ["state.tokens"]


def test_the_digest_tells_apart_proposals_that_differ_in_tokens_rows_or_the_boundary_between_them() -> None:
    joined = pack_tokens([1, 2, 3]) + b"rows"
    proposals = [Proposal(tokens=joined[:cut], rows=joined[cut:]) for cut in range(len(joined) + 1)]
    proposals += [
        Proposal(),
        Proposal(tokens=pack_tokens([1, 2, 4]), rows=b"rows"),
        Proposal(tokens=pack_tokens([1, 2, 3]), rows=b"rowt"),
    ]
    assert len({digest(proposal) for proposal in proposals}) == len(proposals)


def test_the_digest_of_a_proposal_is_the_same_everywhere_and_for_ever() -> None:
    proposal = Proposal(tokens=pack_tokens([1, 2, 3]), rows=b"rows")
    assert digest(Proposal.FromString(proposal.SerializeToString())) == digest(proposal)
    assert digest(proposal).hex() == "f502976fc25a5b9b9184c89c731bb5bc"


def test_a_prefix_is_named_by_its_tokens_and_by_nothing_else() -> None:
    tokens = [3, 0, 0, 7]
    at_once = TokenPrefix(tokens)
    one_by_one = TokenPrefix()
    for token in tokens:
        one_by_one.extend([token])
    detour = TokenPrefix([3, 0, 9, 9, 9])
    detour.truncate(2)
    detour.extend([0, 7])
    for prefix in (one_by_one, detour):
        assert [prefix.hash_at(n) for n in range(5)] == [at_once.hash_at(n) for n in range(5)]
    assert at_once.hash_at(0) == TokenPrefix().hash_at(0)


@pytest.mark.parametrize(
    ("one", "other"),
    [([0], []), ([0, 0], [0]), ([1, 2], [2, 1]), ([0, 1], [1]), ([1], [2]), ([1 << 31], [0])],
)
def test_prefixes_of_other_tokens_order_or_length_have_other_hashes(one: list[int], other: list[int]) -> None:
    assert TokenPrefix(one).hash_at(len(one)) != TokenPrefix(other).hash_at(len(other))


def test_all_short_prefixes_have_hashes_of_their_own_that_fit_the_wire() -> None:
    frontier: list[list[int]] = [[]]
    hashes = {0}
    for _ in range(6):
        frontier = [[*tokens, token] for tokens in frontier for token in range(4)]
        hashes |= {TokenPrefix(tokens).hash_at(len(tokens)) for tokens in frontier}
    assert len(hashes) == sum(4**n for n in range(7))
    assert all(SessionState(start_hash=value).start_hash == value for value in hashes)


@pytest.mark.parametrize("seed", range(20))
def test_a_prefix_behaves_as_a_list_through_any_growth_and_cuts(seed: int) -> None:
    random = np.random.default_rng(seed)
    prefix, mirror = TokenPrefix(), list[int]()
    for _ in range(60):
        if random.random() < 0.6:
            tokens = random.integers(0, 3, size=random.integers(0, 6)).tolist()
            prefix.extend(tokens)
            mirror.extend(tokens)
        else:
            length = int(random.integers(0, len(mirror) + 3))  # beyond the end, nothing happens
            prefix.truncate(length)
            del mirror[length:]
        assert len(prefix) == len(mirror)
        start = int(random.integers(0, len(mirror) + 1))
        assert prefix.since(start) == mirror[start:]
        assert prefix.pack_since(start) == pack_tokens(mirror[start:])
        assert prefix.hash_at(start) == TokenPrefix(mirror[:start]).hash_at(start)
        other = random.integers(0, 3, size=6).tolist()
        agreeing = 0
        while agreeing < min(6, len(mirror) - start) and mirror[start + agreeing] == other[agreeing]:
            agreeing += 1
        assert prefix.common_length(start, other) == start + agreeing


@pytest.mark.parametrize(
    ("tokens", "expected"), [([], 2), ([7], 3), ([7, 8], 4), ([7, 8, 9], 4), ([7, 9], 3), ([9, 8], 2)]
)
def test_the_common_length_counts_the_shared_start_and_ends_at_the_first_difference(
    tokens: list[int], expected: int
) -> None:
    assert TokenPrefix([5, 6, 7, 8]).common_length(2, tokens) == expected


ERRORS = {
    "invalid": TaskError.invalid("sampling.top_p", "is 2; it must lie in (0, 1]"),
    "out of step": TaskError.out_of_step(0, "start is 4; this session holds 0 tokens"),
    "mismatch": TaskError.mismatch("vocab_size is 8 there and 9 here"),
    "stale": TaskError.stale("round is 1; the session is past 2"),
    "other life": TaskError.other_life("epoch is 1; this worker lives in 2"),
    "exhausted": TaskError.exhausted("all slots are at work", 0.25),
    "unavailable": TaskError.unavailable("this worker is draining"),
    "deadline": TaskError.deadline("the task ran out of time"),
    "data loss": TaskError.data_loss("the checksum does not match"),
    "internal": TaskError.internal("a pass failed; the log has it as fault 0123"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_survives_its_way_through_a_reply(name: str) -> None:
    error = ERRORS[name]
    reply = TaskReply.FromString(TaskReply(error=error.to_status()).SerializeToString())
    back = TaskError.from_status(reply.error)
    assert (back.code, back.message, list(back.details)) == (error.code, error.message, list(error.details))
    assert back.worker_length == error.worker_length
    assert back.is_other_life == (name == "other life")
    assert str(back) == error.message


def test_errors_have_the_codes_and_details_that_callers_act_on() -> None:
    code = grpc.StatusCode
    assert ERRORS["invalid"].code is code.INVALID_ARGUMENT
    assert violations(ERRORS["invalid"]) == ["sampling.top_p"]
    assert ERRORS["out of step"].code is code.FAILED_PRECONDITION
    assert ERRORS["out of step"].worker_length == 0  # 0 is a length, not the lack of one
    assert TaskError.out_of_step(17, "").worker_length == 17
    assert ERRORS["mismatch"].code is code.FAILED_PRECONDITION
    assert ERRORS["mismatch"].worker_length is None  # sending tokens again would not help
    assert ERRORS["stale"].code is code.ABORTED
    assert ERRORS["other life"].code is code.ABORTED
    assert ERRORS["exhausted"].code is code.RESOURCE_EXHAUSTED
    assert ERRORS["unavailable"].code is code.UNAVAILABLE
    assert ERRORS["deadline"].code is code.DEADLINE_EXCEEDED
    assert ERRORS["data loss"].code is code.DATA_LOSS
    assert ERRORS["internal"].code is code.INTERNAL
    for name, seconds in (("exhausted", 0.25), ("unavailable", 1.0)):
        (retry,) = ERRORS[name].details
        assert isinstance(retry, RetryInfo)
        assert retry.retry_delay.ToTimedelta().total_seconds() == seconds


def test_a_status_with_an_unknown_code_or_detail_is_still_an_error() -> None:
    status = Status(code=999, message="from a later version")
    status.details.add().Pack(DebugInfo(detail="x"))
    status.details.add().Pack(ErrorInfo(reason="OUT_OF_STEP", metadata={"length": "3"}))
    error = TaskError.from_status(status)
    assert (error.code, error.worker_length, len(error.details)) == (grpc.StatusCode.UNKNOWN, 3, 1)


def test_a_result_without_tokens_is_not_taken_for_no_result() -> None:
    reply = TaskReply.FromString(TaskReply(verify=VerifyResult()).SerializeToString())
    assert reply.WhichOneof("outcome") == "verify"


def test_the_committed_stubs_are_those_of_the_proto_files() -> None:
    command = [sys.executable, "-m", "protos.generate", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_stub_check_sees_a_change_in_a_proto_file(tmp_path: Path) -> None:
    copy = tmp_path / "protos"
    copy.mkdir()
    for path in (ROOT / "protos").iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    proto = copy / "worker.proto"
    proto.write_text(re.sub(r"uint32 choice = 7", "uint32 choice = 9", proto.read_text()))
    command = [sys.executable, "-m", "protos.generate", "--check"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert "worker_pb2.py" in done.stderr


def violations(error: TaskError) -> list[str]:
    (detail,) = error.details
    assert isinstance(detail, BadRequest)
    return [violation.field for violation in detail.field_violations]
